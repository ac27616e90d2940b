"""The options of benchmarks and reports. The module imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from ..common.option import Request, at_least, declared, option
from ..common.registry import left_out
from ..common.text import near_miss, split_list
from ..data.pixels import check_pixels
from ..errors import UsageError
from ..exporter.requests import AnyPath, LoadRequest
from ..graphs.targets import Precision, Scope, runtime_names

if TYPE_CHECKING:
    import numpy as np

    from ..common.timing import Protocol
    from ..data.batches import Feed
    from ..graphs.k import KOption
    from .data import Labelled
    from .results import Results

CpuTarget = Literal["onnx", "ort-cpu"]
"""The targets of graphs that ONNX Runtime runs on the CPU."""

RANGED: tuple[Precision, ...] = ("int8", "fp8")
"""The precisions that need the value ranges of tensors."""

KS = "n,0.5,0.25,0.125"
"""The numbers of experts that are measured without `--k`."""

ALL = "all"
"""Selects every engine, in a list of engines."""

UNMEASURED = ("command", "out")
"""Options of a benchmark that do not affect the measured numbers."""


def _entries(entries: str | float | Sequence[Any]) -> Sequence[Any]:
    """Returns the items of a list, which may be text (`n,0.5`) or a single number."""
    if isinstance(entries, int | float):
        return [entries]
    return split_list(entries) if isinstance(entries, str) else entries


def _known_entries(
    entries: str | Sequence[str], known: Sequence[str], option: str, what: str
) -> list[str]:
    """Returns a list's names without duplicates; `UsageError` if empty, or for an unknown name."""
    names = list(dict.fromkeys(_entries(entries)))
    if not names:
        raise UsageError(f"{option} is empty", hint=near_miss("", known))
    for name in names:
        if name not in known:
            hint = near_miss(name, known) + left_out()
            raise UsageError(f"{option} {name}: there is no such {what}", hint=hint)
    return names


