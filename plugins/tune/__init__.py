"""`moexport tune`: the fastest bundle that keeps an accuracy.

One half of the data is for the search; the other confirms its result.

The search chooses k of each MoE layer, a fixed subset of its experts (the others are dropped, which
makes the file smaller) or one expert for all, its precision and lowering, and the precision of the
rest of the network.

    request ─▶ prepared ─▶ measured layers ─▶ schedule ─▶ trials ─▶ front ─▶ confirmed ─▶ bundle

1. `request.py` reads the options and refuses contradictions. `accuracy/holdout.py` splits the data
   in two: a half for the search, and one that is read once, at the end. `accuracy/quality.py`
   computes how much of the untouched model's quality is kept, with a paired 95% interval.
   `prepare.py` makes the job from these, the ranges for INT8 and the search space (`space.py`);
   `budget.py` limits the time.
2. `layers.py` changes one layer at a time and computes how far each k and each subset moves the
   model's outputs; the layers before it return recorded outputs. Constants replace dropped experts,
   and one merged expert those of a muMoE layer: these substitutes are fitted and trained
   (`substitutes/`).
3. `times.py` measures each layer alone, in each of its forms, with every lowering that supports it
   (`exporter.measured_lowerings`). A model's time is that of the network around its layers plus the
   sum over the layers; whole graphs correct it.
4. `search.py` tries models with one k and one precision. `schedule.py` orders the steps from the
   model as trained to the smallest by accuracy lost per millisecond gained; the search bisects
   them and tries neighbours of the result. Each trial is a whole graph (`graphs.py`): written, run
   over the search's half, timed in turn with the model as trained.
5. `accuracy/confirm.py` runs the best graphs over the other half, in one pass, and selects the
   fastest that passes. They are tested in two sequences of fixed order, each up to the first
   failure; together these err in at most 5% of cases.
6. `tune.py` runs these steps in order. It writes the result as a recipe (`recipe.py`), exports the
   model with it, and then writes results with the whole front for the report (`findings.py`).

A journal records every finished step, so an interrupted search continues from there.
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
