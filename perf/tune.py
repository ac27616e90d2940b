"""Compares `tune` with the best uniform k and precision, and with Optuna.

Each network is trained on one part of its data; `tune` and the others use the other part, half of
which confirms the results. These are timed in turn. A whole run takes about forty minutes.
"""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from tempfile import TemporaryDirectory
from typing import Any

import moexport
import numpy as np
import torch
from moexport.bench.data import LabelledData
from moexport.bench.runners.pytorch import untouched
from moexport.common.console import Progress
from moexport.common.latency import Latency
from moexport.common.text import markdown
from moexport.common.timing import Protocol
from moexport.common.timing import measure as measure_calls
from moexport.errors import MoexportError
from moexport.exporter.export import write_bundle
from moexport.exporter.families.mumoe_mixer import MixerSpec
from moexport.exporter.job import export_job
from moexport.exporter.model import Model
from moexport.exporter.session import SessionOptions
from moexport.graphs.targets import Precision
from moexport.plugins.demo import digits, experts
from moexport.plugins.demo.mumoe import EXPERTS, fit, trainable_mixer
from moexport.plugins.demo.mumoe import save as save_mumoe
from moexport.plugins.text.language import token_windows
from moexport.plugins.tune.accuracy.confirm import SearchResult, confirm_front, front_of
from moexport.plugins.tune.accuracy.quality import Quality, Tally
from moexport.plugins.tune.budget import Clock, spin_for
from moexport.plugins.tune.prepare import SearchJob, prepare
from moexport.plugins.tune.recipe import LayerRecipe
from moexport.plugins.tune.request import TuneRequest
from moexport.plugins.tune.search import search
from moexport.plugins.tune.space import BACKBONE, RANGED, Point, Trial
from moexport.plugins.tune.tune import export_best
from torch import nn
from torch.nn import functional as F

from .measure import keep, kept, measured_on, threads

KEEP = 0.99

SHARES = ("n", "n/2", "n/4", "n/8", "n/16")
"""The k of the uniform exports."""

PRECISIONS: tuple[Precision, ...] = ("fp32", "int8", "int4")

PROTOCOL = Protocol(rounds=21, warmup=5, round_s=0.02, inputs=8)
"""Many short rounds, because the machine changes its speed within tenths of a second."""

FASTEST, OPENED = 3, 3
"""How many uniform exports, the fastest in a first measurement, are timed again together with
`tune`'s bundle, and how often each is opened: sessions of one graph differ by 5%, so being the
fastest of ten is partly luck."""

SECOND_PROTOCOL = replace(PROTOCOL, rounds=45)
"""The protocol of the second measurement."""

TUNE_S, OPTUNA_S = 150.0, 500.0
"""The time limits of the two searches for a network. `tune` has three times as long for the
language model, which is traced again for each k. Optuna's limit is enough for all its graphs."""

COPIES = 16
"""The number of copies of each digit among the inputs; MNIST has 10,000 test images."""

ROTATED, SCALED, SHIFTED = 0.09, 0.05, 0.07
"""The rotation of a copy in radians, its scaling, and its shift in halves of the image."""

FLOOR = 0.9
"""The minimum retention of a point in the comparison of fronts."""

SLACK = 1.25
"""The factor by which times in a search may be wrong, because the machine changes its speed."""

PROPOSALS = 10
"""The limit of Optuna's proposals per graph: known points, which it repeats, are no new graphs."""

OPTUNA_GRAPHS = 3
"""The number of graphs that Optuna may evaluate for each graph of `tune`."""

VIT = Path(__file__).parents[1] / "tests" / "data" / "soft_moe_vit" / "weights.pt"
"""Random weights of a ViT with two MoE layers of 8 experts, the start of its training."""

VIT_EPOCHS, VIT_RATE = 8, 2e-3


@dataclass(frozen=True, slots=True)
class Network:
    """A trained network, and data that it was not trained on."""

    title: str
    model: Model
    data: LabelledData


@dataclass(frozen=True, slots=True)
class Row:
    """The results for one network: milliseconds, retention on the confirming half, and fronts.

    `uniform` is the fastest confirmed uniform export. `area` is the area that the front of `tune`
    dominates after a number of `graphs`, and `optuna_area` that of Optuna's front (`_area`).
    """

    name: str
    untouched: float
    uniform: str
    uniform_ms: float
    uniform_kept: float
    tuned: str
    tuned_ms: float
    tuned_kept: float
    seconds: float
    graphs: int
    area: float
    optuna_graphs: int
    optuna_area: float


