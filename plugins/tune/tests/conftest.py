"""Searches of these tests measure graphs by the processor's time."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from moexport.common import timing


@pytest.fixture(autouse=True, scope="module")
def processor_time() -> Iterator[None]:
    """Other programs add nothing to it: a graph that computes less is faster beside them, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(timing.measure.__kwdefaults__ or {}, "clock_ns", time.process_time_ns)
        yield
