"""`moexport tune`: the fastest bundle that keeps an accuracy.

It is found on one half of the data and confirmed on the other.

What is searched, together: k of each MoE layer, a fixed subset of its experts (the others are
dropped, which makes the file smaller) or one in place of all, its precision, that of the network
around, and how each layer is computed.

    request ──▶ halves ──▶ measured layers ──▶ path ──▶ graphs ──▶ front ──▶ confirmed ──▶ bundle

1. `request.py` reads what is asked and refuses what contradicts itself. `halves.py` deals the data
   in two: one that the search sees, and one that is read once, at the end. `quality.py` says what
   is kept of the untouched model, with a paired 95% interval.
2. `layers.py` looks at one layer at a time, from activations that are computed once: what each k
   and each subset does to the outputs, while the layers before it are played back. Experts that are
   dropped leave constants, and those of a muMoE layer are merged into one: what takes their places
   is fitted and trained to make up for them (`dropped/`).
3. `times.py` measures each layer alone, in each of its forms, with every lowering that can serve
   (`exporter.measured_lowerings`). A model's time is that of the network around its layers plus the
   sum over the layers; whole graphs correct it.
4. `search.py` looks at models of one k and one precision, then orders the steps from the model as
   trained to the smallest one by accuracy lost per millisecond gained, finds by halving how far
   along this path one may go, and tries what lies beside, before and after. Each look is a whole
   graph (`graphs.py`): written, run over the search's half, timed beside the model as trained.
5. `confirm.py` runs the best graphs over the other half, in one pass, and takes the fastest that
   holds: in two sequences that were fixed before, each up to the first that does not, which
   together err in 5% of cases at the most.
6. `tune.py` is the job from top to bottom. What it found becomes a recipe
   (`exporter.bundle.recipe`), which is exported as any model is, and results with the whole front,
   which the report draws (`findings.py`).

Every finished piece is kept in a journal: a search that was ended goes on where it stopped.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    """Called, it is the search itself, as `bench` is: Python binds packages to their names."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs `moexport.calls.tune`."""
        from ..calls import tune

        return tune(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
