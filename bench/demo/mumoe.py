"""`moexport demo --family mumoe`: CP and TR classifiers, an MLP-Mixer and a GPT-2, end to end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...common.progress import Progress
from ...common.text import table
from ...common.timing import Protocol
from ...exporter.bundle.bundle import Bundle
from ...exporter.checkpoints.load import load
from ...exporter.families.gpt2 import GPT2Spec
from ...exporter.families.mixer import MixerSpec
from ...exporter.options import parse_k
from ...exporter.support import support
from ...graphs.layers.mumoe_spec import Form
from ..bench_data import LabelledData
from ..plan import Settings
from ..report.summary import rows_table
from ..results import Results
from ..run import bench, with_threads
from ..runners.candidates import Asked, from_bundle
from . import digits, mumoe_training, topics
from .demo import THREADS, VERIFIED_HEADER, Outcome, claim, exported, verified

EXPERTS = 32
KEPT = ("n", "16", "8", "4", "2", "1")
SEED = 0
LENGTH = 64
"""Positions of the GPT-2."""

CAVEAT = """k buys next to no speed here: the experts' part of a muMoE's work is small, and the
whole of it is computed for every k; what falls with k is the price of choosing. A small k shows how
many experts the task needs."""

SUPPORT_HEADER = ("model", "layer", "experts n", "mean", "p99", "max")


@dataclass(frozen=True, slots=True)
class Trained:
    """A checkpoint and what its user must say of it, beside the shapes."""

    checkpoint: Path
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Group:
    """Networks that are measured on the same inputs, in a file that the command line takes too."""

    name: str
    data: LabelledData
    file: Path
    models: tuple[Trained, ...]


def run_mumoe_demo(directory: Path, progress: Progress, *, force: bool = False) -> Outcome:
    """Trains four muMoE networks on digits and on Python's help; exports, verifies, measures them.

    Each is exported once, with k as an input of the graph, and measured at every k of `KEPT`.
    Raises `BundleError` when `directory` exists, unless it is an earlier demo and `force` is given.
    """
    started = time.monotonic()
    claim(directory, force=force)
    with torch.random.fork_rng(devices=[]), with_threads(THREADS):
        torch.manual_seed(SEED)
        groups = [*_on_digits(directory, progress), _on_text(directory, progress)]
    checked: list[tuple[str, ...]] = []
    supports: list[tuple[object, ...]] = []
    texts, reports = [], []
    for group in groups:
        bundles = [
            exported(
                model.checkpoint,
                model.checkpoint.with_suffix(""),
                "input",
                group.file,
                progress,
                model.config,
            )
            for model in group.models
        ]
        checked += [verified(bundle) for bundle in bundles]
        for model in group.models:
            progress.step(f"counting the coefficients of {model.checkpoint.stem}")
            supports += _supports(model, group.file)
        progress.step(f"measuring {group.name}")
        report = directory / f"report-{group.name}"
        texts.append(rows_table(_measured(bundles, group.data, report, progress)))
        reports.append(f"report: {report / 'report.html'}")
    text = "\n\n".join(
        (
            table(VERIFIED_HEADER, checked),
            "Coefficients that are not zero, of each token (k = max changes nothing):\n"
            + table(SUPPORT_HEADER, supports),
            *texts,
            CAVEAT,
            "\n".join((f"took {time.monotonic() - started:.0f} s", *reports)),
        )
    )
    return Outcome(directory, directory / f"report-{groups[0].name}" / "report.html", text)


def _on_digits(directory: Path, progress: Progress) -> list[Group]:
    """CP and TR classifiers of whole images as vectors, and an MLP-Mixer on images."""
    data = digits.load_digits()
    assert data.train.labels is not None and data.test.labels is not None
    images, labels = torch.from_numpy(data.train.inputs), torch.from_numpy(data.train.labels)
    vectors = LabelledData(
        data.test.inputs.reshape(len(data.test), -1), data.test.labels, "input", "label"
    )
    heads = []
    forms: tuple[tuple[Form, int], ...] = (("cp", 64), ("tr", 16))
    for form, rank in forms:
        progress.step(f"training a {form.upper()} classifier on {len(images)} digits")
        head = mumoe_training.head(form, EXPERTS, vectors.inputs.shape[1], digits.CLASSES, rank)
        batches = _drawn(images.flatten(1), labels, 128)
        path = directory / f"digits-{form}.pt"
        mumoe_training.save(mumoe_training.fit(head, batches, 250, 3e-3), path)
        heads.append(Trained(path, {"input_rank": 2}))
    progress.step(f"training an MLP-Mixer on {len(images)} digits")
    spec = MixerSpec(grid=(4, 4), patch=7, channels=1, dim=64, depth=2, classes=digits.CLASSES)
    mixer = mumoe_training.mixer(spec, EXPERTS, hidden=(32, 128), rank=48)
    path = directory / "mixer.pt"
    mumoe_training.save(mumoe_training.fit(mixer, _drawn(images, labels, 64), 250, 3e-3), path)
    return [
        Group("digits", vectors, _saved(vectors, directory / "digits-test.npz"), tuple(heads)),
        Group(
            "mixer",
            data.test,
            _saved(data.test, directory / "mixer-test.npz"),
            (Trained(path, {"patch_size": spec.patch}),),
        ),
    ]


def _on_text(directory: Path, progress: Progress) -> Group:
    """A two-layer GPT-2 that foretells the next character."""
    text = topics.load_topics()
    progress.step(f"training a GPT-2 on {len(text.train)} characters of Python's help")
    spec = GPT2Spec(LENGTH, len(text.characters), depth=2, heads=4, dim=64, bias=True)
    model = mumoe_training.gpt2(spec, EXPERTS, hidden=256, rank=48)
    mumoe_training.fit(model, _windows(text.train, 32), 600, 3e-3)
    path = directory / "gpt2.pt"
    mumoe_training.save(model, path, n_layer=spec.depth, n_head=spec.heads, n_embd=spec.dim)
    data = LabelledData(text.sequences(LENGTH, 128), None, "input_ids")
    return Group("gpt2", data, _saved(data, directory / "gpt2-test.npz"), (Trained(path),))


def _drawn(inputs: Tensor, labels: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields random batches of labelled inputs, without end."""
    while True:
        rows = torch.randint(len(inputs), (size,))
        yield inputs[rows], labels[rows]


