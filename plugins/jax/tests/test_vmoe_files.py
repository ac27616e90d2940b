"""Checkpoints of google-research/vmoe are read as its code wrote them, or refused."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from moexport.errors import CheckpointError, MissingExtraError
from moexport.exporter.checkpoints import floats
from moexport.exporter.checkpoints.load import load
from moexport.exporter.checkpoints.state_dict import read_checkpoint
from moexport.plugins.jax import vmoe_files
from moexport.plugins.jax.tests.vmoe_writer import Cut, Slices, rows, whole, write
from moexport.tests.recorded import DATA
from msgspec.msgpack import Ext, encode

CASES = sorted(path.parent.name for path in DATA.glob("jax_*/*.index"))
SOFT = DATA / "jax_soft_gap_p1"
STATE = DATA / "jax_soft_map_sincos_trainstate"
ORBAX = DATA / "jax_orbax_soft_gap_p1" / "ckpt_ocdbt"

RANDOM = np.random.default_rng(0)
ARRAYS: dict[str, np.ndarray] = {
    "Encoder/encoderblock_10/scale": RANDOM.standard_normal(4).astype(np.float32),
    "Encoder/encoderblock_2/scale": RANDOM.standard_normal(4).astype(np.float32),
    "head/kernel": RANDOM.standard_normal((4, 3)).astype(np.float32),
    "scale": np.array(RANDOM.standard_normal(), np.float32),
}


def read(source: Path) -> dict[str, np.ndarray]:
    return {key: each.numpy() for key, each in read_checkpoint(source).tensors.items()}


def check_same(found: dict[str, np.ndarray], arrays: dict[str, np.ndarray]) -> None:
    assert found.keys() == {path.replace("/", ".") for path in arrays}
    for path, array in arrays.items():
        np.testing.assert_array_equal(found[path.replace("/", ".")], array.astype(np.float32))


def index_of(case: str) -> Path:
    return next((DATA / case).glob("*.index"))


@pytest.mark.parametrize("case", CASES)
def test_names_and_shapes_are_those_that_the_published_code_has(case: str) -> None:
    listed = json.loads((DATA / case / "meta.json").read_text())["params"]
    found = read(index_of(case))
    assert {key.replace(".", "/"): list(each.shape) for key, each in found.items()} == {
        key: shape for key, (shape, _) in listed.items()
    }
    assert all(np.isfinite(each).all() for each in found.values())


def test_a_prefix_an_index_and_a_folder_are_the_same_checkpoint(tmp_path: Path) -> None:
    index = write(tmp_path / "soft", ARRAYS)
    for source in (index, tmp_path / "soft", tmp_path):
        check_same(read(source), ARRAYS)


@pytest.mark.parametrize("shards", [1, 2, 5])
@pytest.mark.parametrize("cut", [whole, rows])
def test_chunks_go_where_their_slices_say(tmp_path: Path, shards: int, cut: Cut) -> None:
    check_same(read(write(tmp_path / "a", ARRAYS, shards=shards, cut=cut)), ARRAYS)


def test_arrays_are_counted_in_the_order_of_strings(tmp_path: Path) -> None:
    def natural(paths: list[str]) -> list[str]:
        return sorted(
            paths, key=lambda p: [int(w) if w.isdigit() else w for w in re.split(r"(\d+)", p)]
        )

    assert natural(list(ARRAYS)) != sorted(ARRAYS)
    check_same(read(write(tmp_path / "right", ARRAYS)), ARRAYS)
    other = read(write(tmp_path / "natural", ARRAYS, number=natural, shards=1))
    assert not np.array_equal(
        other["Encoder.encoderblock_2.scale"], ARRAYS["Encoder/encoderblock_2/scale"]
    )


def test_other_floats_become_float32(tmp_path: Path) -> None:
    kinds = (ml_dtypes.bfloat16, np.float16, np.float64)
    arrays = {f"a{i}": ARRAYS["head/kernel"].astype(kind) for i, kind in enumerate(kinds)}
    check_same(read(write(tmp_path / "a", arrays)), arrays)


def test_large_arrays_are_in_a_file_without_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(floats, "IN_MEMORY_BYTES", 0)
    found = read_checkpoint(write(tmp_path / "a", ARRAYS, cut=rows))
    assert len(found.mapped) == len(found.files) + 1
    check_same({key: each.numpy() for key, each in found.tensors.items()}, ARRAYS)


STATE_ARRAYS: dict[str, np.ndarray] = {
    **{f"params/{path}": array for path, array in ARRAYS.items()},
    **{f"opt_state/0/mu/{path}": 0 * array for path, array in ARRAYS.items()},
    "step": np.array(7, np.int32),
    "rngs/dropout": np.zeros(2, np.uint32),
}


def test_the_parameters_of_a_train_state_are_read(tmp_path: Path) -> None:
    check_same(read(write(tmp_path / "ckpt_7", STATE_ARRAYS)), ARRAYS)


def test_a_train_state_without_parameters_is_refused(tmp_path: Path) -> None:
    rest = {path: each for path, each in STATE_ARRAYS.items() if not path.startswith("params/")}
    with pytest.raises(CheckpointError, match="train state without params: it has opt_state, "):
        read(write(tmp_path / "ckpt_7", rest))


def by_field(paths: list[str]) -> list[str]:
    fields = ("step", "params", "opt_state", "rngs")
    return sorted(paths, key=lambda path: (fields.index(path.split("/")[0]), path))


def test_files_without_a_version_count_a_train_state_by_its_fields(tmp_path: Path) -> None:
    check_same(read(write(tmp_path / "a", ARRAYS, version=None)), ARRAYS)
    check_same(read(write(tmp_path / "b", STATE_ARRAYS, version=None, number=by_field)), ARRAYS)
    with pytest.raises(CheckpointError, match=r"params|arrays|has"):
        read(write(tmp_path / "c", STATE_ARRAYS, version=None))
    more = {**STATE_ARRAYS, "extra/a": np.zeros(2, np.float32)}
    with pytest.raises(CheckpointError, match="the order of the arrays"):
        read(write(tmp_path / "d", more, version=None))


def test_the_index_alone_describes_a_checkpoint(tmp_path: Path) -> None:
    index = shutil.copy(STATE / "ckpt_3.index", tmp_path)
    model = load(
        index,
        config={"classifier": "map", "position_emb": "sincos2d", "image_size": 32},
        values=False,
    )
    assert "train state" in model.notes[0]
    for fact in ("step 3", "101 arrays", "float32", "2 shards"):
        assert fact in model.notes[0]
    assert list(model.layers) == ["blocks.1.mlp", "blocks.2.mlp", "blocks.3.mlp"]
    with pytest.raises(CheckpointError, match=r"2 of 2 shards are missing: ckpt_3.data-00000-of"):
        read_checkpoint(Path(index))


@pytest.mark.path
@pytest.mark.parametrize("prefix", ["", "params/", "opt/target/"])
def test_a_flat_dict_of_the_same_arrays_is_the_same_model(tmp_path: Path, prefix: str) -> None:
    found = read(index_of(SOFT.name))
    arrays = {prefix + key.replace(".", "/"): each for key, each in found.items()}
    np.savez(tmp_path / "flat.npz", allow_pickle=False, **arrays)
    config = json.loads((SOFT / "meta.json").read_text())["config"]
    flat = load(tmp_path / "flat.npz", config=config)
    whole = load(index_of(SOFT.name), config=config)
    assert flat.family == whole.family == "soft-moe-vmoe-vit"
    for key, tensor in whole.module.state_dict().items():
        np.testing.assert_array_equal(flat.module.state_dict()[key].numpy(), tensor.numpy())


LARGE = """
import re, sys
from pathlib import Path
from moexport.exporter.checkpoints.state_dict import read_checkpoint