def measure(file: Path, progress: Progress, only: str = "") -> None:
    """Measures the networks, and writes the rows after each.

    With `only`, replaces the saved row of one network. Without Optuna, nothing is measured.
    """
    if importlib.util.find_spec("optuna") is None:
        progress.step("optuna is not installed: pip install optuna")
        return
    count = threads()
    rows: dict[str, dict[str, Any]] = {}
    if only and file.exists():
        rows = {row["name"]: row for row in kept(file)["networks"]}
    with TemporaryDirectory(prefix="moexport-tune-") as folder:
        for name, train in NETWORKS.items():
            if only not in ("", name):
                continue
            network = train(Path(folder), progress)
            progress.step(network.title)
            longer = 3.0 if train is _language_model else 1.0
            found = row_of(network, Path(folder), progress, longer * TUNE_S, OPTUNA_S)
            created = datetime.now(UTC).isoformat(timespec="seconds")
            rows[found.name] = {"created": created, **asdict(found)}
            keep(file, "tune", threads=count, keep=KEEP, networks=[*rows.values()])


def table(body: Any) -> str:
    """Returns the results as Markdown."""
    return f"{bundles_table(body)}\n\n{fronts_table(body)}"


def bundles_table(body: Any) -> str:
    """Returns the bundles of `tune` and the best uniform exports as Markdown."""
    rows = [
        (
            row["name"],
            row["uniform"],
            f"{row['uniform_ms']:.3g}",
            f"{row['uniform_kept']:.2%}",
            row["tuned"],
            f"{row['tuned_ms']:.3g}",
            f"{row['tuned_kept']:.2%}",
            f"{row['uniform_ms'] / row['tuned_ms']:.2f}×",
        )
        for row in body["networks"]
    ]
    header = ("network", "best uniform", "ms", "kept", "tune", "ms", "kept", "faster")
    gains = [row["uniform_ms"] / row["tuned_ms"] for row in body["networks"]]
    return (
        f"Measured on {measured_on(body)}, {body['threads']} threads; at least {body['keep']:.0%} "
        f"kept, confirmed, batch 1.\n\n{markdown(header, rows)}\n\n"
        f"The median speedup is {np.median(gains):.2f}×."
    )


def fronts_table(body: Any) -> str:
    """Returns the fronts of the two searches as Markdown."""
    rows = [
        (
            row["name"],
            f"{row['seconds']:.0f}",
            str(row["graphs"]),
            f"{row['area']:.2f}",
            str(row["optuna_graphs"]),
            f"{row['optuna_area']:.2f}",
        )
        for row in body["networks"]
    ]
    header = ("network", "s", "graphs", "area", "Optuna's graphs", "Optuna's area")
    return (
        "The area that the front of `tune` dominates, over log time and the share kept above "
        f"{FLOOR:.0%}, compared with that of Optuna (TPE) with three times as many graphs.\n\n"
        f"{markdown(header, rows)}"
    )


def _digits() -> digits.Digits:
    """Returns half of the digits for training and half for `tune`, each in `COPIES` moved copies.

    Without copies, 450 digits would confirm: too few to tell 99% from 98% in most cases.
    """
    plain = digits.load_digits(test_share=0.5)
    generator = torch.Generator().manual_seed(0)
    return digits.Digits(*(_moved(each, generator) for each in (plain.train, plain.test)))


def _moved(data: LabelledData, generator: torch.Generator) -> LabelledData:
    """Returns copies of images [b, 1, 28, 28], randomly rotated, scaled and shifted a little."""
    assert data.labels is not None, "digits have labels"
    images = torch.from_numpy(data.inputs).repeat(COPIES, 1, 1, 1)
    angle, scale, *shift = (
        limit * (2 * torch.rand(len(images), generator=generator) - 1)
        for limit in (ROTATED, SCALED, SHIFTED, SHIFTED)
    )
    cos, sin = (each / (1 + scale) for each in (angle.cos(), angle.sin()))
    rows = (torch.stack(each, dim=1) for each in ((cos, -sin, shift[0]), (sin, cos, shift[1])))
    grid = F.affine_grid(torch.stack([*rows], dim=1), list(images.shape), align_corners=False)
    moved = F.grid_sample(images, grid, align_corners=False).numpy()
    return replace(data, inputs=moved, labels=np.tile(data.labels, COPIES))


def _digits_network(training: digits.Training, folder: Path, progress: Progress) -> Network:
    progress.step(f"training n = {training.experts}")
    data = _digits()
    path = folder / f"mnist-{training.experts}.pt"
    digits.save(digits.train(training, data.train), path)
    return Network(f"MNIST network, n = {training.experts}", moexport.load(path), data.test)


