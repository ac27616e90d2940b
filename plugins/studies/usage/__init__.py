"""The use of experts: how often each is chosen, by class and layer, and how evenly."""
