"""What a URL names is read as a local file is, through fsspec's memory and a local HTTP server."""

from __future__ import annotations

import gzip
import json
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import moexport
import numpy as np
import pytest
from moexport.common import locations
from moexport.common.files import hash_files
from moexport.common.locations import has_file, local, state_of, url_of
from moexport.data.feeds import batches, count
from moexport.errors import BundleError, CheckpointError, LocationError, MissingExtraError
from moexport.exporter.bundle.bundle import Bundle
from moexport.tests.command import run
from moexport.tests.recorded import DATA

WEIGHTS = DATA / "soft_moe_mnist" / "weights.pt"


ZEROS = gzip.compress(bytes(1 << 26), 1)
"""64 MB in 300 kB."""

FOREVER_S = 120.0
"""How long a server holds a connection, for which no test waits."""

counts: dict[str, int] = {}
"""How often, or how much, was read of files that change."""


ILL_MEANT = ("once", "gzip", "endless", "stalled", "drips", "slow_headers", "changing")


class Quiet(SimpleHTTPRequestHandler):
    """Serves a folder; /denied is forbidden, /short breaks off, and others are ill meant."""

    def do_HEAD(self) -> None:
        if self.path[1:-3] in ("denied", "short", "once", "stalled", "drips", "slow_headers"):
            self.do_GET()
        else:
            super().do_HEAD()

    def do_GET(self) -> None:
        bodies = self.command == "GET"
        if self.path == "/denied.pt":
            self.send_error(403)
        elif (name := self.path[1:-3]) in ILL_MEANT:
            getattr(self, f"_{name}")()
        elif not bodies and self.path == "/short.pt":
            self._head(1000)
        elif self.path == "/short.pt":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"half")
        else:
            super().do_GET()

    def _head(self, size: int | None, **more: str) -> None:
        self.send_response(200)
        if size is not None:
            self.send_header("Content-Length", str(size))
        for name, value in more.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def _once(self) -> None:
        """Breaks off the first time that it is read."""
        self._head(1000)
        if self.command == "GET":
            counts["once"] = counts.get("once", 0) + 1
            self.wfile.write(b"x" * (10 if counts["once"] == 1 else 1000))

    def _gzip(self) -> None:
        self._head(len(ZEROS), Content_Encoding="gzip")
        self.wfile.write(ZEROS)

    def _endless(self) -> None:
        self._head(None)
        with suppress(OSError):
            while counts.setdefault("endless", 0) < 1 << 30:
                counts["endless"] += self.wfile.write(bytes(1 << 20))

    def _stalled(self) -> None:
        self._head(1000)
        if self.command == "GET":
            self.wfile.write(b"x")
            self.wfile.flush()
            time.sleep(FOREVER_S)

    def _drips(self) -> None:
        """Never sends nothing for long, and never ends."""
        self._head(1 << 20)
        if self.command == "GET":
            self._drip(b"x")

    def _slow_headers(self) -> None:
        self.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
        self._drip(b"x")

    def _drip(self, byte: bytes) -> None:
        with suppress(OSError):
            for _ in range(int(FOREVER_S / 0.1)):
                self.wfile.write(byte)
                self.wfile.flush()
                time.sleep(0.1)

    def _changing(self) -> None:
        counts["changing"] = counts.get("changing", 0) + 1
        self._head(4, ETag=f'"{counts["changing"]}"')
        self.wfile.write(b"body")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A folder behind a server on this machine, and its URL."""
    folder = tmp_path / "served"
    folder.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", folder
    server.shutdown()
    server.server_close()


@pytest.fixture
def memory(request: pytest.FixtureRequest) -> str:
    """A folder of its own in fsspec's memory."""
    return f"memory://{request.node.name.replace('[', '-').rstrip(']')}"


def put(url: str, folder: Path) -> None:
    system, path = fsspec.core.url_to_fs(url)
    system.put(f"{folder}/", path, recursive=True)