def _vit(_: Path, progress: Progress, epochs: int = VIT_EPOCHS) -> Network:
    progress.step("training a ViT")
    data = _digits()
    model = moexport.load(VIT, config={"num_heads": 4, "rest": "default"})
    train, test = (replace(e, inputs=_as_colour(e.inputs)) for e in (data.train, data.test))
    module = model.module.requires_grad_(True)
    torch.manual_seed(0)
    for name, weight in module.named_parameters():
        # Training from the recorded weights does not work with so few images.
        if weight.ndim in (2, 4):
            nn.init.xavier_uniform_(weight.flatten(1))
        elif name.endswith("bias"):
            nn.init.zeros_(weight)
    images, labels = torch.from_numpy(train.inputs), torch.from_numpy(train.labels)
    optimiser = torch.optim.AdamW(module.parameters(), lr=VIT_RATE, weight_decay=0.01)
    batches = -(-len(images) // 64)
    steps = epochs * batches
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, VIT_RATE, total_steps=steps)
    for _epoch in range(epochs):
        for rows in torch.split(torch.randperm(len(images)), 64):
            optimiser.zero_grad()
            loss = F.cross_entropy(module(images[rows]), labels[rows])
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            schedule.step()
    module.requires_grad_(False).eval()
    return Network("digits ViT, two layers of 8", model, test)


def _as_colour(images: np.ndarray) -> np.ndarray:
    """Converts digits [b, 1, 28, 28] to [b, 3, 32, 32]."""
    larger = F.interpolate(torch.from_numpy(images), size=(32, 32), mode="bilinear")
    return larger.expand(-1, 3, -1, -1).contiguous().numpy()


def _mixer(folder: Path, progress: Progress) -> Network:
    progress.step("training a mixer")
    data = _digits()
    path = folder / "mixer.pt"
    torch.manual_seed(0)
    spec = MixerSpec(grid=(4, 4), patch=7, channels=1, dim=64, depth=2, classes=digits.CLASSES)
    images, labels = torch.from_numpy(data.train.inputs), torch.from_numpy(data.train.labels)
    batches = [
        (images[rows], labels[rows])
        for _ in range(20)
        for rows in torch.split(torch.randperm(len(images)), 64)
    ]
    save_mumoe(fit(trainable_mixer(spec, EXPERTS, (32, 128), 48), iter(batches), 250, 3e-3), path)
    model = moexport.load(path, config={"patch_size": spec.patch, "act": "entmax15"})
    return Network("muMoE mixer, four layers of 32", model, data.test)


def _language_model(folder: Path, progress: Progress) -> Network:
    place = folder / "experts"
    place.mkdir()
    experts.trained(place, progress)
    model = moexport.load(place / experts.NAME)
    data = token_windows(place / "test.txt", model, experts.LENGTH)
    return Network("token-routed demo, three layers, 4 of 16", model, data)


NETWORKS: Mapping[str, Callable[[Path, Progress], Network]] = {
    "mnist-16": partial(_digits_network, digits.Training(16)),
    "mnist-64": partial(_digits_network, digits.Training(64)),
    "mnist-128": partial(
        _digits_network,
        digits.Training(
            128, hidden=64, normalise=True, scale=16.0, epochs=6, batch=64, learning_rate=4e-3
        ),
    ),
    "vit": _vit,
    "mixer": _mixer,
    "language": _language_model,
}
"""The networks by their names for `--network=`."""


def row_of(
    network: Network, folder: Path, progress: Progress, tune_s: float, optuna_s: float
) -> Row:
    """Returns the results for a network of two searches with these limits in seconds."""
    place = Path(folder) / network.title.replace(" ", "-").replace(",", "")
    request = TuneRequest(keep=KEEP, time=tune_s)
    began = time.monotonic()
    job = prepare(*(network.model, network.data, request, place / "work", progress, Clock(tune_s)))
    found = search(job, progress)
    passing = confirm_front(job, found, progress).within_bounds
    chosen, tuned = export_best(job, passing, found, place / "tuned", place / "recipe", progress)
    seconds = time.monotonic() - began
    uniform = _uniform(network, job, found, place, progress)
    first = {name: bundle for name, (bundle, _) in uniform.items()}
    times = _times(first, network, PROTOCOL, progress)
    fastest = sorted(first, key=times.__getitem__)[:FASTEST]
    finalists = {"tuned": tuned, **{name: first[name] for name in fastest}}
    times = _times(finalists, network, SECOND_PROTOCOL, progress, opened=OPENED)
    best = min(fastest, key=times.__getitem__)
    trials = list(found.trials)
    theirs = _optuna(found, job, OPTUNA_GRAPHS * len(trials), optuna_s, progress)
    area, optuna_area = _areas(trials, theirs, found, progress)
    sizes = {name: layer.spec.experts for name, layer in network.model.layers.items()}
    return Row(
        name=network.title,
        untouched=found.base.quality.untouched,
        uniform=best,
        uniform_ms=times[best],
        uniform_kept=uniform[best][1].kept,
        tuned=chosen.trial.point.text(sizes),
        tuned_ms=times["tuned"],
        tuned_kept=chosen.quality.kept,
        seconds=seconds,
        graphs=len(trials),
        area=area,
        optuna_graphs=len(theirs),
        optuna_area=optuna_area,
    )


