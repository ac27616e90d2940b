"""The command `demo`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from ...commands.options import json_text, options_of, output_option
from ...commands.printing import Printing
from ...common.console import show
from .calls import demo as run_demo
from .request import DemoRequest


def demo(
    *,
    output: Annotated[Path, output_option("DIR", "The folder for all files.")] = Path("demo"),
    request: Annotated[DemoRequest, options_of(DemoRequest)],
    printing: Printing,
) -> None:
    """Train small networks, then export, verify and measure them."""
    with printing.console() as console:
        outcome = run_demo(output, replace(request, progress=console))
    content = {"output": str(outcome.directory), "report": str(outcome.report)}
    show(json_text(content) if printing.as_json else outcome.text)
