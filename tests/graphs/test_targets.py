"""The facts of the targets: each has a record, and the sets of them follow from it."""

from __future__ import annotations

from typing import get_args

import pytest
from moexport.exporter.session import PROVIDERS
from moexport.exporter.tensorrt.backends import BACKENDS
from moexport.graphs.precision.types import PRECISIONS
from moexport.graphs.targets import TARGETS, Target, TargetRecord
from moexport.plugins.openvino.session import DEVICES


def test_every_name_has_a_record_and_no_other() -> None:
    assert tuple(TARGETS) == get_args(Target)


@pytest.mark.parametrize("record", TARGETS.values(), ids=list(TARGETS))
def test_a_target_is_run_by_what_exists(record: TargetRecord) -> None:
    assert [record.provider, record.device, record.backend].count(None) == 2
    assert record.device is None or record.device in DEVICES.values()
    assert record.provider is None or record.provider in PROVIDERS.values()
    assert record.backend is None or record.backend in BACKENDS
    assert {*record.refused, *record.notes} <= set(PRECISIONS)