def _times(
    bundles: Mapping[str, moexport.Bundle],
    network: Network,
    protocol: Protocol,
    progress: Progress,
    opened: int = 1,
) -> dict[str, float]:
    """Times bundles in turn, each in `opened` sessions; returns ms (`_typical`)."""
    calls: dict[str, Callable[[int], object]] = {
        f"{index} {name}": _call(bundle, network.data)
        for name, bundle in bundles.items()
        for index in range(opened)
    }
    found = measure_calls(calls, protocol, title=network.title, progress=progress).latencies
    return {
        name: geometric_mean(_typical(found[f"{index} {name}"]) for index in range(opened))
        for name in bundles
    }


def _typical(latency: Latency) -> float:
    """Returns the geometric mean of the medians of all rounds.

    On a machine that is fast or slow for tenths of a second, the median of all calls belongs to
    whichever state lasts for a little more than half of the time.
    """
    return geometric_mean(latency.rounds)


def _call(bundle: moexport.Bundle, data: LabelledData) -> Callable[[int], object]:
    session = bundle.session()
    bound = [session.bound(data.batch(index, 1)) for index in range(PROTOCOL.inputs)]
    return lambda index: bound[index]()


def _uniform(
    network: Network, job: SearchJob, found: SearchResult, place: Path, progress: Progress
) -> dict[str, tuple[moexport.Bundle, Quality]]:
    """Returns uniform bundles of each k and precision that are confirmed like `tune`'s, by name."""
    bundles: dict[str, moexport.Bundle] = {}
    options, table = job.base.options, job.base.table
    seen = set()
    for precision in PRECISIONS:
        for k in SHARES:
            name = f"k = {k}, {precision}"
            try:
                asked = export_job(
                    network.model,
                    replace(options, k=k, precision=precision),
                    calibration=table if precision in RANGED else None,
                    destination=place / f"{precision}-{k.replace('/', '-')}",
                )
                if (precision, *asked.k.values()) in seen:
                    continue
                seen.add((precision, *asked.k.values()))
                bundles[name] = write_bundle(asked, traced=found.graphs.traces.of(asked))
            except MoexportError as error:
                progress.step(f"{name}: {error.message}")
    qualities = _qualities(bundles, job, found, progress)
    return {
        name: (bundle, qualities[name])
        for name, bundle in bundles.items()
        if qualities[name].low >= KEEP or name == f"k = {SHARES[0]}, {PRECISIONS[0]}"
    }


def _qualities(
    bundles: Mapping[str, moexport.Bundle], job: SearchJob, found: SearchResult, progress: Progress
) -> dict[str, Quality]:
    progress.step("confirming uniform exports")
    metric, graphs = job.metric, found.graphs
    tallies = {name: Tally() for name in bundles}
    no_spinning = SessionOptions(spin_ms=0)
    sessions = {name: bundle.session(options=no_spinning) for name, bundle in bundles.items()}
    base = untouched(job.model)
    for x, labels in graphs.graph_batches(job.holdout.confirming()):
        outputs = base.infer(x)
        for name, session in sessions.items():
            tallies[name] += metric.tally(session(x), outputs, x, labels)
    return {name: metric.quality(tally) for name, tally in tallies.items()}


