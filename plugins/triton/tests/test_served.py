"""NVIDIA's server serves what `triton` writes, without PyTorch, to NVIDIA's client.

The wheel of `nvidia-pytriton` has a server with only the Python backend; `test_repository.py` reads
the configurations for the others.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import pytest
from moexport.errors import EngineError, UsageError
from moexport.plugins.service.findings import services_in
from moexport.tests.recorded import read_case
from moexport.tests.test_wheel import ROOT

pytestmark = pytest.mark.slow

NEEDED = (
    *("numpy", "onnx", "onnxruntime", "protobuf", "ml_dtypes", "typing_extensions", "flatbuffers"),
    *("packaging", "msgspec", "filelock", "psutil"),
)
"""The modules that the Python backend imports, without PyTorch."""

X = read_case("soft_moe_vit").x


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of an environment with moexport and the requirements for bundles."""
    place = tmp_path_factory.mktemp("serving") / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    (site,) = place.glob("lib/python*/site-packages")
    (site / "moexport").symlink_to(ROOT)
    for name in NEEDED:
        installed = metadata.distribution(name)
        for top in {file.parts[0] for file in installed.files or () if file.parts[0] != ".."}:
            if not (site / top).exists():
                (site / top).symlink_to(str(installed.locate_file(top)))
    return place / "bin"


