"""Fixtures for all tests."""

from __future__ import annotations

import pytest
import torch
from moexport.tests.recorded import SOFT_MOE, RecordedCase, read_case


@pytest.fixture(params=SOFT_MOE)
def soft_moe_case(request: pytest.FixtureRequest) -> RecordedCase:
    return read_case(request.param)


@pytest.fixture(autouse=True, scope="session")
def few_threads() -> None:
    torch.set_num_threads(2)