def test_a_path_is_no_url_and_a_path_that_was_made_of_a_url_is_one(tmp_path: Path) -> None:
    for path in ("a/b.pt", "/a/b.pt", "C:/a", "C:\\a", "package.module:factory", tmp_path):
        assert url_of(path) is None
    assert url_of(Path("s3://bucket/a.pt")) == url_of("s3://bucket/a.pt/") == "s3://bucket/a.pt"


def test_a_path_may_be_written_as_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a b"
    folder.mkdir()
    (folder / "w.pt").write_bytes(b"weights")
    monkeypatch.chdir(folder)
    uri = (folder / "w.pt").as_uri()
    assert uri.startswith("file:///") and "a%20b" in uri
    for each in (uri, Path(uri), uri.replace("file://", "file://localhost"), "file:w.pt"):
        assert url_of(each) is None
        assert local(each).samefile("w.pt")
        assert state_of(each)
    assert has_file(folder.as_uri(), "w.pt") and not has_file(folder.as_uri(), "v.pt")
    for wrong in ("file://w.pt", "file://server/w.pt", "file://", "file:"):
        with pytest.raises(LocationError, match=f"{wrong}: this URL does not name") as refused:
            local(wrong)
        assert "three slashes" in str(refused.value.hint)


def test_commands_read_and_write_paths_that_are_written_as_urls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "settings.yaml").write_text("normalize: false\n")
    shutil.copy(WEIGHTS, tmp_path / "w.pt")
    with np.load(DATA / "soft_moe_mnist" / "io.npz") as recorded:
        np.savez(tmp_path / "x.npz", input=recorded["x"])

    def done(*arguments: str) -> str:
        outcome = run(*arguments)
        assert outcome.code == 0, outcome.err
        return outcome.out

    root = tmp_path.as_uri()
    assert root.startswith("file:///")
    shown = done("inspect", f"{root}/w.pt", "--config", f"{root}/settings.yaml")
    assert "soft-moe-mnist" in shown
    assert done("inspect", "file:w.pt") == done("inspect", "w.pt")
    done("export", f"{root}/w.pt", "--data", f"{root}/x.npz", "-o", f"{root}/out")
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "out", "settings.yaml", "w.pt", "x.npz",
    ]  # fmt: skip
    done("verify", f"{root}/out")
    done("run", f"{root}/out", "--input", f"{root}/x.npz", "-o", f"{root}/y.npz")
    with np.load("y.npz") as made:
        with np.load("x.npz") as inputs:
            expected = Bundle.open(f"{root}/out").session()(inputs["input"])
        assert np.array_equal(made["output"], expected)
    outcome = run("inspect", "file://w.pt")
    assert outcome.code == 1 and "file://w.pt: this URL does not name" in outcome.error


def test_a_checkpoint_by_http_is_the_local_one_with_the_url_as_its_source(
    served: tuple[str, Path],
) -> None:
    url, folder = served
    shutil.copy(WEIGHTS, folder / "net.pt")
    model, same = moexport.load(f"{url}/net.pt"), moexport.load(WEIGHTS)
    assert model.source.path == f"{url}/net.pt"
    assert model.source.sha256() == hash_files([WEIGHTS]) == same.source.sha256()
    copy = local(f"{url}/net.pt")
    assert copy.name == "net.pt"
    assert copy.parent.parent.stat().st_mode & 0o077 == 0  # nobody else may read it
    outcome = run("inspect", f"{url}/net.pt", "--json")
    assert outcome.code == 0, outcome.err


def test_shards_of_a_checkpoint_come_with_their_index(served: tuple[str, Path]) -> None:
    import torch
    from safetensors.torch import save_file

    url, folder = served
    tensors = torch.load(WEIGHTS, weights_only=True)
    tensors = {k: v.clone() for k, v in tensors.items()}
    names = sorted(tensors)
    parts = {"one.safetensors": names[:3], "two.safetensors": names[3:]}
    for name, keys in parts.items():
        save_file({key: tensors[key] for key in keys}, folder / name)
    index = {"weight_map": {key: name for name, keys in parts.items() for key in keys}}
    (folder / "m.safetensors.index.json").write_text(json.dumps(index))
    model = moexport.load(f"{url}/m.safetensors.index.json")
    assert model.family == moexport.load(WEIGHTS).family
    (folder / "two.safetensors").unlink()
    shutil.copy(folder / "m.safetensors.index.json", folder / "n.safetensors.index.json")
    with pytest.raises(CheckpointError, match=r"1 of 2 shards are missing: two\.safetensors"):
        moexport.load(f"{url}/n.safetensors.index.json")


