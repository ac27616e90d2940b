"""Files and folders are there whole or not at all, whoever else writes there or is killed."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from moexport.common import writing
from moexport.common.writing import (
    STALE_S,
    exclusive_folder,
    left_behind,
    locked,
    remove_leftovers,
    replace_folder,
    scratch_folder,
    temporary_folder,
    whole_file,
    write_text,
)
from moexport.errors import OutputError

HOLD = """
import sys, time
from pathlib import Path
from moexport.common.writing import {how}
with {how}(Path(sys.argv[1])) as partial:
    print(partial, flush=True)
    time.sleep(60)
"""


def killed(how: str, target: Path) -> Path:
    """What a process leaves that is killed while it writes."""
    code = HOLD.format(how=how)
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(target)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    partial = Path(process.stdout.readline().strip())
    if partial.is_dir():
        (partial / "weights.bin").write_bytes(b"half")
    process.kill()
    process.wait()
    process.stdout.close()
    return partial


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_name_of_what_is_being_written_is_not_known_before(tmp_path: Path) -> None:
    seen = set()
    for _ in range(3):
        with whole_file(tmp_path / "y.npz") as partial:
            assert partial.parent == tmp_path
            assert partial.suffix == ".npz"
            seen.add(partial.name)
    assert len(seen) == 3


def test_a_link_in_place_of_a_temporary_file_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").write_text("mine")
    monkeypatch.setattr(os, "urandom", bytes)
    (tmp_path / f".y.{'0' * 16}.partial.npz").symlink_to("mine")
    with pytest.raises(OutputError, match="File exists"):
        write_text("text", tmp_path / "y.npz")
    assert (tmp_path / "mine").read_text() == "mine"


def test_threads_may_write_the_same_file_at_once(tmp_path: Path) -> None:
    texts = [str(number) * 100_000 for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda text: write_text(text, tmp_path / "y.json"), texts * 8))
    assert (tmp_path / "y.json").read_text() in texts
    assert names(tmp_path) == ["y.json"]


def a_day_later(path: Path) -> None:
    for each in (*path.rglob("*"), path):
        os.utime(each, (0, time.time() - STALE_S - 1))


@pytest.mark.parametrize("how", ["whole_file", "temporary_folder"])
def test_files_of_a_killed_process_are_removed_after_a_day(how: str, tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    left = killed(how, target)
    assert names(tmp_path) == [left.name]
    with getattr(writing, how)(target):
        assert left.exists()  # its writer may live
    a_day_later(left)
    with getattr(writing, how)(target):
        assert not left.exists()
    assert names(tmp_path) == (["out.json"] if how == "whole_file" else [])


def test_a_folder_in_which_a_file_is_being_written_is_not_old(tmp_path: Path) -> None:
    left = killed("temporary_folder", tmp_path / "out")
    a_day_later(left)
    (left / "weights.bin").write_bytes(b"more")
    os.utime(left, (0, 0))
    remove_leftovers(tmp_path / "out")
    assert (left / "weights.bin").read_bytes() == b"more"


def test_what_a_killed_step_left_of_its_scratch_files_is_removed_by_the_next(
    tmp_path: Path,
) -> None:
    left = killed("temporary_folder", tmp_path / "moexport-tune")
    a_day_later(left)
    with scratch_folder("tune", tmp_path) as folder:
        assert not left.exists()
        assert folder.stat().st_mode & 0o777 == 0o700
        with scratch_folder("tune", tmp_path) as other:  # another process, at the same time
            assert folder.exists() and other != folder
    assert names(tmp_path) == []


def test_a_scratch_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="nowhere: cannot be written"):
        scratch_folder("tune", tmp_path / "nowhere").__enter__()


@pytest.mark.parametrize("how", ["whole_file", "temporary_folder"])
def test_what_is_being_written_or_somebody_elses_is_left_alone(how: str, tmp_path: Path) -> None:
    target = tmp_path / "out"
    others = [".out.1234.partial", ".other.0123456789abcdef.partial", "out.partial"]
    for name in others:
        (tmp_path / name).write_text("mine")
    with getattr(writing, how)(target) as partial:
        remove_leftovers(target)
        assert partial.exists()
        assert names(tmp_path) == sorted([*others, partial.name])
    for name in others:
        assert (tmp_path / name).read_text() == "mine"


def folder(place: Path, content: str) -> Path:
    place.mkdir()
    (place / "file").write_text(content)
    return place


def test_a_folder_takes_the_place_of_another(tmp_path: Path) -> None:
    target = folder(tmp_path / "out", "old")
    with temporary_folder(target) as partial:
        (partial / "file").write_text("new")
        replace_folder(partial, target)
    assert (target / "file").read_text() == "new"
    assert names(tmp_path) == ["out"]


def test_of_folders_that_replace_each_other_at_once_each_takes_its_turn(tmp_path: Path) -> None:
    target = folder(tmp_path / "out", "first")

    def replace(number: int) -> None:
        with temporary_folder(target) as partial:
            for name in ("file", "other"):
                (partial / name).write_text(str(number))
            replace_folder(partial, target)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(replace, range(200)))
    assert (target / "file").read_text() == (target / "other").read_text() != "first"
    assert names(tmp_path) == ["out"]


def test_a_folder_that_came_meanwhile_stays_and_nothing_is_left_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the file system has no locks: another took the place between the two renames."""
    target = folder(tmp_path / "out", "first")
    real = writing.move

    def move(old: Path, new: Path) -> None:
        if new == target and not target.exists():
            folder(target, "theirs")
        real(old, new)

    monkeypatch.setattr(writing, "move", move)
    with temporary_folder(target) as partial:
        folder(partial / "inner", "mine")
        with pytest.raises(OSError, match="not empty"):
            replace_folder(partial, target)
    assert (target / "file").read_text() == "theirs"
    assert names(tmp_path) == ["out"]


