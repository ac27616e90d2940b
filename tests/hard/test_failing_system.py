"""What the system refuses is an error that says what and where, and leaves nothing half-written.

`strace` makes a call of the system fail as it does on a real machine that lacks something.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from moexport.tests.command import PROGRAM, Outcome, run
from moexport.tests.recorded import read_case

LAYER = read_case("soft_moe_fkodom")
EXPORT = ("export", LAYER.weights, "--set", "version=0.2.0", "--threads", "1")
RENAMES = "rename,renameat,renameat2"
STARTS = "clone,clone3"

injects = pytest.mark.skipif(
    shutil.which("strace") is None, reason="needs strace, which makes calls of the system fail"
)


def failing(calls: str, error: str, cwd: Path, *arguments: str | Path) -> Outcome:
    """Runs the program with these calls of the system failing, each or the n-th of them."""
    options = ("-f", "-qq", "--seccomp-bpf", "-o", os.devnull, f"--trace={calls}")
    done = subprocess.run(
        ["strace", *options, f"--inject={calls}:error={error}", *PROGRAM, *map(str, arguments)],
        cwd=cwd,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


@pytest.mark.slow
@injects
def test_a_disk_that_fails_is_reported_with_its_file(tmp_path: Path) -> None:
    outcome = failing("fsync", "EIO:when=2", tmp_path, *EXPORT, "-o", "out")
    assert outcome.code == 1
    name, _, rest = outcome.error.partition(": ")
    assert name.startswith("out/")
    assert rest == "cannot be written: Input/output error"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@injects
def test_a_folder_on_another_layer_of_a_container_is_replaced(tmp_path: Path) -> None:
    for force in ((), ("--force",)):
        outcome = failing(RENAMES, "EXDEV:when=1", tmp_path, *EXPORT, "-o", "out", *force)
        assert outcome.code == 0, outcome.err
        assert run("verify", tmp_path / "out").code == 0
        assert [path.name for path in tmp_path.iterdir()] == ["out"]


@injects
def test_failing_to_start_a_thread_is_not_reported_as_a_bug(bundle: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", input=read_case("soft_moe_vit").x)
    arguments = ("run", bundle, "-i", "x.npz", "-o", "y.npz")
    outcome = failing(STARTS, "EAGAIN", tmp_path, *arguments)
    assert outcome.code == 1
    assert outcome.error == "the system refuses to start another thread"
    assert "ulimit -u" in outcome.hint
    assert not (tmp_path / "y.npz").exists()


@pytest.mark.parametrize("option", ["--data", "--input"])
def test_a_device_is_no_file_of_inputs(option: str, bundle: Path, tmp_path: Path) -> None:
    out = ("-o", tmp_path / "out.npz")
    command = (*EXPORT, "--data") if option == "--data" else ("run", bundle, "-i")
    outcome = run(*command, "/dev/zero", *out)
    assert outcome.code == 1
    assert outcome.error == "/dev/zero: not a file"


def test_numbers_of_shards_that_nobody_has_are_refused(tmp_path: Path) -> None:
    pattern = "s-{0.." + "9" * 5000 + "}.tar"
    outcome = run(*EXPORT, "--data", pattern, "-o", tmp_path / "out")
    assert outcome.code == 1
    assert outcome.error.endswith("shard numbers have at most 18 digits")
    assert len(outcome.error) < 200


@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="marks a file as not to be removed"
)
def test_an_old_bundle_that_cannot_be_removed_is_named(tmp_path: Path) -> None:
    assert run(*EXPORT, "-o", tmp_path / "out").code == 0
    fixed = tmp_path / "out" / "manifest.json"
    if subprocess.run(["chattr", "+i", fixed], capture_output=True, check=False).returncode:
        pytest.skip("this file system has no such mark")
    try:
        outcome = run(*EXPORT, "-o", tmp_path / "out", "--force")
        assert outcome.code == 1
        assert "the old folder cannot be removed" in outcome.error
        assert run("verify", tmp_path / "out").code == 0
        (old,) = (path for path in tmp_path.iterdir() if path.name != "out")
        assert str(old) in outcome.error
    finally:
        for path in tmp_path.rglob("manifest.json"):
            subprocess.run(["chattr", "-i", path], check=True)


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode != 0,
    reason="makes file systems read-only in a namespace of its own",
)
def test_without_a_temporary_folder_scratch_files_go_next_to_the_results(tmp_path: Path) -> None:
    data = tmp_path / "data.npz"
    np.savez(data, input=np.concatenate([LAYER.x] * 8))
    place = tmp_path / "volume"
    place.mkdir()
    script = f"""
set -e
mount -t tmpfs none {place}
mount --rbind / / && mount -o remount,bind,ro /
cd /
exec "$@"
"""
    # The volume is mounted below the read-only root, as a container has it.
    arguments = [*EXPORT, "--precision", "int8", "--target", "ort-cpu", "--data", data]
    arguments += ["-o", place / "out"]
    done = subprocess.run(
        ["unshare", "-m", "bash", "-c", script, "-", *PROGRAM, *map(str, arguments)],
        env={n: v for n, v in os.environ.items() if n != "TMPDIR"} | {"HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "out: " in done.stdout
