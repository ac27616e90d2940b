"""OpenVINO as a runtime: the record by which the core finds it."""

from __future__ import annotations

from ...common.environment import versions
from ...exporter.bundle.runtimes import RuntimeRecord
from ...exporter.session import SessionOptions
from ...graphs.targets import TargetRecord
from .session import (
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


def _options(record: TargetRecord, threads: int | None, spin_ms: float | None) -> SessionOptions:
    del record, spin_ms
    return SessionOptions(runtime=OPENVINO, threads=threads)


def _check_runs(record: TargetRecord) -> None:
    del record
    check_device("cpu")


def _program(record: TargetRecord, file: str, feed: str, output: str) -> str:
    # By itself it computes FP32 in BF16 where a CPU has instructions.
    return (
        "import numpy as np, openvino\n"
        'settings = {"INFERENCE_PRECISION_HINT": "f32"}  # as the graph is typed\n'
        f'compiled = openvino.Core().compile_model("{file}", "{record.device}", settings)\n'
        f'y = compiled({{{feed}}})["{output}"]'
    )


def _state() -> str:
    check_package()
    return f"OpenVINO {versions(('openvino',))['openvino']}; {instructions()}"


RUNTIME = RuntimeRecord(
    name=OPENVINO,
    title="OpenVINO",
    open=OpenVinoSession,
    takes=("device", "streams", "cache"),
    extra="openvino",
    options=_options,
    check_runs=_check_runs,
    state=_state,
    check_computes=check_computes,
    check_graphs=check_graphs,
    advice=advice,
    short_products=("bf16",),
    program=_program,
)
