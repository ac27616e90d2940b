"""What is asked of a benchmark, a specialisation and a demo. Importing this loads nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from ..common.option import Request, declared, option
from ..common.registry import left_out
from ..common.text import listed, near_miss
from ..errors import UsageError
from ..exporter.requests import AnyPath, LoadRequest
from ..graphs.targets import Precision, Scope

if TYPE_CHECKING:
    import numpy as np

    from ..common.timing import Protocol
    from ..exporter.options import KOption
    from .data import Labelled
    from .results import Results

CpuTarget = Literal["onnx", "ort-cpu"]
"""What graphs of a benchmark are exported for that ONNX Runtime runs on the CPU."""

ALL = "all"
"""Every engine, in a list of them."""

PLACES = ("command", "out")
"""Options of a benchmark on which no number depends."""


def _entries(entries: str | Sequence[Any]) -> Sequence[Any]:
    """The entries of a list, which may be text: `n,0.5`."""
    return listed(entries) if isinstance(entries, str) else entries


def _known_entries(
    entries: str | Sequence[str], known: Sequence[str], option: str, what: str
) -> list[str]:
    """The names of a list, each once; `UsageError` for none, and for one that is not known."""
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

    return f"A list of {', '.join(KINDS)}; or all."


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest(LoadRequest):
    """What is measured of models and bundles, over which settings, and how."""

    offered: ClassVar[frozenset[str]] = frozenset({"load", "bench"})

    k: str | Sequence[int | float | str] = option(
        "n,0.5,0.25,0.125",
        "A list of numbers of experts: n,0.5,0.25 or 16,8,4.",
        heading="What is measured",
    )
    lowering: str | Sequence[str] = option("auto", "A list of lowerings, or auto.")
    precision: str | Sequence[str] = option(
        "fp32", "A list: fp32,fp16,bf16,int8,int4 (INT8 ranges from the data)."
    )
    engine: str | Sequence[str] = option("all", _engines)
    target: CpuTarget = option("onnx", "The target of graphs that ONNX Runtime runs on the CPU.")
    batch: str | Sequence[int] | None = option(
        None, "A list of batch sizes: 1,16.", unset="1, or the size of a bundle that has only one"
    )
    data: AnyPath | Labelled | np.ndarray | None = option(
        None,
        "Labelled inputs: an .npz, .tar or .parquet shards, a folder of images by class, "
        "package.module:iterable; for a language model a text file or token ids.",
        unset="random inputs, which tell latency and parity only; for a language model text of "
        "Python's own",
        heading="Data",
        kind=str,
        metavar="DATA",
        compare=False,
    )
    rounds: int = option(
        5,
        "Rounds; all engines take turns in each, 5 at least.",
        heading="How it is measured",
        min=5,
    )
    round_s: float = option(0.2, "Seconds of each engine's turn.", in_shell=False)
    warmup: int = option(3, "Calls of each engine that are not timed.", in_shell=False)
    inputs: int = option(8, "Inputs that the calls take in turn.", in_shell=False)
    samples: int | None = option(None, "Number of inputs for the accuracy.", unset="all", min=1)
    threads: int | None = option(
        None,
        "Threads of every engine.",
        unset="those with which the untouched model is fastest",
        min=1,
    )
    memory: bool = option(
        True,
        "Measure the peak memory of each engine in its own process.",
        flag="--memory/--no-memory",
    )
    parts: bool = option(True, "Measure the time of the parts of a graph.", in_shell=False)
    limits: bool = option(
        True, "Measure the machine's rates, for the least time of each row.", in_shell=False
    )
    evaluation_batch: int = option(64, "The batch size of the accuracy.", in_shell=False)
    renormalize: bool = option(
        False, "Rescale the kept experts' weights to a sum of 1.", in_shell=False
    )
    quantize: Scope = option(
        "experts", "What INT8 is for: the experts, or all linear layers.", in_shell=False
    )
    pixels: str | None = option(
        None, "Pixel scale of images: unit, symmetric or imagenet.", unset="as the folder says"
    )
    tokens: int | None = option(
        None,
        "Tokens of a language model's prompt.",
        unset="128, fewer if it has fewer positions",
        min=1,
    )
    out: AnyPath | None = option(
        None,
        "A folder for results.json, report.html and figures.",
        unset="nothing is written",
        in_shell=False,
    )
    before: Results | Mapping[str, Results] | None = option(
        None,
        "Earlier results to compare with in the report; by kind of node where there are several.",
        unset="none",
        in_shell=False,
        compare=False,
    )
    command: str = option(
        "", "What the results say they were made by.", unset="nothing", in_shell=False
    )

    @property
    def ks(self) -> tuple[KOption, ...]:
        """The numbers of experts: at least one, and none left to the run, else `UsageError`."""
        from ..exporter.options import parse_k

        ks = tuple(map(parse_k, _entries(self.k)))
        if not ks or "input" in ks:
            raise UsageError(
                "--k input: a benchmark measures numbers of experts" if ks else "--k is empty",
                hint="for example --k n,0.5,0.25; a bundle whose k is an input is measured at each",
            )
        return ks

    @property
    def lowerings(self) -> tuple[str, ...]:
        """The lowerings; `UsageError` for a name that is none, and for `tune`."""
        from ..exporter.options import TUNE, parse_lowerings

        names = parse_lowerings(",".join(_entries(self.lowering)))
        if TUNE in names:
            raise UsageError(
                "--lowering tune belongs to export: a benchmark measures what it is told",
                hint="name the lowerings to compare, as --lowering dense,gather,grouped",
            )
        return names

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """The precisions; `UsageError` for a name that is none."""
        known: tuple[Precision, ...] = get_args(Precision)
        names = _known_entries(self.precision, known, "--precision", "precision")
        return tuple(name for name in names if name in known)

    @property
    def engines(self) -> tuple[str, ...]:
        """The engines, `all` for every one; `UsageError` for a name that is none."""
        from .engines import KINDS

        names = _known_entries(self.engine, (*KINDS, ALL), "--engine", "engine")
        every = [engine for name in names for engine in (KINDS if name == ALL else (name,))]
        return tuple(dict.fromkeys(every))

    @property
    def batches(self) -> tuple[int, ...]:
        """The batch sizes, 1 unless there are any; `UsageError` for what is none."""
        try:
            sizes = (1,) if self.batch is None else tuple(map(int, _entries(self.batch)))
        except ValueError:
            sizes = ()
        if not sizes or min(sizes) < 1:
            raise UsageError(
                f"--batch {self.batch}: not a list of sizes", hint="for example --batch 1,16"
            )
        return sizes

    @property
    def protocol(self) -> Protocol:
        """How the latency is measured."""
        from ..common.timing import Protocol

        return Protocol(
            rounds=self.rounds, warmup=self.warmup, round_s=self.round_s, inputs=self.inputs
        )

    @property
    def measured(self) -> dict[str, Any]:
        """What numbers depend on, beside the data: the options but those of the results' place."""
        return {
            name: getattr(record, name)
            for record in (self, *self.further)
            for name, (field, _) in declared(type(record)).items()
            if field.compare and name not in PLACES
        }

    @property
    def folder(self) -> Path | None:
        """Where results are written."""
        return None if self.out is None else Path(self.out)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRequest(Request):
    """What a report is compared with, and drawn beside."""

    compare: Results | AnyPath | None = option(
        None,
        "List changes that are larger than the spread.",
        unset="none",
        kind=Path,
        metavar="OLD.JSON",
        compare=False,
    )
    beside: Sequence[Results | AnyPath] = option(
        (),
        "Results of other runs, or machines, to draw in the same charts.",
        unset="none",
        in_shell=False,
        compare=False,
    )
