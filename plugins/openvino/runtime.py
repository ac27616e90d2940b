"""Registers OpenVINO as a runtime with the core."""

from __future__ import annotations

from ...common.environment import versions
from ...common.option import declared
from ...exporter.bundle.runtimes import RuntimeRecord
from ...graphs.targets import TargetRecord
from .request import OpenVinoOptions
from .session import (
    DEVICES,
    OPENVINO,
    OpenVinoSession,
    advice,
    check_computes,
    check_device,
    check_graphs,
    check_package,
    instructions,
)

API = 1


def _check_runs(record: TargetRecord) -> None:
    del record
    check_device("cpu")


def _state() -> str:
    check_package()
    return f"OpenVINO {versions(('openvino',))['openvino']}; {instructions()}"


def _program(file: str, feed: str, output: str) -> str:
    """Returns a program that runs a graph in its own types.

    By default, OpenVINO computes FP32 in BF16 on CPUs that support it.
    """
    return (
        "import numpy as np, openvino\n"
        'settings = {"INFERENCE_PRECISION_HINT": "f32"}  # keeps the types of the graph\n'
        f'compiled = openvino.Core().compile_model("{file}", "{DEVICES["cpu"]}", settings)\n'
        f'y = compiled({{{feed}}})["{output}"]'
    )


RUNTIME = RuntimeRecord(
    name=OPENVINO,
    title="OpenVINO",
    open=OpenVinoSession,
    takes=tuple(declared(OpenVinoOptions)),
    extra="openvino",
    check_runs=_check_runs,
    state=_state,
    check_computes=check_computes,
    check_graphs=check_graphs,
    advice=advice,
    product_types=("bf16",),
    program=_program,
)
