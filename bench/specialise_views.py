"""What `specialise` found, as JSON, as text for a terminal, and as files."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from ..common.text import table
from ..common.writing import whole_file, write_text
from .specialise import ExpertEffect, Specialisation

SCHEMA = 1
JSON_FILE, FIGURE_FILE = "specialise.json", "specialise.png"
SHOWN = 10
"""Experts in the text; the files hold all."""


def to_json(found: Specialisation) -> str:
    """Returns everything as indented JSON, each list of numbers on one line."""
    content = asdict(found)
    experts, groups = content.pop("experts"), content.pop("groups")
    head = {"schema": SCHEMA, **content, "mean_polysemanticity": found.mean_polysemanticity}
    fields = [f"  {json.dumps(key)}: {_line(value)}" for key, value in head.items()]
    for key, records in (("experts", experts), ("groups", groups)):
        lines = ",\n".join(f"    {_line(record)}" for record in records)
        fields.append(f"  {json.dumps(key)}: [\n{lines}\n  ]")
    return "{\n" + ",\n".join(fields) + "\n}\n"


def write(found: Specialisation, directory: Path) -> tuple[Path, ...]:
    """Writes `specialise.json` and `specialise.png`, each whole; returns their paths.

    Raises OutputError where that cannot be.
    """
    from .specialise_figure import draw

    paths = (directory / JSON_FILE, directory / FIGURE_FILE)
    write_text(to_json(found), paths[0])
    with whole_file(paths[1]) as partial:
        draw(found, partial)
    return paths


def text(found: Specialisation) -> str:
    """Returns the experts whose removal changes most, and how many change nothing."""
    changing = ranked(found)
    right = sum((a or 0.0) * s for a, s in zip(found.accuracy, found.samples, strict=True))
    mean = found.mean_polysemanticity
    lines = [
        f"model       {found.model} ({found.family})",
        f"layer       {found.layer}: {' × '.join(map(str, found.levels))} experts, all kept",
        f"accuracy    {right / sum(found.samples):.1%} of {sum(found.samples)} inputs",
        f"experts     {len(changing)} of {len(found.experts)} change the accuracy of a class when "
        "removed",
    ]
    if mean is not None:
        lines.append(f"polysemanticity {mean:.3f} on average over these (0: one class, all of it)")
        lines += ["", table(HEADER, [_cells(found, each) for each in changing[:SHOWN]])]
    if len(changing) > SHOWN:
        lines.append(f"… and {len(changing) - SHOWN} more")
    return "\n".join(lines)


HEADER = (
    "expert",
    "inputs",
    "accuracy",
    "class changed most",
    "before",
    "after",
    "polysemanticity",
)


def ranked(found: Specialisation) -> list[ExpertEffect]:
    """Returns the experts that change a class, those that change the accuracy most first."""
    changing = [e for e in found.experts if e.polysemanticity is not None]
    return sorted(
        changing, key=lambda e: (-sum(abs(c or 0.0) for c in e.change), e.level, e.expert)
    )


def expert_name(found: Specialisation, effect: ExpertEffect) -> str:
    """Returns an expert as `--ablate` takes it: its number, with its level where there are more."""
    return f"{effect.level}.{effect.expert}" if len(found.levels) > 1 else str(effect.expert)


def _cells(found: Specialisation, effect: ExpertEffect) -> tuple[str, ...]:
    changed = effect.most_changed
    right = sum((a or 0.0) * s for a, s in zip(effect.accuracy, found.samples, strict=True))
    return (
        expert_name(found, effect),
        str(effect.inputs),
        f"{right / sum(found.samples):.1%}",
        str(changed),
        f"{found.accuracy[changed]:.1%}",
        f"{effect.accuracy[changed]:.1%}",
        f"{effect.polysemanticity:.3f}",
    )


def _line(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
