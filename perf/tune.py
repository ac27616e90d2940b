"""`tune` beside the best uniform k and precision of `bench`, and beside Optuna as the search.

Each network is trained on half of the digits; `tune` and all others get the other half, half of
which confirms. What each found is timed in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import moexport
import numpy as np
import torch
from moexport.bench.data import LabelledData
from moexport.bench.demo import digits
from moexport.bench.demo.mumoe import EXPERTS, fit, trainable_mixer
from moexport.bench.demo.mumoe import save as save_mumoe
from moexport.bench.runners.pytorch import untouched
from moexport.common.console import Progress
from moexport.common.text import markdown
from moexport.common.timing import Protocol
from moexport.common.timing import measure as measure_calls
from moexport.errors import MoexportError
from moexport.exporter.families.mumoe_mixer import MixerSpec
from moexport.exporter.model import Model
from moexport.graphs.targets import Precision
from moexport.tune.graphs import Look
from moexport.tune.halves import Halves
from moexport.tune.quality import Tally, metric_for
from moexport.tune.request import TuneRequest
from moexport.tune.search import AROUND, front_of
from moexport.tune.space import Choice, Point
from moexport.tune.tune import Found, Job
from torch.nn import functional as F

from .measure import measured_on, threads

KEEP = 0.99

SHARES = ("n", "1/2", "1/4", "1/8", "1/16")
"""The k that `bench` would be asked for."""

PRECISIONS: tuple[Precision, ...] = ("fp32", "int8")

PROTOCOL = Protocol(rounds=9, warmup=5, round_s=0.2, inputs=8)

MORE = 3
"""Optuna may look at so many times as many graphs."""

VIT = Path(__file__).parents[1] / "tests" / "data" / "soft_moe_vit" / "weights.pt"
"""Random weights of a ViT with two MoE layers of 8 experts, which is trained here."""


@dataclass(frozen=True, slots=True)
class Case:
    """A network and the data that `tune` gets."""

    name: str
    model: Model
    data: LabelledData


@dataclass(frozen=True, slots=True)
class Row:
    """What was found for one network: milliseconds, what is kept on the confirming half, looks.

    `optuna_looks` is after how many graphs Optuna's front was as good as ours, None where it was
    not within its number; `share` is its dominated area over ours then.
    """

    name: str
    uniform: str
    uniform_ms: float
    uniform_kept: float
    tuned: str
    tuned_ms: float
    tuned_kept: float
    looks: int
    seconds: float
    optuna_looks: int | None
    share: float


def measure(progress: Progress) -> Mapping[str, object]:
    """Returns a row for each network."""
    count = threads()
    rows = []
    with TemporaryDirectory(prefix="moexport-tune-") as folder:
        for case in _cases(Path(folder), progress):
            progress.step(case.name)
            rows.append(asdict(_row(case, Path(folder), progress)))
    return {"threads": count, "keep": KEEP, "rows": rows}


def table(body: Any) -> str:
    """The results as Markdown."""
    cells = [
        (
            row["name"],
            row["uniform"],
            f"{row['uniform_ms']:.3g}",
            row["tuned"],
            f"{row['tuned_ms']:.3g}",
            f"{row['uniform_ms'] / row['tuned_ms']:.2f}×",
            f"{row['uniform_kept']:.2%} / {row['tuned_kept']:.2%}",
            f"{row['looks']} in {row['seconds']:.0f} s",
            "never" if row["optuna_looks"] is None else row["optuna_looks"],
        )
        for row in body["rows"]
    ]
    heads = ("network", "best uniform", "ms", "tune", "ms", "faster", "kept, confirmed")
    gains = [row["uniform_ms"] / row["tuned_ms"] for row in body["rows"]]
    return (
        f"Measured on {measured_on(body)}, {body['threads']} threads; at {body['keep']:.0%} kept, "
        f"batch 1.\n\n{markdown((*heads, 'graphs', 'Optuna as good after'), cells)}\n\n"
        f"The median is {np.median(gains):.2f} times as fast."
    )


def _cases(folder: Path, progress: Progress) -> Iterator[Case]:
    data = digits.load_digits(test_share=0.5)
    for training in (
        digits.Training(16),
        digits.Training(64),
        digits.Training(
            128, hidden=64, normalise=True, scale=16.0, epochs=6, batch=64, learning_rate=4e-3
        ),
    ):
        progress.step(f"training n = {training.experts}")
        path = folder / f"mnist-{training.experts}.pt"
        digits.save(digits.train(training, data.train), path)
        yield Case(f"MNIST network, n = {training.experts}", moexport.load(path), data.test)
    progress.step("training a ViT")
    model, test = _vit(data)
    yield Case("digits ViT, two layers of 8", model, test)
    progress.step("training a mixer")
    yield Case("muMoE mixer, four layers of 32", _mixer(data, folder / "mixer.pt"), data.test)


def _vit(data: digits.Digits) -> tuple[Model, LabelledData]:
    model = moexport.load(VIT, config={"num_heads": 4, "rest": "default"})
    wide = [replace(each, inputs=_as_colour(each.inputs)) for each in (data.train, data.test)]
    module = model.module.requires_grad_(True)
    torch.manual_seed(0)
    optimiser = torch.optim.Adam(module.parameters(), lr=2e-3)
    images, labels = torch.from_numpy(wide[0].inputs), torch.from_numpy(wide[0].labels)
    for _ in range(30):
        for rows in torch.split(torch.randperm(len(images)), 64):
            optimiser.zero_grad()
            loss = F.cross_entropy(module(images[rows]), labels[rows])
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    module.requires_grad_(False).eval()
    return model, wide[1]


def _as_colour(images: np.ndarray) -> np.ndarray:
    """Digits [b, 1, 28, 28] as [b, 3, 32, 32]."""
    larger = F.interpolate(torch.from_numpy(images), size=(32, 32), mode="bilinear")
    return larger.expand(-1, 3, -1, -1).contiguous().numpy()


def _mixer(data: digits.Digits, path: Path) -> Model:
    torch.manual_seed(0)
    spec = MixerSpec(grid=(4, 4), patch=7, channels=1, dim=64, depth=2, classes=digits.CLASSES)
    images, labels = torch.from_numpy(data.train.inputs), torch.from_numpy(data.train.labels)
    batches = [
        (images[rows], labels[rows])
        for _ in range(20)
        for rows in torch.split(torch.randperm(len(images)), 64)
    ]
    save_mumoe(fit(trainable_mixer(spec, EXPERTS, (32, 128), 48), iter(batches), 250, 3e-3), path)
    return moexport.load(path, config={"patch_size": spec.patch, "act": "entmax15"})


def _row(case: Case, folder: Path, progress: Progress) -> Row:
    place = folder / case.name.replace(" ", "-").replace(",", "")
    tuned = moexport.tune(case.model, case.data, place / "tuned", keep=KEEP, progress=progress)
    uniform = _uniform(case, place, progress)
    bundles = {"tuned": tuned.bundle, **{name: bundle for name, (bundle, _) in uniform.items()}}
    calls: dict[str, Callable[[int], object]] = {
        name: partial(_call, bundle.session(), case.data) for name, bundle in bundles.items()
    }
    times = measure_calls(calls, PROTOCOL, title=case.name, progress=progress).latencies
    best = min(uniform, key=lambda name: times[name].median)
    ours, reached, share = _beside_optuna(case, folder, progress)
    return Row(
        name=case.name,
        uniform=best,
        uniform_ms=times[best].median,
        uniform_kept=uniform[best][1],
        tuned=tuned.chosen.look.point.text(tuned.experts),
        tuned_ms=times["tuned"].median,
        tuned_kept=tuned.chosen.quality.kept,
        looks=ours,
        seconds=tuned.seconds,
        optuna_looks=reached,
        share=share,
    )


def _call(session: Any, data: LabelledData, index: int) -> object:
    return session(data.batch(index, 1))


def _uniform(
    case: Case, place: Path, progress: Progress
) -> dict[str, tuple[moexport.Bundle, float]]:
    """The bundles of one k and precision that are confirmed, and what they keep."""
    halves = Halves.of(case.data)
    base, found = untouched(case.model), {}
    confirming = list(halves.confirming())
    outputs = [base.infer(x) for x, _ in confirming]
    metric = metric_for(None, outputs[0], *confirming[0])
    for precision in PRECISIONS:
        for k in SHARES:
            name = f"k = {k}, {precision}"
            progress.step(f"{case.name}: {name}")
            try:
                bundle = moexport.export(
                    case.model,
                    place / f"{precision}-{k.replace('/', '')}",
                    k=k,
                    precision=precision,
                    target="ort-cpu",
                    data=halves.search.inputs[:256],
                    verify=False,
                )
            except MoexportError as error:
                progress.step(f"{name}: {error.message}")
                continue
            session, tally = bundle.session(), Tally()
            for (x, labels), y in zip(confirming, outputs, strict=True):
                tally += metric.tally(session(x), y, x, labels)
            quality = metric.quality(tally)
            if quality.low >= KEEP:
                found[name] = (bundle, quality.kept)
    return found


def _beside_optuna(case: Case, folder: Path, progress: Progress) -> tuple[int, int | None, float]:
    """How many graphs our search made, after how many Optuna's front was as good, and its share."""
    request = TuneRequest(keep=KEEP)
    with TemporaryDirectory(dir=folder) as own, TemporaryDirectory(dir=folder) as other:
        found = Job.begin(case.model, case.data, request, Path(own), progress).search(progress)
        job = Job.begin(case.model, case.data, request, Path(other), progress)
        limit = MORE * len(found.looks)
        theirs = _optuna(found, job, limit, progress)
    area = partial(_area, base=found.base)
    wanted = area(found.looks)
    for count in range(1, len(theirs) + 1):
        if area(theirs[:count]) >= wanted:
            return len(found.looks), count, area(theirs[:count]) / wanted
    return len(found.looks), None, area(theirs) / wanted


