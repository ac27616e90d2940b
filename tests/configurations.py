"""Exports random calls of the published constructors and random settings of `transformers`.

Every number is the seed of a draw: a family, a call of its constructor (with `None` and `False`
among the arguments), a target, k, a precision and sizes. The command line exports and verifies it,
and the graph's outputs are compared with the published formula in float64:

    python -m moexport.tests.configurations --first 0 --count 500
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import torch
from moexport.graphs.targets import TARGETS, Target
from moexport.plugins.token_routed.tests import architectures
from moexport.tests.command import run
from moexport.tests.exporter.families.test_constructors import CASES, Case
from moexport.tests.hard.pairs.formulas import Change, by_formulas

TRANSFORMERS = "transformers"
FAMILIES = (*CASES, TRANSFORMERS)
KS = ("n", "1", "0.5", "input")
BATCHES = (None, "3", "1:1:32", "2:5:9", "1:2:2")
PRECISIONS = ("fp32", "fp32", "fp32", "fp16", "int8")
BOUNDS = {"fp32": 1e-4, "fp16": 2e-2, "int8": 2e-1}
"""Bounds relative to an input's own max|y|. Below FP32 they apply to the median input, since others
may select other experts."""

CLEAR = 1e-4
"""The margin of the selection from which an input is compared."""

HEADS = ({"num_attention_heads": 4, "num_key_value_heads": 2}, {"num_attention_heads": 2})
WIDTHS = ({"hidden_size": 32}, {"hidden_size": 56}, {"hidden_size": 24}, {"hidden_size": 64})


@dataclass(frozen=True)
class Draw:
    """An export to test; `call` has the arguments of a constructor, or settings."""

    seed: int
    family: str
    call: str
    target: Target
    k: str
    precision: str
    batch: str | None


@dataclass(frozen=True)
class Result:
    """The outcome of a draw: `right`, `refused` with an error of ours, or `failed`."""

    draw: Draw
    verdict: str
    said: str


@cache
def cases(family: str) -> tuple[Case, ...]:
    return tuple(CASES[family]())


def drawn(seed: int) -> tuple[Draw, Case | dict[str, Any]]:
    """Returns the draw of a seed, with its case or the settings of a model of `transformers`."""
    chance = random.Random(seed)
    family = chance.choice(FAMILIES)
    what: Case | dict[str, Any]
    if family == TRANSFORMERS:
        name = chance.choice(sorted(architectures.ARCHITECTURES))
        what = {"architecture": name, "second": chance.random() < 0.5}
        what |= {**chance.choice(HEADS), **chance.choice(WIDTHS)}
        call = " ".join(f"{key}={value}" for key, value in what.items())
    else:
        what = chance.choice(cases(family))
        call = what.name
    targets = [t for t in TARGETS.names if t != "openvino" or chance.random() < 0.5]
    draw = Draw(
        *(seed, family, call, chance.choice(targets), chance.choice(KS)),
        *(chance.choice(PRECISIONS), chance.choice(BATCHES)),
    )
    return draw, what


def outcome(seed: int, folder: Path) -> Result:
    """Exports a draw and compares it."""
    draw, what = drawn(seed)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        if isinstance(what, Case):
            torch.save(what.state, folder / "w.pt")
            (folder / "config.json").write_text(json.dumps(what.call))
            source = [str(folder / "w.pt"), "--family", draw.family]
            source += ["--config", str(folder / "config.json")]
        else:
            settings = dict(what)
            architecture = architectures.ARCHITECTURES[settings.pop("architecture")]
            second = settings.pop("second")
            source = [
                str(architectures.save(architecture, folder / "m", second=second, **settings))
            ]
    except (ValueError, TypeError, AttributeError, RuntimeError, AssertionError) as error:
        return Result(draw, "refused", f"the library: {error}"[:200])
    return _exported(draw, what, source, folder)


def _exported(draw: Draw, what: Case | dict[str, Any], source: list[str], folder: Path) -> Result:
    options = ["--k", draw.k, "--target", draw.target, "--precision", draw.precision]
    options += ["--threads", "1"] + (["--batch", draw.batch] if draw.batch else [])
    if draw.precision == "int8":
        if not isinstance(what, Case):
            options += ["--data", str(_ids(folder))]
        else:
            options += ["--data", str(_inputs(what, folder))]
    export = run("export", *source, "-o", folder / "out", *options)
    if export.code:
        raw = "defect" in export.err or "Traceback" in export.err
        return Result(draw, "failed" if raw else "refused", export.err.strip()[-600:])
    verify = run("verify", folder / "out")
    if verify.code:
        return Result(draw, "failed", (verify.out + verify.err).strip()[-600:])
    if not isinstance(what, Case) or TARGETS[draw.target].runtime.startswith("tensorrt"):
        return Result(draw, "right", "verified")
    off = _off(draw, what, folder)
    return Result(draw, "right" if off <= BOUNDS[draw.precision] else "failed", f"off by {off:.1e}")


def _inputs(case: Case, folder: Path) -> Path:
    chance = np.random.default_rng(1)
    shape = (32, *case.shape[1:])
    x: Any = chance.standard_normal(shape).astype(np.float32)
    if len(case.shape) == 2:
        x = chance.integers(0, 11, shape)
    np.savez(folder / "data.npz", input=x)
    return folder / "data.npz"


def _ids(folder: Path) -> Path:
    ids = np.random.default_rng(1).integers(0, architectures.SMALL["vocab_size"], (32, 9))
    np.savez(folder / "data.npz", input_ids=ids)
    return folder / "data.npz"


def _off(draw: Draw, case: Case, folder: Path) -> float:
    """Returns the graph's error relative to the formula, at both ends of the batch range."""
    model = moexport.load(folder / "w.pt", family=draw.family, config=case.call)
    bundle = moexport.Bundle.open(folder / "out")
    session = bundle.session()
    experts = {name: layer.spec.experts for name, layer in model.layers.items()}
    sizes = [1, 2, 17] if draw.batch is None else sorted({*map(int, draw.batch.split(":"))})
    worst = 0.0
    for size in sizes:
        for k in {1, max(1, min(experts.values()) // 2)} if draw.k == "input" else {None}:
            x = np.load(_inputs(case, folder))["input"]
            x = np.concatenate([x] * (size // len(x) + 1))[:size]
            kept = {layer.name: layer.k if k is None else k for layer in bundle.manifest.layers}
            changes = {name: Change(k=kept[name]) for name in experts}
            network, margins = by_formulas(model.module, changes)
            with torch.no_grad():
                given = torch.from_numpy(x)
                y: Any = network(given.double() if given.is_floating_point() else given)
            wanted = (y[0] if isinstance(y, tuple) else y).numpy()
            got = session(x) if k is None else session(x, k=k)
            got = next(iter(got.values())) if isinstance(got, dict) else got
            axes = tuple(range(1, wanted.ndim))
            off = np.abs(got - wanted).max(axes) / np.maximum(np.abs(wanted).max(axes), 1e-30)
            if margins.least is not None:
                off = off[margins.least.numpy() > CLEAR]
            if off.size:
                worst = max(worst, float(off.max() if draw.precision == "fp32" else np.median(off)))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m moexport.tests.configurations")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--json", type=Path, help="a file with a line of JSON for every draw")
    options = parser.parse_args()
    verdicts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.first, options.first + options.count):
            result = outcome(seed, Path(folder) / "draw")
            verdicts[result.verdict] += 1
            if result.verdict == "failed":
                print(f"FAILED {result.draw}\n    {result.said}", flush=True)
            if options.json is not None:
                with options.json.open("a") as lines:
                    lines.write(json.dumps(asdict(result)) + "\n")
    print(", ".join(f"{verdict} {count}" for verdict, count in sorted(verdicts.items())))
    sys.exit(int(bool(verdicts["failed"])))


if __name__ == "__main__":
    main()
