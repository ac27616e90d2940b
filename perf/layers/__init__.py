"""Single layers: the grid of the speed targets, muMoE layers, and how well `auto` chooses."""
