"""Mapped pages are given back, and nothing that was changed in memory is ever lost."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from moexport.common import files as pages
from moexport.common.files import Reading, release
from moexport.exporter.bundle.weights import WEIGHTS_FILE
from moexport.exporter.checkpoints.load import load
from moexport.exporter.export import plan_job
from moexport.exporter.job import export_job
from moexport.exporter.options import ExportOptions
from moexport.exporter.reference import compared_inputs, torch_reference
from moexport.exporter.write import write_graphs
from moexport.tests.exporter.families.states import vit_state

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="page advice is Linux's; elsewhere it is a no-op"
)

SIZE = 64 << 20


def mapped_resident_bytes(path: Path) -> int:
    text = Path("/proc/self/smaps").read_text(encoding="utf-8")
    blocks = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", text)
    return sum(
        1024 * int(match.group(1))
        for block in blocks
        if str(path) in block and (match := re.search(r"^Rss:\s+(\d+)", block, re.MULTILINE))
    )


def test_resident_pages_of_a_mapped_file_are_dropped_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    np.full(SIZE // 4, 3.0, dtype=np.float32).tofile(path)
    mapped = np.memmap(path, dtype=np.float32, mode="r")
    assert mapped.sum(dtype=np.float64) == 3.0 * (SIZE // 4)
    assert mapped_resident_bytes(path) > SIZE // 2
    release([path])
    assert mapped_resident_bytes(path) < SIZE // 8
    assert mapped.sum(dtype=np.float64) == 3.0 * (SIZE // 4)


def test_a_mapping_that_was_written_to_keeps_its_changes(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    np.zeros(SIZE // 4, dtype=np.float32).tofile(path)
    mapped = np.memmap(path, dtype=np.float32, mode="c")  # private: changes live in memory alone
    mapped[1000] = 7.0
    release([path])
    assert mapped[1000] == 7.0


def test_files_that_are_not_mapped_are_no_error(tmp_path: Path) -> None:
    release([tmp_path / "absent.bin"])
    release([])
    assert mapped_resident_bytes(tmp_path / "absent.bin") == 0


def test_a_pass_over_a_mapped_file_holds_a_step_of_it(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    np.full(SIZE // 4, 3.0, dtype=np.float32).tofile(path)
    mapped = np.memmap(path, dtype=np.float32, mode="r")
    step, total, most = SIZE // 8, 0.0, 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "STEP_BYTES", step)
        reading = Reading([path])
        for part in np.split(mapped, 32):
            total += float(part.sum(dtype=np.float64))
            most = max(most, mapped_resident_bytes(path))
            reading.advance(part.nbytes)
        reading.end()
    assert total == 3.0 * (SIZE // 4)
    assert 0 < most < 2 * step
    assert mapped_resident_bytes(path) < step


@contextmanager
def most_mapped_bytes() -> Iterator[list[int]]:
    """Within the context, appends how many bytes of files are mapped more than before it."""

    def mapped() -> int:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        found = re.search(r"RssFile:\s+(\d+)", status)
        assert found is not None
        return 1024 * int(found[1])

    def watch() -> None:
        while not done.wait(0.001):
            seen.append(mapped() - before)

    before, seen, done = mapped(), [0], threading.Event()
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield seen
    finally:
        done.set()
        watcher.join()


@pytest.mark.slow
def test_a_checkpoint_is_loaded_written_and_run_a_part_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "STEP_BYTES", 8 << 20)
    layer_bytes = 24 << 20
    path = tmp_path / "vit.pt"
    moe = tuple(range(6))
    torch.save(
        vit_state(d=64, heads=4, depth=6, moe=moe, moe_h=layer_bytes // (4 * 2 * 4 * 64)), path
    )
    assert path.stat().st_size > 6 * layer_bytes
    with most_mapped_bytes() as loading:
        model = load(path, config={"num_heads": 4, "rest": "default"})
    job = export_job(model, ExportOptions(k=2))
    planned = plan_job(job)
    x = next(compared_inputs(job))
    (tmp_path / "bundle").mkdir()
    with most_mapped_bytes() as writing:
        write_graphs(planned, tmp_path / "bundle")
    with most_mapped_bytes() as running:
        torch_reference(job, x)
    assert (tmp_path / "bundle" / WEIGHTS_FILE).stat().st_size > 6 * layer_bytes
    # A tensor, or a layer where PyTorch runs it, is used whole, and the backbone beside it.
    assert max(loading) < 2 * layer_bytes
    assert max(writing) < 2 * layer_bytes
    assert layer_bytes // 2 < max(running) < 2 * layer_bytes