def _engines() -> str:
    from .engines import KINDS

    return f"A list of engines, or all: {', '.join(KINDS)}."


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest(LoadRequest):
    """What a benchmark of models and bundles measures, and how."""

    offered: ClassVar[frozenset[str]] = frozenset({"load", "bench"})

    k: str | int | float | Sequence[int | float | str] | None = option(
        None, "A list of numbers of experts: n,0.5,0.25 or 16,8,4.", unset=KS
    )
    lowering: str | Sequence[str] | None = option(
        None, "A list of lowerings, or auto.", unset="auto"
    )
    precision: str | Sequence[str] | None = option(
        None, "A list of precisions: fp32,fp16,bf16,int8,int4.", unset="fp32"
    )
    engine: str | Sequence[str] = option("all", _engines)
    target: CpuTarget | None = option(
        None, "The target of graphs that ONNX Runtime runs on the CPU.", unset="onnx"
    )
    batch: str | int | Sequence[int] | None = option(
        None, "A list of batch sizes: 1,16.", unset="1, or the size of a bundle that has only one"
    )
    data: AnyPath | Labelled | np.ndarray | Mapping[str, Any] | None = option(
        None,
        "Labelled inputs: an .npz, .tar or .parquet shards, a folder of images by class, "
        "package.module:iterable; for a language model, a text file or token ids.",
        unset="random inputs, for latency and parity only; for a language model, the text of "
        "Python's help",
        compare=False,
    )
    rounds: int = option(
        5, "The number of rounds, at least 5; all engines take turns in each round."
    )
    round_s: float = option(0.2, "The length of each engine's turn, in seconds.", in_shell=False)
    warmup: int = option(3, "The number of untimed calls of each engine.", in_shell=False)
    inputs: int = option(8, "The number of batches that calls use in turn.", in_shell=False)
    samples: int | None = option(None, "The number of inputs for measuring accuracy.", unset="all")
    threads: int | None = option(
        None,
        "The number of threads for every engine.",
        unset="the number with which the untouched model is fastest",
    )
    memory: bool = option(
        True,
        "Measure the peak memory of each engine in its own process.",
        flag="--memory/--no-memory",
    )
    parts: bool = option(True, "Measure the time of the parts of a graph.", in_shell=False)
    limits: bool = option(
        True, "Measure the machine's rates and derive each row's minimum time.", in_shell=False
    )
    evaluation_batch: int = option(64, "The batch size for measuring accuracy.", in_shell=False)
    renormalize: bool = option(
        False, "Rescale the kept experts' weights to a sum of 1.", in_shell=False
    )
    quantize: Scope | None = option(
        None, "The layers in INT8: the experts, or all linear layers.", unset="experts"
    )
    calibrate_data: Feed | None = option(
        None,
        "Inputs for INT8 ranges, distinct from the measured ones.",
        unset="the first inputs of the data, up to 256, which are not measured",
        compare=False,
    )
    calibration: AnyPath | None = option(
        None, "A table of INT8 ranges from calibrate.", unset="none", compare=False
    )
    pixels: str | None = option(
        None, "The scale of pixels: unit, symmetric or imagenet.", unset="none; required for images"
    )
    tokens: int | None = option(
        None,
        "The number of tokens in a language model's prompt.",
        unset="128, or fewer if the model has fewer positions",
    )
    out: AnyPath | None = option(
        None,
        "A folder for results.json, report.html and figures.",
        unset="nothing is written",
        in_shell=False,
    )
    before: Results | Mapping[str, Results] | None = option(
        None,
        "Earlier results to compare with in the report; by kind of node if there are several.",
        unset="none",
        in_shell=False,
        compare=False,
    )
    command: str = option(
        "", "The command to record in the results.", unset="nothing", in_shell=False
    )

    @property
    def ks(self) -> tuple[KOption, ...]:
        """The numbers of experts: at least one, all constants; otherwise `UsageError`."""
        from ..graphs.k import parse_k

        ks = tuple(map(parse_k, _entries(KS if self.k is None else self.k)))
        if not ks or "input" in ks:
            raise UsageError(
                "--k input: a benchmark needs numbers of experts" if ks else "--k is empty",
                hint="for example --k n,0.5,0.25; a bundle with k as an input runs each of them",
            )
        return ks

    @property
    def lowerings(self) -> tuple[str, ...]:
        """The lowerings; `UsageError` for an unknown name, and for `tune`."""
        from ..exporter.options import TUNE, parse_lowerings

        names = parse_lowerings(
            ",".join(_entries("auto" if self.lowering is None else self.lowering))
        )
        if TUNE in names:
            raise UsageError(
                "--lowering tune belongs to export: a benchmark measures the named lowerings",
                hint="name the lowerings to compare, such as --lowering dense,gather,grouped",
            )
        return names

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """The precisions; `UsageError` for an unknown name."""
        known: tuple[Precision, ...] = get_args(Precision)
        given = "fp32" if self.precision is None else self.precision
        names = _known_entries(given, known, "--precision", "precision")
        return tuple(name for name in names if name in known)

    @property
    def engines(self) -> tuple[str, ...]:
        """The engines, `all` for every one; `UsageError` for an unknown name."""
        from .engines import KINDS

        for name in _entries(self.engine):
            if name not in KINDS and name in runtime_names():
                hint = f"`moexport run BUNDLE --engine {name}` works; bench needs a target for it"
                raise UsageError(f"--engine {name}: a runtime that no target uses", hint=hint)
        names = _known_entries(self.engine, (*KINDS, ALL), "--engine", "engine")
        every = [engine for name in names for engine in (KINDS if name == ALL else (name,))]
        return tuple(dict.fromkeys(every))

    @property
    def batches(self) -> tuple[int, ...]:
        """The batch sizes, by default 1; `UsageError` for invalid ones."""
        try:
            sizes = (1,) if self.batch is None else tuple(map(int, _entries(self.batch)))
        except ValueError:
            sizes = ()
        if not sizes or min(sizes) < 1:
            raise UsageError(
                f"--batch {self.batch}: not a list of sizes", hint="for example --batch 1,16"
            )
        return sizes

    def check(self) -> None:
        """Raises `UsageError` for an invalid value of an option, without loading PyTorch."""
        _ = (self.ks, self.lowerings, self.precisions, self.batches, self.engines)
        for name in ("samples", "threads", "evaluation_batch"):
            at_least(self, name, 1)
        if self.pixels is not None:
            check_pixels(self.pixels, given=self.data is not None)

    def check_ranges(self) -> None:
        """Raises `UsageError` for INT8 options that do not apply to the exported graphs."""
        sources = {"--calibrate-data": self.calibrate_data, "--calibration": self.calibration}
        given = [spelling for spelling, value in sources.items() if value is not None]
        if given and not {*RANGED} & {*self.precisions}:
            raise UsageError(
                f"{given[0]}: --precision {','.join(self.precisions)} needs no ranges",
                hint=f"leave {given[0]} out, or add int8 to --precision",
            )
        if len(given) == len(sources):
            raise UsageError(
                "--calibrate-data with --calibration: the table already has the ranges",
                hint="leave one of them out",
            )
        if self.quantize not in (None, "experts") and "int8" not in self.precisions:
            raise UsageError(
                f"--quantize {self.quantize} belongs to --precision int8",
                hint="add int8 to --precision, or leave --quantize out",
            )

    @property
    def protocol(self) -> Protocol:
        from ..common.timing import Protocol

        return Protocol(
            rounds=self.rounds, warmup=self.warmup, round_s=self.round_s, inputs=self.inputs
        )

    @property
    def measured(self) -> dict[str, Any]:
        """The options that affect the numbers, without the data."""
        return {
            name: getattr(record, name)
            for record in (self, *self.further)
            for name, (field, _) in declared(type(record)).items()
            if field.compare and name not in UNMEASURED
        }

    @property
    def folder(self) -> Path | None:
        return None if self.out is None else Path(self.out)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRequest(Request):
    """The results to compare with, and those to show in the same charts."""

    compare: Results | AnyPath | None = option(
        None,
        "List the changes since these results that are larger than the spread.",
        unset="none",
        compare=False,
        is_path=True,
    )
    beside: Sequence[Results | AnyPath] = option(
        (),
        "Results of other runs or machines to show in the same charts.",
        unset="none",
        in_shell=False,
        compare=False,
    )