def _windows(ids: np.ndarray, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields random batches of sequences and of the tokens that follow each, without end."""
    tokens = torch.from_numpy(ids)
    within = torch.arange(LENGTH + 1)
    while True:
        window = tokens[torch.randint(len(tokens) - LENGTH, (size, 1)) + within]
        yield window[:, :-1], window[:, 1:]


def _saved(data: LabelledData, path: Path) -> Path:
    arrays = {data.input_name: data.inputs}
    if data.labels is not None and data.label_name is not None:
        arrays[data.label_name] = data.labels
    np.savez(path, **arrays)  # type: ignore[arg-type]  # names as keywords
    return path


def _supports(model: Trained, data: Path) -> list[tuple[object, ...]]:
    loaded = load(model.checkpoint, config=dict(model.config))
    return [
        (
            model.checkpoint.stem,
            row.layer,
            row.experts,
            f"{row.mean:.1f}",
            f"{row.p99:.0f}",
            row.max,
        )
        for row in support(loaded, str(data))
    ]


def _measured(
    bundles: Sequence[Bundle], data: LabelledData, out: Path, progress: Progress
) -> Results:
    asked = Asked(ks=tuple(parse_k(k) for k in KEPT), threads=THREADS)
    return bench(
        [from_bundle(bundle, asked) for bundle in bundles],
        data,
        Settings(
            protocol=Protocol(inputs=8, round_s=0.1),
            threads=THREADS,
            memory=False,  # a process for each of many rows, of networks this small
        ),
        out=out,
        command=f"moexport demo --family mumoe -o {out.parent}",
        progress=progress,
    )