def allocated():
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

read_checkpoint(Path(sys.argv[1]))  # what libraries allocate once
before = allocated()
found = read_checkpoint(Path(sys.argv[2]))
print(allocated() - before, len(found.mapped) - len(found.files))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc/self/status")
def test_reading_two_hundred_megabytes_in_shards_allocates_a_few(tmp_path: Path) -> None:
    large = {"a/kernel": np.ones((50, 1000, 1000), np.float32), "b": np.ones(7, np.float32)}
    places = write(tmp_path / "small", ARRAYS), write(tmp_path / "large", large, shards=4, cut=rows)
    command = [sys.executable, "-c", LARGE, *map(str, places)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    grown, temporary = map(int, done.stdout.split())
    assert grown < 20 << 20
    assert temporary == 1


# --- what is refused ---------------------------------------------------------------------------


def shard(index: Path, number: int = 0) -> Path:
    return sorted(index.parent.glob(f"{index.stem}.data-*"))[number]


def overlapping(path: str, shape: tuple[int, ...]) -> list[Slices]:
    return [((0, 3), (0, 3)), ((2, 4), (0, 3))] if path == "head/kernel" else whole(path, shape)


def gapped(path: str, shape: tuple[int, ...]) -> list[Slices]:
    return [((0, 1), (0, 3)), ((2, 4), (0, 3))] if path == "head/kernel" else whole(path, shape)


def outside(path: str, shape: tuple[int, ...]) -> list[Slices]:
    return [((0, 5), (0, 3))] if path == "head/kernel" else whole(path, shape)


def half(path: str, shape: tuple[int, ...]) -> list[Slices]:
    return [((0, 2), (0, 3)), ((2, 4), (0, 3))] if path == "head/kernel" else whole(path, shape)


def test_chunks_that_overlap_reach_outside_or_leave_gaps_are_refused(tmp_path: Path) -> None:
    for cut, words in ((overlapping, "overlap at"), (gapped, "leave gaps"), (outside, "beyond")):
        with pytest.raises(CheckpointError, match=f"head/kernel.*{words}"):
            read(write(tmp_path / "a", ARRAYS, told=cut))
    with pytest.raises(CheckpointError, match=r"head/kernel at .* its index has it at"):
        read(write(tmp_path / "a", ARRAYS, told=half, shards=1))


def test_a_missing_or_cut_shard_is_named(tmp_path: Path) -> None:
    index = write(tmp_path / "a", ARRAYS)
    kept = shard(index, 1).read_bytes()
    shard(index, 1).unlink()
    with pytest.raises(CheckpointError, match=r"1 of 2 shards are missing: a.data-00001-of-00002"):
        read(index)
    for length in range(0, len(kept), 7):
        (tmp_path / "a.data-00001-of-00002").write_bytes(kept[:length])
        with pytest.raises(CheckpointError, match=r"a\.data-00001-of-00002"):
            read(index)


def test_another_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="version is '20991231', but only 20220622 is"):
        read(write(tmp_path / "a", ARRAYS, version="20991231"))


