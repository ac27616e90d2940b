"""Labelled data that are streamed: images by class, code, folders of arrays."""

from __future__ import annotations

import io
import os
import resource
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from moexport.bench.data import open_labelled, read_image
from moexport.bench.runners.base import first_of
from moexport.errors import FeedError, UsageError
from moexport.exporter.model import TensorSpec
from PIL import Image

SPEC = TensorSpec("input", "float32", ("batch", 3, 8, 8))


def images(folder: Path) -> Path:
    """Two classes, three images: grey 0, 255 and 128, one of them wide."""
    for name, grey, size in (("a/1", 0, (20, 20)), ("b/1", 255, (40, 20)), ("a/2", 128, (20, 20))):
        path = folder / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, (grey, grey, grey)).save(path)
    return folder


def test_images_are_streamed_by_class_in_the_order_of_the_folders(tmp_path: Path) -> None:
    data = open_labelled(str(images(tmp_path)), SPEC, "symmetric")
    ((x, labels),) = data.stream(10)
    assert data.samples == 3
    assert labels is not None
    assert labels.tolist() == [0, 1, 0]
    assert first_of(x).shape == (3, 3, 8, 8)
    assert first_of(x).mean(axis=(1, 2, 3)) == pytest.approx([-1, 1, 2 * 128 / 255 - 1], abs=1e-6)
    assert [len(part) for part, _ in data.stream(2)] == [2, 1]
    assert len(data.head(2)) == 2


def test_an_image_of_the_models_size_is_taken_as_it_is(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    (tmp_path / "a").mkdir()
    Image.fromarray(pixels).save(tmp_path / "a" / "0.png")
    ((x, _),) = open_labelled(str(tmp_path), SPEC, "unit").stream(1)
    np.testing.assert_allclose(first_of(x)[0].transpose(1, 2, 0), pixels / 255, atol=1e-7)


def test_other_images_are_other_data(tmp_path: Path) -> None:
    first = open_labelled(str(images(tmp_path)), SPEC, "unit").fingerprint
    assert open_labelled(str(tmp_path), SPEC, "unit").fingerprint == first
    assert open_labelled(str(tmp_path), SPEC, "imagenet").fingerprint != first
    Image.new("RGB", (9, 9)).save(tmp_path / "b" / "2.png")
    assert open_labelled(str(tmp_path), SPEC, "unit").fingerprint != first


def test_the_scale_of_pixels_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="weights do not show how images were scaled"):
        open_labelled(str(images(tmp_path)), SPEC)
    np.savez(tmp_path / "x.npz", input=np.zeros((2, *SPEC.shape[1:]), np.float32))
    with pytest.raises(UsageError, match=r"--pixels unit: .*x\.npz is not a folder of images"):
        open_labelled(str(tmp_path / "x.npz"), SPEC, "unit")
    with pytest.raises(UsageError, match="--pixels percent"):
        open_labelled(str(tmp_path), SPEC, "percent")
    with pytest.raises(UsageError, match="folder of images"):
        open_labelled(str(tmp_path), TensorSpec("input", "float32", ("batch", 9)), "unit")


def test_what_is_no_image_is_named(tmp_path: Path) -> None:
    (images(tmp_path) / "b" / "2.png").write_bytes(b"no image")
    with pytest.raises(FeedError, match=r"2\.png"):
        list(open_labelled(str(tmp_path), SPEC, "unit").stream(4))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(FeedError, match="neither a folder of images per class"):
        open_labelled(str(empty), SPEC, "unit")


@pytest.mark.parametrize("size", [(50_000, 50_000), (1, 60_000)], ids=["large", "thin"])
def test_an_image_of_too_many_pixels_is_refused_before_it_is_unpacked(
    size: tuple[int, int], tmp_path: Path
) -> None:
    """A thin one would be enlarged until its shorter side is the model's."""
    path = tmp_path / "a.png"
    data = io.BytesIO()
    Image.new("1", size if min(size) == 1 else (8, 8)).save(data, "png")
    head = struct.pack(">II", *size) + data.getvalue()[24:29]
    crc = struct.pack(">I", zlib.crc32(b"IHDR" + head))
    path.write_bytes(data.getvalue()[:16] + head + crc + data.getvalue()[33:])
    wide = TensorSpec("input", "float32", ("batch", 3, 224, 224))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(FeedError, match=r"a\.png: .*(the limit is 67108864 pixels|exceeds limit)"):
        read_image(path, wide, "unit")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # kB


def test_an_image_of_another_format_is_not_given_to_its_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pillow has Ghostscript draw what begins as PostScript, whatever it is called."""
    proof = tmp_path / "proof"
    program = tmp_path / "bin" / "gs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch '{proof}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    path = tmp_path / "a.png"
    path.write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n")
    with pytest.raises(FeedError, match=r"a\.png: not a readable image"):
        read_image(path, SPEC, "unit")
    assert not proof.exists()


def test_code_yields_inputs_and_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "given.py").write_text(
        "import numpy as np\n"
        "def pairs():\n"
        "    for i in range(3):\n"
        "        yield np.full((2, 4), i, np.float64), np.array([i, i])\n"
        "def dicts():\n"
        "    yield {'input': np.zeros((2, 4)), 'label': [1, 0]}\n"
        "def wrong():\n"
        "    yield np.zeros((2, 4)), np.zeros((3,))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = TensorSpec("input", "float32", ("batch", 4))
    data = open_labelled("given:pairs", spec)
    assert data.labelled
    found = list(data.stream(4))
    assert [len(x) for x, _ in found] == [4, 2]
    assert np.concatenate([y for _, y in found if y is not None]).tolist() == [0, 0, 1, 1, 2, 2]
    assert first_of(found[0][0]).dtype == np.float32
    ((_, labels),) = open_labelled("given:dicts", spec).stream(2)
    assert labels is not None
    assert labels.tolist() == [1, 0]
    with pytest.raises(FeedError, match="3 labels for the 2 samples"):
        open_labelled("given:wrong", spec)


def test_a_folder_of_arrays_has_no_labels(tmp_path: Path) -> None:
    np.save(tmp_path / "0.npy", np.zeros((3, 4)))
    data = open_labelled(str(tmp_path), TensorSpec("input", "float32", ("batch", 4)))
    assert not data.labelled
    assert [len(x) for x, _ in data.stream(2)] == [2, 1]
