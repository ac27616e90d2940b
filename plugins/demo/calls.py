"""The Python function of the demo."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ...common.libraries import check_pytorch
from ...common.option import takes
from ...common.writing import check_folder
from ...exporter.requests import AnyPath
from .request import DemoRequest

if TYPE_CHECKING:
    from .demo import Outcome


@takes(DemoRequest)
def demo(out: AnyPath, request: DemoRequest) -> Outcome:
    """Trains networks on handwritten digits or on text; exports, verifies and measures them.

    All files are written to the folder `out`.
    """
    check_folder(Path(out))
    check_pytorch("the demo")
    from ...common.console import Silent

    watcher, family, force = request.progress or Silent(), request.family, request.force
    if family == "mumoe":
        from .mumoe import run_mumoe_demo

        return run_mumoe_demo(Path(out), watcher, force=force)
    if family == "experts":
        from .experts import run_experts_demo

        return run_experts_demo(Path(out), watcher, force=force)
    from .demo import run_demo
    from .tuned import tuned_bundle

    return run_demo(Path(out), watcher, force=force, search=partial(tuned_bundle, watcher))
