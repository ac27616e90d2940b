"""The arguments and options that several commands share; heavy imports wait inside."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..common.console import Console
from ..errors import UsageError

if TYPE_CHECKING:
    from ..exporter.model import Model


class Target(StrEnum):
    """Who runs the graph; the names of `graphs.target.Target`."""

    ONNX = "onnx"
    ORT_CPU = "ort-cpu"
    ORT_CUDA = "ort-cuda"
    TENSORRT = "tensorrt"
    TENSORRT_RTX = "tensorrt-rtx"


class Method(StrEnum):
    """How a calibration chooses ranges; the names of `calibration.table.Method`."""

    MINMAX = "minmax"
    PERCENTILE = "percentile"
    ENTROPY = "entropy"
    MSE = "mse"


class Precision(StrEnum):
    """What a graph computes in; the names of `graphs.arithmetic.Precision`."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"


class FloatType(StrEnum):
    """The float types among them."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"


class Quantize(StrEnum):
    """What INT8 is for; the names of `exporter.numbers.Scope`."""

    EXPERTS = "experts"
    ALL = "all"


class Kind(StrEnum):
    """Kinds of MoE layers; the names of `graphs.moe.Kind`."""

    SOFT_MOE = "soft-moe"
    MUMOE = "mumoe"


def typed_path(text: str | Path) -> Path:
    """Returns the path that was typed; bad usage for an empty one, which would be `.`."""
    if text == "":
        raise typer.BadParameter("it is empty: name a file or folder, . for the current one")
    return Path(text)


def typed_source(text: str) -> str:
    """Returns the MODEL that was typed; `UsageError` for an empty one."""
    if not text:
        raise UsageError("MODEL is empty", hint="give a checkpoint or package.module:factory")
    return text


ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        parser=typed_source,
        help="A checkpoint file or folder, or package.module:factory.",
    ),
]
BundleArgument = Annotated[
    Path, typer.Argument(metavar="BUNDLE", parser=typed_path, help="A folder that export wrote.")
]
FEED: Any = typer.Option(
    metavar="FEED", help="Inputs: an .npz, a folder of .npy, or package.module:iterable."
)
Data = Annotated[str | None, FEED]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def output_option(metavar: str, text: str) -> Any:
    """Returns the declaration of `--output`, which every command has that writes."""
    return typer.Option("--output", "-o", metavar=metavar, parser=typed_path, help=text)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlags:
    """How MODEL is read."""

    family: Annotated[
        str | None, typer.Option(help="Skip detection: soft-moe-vit, mumoe-gpt2, …")
    ] = None
    config: Annotated[
        Path | None,
        typer.Option(help="What shapes cannot tell: constructor arguments as JSON, YAML or TOML."),
    ] = None
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="One such argument: --set num_heads=12."),
    ] = None
    weights: Annotated[
        Path | None, typer.Option(help="The weights for a package.module:factory.")
    ] = None

    def load(self, source: str, console: Console, *, values: bool = True) -> Model:
        """Returns the model that a command names; raises what `exporter.load.load` raises."""
        console.step(f"loading {source}")
        from ..exporter.checkpoints.load import load, read_config

        config = read_config(self.config, self.sets or ())
        return load(source, family=self.family, config=config, weights=self.weights, values=values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verbosity:
    """How much a command says beside its result."""

    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say more; show tracebacks.")] = (
        False
    )
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Say nothing but results and errors.")
    ] = False

    def console(self) -> Console:
        """Returns what the command speaks through."""
        return Console(verbose=self.verbose, quiet=self.quiet)