def test_shards_of_another_checkpoint_are_refused(tmp_path: Path) -> None:
    index = write(tmp_path / "a", ARRAYS, shards=1)
    write(tmp_path / "b", {**ARRAYS, "more": np.zeros(3, np.float32)}, shards=1)
    shutil.move(tmp_path / "b.data-00000-of-00001", shard(index))
    with pytest.raises(CheckpointError, match="has 5 arrays, but its index places 4 in it"):
        read(index)
    doubles = {path: array.astype(np.float64) for path, array in ARRAYS.items()}
    write(tmp_path / "b", doubles, shards=1)
    shutil.move(tmp_path / "b.data-00000-of-00001", shard(index))
    with pytest.raises(CheckpointError, match="its dtype in the index is float32"):
        read(index)


def oversized(size: int) -> bytes:
    """An index that declares an array of this size."""
    shaped = encode([[size], "float32", False, {}])
    info = encode([shaped, [encode([encode([0, size, None])])], [0]])
    return encode({"shard_count": 1, "index": {"a": Ext(8, info)}, "version": "20220622"})


BOMBS: dict[str, Callable[[], bytes]] = {
    "a false size": lambda: oversized(2**39),
    "deep": lambda: (
        b"\x83\xabshard_count\x01\xa7version\xa820220622\xa5index" + b"\x81\xa1a" * 5000 + b"\xc0"
    ),
    "deeper": lambda: b"\x83\xabshard_count\x01\xa7version\xa820220622\xa5index" + b"\x91" * 10**6,
    "a long list": lambda: (
        b"\x83\xabshard_count\x01\xa7version\xa820220622\xa5index\xdd\xff\xff\xff\xff"
    ),
    "a long map": lambda: b"\xdf\xff\xff\xff\xff",
    "a long text": lambda: b"\x81\xdb\xff\xff\xff\xff",
    "many shards": lambda: encode({"shard_count": 10**9, "index": {}, "version": "20220622"}),
    "a long list of chunks": lambda: encode(
        {"shard_count": 1, "index": {"a": Ext(8, b"\x93\xc4\x00\xdd\xff\xff\xff\xff")}}
    ),
    "nothing": lambda: b"",
    "text": lambda: b'{"weight_map": {}}',
}


