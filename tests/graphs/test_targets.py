"""The facts of the targets: each has a record, and the sets of them follow from it."""

from __future__ import annotations

import pytest
from moexport.exporter.bundle.runtimes import RUNTIMES
from moexport.exporter.session import PROVIDERS
from moexport.exporter.tensorrt.backends import BACKENDS
from moexport.graphs.lowerings.cost import rates_of
from moexport.graphs.precision.types import PRECISIONS
from moexport.graphs.targets import TARGETS, TargetRecord


@pytest.mark.parametrize("record", list(TARGETS), ids=TARGETS.names)
def test_a_target_is_run_by_what_exists(record: TargetRecord) -> None:
    own = [record.provider, record.backend].count(None) == 1
    assert own == (record.runtime == "onnxruntime")
    assert record.runtime in RUNTIMES
    assert {*rates_of(record.machine)} == {*PRECISIONS}
    assert record.provider is None or record.provider in PROVIDERS.values()
    assert record.backend is None or record.backend in BACKENDS
    assert {*record.refused, *record.notes} <= set(PRECISIONS)