@pytest.fixture(scope="module")
def repository(
    bundles: dict[str, moexport.Bundle], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    place = tmp_path_factory.mktemp("repository") / "models"
    moexport.triton(*([bundles["2"], bundles["4"]], place), name="vit", backend="python", threads=1)
    moexport.triton(bundles["input"], place, name="any", backend="python", k=3, threads=1)
    return place


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture(scope="module")
def address(
    repository: Path, python: Path, packages: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The address of a server, which stops after the tests."""
    server = packages / "pytriton" / "tritonserver"
    stub = "triton_python_backend_stub"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if not (server / "python_backend_stubs" / version / stub).is_file():
        pytest.skip(f"the server has no Python backend for Python {version}")
    shutil.copy(server / "python_backend_stubs" / version / stub, server / "backends" / "python")
    for program in (server / "bin" / "tritonserver", server / "backends" / "python" / stub):
        program.chmod(0o755)
    http, grpc = free_port(), free_port()
    log = tmp_path_factory.mktemp("server") / "log.txt"
    with log.open("w") as output:
        process = subprocess.Popen(
            [
                server / "bin" / "tritonserver",
                *(f"--model-repository={repository}", f"--backend-directory={server / 'backends'}"),
                *("--http-address=127.0.0.1", f"--http-port={http}"),
                *("--grpc-address=127.0.0.1", f"--grpc-port={grpc}", "--allow-metrics=false"),
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
            # It runs the first Python in PATH, without PYTHONPATH.
            env={
                **os.environ,
                "PATH": f"{python}{os.pathsep}{os.environ['PATH']}",
                "LD_LIBRARY_PATH": str(sysconfig.get_config_var("LIBDIR")),
            },
        )
    try:
        wait_until_ready(process, http, log)
        yield f"127.0.0.1:{grpc}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    for _ in range(600):
        if process.poll() is not None:
            said = log.read_text()
            if "GLIBC" in said or "libpython" in said:
                pytest.skip(f"the server does not start on this system: {said[-200:]}")
            pytest.fail(said[-3000:])
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready")
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
        else:
            return
    pytest.fail(log.read_text()[-3000:])


class Asked:
    """A client of one model."""

    def __init__(self, client: Any, address: str, model: str) -> None:
        self._module, self._model = client, model
        self._client = client.InferenceServerClient(address)

    def inputs(self, x: np.ndarray, k: list[int] | None = None) -> list[Any]:
        arrays = {"input": (x, "FP32")}
        if k is not None:
            arrays["k"] = (np.array(k, np.int64).reshape(-1, 1), "INT64")
        made = []
        for name, (array, kind) in arrays.items():
            made.append(self._module.InferInput(name, [*array.shape], kind))
            made[-1].set_data_from_numpy(array)
        return made

    def __call__(self, x: np.ndarray, k: list[int] | None = None) -> Any:
        return self._client.infer(self._model, self.inputs(x, k)).as_numpy

    def later(self, x: np.ndarray, k: int, found: list[Any]) -> None:
        """Sends a request; the answer is added to `found`."""
        self._client.async_infer(
            self._model,
            self.inputs(x, [k] * len(x)),
            lambda result, error: found.append(error or result),
        )


def assert_same(found: Any, wanted: dict[str, np.ndarray], ending: str = "") -> None:
    """Checks that outputs and selected experts are those of the bundle in this process."""
    for name, array in wanted.items():
        served = found(f"{name}{ending}")
        assert served.shape == array.shape
        if array.dtype == np.int64:
            assert np.array_equal(served, array)
        else:
            assert np.abs(served - array).max() <= 1e-5 * np.abs(array).max()


@pytest.mark.parametrize("k", [1, 4, 8, None])
def test_every_request_chooses_its_k(
    k: int | None, client: Any, address: str, bundles: dict[str, moexport.Bundle]
) -> None:
    found = Asked(client, address, "any")(X, None if k is None else [k] * len(X))
    assert_same(found, bundles["input"].session().run(X, k or 3))


def test_requests_of_different_k_are_answered_at_once(
    client: Any, address: str, bundles: dict[str, moexport.Bundle]
) -> None:
    asked, session = Asked(client, address, "any"), bundles["input"].session()
    answers: dict[int, list[Any]] = {k: [] for k in range(1, 9)}
    for k, found in answers.items():
        for x in X:
            asked.later(x[None], k, found)
    until = time.monotonic() + 60
    while any(len(found) < len(X) for found in answers.values()):
        assert time.monotonic() < until
        time.sleep(0.01)
    for k, found in answers.items():
        wanted = session(X, k)
        for result in found:
            y = result.as_numpy("output")
            assert np.abs(wanted - y).max(axis=1).min() <= 1e-5 * np.abs(wanted).max()


def test_an_ensemble_gives_the_outputs_of_every_k(
    client: Any, address: str, bundles: dict[str, moexport.Bundle]
) -> None:
    found = Asked(client, address, "vit")(X)
    for k in ("2", "4"):
        assert_same(found, bundles[k].session().run(X), f"_k{k}")


@pytest.mark.parametrize(
    ("k", "said"),
    [
        ([9], "k = 9: the model has 8 experts"),
        ([0], "k = 0"),
        ([2, 3], "send a separate request for each k"),
    ],
    ids=str,
)
def test_a_refusal_of_the_bundle_is_the_answer_to_that_request(
    k: list[int], said: str, client: Any, address: str
) -> None:
    asked = Asked(client, address, "any")
    with pytest.raises(Exception, match=said):
        asked(X[: len(k)], k)
    assert asked(X[:1], [2])("output").shape == (1, 10)


def test_other_shapes_and_models_are_refused(client: Any, address: str) -> None:
    with pytest.raises(Exception, match="unexpected shape for input 'input'"):
        Asked(client, address, "any")(X[..., :5])
    with pytest.raises(Exception, match="unknown model: 'none'"):
        Asked(client, address, "none")(X)


@pytest.mark.usefixtures("client")
def test_the_server_is_compared_with_the_same_bundle_in_this_process(
    address: str, bundles: dict[str, moexport.Bundle], tmp_path: Path
) -> None:
    pytest.importorskip("mlperf_loadgen", reason="LoadGen is not installed")
    results = moexport.bench(
        bundles["2"].path,
        engine="onnxruntime",
        data=np.repeat(X, 8, axis=0),
        batch="1,8",
        scenario="server,offline",
        latency_bound="300ms",
        duration="3s",
        triton=f"{address}/vit-k2",
        memory=False,
        parts=False,
        limits=False,
        round_s=0.01,
        out=tmp_path,
    )
    found = services_in(results.analyses)
    assert found is not None
    for scenario in ("server", "offline"):
        services = {one.engine: one for one in found.of(scenario)}
        assert services.keys() == {"pytorch-eager", "onnxruntime", "triton"}
        served = services["triton"]
        assert served.rate, served.reason
        assert (served.k, served.experts) == (2, 8)
        assert (tmp_path / served.logs / "mlperf_log_summary.txt").is_file()
    assert "Triton" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.usefixtures("client")
@pytest.mark.parametrize(
    ("triton", "said"),
    [
        ("{address}/none", "none"),
        ("127.0.0.1:1/vit", 'triton="127.0.0.1:1/vit"'),
        ("localhost", 'triton="localhost": expected the form ADDRESS/MODEL'),
    ],
)
def test_an_unreachable_server_is_refused_before_anything_is_measured(
    triton: str, said: str, address: str, bundles: dict[str, moexport.Bundle], tmp_path: Path
) -> None:
    with pytest.raises((EngineError, UsageError), match=said):
        moexport.bench(
            bundles["2"].path,
            engine="onnxruntime",
            data=X,
            scenario="offline",
            triton=triton.format(address=address),
            out=tmp_path / "out",
        )
    assert not (tmp_path / "out" / "results.json").exists()


def test_a_server_that_is_not_there_is_an_error_of_the_client(client: Any) -> None:
    with pytest.raises(Exception, match="UNAVAILABLE"):
        Asked(client, f"127.0.0.1:{free_port()}", "any")(X)
