"""The command `demo`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from ...commands.options import AsJson, Verbosity, json_text, output_option
from ...common.console import show
from .calls import demo_as
from .request import DemoRequest


def demo(
    *,
    output: Annotated[Path, output_option("DIR", "The folder for all files.")] = Path("demo"),
    request: DemoRequest,
    as_json: AsJson = False,
    verbosity: Verbosity,
) -> None:
    """Train small networks, export, verify and measure them."""
    with verbosity.console() as console:
        outcome = demo_as(output, replace(request, progress=console))
    made = {"output": str(outcome.directory), "report": str(outcome.report)}
    show(json_text(made) if as_json else outcome.text)
