"""A search for requests per second serves the confirmed points and exports the fastest one."""

from __future__ import annotations

from pathlib import Path

import moexport
import pytest
from moexport.bench.results import read
from moexport.errors import UsageError
from moexport.plugins.service.findings import services_in
from moexport.plugins.tune.accuracy import confirm
from moexport.plugins.tune.accuracy.confirm import ContractError
from moexport.plugins.tune.findings import text
from moexport.plugins.tune.recipe import RECIPE_FILE, read_recipe
from moexport.plugins.tune.request import TuneRequest
from moexport.plugins.tune.tests.small_search import small_search
from moexport.plugins.tune.tune import Tuned

pytest.importorskip("mlperf_loadgen", reason="LoadGen is not installed")


def search(folder: Path, bound: str) -> Tuned:
    return small_search(
        folder, precision="fp32", batch="1:1:8", scenario="server", max_latency=bound
    )


@pytest.mark.slow
def test_the_bundle_is_the_point_that_serves_most_within_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confirm, "MAX_SERVED", 2)
    tuned = search(tmp_path, "60ms")
    assert tuned.services is not None
    exported = [one for one in tuned.services.services if one.exported]
    assert 1 <= len(exported) <= 2
    most = max(exported, key=lambda one: one.rate or 0.0)
    assert most.rate is not None
    assert most.bound_ms == 60
    assert most.k == max(tuned.chosen.trial.point.k.values())
    assert most.reached in text(tuned)
    (untouched,) = (one for one in tuned.services.services if not one.exported)
    assert untouched.k == 8

    kept = services_in(read(tmp_path / "report" / "results.json").analyses)
    assert kept == tuned.services
    assert (tmp_path / "report" / most.logs / "mlperf_log_summary.txt").is_file()
    asked = read_recipe(tuned.bundle.path / RECIPE_FILE).contract["asked"]
    assert asked["scenario"] == "server"
    assert all(check.passed for check in moexport.verify(tuned.bundle.path))


@pytest.mark.slow
def test_a_bound_that_nothing_keeps_writes_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match=r'max_latency="0\.0001ms"'):
        search(tmp_path, "0.0001ms")
    assert not (tmp_path / "out").exists()


def test_a_scenario_without_a_bound_is_refused() -> None:
    with pytest.raises(UsageError, match="--scenario server: the latency bound is missing"):
        TuneRequest(scenario="server").check()
