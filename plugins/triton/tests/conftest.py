"""Bundles to serve, NVIDIA's client, and its server if there is one for this machine."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import moexport
import pytest
from moexport.tests.recorded import read_case
from moexport.tests.test_wheel import PIP

PACKAGES = Path(__file__).with_name("packages.txt")


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packages that `packages.txt` names."""
    if sys.platform != "linux":
        pytest.skip("NVIDIA's server is for Linux")
    place = tmp_path_factory.mktemp("triton")
    done = subprocess.run(
        [*PIP, "install", "--no-deps", "--target", place, "-r", PACKAGES],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"NVIDIA's client and server cannot be installed: {done.stderr[-200:]}")
    return place


@pytest.fixture(scope="session")
def client(packages: Path) -> Iterator[Any]:
    """The module of NVIDIA's client."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(packages))
        yield importlib.import_module("tritonclient.grpc")


@pytest.fixture(scope="session")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, moexport.Bundle]:
    """Bundles of a ViT that exposes its routing, by k: 2, 4 and an input."""
    place, case = tmp_path_factory.mktemp("bundles"), read_case("soft_moe_vit")
    model = moexport.load(case.weights, config=case.config)
    return {
        k: moexport.export(
            *(model, place / k),
            k=k,
            target="ort-cpu",
            lowering="gather",
            data=case.x,
            expose_routing=True,
        )
        for k in ("2", "4", "input")
    }
