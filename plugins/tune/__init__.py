"""Implements `moexport tune`, which finds the fastest bundle that keeps an accuracy.

One half of the data is for the search; the other half confirms its result.

For each MoE layer, the search chooses k, the experts, the precision and the lowering. The experts
are all, a fixed subset (the others are dropped, which makes the file smaller), or one expert that
replaces all. The search also chooses the precision of the rest of the network.

    request ─▶ prepared ─▶ measured layers ─▶ schedule ─▶ trials ─▶ front ─▶ confirmed ─▶ bundle

1. `request.py` reads the options and refuses contradictions. `accuracy/holdout.py` splits the data
   in two: one half for the search, and one that is read once, at the end. `accuracy/quality.py`
   computes how much of the untouched model's quality is kept, with a paired 95% interval.
   `prepare.py` combines these, the ranges for INT8 and the search space (`space.py`) in a job;
   `budget.py` limits the time.
2. `layers.py` changes one layer at a time and computes how far each k and each subset moves the
   model's outputs; the layers before it return recorded outputs. Substitutes are fitted and
   trained (`substitutes/`): constants for dropped experts, and one merged expert for all experts
   of a muMoE layer.
3. `times.py` times each layer alone, in each of its forms, with every lowering that supports the
   form (`exporter.measured_lowerings`). The time of a model is that of the network around its
   layers plus the sum over the layers; the times of whole graphs correct this sum.
4. `search.py` tries models with one k and one precision. `schedule.py` orders the steps from the
   model as trained to the smallest by accuracy lost per millisecond gained; the search bisects
   them and tries neighbours of the result. Each trial is a whole graph (`graphs.py`) that is
   written, run on the search's half, and timed alternately with the model as trained.
5. `accuracy/confirm.py` runs the best graphs on the other half, in one pass, and selects the
   fastest that passes. They are tested in two sequences of fixed order, each up to the first
   failure; together, the two sequences err in at most 5% of cases.
6. `tune.py` runs these steps in order. It writes the result as a recipe (`recipe.py`), exports the
   model with the recipe, and then writes the results for the report (`findings.py`).

A journal records every finished step, so an interrupted search can continue.
"""

from __future__ import annotations

from ...commands.command import Command

API = 1

COMMAND = Command(
    "tune",
    "Find the fastest bundle that keeps an accuracy.",
    "moexport tune vit.pt --data val.npz --keep 99% -o tuned",
    "moexport.plugins.tune.cli:tune",
    130,
    calls=("load", "tune"),
)
