"""`moexport tune`: the fastest bundle that keeps an accuracy.

It is found on one half of the data and confirmed on the other.

The search covers, together: k of each MoE layer, a fixed subset of its experts (the others are
dropped, which makes the file smaller) or one in place of all, its precision, that of the network
around, and how each layer is computed.

    request ─▶ prepared ─▶ measured layers ─▶ schedule ─▶ trials ─▶ front ─▶ confirmed ─▶ bundle

   1. `request.py` reads the options and refuses contradictions. `accuracy/holdout.py` deals the
   data in two: one that the search sees, and one that is read once, at the end.
   `accuracy/quality.py` computes the retention of the untouched model's quality, with a paired 95%
   interval. `prepare.py` makes the job of these, with the ranges for INT8 and all that may vary
   (`space.py`); `budget.py` has the time for it.
   2. `layers.py` evaluates one layer at a time, from activations that are computed once: what each
   k and each subset does to the outputs, with recorded outputs of the layers before it. Experts
   that are dropped leave constants, and those of a muMoE layer are merged into one: their
   substitutes are fitted and trained to make up for them (`substitutes/`).
3. `times.py` measures each layer alone, in each of its forms, with every lowering that can serve
   (`exporter.measured_lowerings`). A model's time is that of the network around its layers plus the
   sum over the layers; whole graphs correct it.
   4. `search.py` tries models of one k and one precision. `schedule.py` orders the steps from the
   model as trained to the smallest one by accuracy lost per millisecond gained; the search bisects
   to find how far one may go, and tries neighbouring points before and after that. Each trial is a
   whole graph (`graphs.py`): written, run over the search's half, timed along with the model as
   trained.
5. `accuracy/confirm.py` runs the best graphs over the other half, in one pass, and takes the
   fastest that passes: in two sequences that were fixed before, each up to the first failure,
   which together err in 5% of cases at the most.
6. `tune.py` runs these steps in order. The result becomes a recipe, on disk before anything else
   (`recipe.py`), which is exported like any model, and results with the whole front,
   which the report draws (`findings.py`).

Every finished piece is kept in a journal: an interrupted search continues from there.
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