def test_what_another_is_moving_aside_is_not_moved_back(tmp_path: Path) -> None:
    aside = folder(tmp_path / f".out.{'a' * 16}.old", "old")
    with locked(tmp_path):
        remove_leftovers(tmp_path / "out")
        assert names(tmp_path) == [aside.name]
    remove_leftovers(tmp_path / "out")
    assert names(tmp_path) == ["out"]


def test_a_folder_that_was_moved_aside_by_a_killed_process_comes_back(tmp_path: Path) -> None:
    folder(tmp_path / f".out.{'a' * 16}.old", "old")
    remove_leftovers(tmp_path / "out")
    assert (tmp_path / "out" / "file").read_text() == "old"
    older = folder(tmp_path / f".out.{'b' * 16}.old", "older")
    a_day_later(older)
    remove_leftovers(tmp_path / "out")
    assert (tmp_path / "out" / "file").read_text() == "old"
    assert names(tmp_path) == ["out"]


def test_files_are_flushed_before_they_are_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, list[str]]] = []
    real = os.fsync

    def sync(handle: int) -> None:
        path = Path(f"/proc/self/fd/{handle}").readlink()
        synced.append((path.name, names(tmp_path)))
        real(handle)

    if sys.platform != "linux":
        pytest.skip("reads descriptors as Linux shows them")
    monkeypatch.setattr(os, "fsync", sync)
    write_text("text", tmp_path / "a.json")
    (file, before), (above, after) = synced
    assert file.startswith(".a.")
    assert "a.json" not in before
    assert (above, after) == (tmp_path.name, ["a.json"])
    synced.clear()
    with temporary_folder(tmp_path / "out") as partial:
        folder(partial / "inner", "new")
        replace_folder(partial, tmp_path / "out")
    assert {name for name, seen in synced if "out" not in seen} == {"file", "inner", partial.name}
    assert synced[-1][0] == tmp_path.name


def test_who_holds_a_folder_lets_others_wait(tmp_path: Path) -> None:
    turns: list[int] = []

    def work(number: int) -> None:
        with locked(tmp_path):
            turns.extend([number] * 3)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert [turns[i : i + 3] for i in range(0, 24, 3)] == [[n] * 3 for n in turns[::3]]
    assert sys.platform == "win32" or names(tmp_path) == []


def test_a_second_command_with_the_same_folder_is_refused_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    code = HOLD.format(how="exclusive_folder")
    with subprocess.Popen([sys.executable, "-c", code, folder], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        with (
            pytest.raises(OutputError, match="results: another moexport process"),
            exclusive_folder(folder),
        ):
            pass
        assert process.poll() is None  # it was not waited for
        process.kill()
    with exclusive_folder(folder):  # the lock went with the process
        assert folder.is_dir()
    assert names(folder) == []


def test_a_folder_to_which_nothing_was_written_is_removed(tmp_path: Path) -> None:
    with exclusive_folder(tmp_path / "a" / "b"):
        pass
    assert names(tmp_path) == []  # what was made above it, too
    with exclusive_folder(tmp_path / "c"):
        (tmp_path / "c" / "results.json").write_text("{}")
    assert names(tmp_path / "c") == ["results.json"]


def test_what_is_being_written_is_known_as_long_as_it_is_there(tmp_path: Path) -> None:
    before = left_behind()  # what another test's downloads are in, until the process ends
    with whole_file(tmp_path / "y.npz") as partial:
        assert left_behind() == sorted([*before, partial])
    assert left_behind() == before


def test_a_full_disk_is_told_with_the_file_that_did_not_fit(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "/somewhere/else.tmp")
    elsewhere = pytest.raises(
        OutputError, match=r"^/somewhere/else\.tmp: cannot be written: No spa"
    )
    with elsewhere, whole_file(tmp_path / "y.npz"):
        raise full
    here = pytest.raises(OutputError, match=r"y\.npz: cannot be written: No space")
    with here, whole_file(tmp_path / "y.npz") as partial:
        raise OSError(errno.ENOSPC, "No space left on device", str(partial))
    assert names(tmp_path) == []
