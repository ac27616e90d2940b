"""Commands take groups of options; the parser sees each option by itself."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import typer
from moexport.commands.options import flattened
from moexport.tests.command import run


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    rows: Annotated[int, typer.Option(help="How many.")]
    columns: Annotated[int, typer.Option(help="How wide.")] = 2


seen: list[tuple[str, Sizes, bool]] = []


def command(*, name: Annotated[str, typer.Argument()], sizes: Sizes, loud: bool = False) -> None:
    """Does nothing."""
    seen.append((name, sizes, loud))


def test_a_group_s_fields_stand_where_the_group_stood() -> None:
    parameters = inspect.signature(flattened(command)).parameters
    assert list(parameters) == ["name", "rows", "columns", "loud"]
    assert parameters["rows"].default is inspect.Parameter.empty
    assert [parameters[name].default for name in ("columns", "loud")] == [2, False]
    assert flattened(command).__doc__ == "Does nothing."


def test_the_parser_makes_the_group_that_the_command_takes() -> None:
    app = typer.Typer()
    app.command()(flattened(command))
    app(["a", "--rows", "3", "--loud"], standalone_mode=False)
    assert seen == [("a", Sizes(rows=3), True)]
    with pytest.raises(typer.BadParameter, match="rows"):
        app(["a"], standalone_mode=False)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--workspace", "9" * 5000 + "GiB"),
        ("--weight-streaming", "9" * 5000),
        ("--compute-capability", "9" * 5000 + ".9"),
    ],
)
def test_a_number_of_thousands_of_digits_is_no_defect(
    option: str, value: str, bundle: Path
) -> None:
    outcome = run("build", bundle, "--target", "tensorrt-rtx", option, value)
    assert outcome.code == 2
    assert option in outcome.error
