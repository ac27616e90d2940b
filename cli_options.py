"""The arguments and options that several commands share; heavy imports wait inside."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .console import Console
from .errors import UsageError

if TYPE_CHECKING:
    from .exporter.model import Model


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


ModelArgument = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A checkpoint file or folder, or package.module:factory."),
]
BundleArgument = Annotated[
    Path, typer.Argument(metavar="BUNDLE", help="A folder that export wrote.")
]
Family = Annotated[str | None, typer.Option(help="Skip detection: soft-moe-vit, mumoe-gpt2, …")]
Config = Annotated[
    Path | None,
    typer.Option(help="What shapes cannot tell: constructor arguments as JSON, YAML or TOML."),
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="One such argument: --set num_heads=12."),
]
Weights = Annotated[Path | None, typer.Option(help="The weights for a package.module:factory.")]
Data = Annotated[
    str | None,
    typer.Option(
        metavar="FEED", help="Inputs: an .npz, a folder of .npy, or package.module:iterable."
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say more; show tracebacks.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but results and errors.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def load_model(
    console: Console,
    source: str,
    family: str | None,
    config: Path | None,
    sets: list[str] | None,
    weights: Path | None,
    *,
    values: bool = True,
) -> Model:
    """Returns the model that a command names; raises what `exporter.load.load` raises."""
    if not source:
        raise UsageError("MODEL is empty", hint="give a checkpoint or package.module:factory")
    console.step(f"loading {source}")
    from .exporter.load import load, read_config

    given = read_config(config, sets or ())
    return load(source, family=family, config=given, weights=weights, values=values)
