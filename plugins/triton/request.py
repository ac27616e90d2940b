"""The options of `triton`; this module imports no large library."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from ...common.option import Request, at_least, option
from ...common.text import near_miss
from ...errors import UsageError

ServingBackend = Literal["onnxruntime", "openvino", "tensorrt", "python"]
"""The supported backends of Triton."""


Device = Literal["cpu", "gpu"]
"""The devices on which instances can run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonRequest(Request):
    """The options of `triton`."""

    name: str | None = option(
        None, "The name of the model or the ensemble.", unset="the checkpoint's"
    )
    backend: ServingBackend | None = option(
        None,
        "The Triton backend: onnxruntime, openvino, tensorrt (runs the engine) or python (runs "
        "moexport, without PyTorch).",
        unset="tensorrt if the bundle has an engine, python for openvino, otherwise onnxruntime",
    )
    device: Device | None = option(
        None, "The device of the instances: cpu or gpu.", unset="the bundle's"
    )
    k: int | None = option(
        None, "The default k of requests, if k is an input of the graph.", unset="all experts"
    )
    version: int = option(1, "The version number to write.")
    instances: int = option(1, "The number of instances per model.")
    threads: int | None = option(
        None, "The number of ONNX Runtime threads per instance.", unset="its own choice"
    )
    delay_us: int | None = option(
        None, "How long Triton waits to fill a batch, in microseconds.", unset="100"
    )
    force: bool = option(False, "Replace an existing model.")

    def __post_init__(self) -> None:
        """Raises `UsageError` for options that are invalid for every bundle."""
        for name, allowed in (("backend", get_args(ServingBackend)), ("device", get_args(Device))):
            value = getattr(self, name)
            if value is not None and value not in allowed:
                raise UsageError(f"--{name} {value}: unknown value", hint=near_miss(value, allowed))
        if self.name is not None and not re.fullmatch(r"\w[\w.-]*", self.name, re.ASCII):
            raise UsageError(
                f"--name {self.name}: a model's name may contain only letters, digits, _, - and .",
                hint="for example --name vit",
            )
        for name in ("version", "instances", "threads"):
            at_least(self, name, 1)
        at_least(self, "delay_us", 0)