@pytest.mark.parametrize("scheme", ["http", "memory"])
def test_a_bundle_by_url_runs_and_verifies(
    scheme: str, served: tuple[str, Path], memory: str, exported: Path, tmp_path: Path
) -> None:
    if scheme == "http":
        url = f"{served[0]}/bundle"
        shutil.copytree(exported, served[1] / "bundle")
    else:
        url = memory
        put(url, exported)
    here, there = Bundle.open(exported), Bundle.open(url)
    x = np.random.default_rng(0).standard_normal((2, 3, 32, 32)).astype(np.float32)
    x = x[..., : _size(here), : _size(here)]
    assert np.array_equal(here.session()(x), there.session()(x))
    assert run("inspect", url).out.replace(url, "") == run("inspect", exported).out.replace(
        str(exported), ""
    )
    refused = run("build", url, "--target", "tensorrt-rtx")
    assert (refused.code, "copy the bundle to this machine" in refused.hint) == (2, True)


def _size(bundle: Bundle) -> int:
    size = bundle.manifest.inputs[0].shape[-1]
    assert isinstance(size, int)
    return size


def test_a_bundle_by_url_whose_file_is_missing_or_changed_is_not_run(
    served: tuple[str, Path], exported: Path
) -> None:
    url, folder = served
    shutil.copytree(exported, folder / "short")
    weights = folder / "short" / "weights.bin"
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(BundleError, match="the content has changed"):
        Bundle.open(f"{url}/short").session()
    assert f"error: {url}/short: " in run("verify", f"{url}/short").err
    shutil.copytree(exported, folder / "missing")
    (folder / "missing" / "weights.bin").unlink()
    with pytest.raises(BundleError, match="the file is missing"):
        Bundle.open(f"{url}/missing").session()


def test_feeds_by_url_hold_what_the_files_hold(memory: str, tmp_path: Path) -> None:
    x = np.arange(24, dtype=np.float32).reshape(6, 4)
    folder = tmp_path / "rows"
    folder.mkdir()
    np.save(folder / "a.npy", x[:4])
    np.save(folder / "b.npy", x[4:])
    np.savez(tmp_path / "x.npz", input=x)
    put(f"{memory}/rows", folder)
    fsspec.filesystem("memory").put(str(tmp_path / "x.npz"), f"{memory}/x.npz")
    for url in (f"{memory}/rows", f"{memory}/x.npz"):
        assert np.array_equal(np.concatenate(list(batches(url, "input"))), x)
        assert count(url, "input") == 6


def test_what_cannot_be_read_is_told_by_its_url(served: tuple[str, Path], memory: str) -> None:
    url, _ = served
    for place, said, hint in (
        (f"{url}/gone.pt", "no such file", "check the URL"),
        (f"{url}/denied.pt", "403", "log in"),
        (f"{url}/short.pt", "cannot be read", "connection"),
        (f"{memory}/gone.npz", "no such file", "check the URL"),
        ("nosuch://a/b.pt", "cannot be read", "check the URL"),
        ("http://127.0.0.1:1/a.pt", "cannot be read", "connection"),
    ):
        with pytest.raises(LocationError) as caught:
            local(place)
        assert caught.value.message.startswith(f"{place}: ")
        assert said in caught.value.message
        assert hint in (caught.value.hint or "")


def test_a_damaged_checkpoint_is_told_by_its_url_and_not_by_its_copy(
    served: tuple[str, Path],
) -> None:
    url, folder = served
    (folder / "net.pt").write_bytes(WEIGHTS.read_bytes()[:1000])
    outcome = run("inspect", f"{url}/net.pt")
    assert outcome.code == 1
    assert outcome.error.startswith(f"{url}/net.pt: damaged")