def _optuna(
    found: SearchResult, job: SearchJob, limit: int, seconds: float, progress: Progress
) -> list[Trial]:
    """Returns Optuna's points for the same choices; both searches know the layers' lowerings."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    trials: dict[str, Trial] = {}

    def objective(trial: Any) -> tuple[float, float]:
        width = trial.suggest_categorical("width", ["fp32", *job.spaces["ort-cpu"].integers])
        layers = []
        for name, listed in found.choices.items():
            index = trial.suggest_int(name, 0, len(listed) - 1)
            integer = trial.suggest_categorical(f"{name} in integers", [False, True])
            serves = width != "fp32" and name in job.spaces["ort-cpu"].integers[width]
            choice: LayerRecipe = listed[index]
            layers.append(
                (name, replace(choice, precision=width if integer and serves else "fp32"))
            )
        point = Point(tuple(layers), "ort-cpu")
        around = trial.suggest_categorical("around in integers", [False, True])
        if around and width != "fp32" and BACKBONE in job.spaces["ort-cpu"].integers[width]:
            point = point.with_around(width)
        if not found.graphs.times["ort-cpu"].knows(point):
            raise optuna.TrialPruned  # there was no time to measure such a layer
        known = point.key in trials
        trials[point.key] = trial = found.graphs.trial(point)
        progress.advance(not known)
        if len(trials) == limit:
            study.stop()
        return trial.ms, trial.quality.kept

    job.clock.seconds = math.inf  # no limit shortens the training of experts' substitutes
    sampler = optuna.samplers.TPESampler(seed=0)
    study = optuna.create_study(directions=["minimize", "maximize"], sampler=sampler)
    progress.step(f"Optuna: {limit} graphs", total=limit)
    with found.graphs.timed_with(found.base):
        study.optimize(
            objective, n_trials=PROPOSALS * limit, timeout=seconds, catch=(MoexportError,)
        )
    return [*trials.values()]


def _areas(
    ours: Sequence[Trial], theirs: Sequence[Trial], found: SearchResult, progress: Progress
) -> tuple[float, float]:
    """Returns the areas that two fronts dominate, with times that are measured again, in turn.

    The machine was in another state while the second search ran, and both searches measured only
    briefly, so new times decide which points are on a front. The area is computed from times that
    are measured once more, because the more graphs there are, the more are on a front by luck.
    """
    base, *points = _timed(
        (found.base, *_maybe_on_front(ours, found.base), *_maybe_on_front(theirs, found.base)),
        *(found, PROTOCOL, progress),
    )
    keys = [{trial.point.key for trial in trials} for trials in (ours, theirs)]
    fronts = [
        {each.point.key for each in _worth_keeping([p for p in points if p.point.key in own], base)}
        for own in keys
    ]
    on_fronts = [each for each in points if each.point.key in fronts[0] | fronts[1]]
    base, *points = _timed((base, *on_fronts), found, SECOND_PROTOCOL, progress)
    area, optuna_area = (
        round(_area([each for each in points if each.point.key in front], base), 4)
        for front in fronts
    )
    return area, optuna_area


def _timed(
    trials: Sequence[Trial], found: SearchResult, protocol: Protocol, progress: Progress
) -> list[Trial]:
    """Returns distinct trials with new times, measured in turn."""
    points = {trial.point.key: trial for trial in trials}
    listed = [(each.point, each.lowerings) for each in points.values()]
    with found.graphs.opened(listed, spin_ms=spin_for(trials[0].ms)) as opened:
        calls = dict(zip(points, map(found.graphs.call, opened), strict=True))
        times = measure_calls(calls, protocol, title="both fronts", progress=progress).latencies
    return [replace(trial, ms=_typical(times[key])) for key, trial in points.items()]


def _maybe_on_front(trials: Sequence[Trial], base: Trial) -> list[Trial]:
    """Returns the trials that no other trial beats by more than the error of their times."""
    enough = [trial for trial in trials if trial.quality.kept >= FLOOR]
    return [
        trial
        for trial in enough
        if not any(
            SLACK * other.ms < trial.ms and other.quality.kept >= trial.quality.kept
            for other in (*enough, base)
        )
    ]


def _worth_keeping(trials: Sequence[Trial], base: Trial) -> list[Trial]:
    enough = [trial for trial in trials if trial.ms <= base.ms and trial.quality.kept >= FLOOR]
    return front_of(enough)


def _area(trials: Sequence[Trial], base: Trial) -> float:
    """Returns the area that a front dominates, over log time, up to the trained model's, and share.

    A model that keeps less than `FLOOR` adds nothing: it would not be deployed.
    """
    front = _worth_keeping(trials, base)
    # Starting with the fastest, each trial adds the interval of time up to the next slower one.
    area, edges = 0.0, [trial.ms for trial in front[::-1]] + [base.ms]
    for trial, end in zip(front[::-1], edges[1:], strict=True):
        height = min(1.0, max(0.0, trial.quality.kept - FLOOR) / (1 - FLOOR))
        area += float(np.log(end / trial.ms)) * height
    return area
