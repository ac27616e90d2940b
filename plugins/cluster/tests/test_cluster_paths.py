"""Nodes of a cluster find the files that options, even those of plugins, name."""

from __future__ import annotations

from pathlib import Path

import pytest
from moexport.bench.request import BenchRequest
from moexport.common.option import requested
from moexport.exporter.requests import LoadRequest
from moexport.plugins.cluster.paths import paths_in, with_paths_everywhere
from moexport.plugins.own_layers.request import NetworkOptions


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files in the working directory, one of which has the name of an option's value."""
    monkeypatch.chdir(tmp_path)
    for name in ("c.json", "w.pt", "all", "onnx", "r"):
        Path(name).touch()


@pytest.mark.parametrize("request_of", [LoadRequest, BenchRequest])
def test_paths_of_a_request_and_of_plugins_are_absolute(request_of: type[LoadRequest]) -> None:
    given = {"config": Path("c.json"), "weights": "w.pt", "adapter": "own:adapt"}
    request: LoadRequest = with_paths_everywhere(requested(request_of, given))
    assert request.config == str(Path("c.json").absolute())
    network = request.asked(NetworkOptions)
    assert network == NetworkOptions(weights=str(Path("w.pt").absolute()), adapter="own:adapt")
    assert paths_in(request) == [request.config, network.weights]


def test_a_value_that_is_no_path_stays_even_if_a_file_has_its_name() -> None:
    request = BenchRequest(engine="all", target="onnx", out="r", config="absent.json")
    assert with_paths_everywhere(request) == request


def test_another_file_of_weights_is_another_journal() -> None:
    one, other = (
        requested(LoadRequest, {"weights": name, "config": {"d": 1}}) for name in ("w.pt", "all")
    )
    assert paths_in(one) != paths_in(other)