@pytest.mark.parametrize(("scheme", "package"), [("s3", "s3fs"), ("gs", "gcsfs")])
def test_a_url_without_its_library_names_the_extra(
    scheme: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=f"{scheme}:// needs a library") as caught:
        local(f"{scheme}://bucket/net.pt")
    assert caught.value.hint == f"pip install '.[{scheme}]' in a clone of moexport"


def test_results_are_not_written_to_a_url() -> None:
    outcome = run("export", WEIGHTS, "-o", "s3://bucket/out")
    assert outcome.code == 2
    assert "is a URL" in outcome.error


def test_a_name_that_leads_out_of_the_copy_is_refused(memory: str) -> None:
    system = fsspec.filesystem("memory")
    system.store[f"/{memory.removeprefix('memory://')}/../../x"] = system.open(f"{memory}/ok", "wb")
    with pytest.raises(LocationError, match="that cannot be copied"):
        local(memory)


def test_a_download_that_broke_off_is_tried_again_at_once(served: tuple[str, Path]) -> None:
    counts.clear()
    assert local(f"{served[0]}/once.pt").read_bytes() == b"x" * 1000
    assert counts["once"] == 2


def test_a_server_that_sends_nothing_is_not_waited_for(
    served: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locations, "STALLED_S", 2.0)
    started = time.monotonic()
    with pytest.raises(LocationError, match=r"stalled\.pt: cannot be read \(no data arrived for"):
        local(f"{served[0]}/stalled.pt")
    assert time.monotonic() - started < FOREVER_S / 2


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("drips", r"only \d+ bytes arrived in \d s, less than 16384 a second"),
        ("slow_headers", r"cannot be read \(no data arrived for 2 s, or the transfer was too slow"),
    ],
)
def test_a_server_that_drips_is_not_waited_for(
    name: str, said: str, served: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locations, "STALLED_S", 2.0)
    started = time.monotonic()
    with pytest.raises(LocationError, match=rf"{name}\.pt: {said}"):
        local(f"{served[0]}/{name}.pt")
    assert time.monotonic() - started < FOREVER_S / 2


def test_an_endless_body_is_cut_at_its_budget(
    served: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts.clear()
    monkeypatch.setattr(locations, "UNKNOWN_BYTES", 8 << 20)
    with pytest.raises(LocationError, match=f"sends more than the {8 << 20}"):
        local(f"{served[0]}/endless.pt")
    assert counts["endless"] < 64 << 20


def test_a_compressed_reply_is_not_unpacked(served: tuple[str, Path]) -> None:
    assert local(f"{served[0]}/gzip.pt").read_bytes() == ZEROS


def test_a_file_that_does_not_fit_is_not_begun(
    served: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, folder = served
    (folder / "large.pt").write_bytes(b"x" * 1000)
    monkeypatch.setattr(locations, "RESERVED_BYTES", 1 << 60)
    with pytest.raises(LocationError, match=r"large\.pt has 1000 bytes, but only 0 are free"):
        local(f"{url}/large.pt")


def test_a_file_that_changes_while_it_is_copied_is_reported(served: tuple[str, Path]) -> None:
    with pytest.raises(LocationError, match="it changed while it was being copied"):
        local(f"{served[0]}/changing.pt")


def test_a_file_that_changed_between_two_reads_has_another_state(
    served: tuple[str, Path], memory: str
) -> None:
    url, folder = served
    system = fsspec.filesystem("memory")
    for place, write in (
        (f"{url}/a.npz", (folder / "a.npz").write_bytes),
        (f"{memory}/a.npz", partial(system.pipe, f"{memory}/a.npz")),
    ):
        write(b"one")
        before = state_of(place)
        assert before and state_of(place) == before
        time.sleep(1.1)  # what the server tells is a time in seconds
        write(b"two")
        assert state_of(place) != before