def _optuna(found: Found, job: Job, limit: int, progress: Progress) -> list[Look]:
    """What Optuna looks at, over the same choices, with the layers' times known to both."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    looks: list[Look] = []

    def objective(trial: Any) -> tuple[float, float]:
        widths = ["fp32", *job.space.integers]
        width = trial.suggest_categorical("width", widths)
        layers = []
        for name, listed in found.choices.items():
            at = trial.suggest_int(name, 0, len(listed) - 1)
            integer = trial.suggest_categorical(f"{name} in integers", [False, True])
            serves = width != "fp32" and name in job.space.integers[width]
            choice: Choice = listed[at]
            layers.append(
                (name, replace(choice, precision=width if integer and serves else "fp32"))
            )
        point = Point(tuple(layers))
        around = trial.suggest_categorical("around in integers", [False, True])
        if around and width != "fp32" and AROUND in job.space.integers[width]:
            point = point.with_around(width)
        look = found.graphs.look(point)
        looks.append(look)
        progress.advance(1)
        return look.ms, look.quality.kept

    sampler = optuna.samplers.TPESampler(seed=0)
    study = optuna.create_study(directions=["minimize", "maximize"], sampler=sampler)
    progress.step(f"Optuna: {limit} graphs", total=limit)
    study.optimize(objective, n_trials=limit, catch=(MoexportError,))
    return looks


def _area(looks: Sequence[Look], base: Look) -> float:
    """The area that a front dominates: over time in factors of the model as trained, and kept."""
    front = front_of([look for look in looks if look.ms <= base.ms], lambda look: look.ms)
    # From the fastest on: each adds the stretch of time up to the next slower one.
    area, edges = 0.0, [look.ms for look in front[::-1]] + [base.ms]
    for look, end in zip(front[::-1], edges[1:], strict=True):
        area += float(np.log(end / look.ms)) * min(1.0, max(0.0, look.quality.kept))
    return area
