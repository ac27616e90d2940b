"""Parses the edits of an export: `--ablate`, `--steer` and a `--rewrite` file.

Experts and outputs are counted from 0, as in arrays, but levels from 1, as in `inspect`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...common.documents import read_document
from ...common.option import Mistake, changed
from ...errors import UsageError
from ...exporter.bundle.steps import Step
from ...graphs.edits import (
    AT_RUN_TIME,
    LARGEST,
    REWRITE_FORMAT,
    AblatedCombination,
    Ablation,
    Edits,
    Steer,
    parse_rewrite,
)
from ...graphs.targets import TARGETS
from .request import EditOptions

if TYPE_CHECKING:
    from ...exporter.model import Model
    from ...exporter.options import ExportOptions

API = 1

_STEER = re.compile(r"(.+?):(?:(\d+)\.)?(\d+)(?::([^:]+))?")
_STEER_SYNTAX = (
    "--steer LAYER:EXPERT or LAYER:EXPERT:STRENGTH; in a hierarchy LAYER:LEVEL.EXPERT; separate "
    "several by commas; --steer input makes the strengths an input of the graph"
)
_EXPERT = re.compile(r"(?:(\d+)\.)?(\d+)")
_COMBINATION = re.compile(r"\d+(?:\+\d+)+")
_ABLATE_SYNTAX = (
    "--ablate LAYER:EXPERT; in a hierarchy LAYER:LEVEL.EXPERT, or LAYER:EXPERT+EXPERT for a "
    "combination of one per level; separate several with commas"
)


def read_edits(
    ablate: str | Sequence[str] = (),
    rewrite: str | Path | Sequence[Mapping[str, Any]] | None = None,
    steer: str | Sequence[str] = (),
) -> Edits:
    """Returns the edits of `--ablate` and `--steer` texts and of a `--rewrite` file or its entries.

    Raises `UsageError` for edits that are invalid for every model.
    """
    texts = [ablate] if isinstance(ablate, str) else ablate
    removed = dict.fromkeys(ablation for text in texts for ablation in _parse_ablate(text))
    steers = _parse_steers([steer] if isinstance(steer, str) else steer)
    if rewrite is None:
        return Edits((*removed, *steers))
    where = str(rewrite) if isinstance(rewrite, str | Path) else "rewrite"
    entries = _read_json(Path(rewrite)) if isinstance(rewrite, str | Path) else rewrite
    if not isinstance(entries, Sequence) or isinstance(entries, str) or not entries:
        raise UsageError(f"{where}: no output to rewrite is listed", hint=REWRITE_FORMAT)
    rewrites = (parse_rewrite(entry, f"{where}: entry {i}") for i, entry in enumerate(entries))
    return Edits((*removed, *rewrites, *steers))


def _parse_steers(texts: Sequence[str]) -> tuple[Steer, ...]:
    """Parses `layer:3`, `layer:3:2.5`, `blocks.1.mlp:2.0:-1` and `input`.

    `input` makes the strengths an input of the graph.
    """
    parts = [part.strip() for text in texts for part in text.split(",")]
    at_run_time = AT_RUN_TIME in parts
    steers: list[Steer] = []
    for part in (entry for entry in parts if entry != AT_RUN_TIME):
        match = _STEER.fullmatch(part)
        if match is None:
            raise UsageError(f"--steer {part}: not an expert of a layer", hint=_STEER_SYNTAX)
        layer, level, expert, strength = match.groups()
        if at_run_time and strength is not None:
            raise UsageError(
                f"--steer {part}: with --steer input, strengths are an input of the graph",
                hint=f"leave :{strength} out, or leave --steer input out",
            )
        value = None if at_run_time else _parse_strength(part, strength or "1")
        steers.append(Steer(layer, int(expert), None if level is None else int(level), value))
        if [steer.name for steer in steers].count(steers[-1].name) > 1:
            raise UsageError(
                f"--steer {part}: this expert is named twice", hint="give the sum of its strengths"
            )
    if at_run_time and not steers:
        raise UsageError("--steer input: no expert is named", hint=_STEER_SYNTAX)
    return tuple(steers)


def _parse_strength(part: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise UsageError(f"--steer {part}: {text} is not a number", hint=_STEER_SYNTAX) from None
    if not abs(value) <= LARGEST:  # also false for NaN
        raise UsageError(
            f"--steer {part}: a strength of {value} is not a finite FP32 number",
            hint="give a number such as 0.5 or -1; 1 adds the expert's cluster centre once",
        )
    return value


def _parse_ablate(text: str) -> list[Ablation | AblatedCombination]:
    """Parses a list such as `blocks.6.mlp:3,5,blocks.7.mlp:2.4`.

    An expert without a layer belongs to the last layer named before it.
    """
    ablations: list[Ablation | AblatedCombination] = []
    for part in text.split(","):
        layer, colon, number = part.strip().rpartition(":")
        expert, combination = _EXPERT.fullmatch(number), _COMBINATION.fullmatch(number)
        if (expert is None and combination is None) or (not layer and (colon or not ablations)):
            raise UsageError(
                f"--ablate {text}: '{part.strip()}' is not an expert of a layer",
                hint=_ABLATE_SYNTAX,
            )
        name = layer or ablations[-1].layer
        if expert is None:
            ablations.append(AblatedCombination(name, tuple(map(int, number.split("+")))))
            continue
        level = None if expert[1] is None else int(expert[1])
        ablations.append(Ablation(name, int(expert[2]), level))
    return ablations


def _read_json(path: Path) -> Any:
    try:
        return read_document(path, "json", lambda message: UsageError(message, hint=REWRITE_FORMAT))
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be read: {error.strerror}", hint="check --rewrite"
        ) from error


def _applies(options: ExportOptions) -> bool:
    requested = options.asked(EditOptions)
    # An empty list is not the default: it is refused later.
    return requested.rewrite is not None or bool(changed(requested))


def _change(options: ExportOptions) -> ExportOptions:
    requested = options.asked(EditOptions)
    added = read_edits(requested.ablate, requested.rewrite, requested.steer)
    before = options.edits
    return replace(options, edits=Edits((*before.kept, *before.merged, *added.listed)))


def _check(options: ExportOptions, model: Model | None) -> Iterator[Mistake]:
    del model
    engines = TARGETS[options.target].compiled
    if options.edits.at_run_time and (engines or options.integers):
        option = f"target {options.target}" if engines else f"precision {options.precision}"
        yield (
            f"--steer input with --{option}: only graphs with one input are supported",
            "give the strengths to the export: --steer LAYER:EXPERT:STRENGTH",
        )


EDITS = Step("edits", requested=_applies, change=_change, check=_check)
