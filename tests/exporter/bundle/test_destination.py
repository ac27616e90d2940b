"""A bundle is written whole or not at all, and nothing but a bundle is ever replaced."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from moexport.errors import BundleError
from moexport.exporter.bundle.destination import atomic_directory
from moexport.tests.command import Outcome, run, run_program
from moexport.tests.recorded import DATA, VIT_SETS

LAYER = DATA / "soft_moe_lucidrains" / "weights.pt"


def export(destination: Path, *options: str) -> Outcome:
    return run("export", LAYER, "-o", destination, *options)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, hidden ones too."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def assert_refused(outcome: Outcome, message: str, code: int = 1) -> None:
    assert (outcome.code, outcome.out) == (code, "")
    assert message in outcome.error
    assert outcome.hint
    assert "defect" not in outcome.err


def a_bundle(folder: Path) -> None:
    """The least that counts as a bundle."""
    folder.mkdir(parents=True)
    content = {"schema": 1, "moexport": "0", "layers": [], "files": {"weights.bin": {}}}
    (folder / "manifest.json").write_text(json.dumps(content))
    (folder / "weights.bin").write_bytes(b"old")


def test_an_existing_bundle_stays_unless_forced(tmp_path: Path) -> None:
    a_bundle(tmp_path / "out")
    before = contents(tmp_path)
    outcome = export(tmp_path / "out")
    assert_refused(outcome, "a bundle already exists there")
    assert "--force" in outcome.hint
    assert contents(tmp_path) == before
    assert export(tmp_path / "out", "--force").code == 0
    assert run("verify", tmp_path / "out", "-q").code == 0
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_files_that_somebody_keeps_in_a_bundle_are_not_lost_to_force(tmp_path: Path) -> None:
    a_bundle(tmp_path / "out")
    (tmp_path / "out" / "labels.txt").write_text("mine")
    (tmp_path / "out" / ".engines.1.partial").mkdir()
    before = contents(tmp_path)
    outcome = export(tmp_path / "out", "--force")
    assert_refused(outcome, "contains other files: labels.txt; it is left untouched")
    assert "move them elsewhere" in outcome.hint
    assert contents(tmp_path) == before
    (tmp_path / "out" / "labels.txt").unlink()
    assert export(tmp_path / "out", "--force").code == 0


def test_a_forced_export_that_fails_leaves_the_old_bundle(tmp_path: Path) -> None:
    a_bundle(tmp_path / "out")
    before = contents(tmp_path)
    outcome = export(tmp_path / "out", "--force", "--rtol", "0", "--atol", "0")
    assert_refused(outcome, "differs from PyTorch", code=3)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("force", [(), ("--force",)], ids=["plain", "forced"])
@pytest.mark.parametrize(
    "file",
    [
        ("notes.txt", "mine"),
        # A web extension's, a web app's, a broken one: other programs write manifests, too.
        ("manifest.json", '{"manifest_version": 3, "name": "an extension"}'),
        ("manifest.json", '{"schema": 1}'),
        ("manifest.json", "{"),
    ],
    ids=["file", "extension", "other", "broken"],
)
def test_a_folder_that_is_no_bundle_is_never_touched(
    file: tuple[str, str], force: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / file[0]).write_text(file[1])
    before = contents(tmp_path)
    assert_refused(export(tmp_path / "out", *force), "is not a bundle; it is left untouched")
    assert contents(tmp_path) == before


def test_an_empty_folder_is_a_fine_destination(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert export(tmp_path / "out").code == 0
    assert (tmp_path / "out" / "manifest.json").is_file()
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_the_current_folder_is_a_fine_destination(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    outcome = export(Path())
    assert outcome.code == 0, outcome.err
    assert (tmp_path / "here" / "manifest.json").is_file()
    assert list(tmp_path.iterdir()) == [tmp_path / "here"]


def test_a_link_to_a_bundle_stays_a_link(tmp_path: Path) -> None:
    a_bundle(tmp_path / "versions" / "1")
    (tmp_path / "latest").symlink_to("versions/1")
    outcome = export(tmp_path / "latest", "--force")
    assert outcome.code == 0, outcome.err
    assert (tmp_path / "latest").is_symlink()
    assert (tmp_path / "versions" / "1" / "model.onnx").is_file()
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_dir()) == ["1", "latest", "versions"]


@pytest.mark.parametrize("force", [(), ("--force",)], ids=["plain", "forced"])
def test_a_file_or_a_dangling_link_is_never_replaced(
    force: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to("nowhere")
    assert_refused(export(tmp_path / "file", *force), "a file with this name exists")
    assert_refused(export(tmp_path / "link", *force), "a file with this name exists")
    assert contents(tmp_path) == {"file": b"mine"}
    assert (tmp_path / "link").is_symlink()


def test_a_file_cannot_hold_a_bundle(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file" / "out", tmp_path / "file" / "deeper" / "out"):
        assert_refused(export(place), f"{tmp_path / 'file'}: not a folder")
    assert contents(tmp_path) == {"file": b"mine"}


def test_a_name_that_no_file_system_takes_is_an_error(tmp_path: Path) -> None:
    assert_refused(export(tmp_path / ("x" * 400)), "cannot be written: File name too long")
    assert_refused(export(tmp_path / ("x" * 250)), "cannot be written: File name too long")
    assert list(tmp_path.iterdir()) == []


def test_missing_parents_are_made(tmp_path: Path) -> None:
    assert export(tmp_path / "a" / "b" / "out").code == 0
    assert sorted(p.name for p in (tmp_path / "a" / "b").iterdir()) == ["out"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o555)
    assert_refused(export(tmp_path / "closed" / "out"), "cannot be written: Permission denied")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 192 kB: room for the layer's weights and not for the whole bundle."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=192k", "tmpfs", str(place)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip("a small file system cannot be mounted here: no permission")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_disk_too_small_for_the_weights_is_told_before_anything_is_written(
    small_disk: Path,
) -> None:
    outcome = run(
        *("export", DATA / "soft_moe_mnist" / "weights.pt", "-o", small_disk / "out", "--k", "4")
    )
    assert_refused(outcome, "not enough space: the bundle needs")
    assert "writing" not in outcome.err
    assert list(small_disk.iterdir()) == []


def test_a_disk_that_fills_up_leaves_nothing_behind(small_disk: Path) -> None:
    graphs = "--lowering=dense,gather,grouped,conditional"
    (small_disk / "mine").write_bytes(bytes(4096))
    outcome = export(small_disk / "out", graphs, "--k", "2")
    assert_refused(outcome, "cannot be written: No space left on device")
    assert "writing" in outcome.err
    assert [path.name for path in small_disk.iterdir()] == ["mine"]


def test_a_disk_that_fills_up_keeps_the_bundle_that_was_there(small_disk: Path) -> None:
    a_bundle(small_disk / "out")
    before = contents(small_disk)
    graphs = "--lowering=dense,gather,grouped,conditional"
    outcome = export(small_disk / "out", graphs, "--k", "2", "--force")
    assert_refused(outcome, "cannot be written: No space left on device")
    assert contents(small_disk) == before


def test_outputs_that_fill_the_disk_are_told_and_not_kept(
    small_disk: Path, exported: Path, tmp_path: Path
) -> None:
    np.savez(tmp_path / "x.npz", input=np.zeros((8, 3, 32, 32), np.float32))
    (small_disk / "mine").write_bytes(bytes(192 << 10))
    arguments = ("run", exported, "-i", tmp_path / "x.npz", "-o", small_disk / "y.npz")
    outcome = run_program(*arguments)
    assert_refused(outcome, "y.npz: cannot be written: No space left on device")
    assert "Traceback" not in outcome.err  # of an archive that ends with its process, either
    assert [path.name for path in small_disk.iterdir()] == ["mine"]


@pytest.mark.parametrize("free", [0, 20 << 10])
def test_ranges_that_do_not_fit_on_the_disk_leave_no_folder(
    free: int, small_disk: Path, tmp_path: Path
) -> None:
    np.savez(tmp_path / "x.npz", input=np.zeros((3, 5, 24), np.float32))
    (small_disk / "mine").write_bytes(bytes((192 << 10) - free))
    place = small_disk / "new" / "folder" / "table.json"
    layer = (DATA / "soft_moe_fkodom" / "weights.pt", "--set", "version=0.2.0")
    outcome = run("calibrate", *layer, "--data", tmp_path / "x.npz", "-o", place)
    assert outcome.code == 1
    assert outcome.error == f"{place.parent}: cannot be written: No space left on device"
    assert [path.name for path in small_disk.rglob("*")] == ["mine"]


@pytest.fixture
def writers(exported: Path, tmp_path: Path) -> dict[str, tuple[str | Path, ...]]:
    """Every command that writes beside `export`, without its `-o`."""
    x, labelled = tmp_path / "x.npz", tmp_path / "labelled.npz"
    images = np.zeros((2, 3, 32, 32), np.float32)
    np.savez(x, input=images)
    np.savez(labelled, input=images, label=np.array([0, 1]))
    results = tmp_path / "results.json"
    results.write_text('{"schema": 1, "environment": {}, "model": null, "models": [], "rows": []}')
    vit = DATA / "soft_moe_vit" / "weights.pt"
    quick = ("--k", "2", "--engine", "onnxruntime", "--no-memory")
    return {
        "y.npz": ("run", exported, "-i", x),
        "report.html": ("report", results),
        "table.json": ("calibrate", vit, "--data", x, *VIT_SETS),
        "experts": ("specialise", vit, "--data", labelled, *VIT_SETS),
        "bench": ("bench", vit, "--data", x, *VIT_SETS, *quick),
    }


EXPERTS = pytest.param("experts", marks=pytest.mark.plugins)
NAMES = ("y.npz", "report.html", "table.json", EXPERTS, "bench")


@pytest.mark.parametrize("name", NAMES[:-1])
def test_missing_folders_are_made(
    writers: dict[str, tuple[str | Path, ...]], tmp_path: Path, name: str
) -> None:
    place = tmp_path / "missing" / "too" / name
    outcome = run(*writers[name], "-o", place)
    assert outcome.code == 0, outcome.err
    assert place.exists()
    assert not [path for path in place.parent.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("name", NAMES)
def test_a_place_that_cannot_be_written_is_refused_before_any_work(
    writers: dict[str, tuple[str | Path, ...]], tmp_path: Path, name: str
) -> None:
    before = contents(tmp_path)
    outcome = run(*writers[name], "-o", tmp_path / "x.npz" / name)
    assert_refused(outcome, f"x.npz: not a folder, so {name} cannot be created in it")
    steps = [line for line in outcome.err.splitlines() if line.startswith("moexport: ")]
    assert all(step.startswith("moexport: loading ") for step in steps)
    if "." in name:
        assert_refused(run(*writers[name], "-o", tmp_path), "cannot be written: it is a folder")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", NAMES[:3])
def test_a_link_to_a_file_stays_a_link(
    writers: dict[str, tuple[str | Path, ...]], tmp_path: Path, name: str
) -> None:
    (tmp_path / "store").mkdir()
    link = tmp_path / f"link.{name.split('.')[1]}"
    link.symlink_to(f"store/{name}")
    outcome = run(*writers[name], "-o", link)
    assert outcome.code == 0, outcome.err
    assert link.is_symlink()
    assert (tmp_path / "store" / name).stat().st_size > 0
    link.unlink()
    link.symlink_to(link.name)
    assert_refused(run(*writers[name], "-o", link), "Too many levels of symbolic links")


@pytest.mark.parametrize("name", NAMES[:3])
def test_what_is_no_file_is_never_replaced_by_one(
    writers: dict[str, tuple[str | Path, ...]], tmp_path: Path, name: str
) -> None:
    place = tmp_path / f"pipe.{name.split('.')[1]}"
    os.mkfifo(place)
    assert_refused(run(*writers[name], "-o", place), "cannot be written: it is not a regular file")
    assert place.is_fifo()


def test_a_table_replaces_nothing_but_a_table(
    writers: dict[str, tuple[str | Path, ...]], tmp_path: Path
) -> None:
    before = contents(tmp_path)
    for name in ("x.npz", "results.json"):
        outcome = run(*writers["table.json"], "-o", tmp_path / name, "--force")
        assert_refused(outcome, "is not a calibration table; it is left untouched")
    assert contents(tmp_path) == before


def test_a_report_does_not_take_the_place_of_its_results(
    writers: dict[str, tuple[str | Path, ...]], tmp_path: Path
) -> None:
    before = contents(tmp_path)
    for name in ("results.json", "page.md", "page.csv", "page"):
        outcome = run(*writers["report.html"], "-o", tmp_path / name)
        assert (outcome.code, outcome.out) == (2, "")
        assert "the page must be an .html file" in outcome.error
    assert contents(tmp_path) == before


WAITS_AT_THE_END = """
import time
from moexport.__main__ import main
from moexport.common.console import Console

