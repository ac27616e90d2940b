"""How many bytes of an engine's weights lie on the GPU where they are streamed: sizes alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from moexport.errors import EngineError
from moexport.exporter.tensorrt.backends import TENSORRT
from moexport.exporter.tensorrt.plan_file import (
    RESERVED_BYTES,
    _set_budget,
    streaming_budget,
    unloadable,
)
from moexport.exporter.tensorrt.trust import PlanFile

GIB = 1 << 30

PLAN = PlanFile(path=Path("engine.plan"), backend=TENSORRT, record=None)


@pytest.mark.parametrize(
    ("streamable", "free", "context", "beside", "kept"),
    [
        (3 * GIB, 20 * GIB, GIB, 0, 3 * GIB),  # all of them fit
        (30 * GIB, 20 * GIB, 2 * GIB, 0, 18 * GIB - RESERVED_BYTES),
        (30 * GIB, 20 * GIB, 2 * GIB, 8 * GIB, 10 * GIB - RESERVED_BYTES),
        (30 * GIB, GIB, 2 * GIB, 0, 0),
        (0, 20 * GIB, GIB, 0, 0),
    ],
)
def test_weights_fill_what_the_context_and_what_is_bound_leave(
    streamable: int, free: int, context: int, beside: int, kept: int
) -> None:
    assert streaming_budget(streamable, free, context, beside) == kept


class EngineOf32Bits:
    """Keeps budgets that a 32-bit number holds, and drops the others as TensorRT's setter does."""

    def __init__(self) -> None:
        self.budget = 0

    @property
    def weight_streaming_budget_v2(self) -> int:
        return self.budget

    @weight_streaming_budget_v2.setter
    def weight_streaming_budget_v2(self, budget: int) -> None:
        if 0 <= budget < 2 * GIB:
            self.budget = budget


def test_a_budget_that_the_engine_drops_is_an_error_with_both_sizes() -> None:
    engine = EngineOf32Bits()
    _set_budget(PLAN, engine, GIB, [])
    assert engine.budget == GIB
    with pytest.raises(EngineError, match=rf"{3 * GIB} bytes .* keeps {GIB}: too much") as caught:
        _set_budget(PLAN, engine, 3 * GIB, ["an older line", "too much"])
    assert "--weight-streaming" in (caught.value.hint or "")


def test_an_engine_that_does_not_fit_the_gpu_is_told_apart_from_a_damaged_one() -> None:
    full = "[virtualMemoryBuffer.cpp::resizePhysical::145] Error Code 2: OutOfMemory (no further)"
    assert "--weight-streaming auto" in (unloadable(PLAN, [full]).hint or "")
    assert "moexport build" in (unloadable(PLAN, ["magicTag mismatch"]).hint or "")
