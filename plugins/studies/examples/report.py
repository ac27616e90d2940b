"""Writes the examples of experts as JSON, as text and as a page with the images or texts.

The page is self-contained. It contains each image once, even if several experts share the image. If
the layer's tokens are patches, a map of their weights is drawn over the image.
"""

from __future__ import annotations

import base64
import io
import json
from dataclasses import asdict, replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from ....common.text import table
from ....common.writing import write_text
from ....data.batches import Array
from .search import Examples, ExpertExamples, TopInput
from .shown import Contents

JSON_FILE, PAGE_FILE = "examples.json", "examples.html"

SCHEMA = 1

MAX_EXAMPLES, MAX_EXPERTS, MAX_ON_PAGE = 5, 20, 256
"""How many examples of an expert and how many experts the text shows, and experts the page."""

SIDE = 112
"""The longer side of an image on the page, in pixels."""


def to_dict(found: Examples) -> dict[str, Any]:
    """Returns the examples as plain data, each with its text if that is known."""
    content = asdict(replace(found, shares=(), shown=Contents()))
    del content["shares"], content["shown"]
    for record, expert in zip(content["experts"], found.experts, strict=True):
        for fields, example in zip(record["examples"], expert.examples, strict=True):
            words = "".join(_words(example, found.shown))
            fields.update({"text": words} if words else {})
            for key in [key for key in ("label", "token") if fields[key] is None]:
                del fields[key]
    return content


def text(found: Examples) -> str:
    """Returns a table of the experts that have examples: inputs, tokens and weights."""
    experts = [expert for expert in found.experts if expert.examples]
    rows = [
        (found.name(expert), ", ".join(_line(top, found) for top in expert.examples[:MAX_EXAMPLES]))
        for expert in experts[:MAX_EXPERTS]
    ]
    lines = [
        f"examples    for {len(experts)} of {len(found.experts)} experts of {found.layer}, from "
        f"{found.inputs} inputs, by {found.weight}",
        "",
        table(("expert", "input:token (weight)" if found.by_token else "input (weight)"), rows),
    ]
    if len(experts) > MAX_EXPERTS:
        lines.append(f"… and {len(experts) - MAX_EXPERTS} more")
    return "\n".join(lines)


def _line(example: TopInput, found: Examples) -> str:
    if example.token is None:
        return f"#{example.input} ({example.weight:.3g})"
    _, word, _ = _words(example, found.shown)
    token = repr(word) if word else f"id {example.token}"
    return f"#{example.input}:{example.tokens[0][0]} {token} ({example.weight:.3g})"


def _words(example: TopInput, shown: Contents) -> tuple[str, str, str]:
    """Returns the texts before, of and after a token; for a whole input, only its own text."""
    if example.token is None:
        return "", shown.text(example.input), ""
    return shown.around(example.input, example.tokens[0][0])


def write(found: Examples, directory: Path) -> tuple[Path, ...]:
    paths = (directory / JSON_FILE, directory / PAGE_FILE)
    content = {"schema": SCHEMA, **to_dict(found)}
    write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", paths[0])
    write_text(page(found), paths[1])
    return paths


STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em auto; max-width: 1200px; color: #1c2733 }
h2 { font-size: 1em; margin: 1.6em 0 .4em }
.row { display: flex; flex-wrap: wrap; gap: 10px }
.cell { font-size: 11px; color: #55606c; max-width: 20em }
.image, .map { background-size: 100% 100%; image-rendering: pixelated }
.map { width: 100%; height: 100% }
.image:hover .map { opacity: 0 }
.words { white-space: pre-wrap; color: #1c2733 }
mark { background: #ffd58a }
"""


def page(found: Examples) -> str:
    """Returns the page, with a row of examples for each expert that has any."""
    experts = [expert for expert in found.experts if expert.examples]
    by_weight = sorted(experts, key=lambda expert: -expert.examples[0].weight)[:MAX_ON_PAGE]
    listed = sorted(by_weight, key=lambda expert: (expert.level, expert.expert))
    sizes, shown = _grid(found), found.shown
    used = sorted({example.input for expert in listed for example in expert.examples})
    styles = [STYLE]
    if shown.images is not None:
        styles += [_image_style(number, shown.images[number]) for number in used]
    title = f"{Path(found.model).name}, layer {found.layer}: examples of its experts"
    about = (
        f"{len(listed)} of {len(found.experts)} experts, from {found.inputs} inputs. Weight: "
        f"{found.weight}."
    )
    if sizes is not None and shown.images is not None:
        about += f" Red: {found.share}, by patch; point at an image to hide the red."
    if len(experts) > len(listed):
        about += (
            f" {len(experts) - len(listed)} experts with smaller weights are only in {JSON_FILE}."
        )
    if len(experts) < len(found.experts):
        without_examples = len(found.experts) - len(experts)
        about += f" {without_examples} experts have no examples: no input gives them a weight."
    rows = [
        f"<h2>Expert {found.name(expert)}</h2>\n<div class=row>"
        + "".join(_cells(found, expert, sizes))
        + "</div>"
        for expert in listed
    ]
    return (
        f"<!doctype html>\n<html lang=en><meta charset=utf-8>\n<title>{escape(title)}</title>\n"
        f"<style>{''.join(styles)}</style>\n<h1>{escape(title)}</h1>\n<p>{escape(about)}</p>\n"
        + "\n".join(rows)
        + "\n</html>\n"
    )


def _cells(found: Examples, expert: ExpertExamples, sizes: tuple[int, int] | None) -> list[str]:
    """Returns the examples of an expert, each with its numbers below."""
    cells, shown = [], found.shown
    for row, example in enumerate(expert.examples):
        parts = []
        if shown.images is not None and example.token is None:
            shares = found.shares[expert.level - 1][row, expert.expert]
            overlay = "" if sizes is None else _map(shares, sizes)
            parts.append(f'<div class="image i{example.input}">{overlay}</div>')
        before, word, after = map(escape, _words(example, shown))
        if word:
            marked = f"<mark>{word}</mark>" if example.token is not None else word
            parts.append(f"<div class=words>{before}{marked}{after}</div>")
        parts.append(escape(_caption(example)))
        cells.append(f"<div class=cell>{''.join(parts)}</div>")
    return cells


def _caption(example: TopInput) -> str:
    label = "" if example.label is None else f", label {example.label}"
    words = f"input {example.input}{label}: {example.weight:.3g}"
    if example.token is not None:
        return f"{words}; token {example.tokens[0][0]}, id {example.token}"
    if example.tokens and (len(example.tokens) > 1 or example.tokens[0][0] > 0):
        words += "; tokens " + ", ".join(f"{at} ({share:.2g})" for at, share in example.tokens)
    return words


def _image_style(number: int, image: Array) -> str:
    height, width = image.shape[:2]
    scale = SIDE / max(height, width)
    return (
        f".i{number}{{width:{round(width * scale)}px;height:{round(height * scale)}px;"
        f"background-image:url({_png(image, scale)})}}\n"
    )


def _png(image: Array, scale: float = 1.0) -> str:
    """Returns an image as the data URL of a PNG, scaled down if `scale` is below 1."""
    from PIL import Image

    picture = Image.fromarray(np.ascontiguousarray(image))
    if scale < 1:
        size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
        picture = picture.resize(size, Image.Resampling.BILINEAR)
    file = io.BytesIO()
    picture.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _grid(found: Examples) -> tuple[int, int] | None:
    """Returns the rows and columns of the patches; None if a layer's tokens are not patches.

    One more token may come before the patches. In a layer that mixes patches, tokens are channels,
    and the width is the number of patches.
    """
    if found.shown.pixels is None or not found.shares:
        return None
    height, width = found.shown.pixels
    tokens = found.shares[0].shape[-1]
    for count in (tokens, tokens - 1):
        rows = round((count * height / width) ** 0.5) if count > 1 else 0
        fits = rows and count % rows == 0 and rows * width == count // rows * height
        if fits and found.dim != count:
            return rows, count // rows
    return None


def _map(shares: Array, sizes: tuple[int, int]) -> str:
    """Returns the weights of an image's patches as a red overlay; larger ones are more opaque."""
    rows, columns = sizes
    weights = shares[len(shares) - rows * columns :].reshape(rows, columns)
    overlay = np.zeros((rows, columns, 4), np.uint8)
    overlay[..., 0] = 230
    overlay[..., 3] = (weights / max(weights.max(), 1e-30) * 160).clip(0, 160)
    return f'<div class=map style="background-image:url({_png(overlay)})"></div>'
