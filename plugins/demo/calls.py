"""The Python function of the demo."""

from __future__ import annotations

from importlib import import_module
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
    """Trains networks on handwritten digits or text, then exports, verifies and measures them.

    All files are written to the folder `out`.
    """
    check_folder(Path(out))
    check_pytorch("the demo")
    from ...common.console import Silent
    from .demo import run_demo

    # Each module is also the name of a family.
    module = import_module(f".{request.family.replace('-', '_')}", __package__)
    progress = request.progress or Silent()
    return run_demo(module.DEMO, Path(out), progress, force=request.force)