@pytest.mark.parametrize("what", BOMBS)
def test_a_malicious_index_is_refused_at_once(tmp_path: Path, what: str) -> None:
    index = tmp_path / "a.index"
    index.write_bytes(BOMBS[what]())
    (tmp_path / "a.data-00000-of-00001").write_bytes(b"\x80")
    for values in (True, False):
        with pytest.raises(CheckpointError):
            read_checkpoint(index, values=values)


SHARD_BOMBS = {
    "a long list": b"\xdd\xff\xff\xff\xff",
    "many parts": b"\x91\x92\xdd\xff\xff\xff\xff",
    "a piece declared as longer": encode(
        [[[Ext(1, encode([[2**40], "float32", b"\0" * 48]))], Ext(6, encode([]))]]
    ),
    "a piece of another type": encode(
        [[[Ext(1, encode([[12], "int8", b"\0" * 12]))], Ext(6, encode([]))]]
    ),
    "another type": encode([[[Ext(3, b"\0" * 48)], Ext(6, encode([]))]]),
    "deep": b"\x91" * 100_000,
}


@pytest.mark.parametrize("what", SHARD_BOMBS)
def test_a_malicious_shard_is_refused_at_once(tmp_path: Path, what: str) -> None:
    index = write(tmp_path / "a", {"kernel": ARRAYS["head/kernel"]}, shards=1)
    content = b"\x82" + encode("__msgpack_array_chunk_a87ca2__") + b"\xc3" + b"\xa10"
    shard(index).write_bytes(content + SHARD_BOMBS[what] + b"\0" * 48)
    with pytest.raises(CheckpointError, match=r"a.data-00000-of-00001"):
        read(index)


def test_sizes_without_shards_are_not_believed(tmp_path: Path) -> None:
    (tmp_path / "a.index").write_bytes(oversized(vmoe_files.WITHOUT_SHARDS + 1))
    with pytest.raises(CheckpointError, match="too large to be accepted without its shards"):
        read_checkpoint(tmp_path / "a.index", values=False)


# --- Orbax -------------------------------------------------------------------------------------


def test_a_state_of_orbax_has_the_same_arrays_as_the_other_format(tmp_path: Path) -> None:
    tensorstore = pytest.importorskip("tensorstore")
    wanted = read(index_of(SOFT.name))
    for source in (ORBAX, ORBAX / "3", ORBAX / "3" / "state"):
        check_same(read(source), {key.replace(".", "/"): each for key, each in wanted.items()})
    # The older layout: a folder for each array.
    for key, array in {**wanted, "step": np.array(3, np.int32)}.items():
        name = key if key == "step" else f"params.{key}"
        spec = {"driver": "zarr", "kvstore": f"file://{tmp_path}/5/state/{name}/", "create": True}
        spec["metadata"] = {
            "compressor": {"id": "zstd"},
            "shape": list(array.shape),
            "chunks": [max(1, -(-n // 2)) for n in array.shape],
            "dtype": array.dtype.str,
        }
        tensorstore.open(spec).result().write(array).result()
    check_same(read(tmp_path), {key.replace(".", "/"): each for key, each in wanted.items()})
    assert "step 5" in read_checkpoint(tmp_path, values=False).notes[0]


def test_a_damaged_state_of_orbax_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("tensorstore")
    place = shutil.copytree(ORBAX / "3", tmp_path / "3") / "state"
    largest = max((place / "ocdbt.process_0" / "d").iterdir(), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    with pytest.raises(CheckpointError, match="cannot be read"):
        read(tmp_path)
    (place / "manifest.ocdbt").write_bytes(b"\0" * 20)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read(tmp_path)
    shutil.copytree(ORBAX / "3", tmp_path / "4")
    with pytest.raises(CheckpointError, match="2 steps could be the weights"):
        read(tmp_path)


def test_orbax_without_its_extra_hints_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with pytest.raises(MissingExtraError) as told:
        read(ORBAX)
    assert "orbax" in str(told.value.hint)