step = Console.step
def waits(self, text, *given, **named):
    step(self, text, *given, **named)
    if text == "hashing":
        time.sleep(60)

Console.step = waits
main()
"""
"""A bundle is not whole before the interrupt comes, however late it does."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("tracing", signal.SIGINT),
        ("writing", signal.SIGINT),
        ("checking", signal.SIGINT),
        ("tracing", signal.SIGHUP),
        ("checking", signal.SIGTERM),
    ],
)
def test_an_interrupt_at_any_moment_leaves_nothing_behind(
    moment: str, number: signal.Signals, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", WAITS_AT_THE_END, "export", str(LAYER), "-o", "out"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if moment in line:
            break
    assert seen
    assert moment in seen[-1]
    time.sleep(0.01)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "error: interrupted; no partial files remain"
    assert "Traceback" not in err
    assert out == ""
    assert list(tmp_path.iterdir()) == []


class Stop(BaseException):
    """Stands for an interrupt where the test decides when it comes."""


def test_an_interrupt_while_writing_keeps_the_old_bundle(tmp_path: Path) -> None:
    a_bundle(tmp_path / "out")
    before = contents(tmp_path)
    with pytest.raises(Stop), atomic_directory(tmp_path / "out", force=True) as folder:
        (folder / "weights.bin").write_bytes(b"new")
        raise Stop
    assert contents(tmp_path) == before
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_a_destination_that_appeared_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    with (
        pytest.raises(BundleError, match="a bundle already exists there"),
        atomic_directory(tmp_path / "out", force=False) as folder,
    ):
        (folder / "weights.bin").write_bytes(b"new")
        a_bundle(tmp_path / "out")
    assert contents(tmp_path / "out")["weights.bin"] == b"old"
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_a_dry_run_writes_nothing_and_gives_each_reason(tmp_path: Path) -> None:
    vit = DATA / "soft_moe_vit" / "weights.pt"
    place = tmp_path / "a" / "out"
    options = (*VIT_SETS, "-o", place, "--k", "2,8", "--lowering", "auto,grouped")
    outcome = run("export", vit, *options, "--dry-run")
    assert outcome.code == 0, outcome.err
    assert list(tmp_path.iterdir()) == []
    for text in ("blocks.2.mlp", "2/8", "8/8", "predicted", "requested", "model-grouped.onnx"):
        assert text in outcome.out
    assert "nothing was written (--dry-run)" in outcome.out
    content = json.loads(run("export", vit, *options, "--dry-run", "--json").out)
    assert [layer["k"] for layer in content["graphs"]["model.onnx"]] == [2, 8]
    assert content["files"]["weights.bin"] > 1_000_000
    assert all(layer["reason"] for layer in content["graphs"]["model.onnx"])
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_over_an_existing_bundle_says_what_it_would_write(tmp_path: Path) -> None:
    a_bundle(tmp_path / "out")
    before = contents(tmp_path)
    assert export(tmp_path / "out", "--dry-run").code == 0
    assert contents(tmp_path) == before
