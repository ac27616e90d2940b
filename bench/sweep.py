"""What `bench` and `specialise` are asked, made into candidates and data, and measured."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from ..common.console import Progress, Silent
from ..common.timing import Protocol
from ..errors import UsageError
from ..exporter.bundle.bundle import Bundle
from ..exporter.inputs import check_array, random_inputs, with_axes
from ..exporter.model import Model
from ..exporter.options import AUTO, KOption, parse_k, parse_lowerings
from ..graphs.targets import Target
from .analyses.experts import Wanted, parse_analyses, studied
from .cases import Candidate
from .data import Labelled, LabelledData, load_groups, open_labelled
from .plan import Settings
from .results import Results
from .run import bench as run_bench
from .runners.available import parse_engines, select
from .runners.candidates import Sweep, exported, from_bundle, parse_precisions, with_distinct_names
from .specialise import Specialisation
from .specialise import specialise as run_specialise


def sweep(
    listed: Sequence[Model | Bundle],
    *,
    data: str | Path | Labelled | np.ndarray | None,
    k: Sequence[int | float | str],
    lowering: str,
    precision: str,
    engine: str,
    target: Target,
    batch: Sequence[int],
    out: Path | None,
    rounds: int,
    round_s: float,
    samples: int | None,
    threads: int | None,
    memory: bool,
    parts: bool,
    pixels: str | None,
    before: Results | None,
    analysis: str,
    max_subsets: int | None,
    command: str,
    progress: Progress | None,
) -> Results:
    """Returns every row of a sweep over models and bundles; `moexport.bench` says what each is."""
    watcher = progress or Silent()
    engines = parse_engines(engine)
    selection = select(engines)
    for each in selection.absent:
        if each.engine in engines:
            watcher.step(f"not measured: {each.engine}: {each.reason}")
    wanted = Wanted(parse_analyses(analysis), max_subsets=max_subsets) if analysis else None
    if max_subsets is not None and not (wanted and "subsets" in wanted.names):
        raise UsageError(
            f"--max-subsets {max_subsets}: no subsets are tried", hint="add --analysis subsets"
        )
    # The same threads for every engine: PyTorch's own choice, unless told.
    threads = threads or torch.get_num_threads()
    asked = Sweep(
        ks=_swept(k),
        lowerings=parse_lowerings(lowering),
        batches=tuple(batch),
        engines=selection.names,
        precisions=parse_precisions(precision),
        threads=threads,
        cpu_target=target,
    )
    _check_exported(listed, asked)
    first = next((item for item in listed if isinstance(item, Model)), None)
    labelled = None if first is None else _labelled(data, first, max(batch), pixels)
    if labelled is not None:
        asked = replace(asked, shape=labelled.head(1).inputs.shape[1:])
        if "int8" in asked.precisions:
            asked = replace(asked, calibration=labelled.head(CALIBRATION_INPUTS).inputs)
    settings = Settings(
        batches=tuple(batch),
        protocol=Protocol(rounds=rounds, round_s=round_s, inputs=8),
        samples=samples,
        threads=threads,
        memory=memory,
        parts=parts,
    )
    with ExitStack() as stack:
        candidates = _candidates(listed, asked, stack, watcher)
        if labelled is None:
            labelled = _labelled(data, candidates[0].model, max(batch), pixels)
        analyses = studied(candidates, labelled, wanted, samples, watcher) if wanted else {}
        return run_bench(
            candidates,
            labelled,
            settings,
            out=out,
            command=command,
            progress=watcher,
            absent=selection.absent,
            before=before,
            analyses=analyses,
        )


def _check_exported(listed: Sequence[Model | Bundle], asked: Sweep) -> None:
    """Raises `UsageError` for what says how a model is exported where only bundles are."""
    after = [*listed[1:], None]
    pairs = zip(listed, after, strict=True)
    if any(isinstance(each, Model) and not isinstance(then, Bundle) for each, then in pairs):
        return
    idle = {
        "--lowering": asked.lowerings != (AUTO,),
        "--precision": asked.precisions != ("fp32",),
        "--target": asked.cpu_target != "onnx",
    }
    for option in (option for option, given in idle.items() if given):
        raise UsageError(
            f"{option}: the bundles that were named are measured as they are",
            hint=f"leave {option} out, or name a model without its bundle",
        )


def specialised(
    model: Model,
    data: str | Path | LabelledData,
    *,
    layer: str | None = None,
    group_by: str | Sequence[int | bool | str] | None = None,
    progress: Progress | None = None,
) -> Specialisation:
    """Returns what `moexport.specialise` finds."""
    labelled = _labelled(data, model, 1).head(sys.maxsize)
    labelled = replace(labelled, inputs=with_axes(labelled.inputs, model.input))
    check_array(labelled.inputs, model.input, f"{model.source.path}: ")
    groups: np.ndarray | None = None
    if isinstance(group_by, str):
        if isinstance(data, LabelledData):
            raise UsageError(
                f"group_by={group_by!r} names an array of a file, and the data are none",
                hint="give the subgroup of each input as a sequence",
            )
        groups = load_groups(Path(data), group_by, len(labelled))
    elif group_by is not None:
        groups = np.asarray(group_by)
    return run_specialise(model, labelled, layer=layer, groups=groups, progress=progress)


def _candidates(
    listed: Sequence[Model | Bundle], asked: Sweep, stack: ExitStack, progress: Progress
) -> list[Candidate]:
    """A candidate per model; the bundles that follow a model are measured beside it."""
    candidates: list[Candidate] = []
    places: list[Path] = []
    model: Model | None = None
    for index, item in enumerate(listed):
        if isinstance(item, Bundle):
            candidates.append(from_bundle(item, asked, model=model))
            places.append(item.path)
            continue
        model = item
        followed = index + 1 < len(listed) and isinstance(listed[index + 1], Bundle)
        if not followed:
            candidates.append(stack.enter_context(exported(model, asked, progress=progress)))
            places.append(Path(model.source.path))
    return with_distinct_names(candidates, places)


RANDOM_INPUTS = 16
CALIBRATION_INPUTS = 256
"""INT8 takes its ranges from this many of the benchmark's inputs; their labels play no part."""


def _labelled(
    data: str | Path | Labelled | np.ndarray | None,
    model: Model,
    batch: int,
    pixels: str | None = None,
) -> Labelled:
    if isinstance(data, str | Path):
        return open_labelled(str(data), model.input, pixels)
    if pixels is not None:
        raise UsageError(
            f"--pixels {pixels}: there is no folder of images", hint="give one with --data"
        )
    if data is None:
        data = random_inputs(model, max(batch, RANDOM_INPUTS))
    if isinstance(data, np.ndarray):
        return LabelledData(data, None, model.input.name)
    return data


def _swept(k: Sequence[int | float | str]) -> tuple[KOption, ...]:
    """The k of a sweep: at least one, and none left to the run."""
    ks = tuple(parse_k(each) for each in k)
    if not ks or "input" in ks:
        raise UsageError(
            "--k input: a benchmark measures numbers of experts" if ks else "--k is empty",
            hint="for example --k n,0.5,0.25; a bundle whose k is an input is measured at each",
        )
    return ks
