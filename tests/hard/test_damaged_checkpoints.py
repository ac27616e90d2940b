"""No checkpoint, however damaged or ill meant, is answered with a traceback or without an end.

What a file declares bounds what it may cost: none of these takes more than 5 s or 1 GB.
"""

from __future__ import annotations

import importlib.util
import io
import json
import random
import shutil
import zipfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from moexport.errors import MoexportError
from moexport.exporter.checkpoints.load import load
from moexport.exporter.checkpoints.state_dict import read_checkpoint
from moexport.plugins.jax.tests import vmoe_writer
from moexport.tests.calibration.test_shards import header, pax
from moexport.tests.exporter.families.states import VIT, lucidrains_state, vit_state, vmoe_state
from moexport.tests.hard.fuzzing import Subject, attempt, fuzz
from moexport.tests.recorded import DATA
from safetensors.torch import save_file

pytestmark = pytest.mark.slow


def read(path: Path) -> None:
    """Loads a checkpoint with what its family asks for."""
    try:
        load(path, config=VIT)
    except MoexportError:
        load(path)


def seeds(folder: Path) -> list[Path]:
    """One checkpoint of each kind of file, each in a folder of its own."""
    state = vit_state(d=6, h=4, n=2, moe_h=4)
    wrapped, args = {f"module.{k}": t.half() for k, t in state.items()}, Namespace(**VIT)
    kinds: dict[str, Callable[[Path], Path]] = {
        "zip": lambda place: _saved(state, place / "w.pt"),
        "wrapped": lambda place: _saved({"model": wrapped, "args": args}, place / "w.ckpt"),
        "legacy": lambda p: _saved(state, p / "w.pth", _use_new_zipfile_serialization=False),
        "safetensors": lambda place: _safetensors(state, place / "w.safetensors"),
        "npz": lambda place: _npz(place / "w.npz"),
        "sharded": _sharded,
    }
    found = []
    for name, write in kinds.items():
        (folder / name).mkdir(parents=True)
        found.append(write(folder / name))
    return found


def _saved(content: Any, path: Path, **options: Any) -> Path:
    torch.save(content, path, **options)
    return path


def _safetensors(state: dict[str, torch.Tensor], path: Path) -> Path:
    save_file(state, path)
    return path


def _npz(path: Path) -> Path:
    arrays = {key: tensor.numpy() for key, tensor in vmoe_state().items()}
    np.savez_compressed(path, allow_pickle=False, **arrays)
    return path


def _sharded(folder: Path) -> Path:
    state = lucidrains_state()
    names = sorted(state)
    halves = {"a.safetensors": names[: len(names) // 2], "b.safetensors": names[len(names) // 2 :]}
    for name, keys in halves.items():
        save_file({key: state[key] for key in keys}, folder / name)
    index = {"weight_map": {key: name for name, keys in halves.items() for key in keys}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"num_slots": 2, "nested": [[1, 2], {"a": 3}]}')
    return folder / "model.safetensors.index.json"


SUBJECT = Subject(seeds, read)


def by_jax(folder: Path) -> list[Path]:
    """Checkpoints of google-research/vmoe, as its code wrote them and in many chunks, and Orbax."""
    found = []
    for case in ("jax_e3_last2_m2", "jax_soft_gap_p1"):
        place = shutil.copytree(DATA / case, folder / case, ignore=shutil.ignore_patterns("io.npz"))
        found.append(next(place.glob("*.index")))
    arrays = {key: each.numpy() for key, each in read_checkpoint(found[0]).tensors.items()}
    arrays = {f"params/{key.replace('.', '/')}": each for key, each in arrays.items()}
    (folder / "chunks").mkdir()
    state = {**arrays, "step": np.array(3, np.int32), "rngs/dropout": np.zeros(2, np.uint32)}
    found.append(
        vmoe_writer.write(folder / "chunks" / "ckpt_3", state, cut=vmoe_writer.rows, shards=3)
    )
    if importlib.util.find_spec("tensorstore") is None:
        return found
    import tensorstore

    whole = shutil.copytree(DATA / "jax_orbax_soft_gap_p1" / "ckpt_ocdbt" / "3", folder / "3")
    found.append(whole / "state" / "manifest.ocdbt")
    for key, array in arrays.items():
        metadata = {"shape": list(array.shape), "chunks": list(array.shape), "dtype": "<f4"}
        spec = {"driver": "zarr", "metadata": metadata, "create": True}
        name = key.replace("/", ".")
        spec["kvstore"] = f"file://{folder}/zarr/{name}/"
        tensorstore.open(spec).result().write(array).result()
    found.append(folder / "zarr" / "params.head.kernel" / ".zarray")
    return found


def read_by_jax(path: Path) -> None:
    """Loads and looks at what a training in JAX left."""
    source = {"manifest.ocdbt": path.parent, ".zarray": path.parent.parent}.get(path.name, path)
    file = path.parent / "meta.json"
    try:
        load(source, values=False)
    finally:
        config = json.loads(file.read_bytes())["config"] if file.is_file() else E3
        load(source, config=config)


E3 = json.loads((DATA / "jax_e3_last2_m2" / "meta.json").read_text())["config"]

JAX = Subject(
    by_jax,
    read_by_jax,
    (
        *(
            "eee_s8_last2.index",
            "eee_s8_last2.data-00000-of-00002",
            "soft_s8.index",
            ".zarray",
            "0",
        ),
        *("soft_s8.data-00000-of-00001", "ckpt_3.index", "ckpt_3.data-00001-of-00003"),
        *("manifest.ocdbt", "_METADATA", "0.0"),
    ),
)


def test_damaged_checkpoints_of_jax_are_read_or_refused(tmp_path: Path) -> None:
    findings = [each for each in fuzz(JAX, tmp_path, 1, range(200)) if each is not None]
    assert findings == []


def test_damaged_checkpoints_are_read_or_refused(tmp_path: Path) -> None:
    findings = [each for each in fuzz(SUBJECT, tmp_path, 1, range(600)) if each is not None]
    assert findings == []


# --- ill meant ---------------------------------------------------------------------------------


def self_containing(path: Path) -> None:
    content: dict[str, Any] = {}
    content["model"] = content
    torch.save(content, path)


def quantised(path: Path) -> None:
    weight = torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8)
    torch.save({**vit_state(), "head.weight": weight}, path)


def nested(path: Path) -> None:
    tensor = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    torch.save({**vit_state(), "head.weight": tensor}, path)


def with_npy(path: Path, shape: str, descr: str = "'<f4'") -> None:
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    member = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + b"\0" * 64
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("w.npy", member)


def bomb(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("w.npy", b"\0" * (300 << 20))


def pickle_bomb(path: Path) -> None:
    buffer = io.BytesIO()
    torch.save({"w": torch.ones(3)}, buffer)
    with zipfile.ZipFile(buffer) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            padded = b"\x80\x02" + b"]0" * (150 << 20) if name.endswith("data.pkl") else content
            archive.writestr(name, padded)


def with_pickle(path: Path, body: bytes) -> None:
    """A file of `torch.save` whose pickle is this one."""
    buffer = io.BytesIO()
    torch.save({"w": torch.ones(3)}, buffer)
    with zipfile.ZipFile(buffer) as archive, zipfile.ZipFile(path, "w") as new:
        for name in archive.namelist():
            new.writestr(name, body if name.endswith("data.pkl") else archive.read(name))


def doubled_bytes(path: Path) -> None:
    body = b"\x80\x02c_codecs\nencode\nX\4\0\0\0abcdX\6\0\0\0latin1\x86R"
    with_pickle(path, body + b"q\0c_codecs\nencode\nh\0X\3\0\0\0hex\x86R" * 28 + b".")


def large_bytearray(path: Path) -> None:
    with_pickle(path, b"\x80\x02c__builtin__\nbytearray\n\x8a\x05\x00\x5e\xd0\xb2\x00\x85R.")


def state(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    return {**vit_state(), **{key.replace("__", "."): tensor for key, tensor in changes.items()}}


ILL_MEANT: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a dict that holds itself": ("w.pt", self_containing),
    "a block index of 10^23": (
        "w.pt",
        lambda path: torch.save({**state(), f"blocks.{10**23}.norm1.weight": torch.ones(1)}, path),
    ),
    "a block index of 5000 digits": (
        "w.pt",
        lambda path: torch.save({**state(), f"blocks.{'9' * 5000}.mlp.phi": torch.ones(1)}, path),
    ),
    "numbers repeated 10^12 times": (
        "w.pt",
        lambda path: torch.save({"w": torch.zeros(1).expand(10**6, 10**6)}, path),
    ),
    "many shapes of one storage": (
        "w.pt",
        lambda path: torch.save(
            {str(i): torch.zeros(1).expand(10**4, 10**3) for i in range(99)}, path
        ),
    ),
    "empty experts by the billion": (
        "w.pt",
        lambda path: torch.save(state(blocks__1__mlp__phi=torch.ones(12, 10**9, 0)), path),
    ),
    "more experts than tensors": (
        "w.pt",
        lambda path: torch.save(state(blocks__1__mlp__phi=torch.ones(1, 10**5, 1)), path),
    ),
    "sparse": ("w.pt", lambda path: torch.save(state(head__weight=torch.eye(3).to_sparse()), path)),
    "sparse by the billion": (
        "w.pt",
        lambda path: torch.save(
            {"w": torch.sparse_coo_tensor(torch.zeros(2, 1), torch.ones(1), (10**9, 10**9))}, path
        ),
    ),
    "quantised": ("w.pt", quantised),
    "nested": ("w.pt", nested),
    "an array of another size": ("w.npz", lambda path: with_npy(path, "(10**12,)")),
    "an array by the billion": ("w.npz", lambda path: with_npy(path, "(1000000000,)")),
    "an array of a negative size": ("w.npz", lambda path: with_npy(path, "(-4,)")),
    "an array of nothing": ("w.npz", lambda path: with_npy(path, "(1000000000000,)", "'<U0'")),
    "a nested header": ("w.npz", lambda path: with_npy(path, "(" * 900 + ")" * 900)),
    "objects": ("w.npz", lambda path: with_npy(path, "(3,)", "'|O'")),
    "a zip bomb of arrays": ("w.npz", bomb),
    "a zip bomb of a pickle": ("w.pt", pickle_bomb),
    "bytes doubled 28 times": ("w.pt", doubled_bytes),
    "a bytearray of 3 GB": ("w.pt", large_bytearray),
    "a deep index": (
        "m.safetensors.index.json",
        lambda path: path.write_text('{"weight_map": ' + "[" * 100_000),
    ),
    "an index of a number that is none": (
        "m.safetensors.index.json",
        lambda path: path.write_text('{"weight_map": {"a": ' + "9" * 5000 + "}}"),
    ),
    "a tar whose records backtrack": (
        "w.pth",
        lambda path: path.write_bytes(pax(b"1" * 200_000) + bytes(10240)),
    ),
    "a tar of a negative size": (
        "w.pth",
        lambda path: path.write_bytes(header("w", b"x", b"\xff" * 10 + b"\xfe\0") + bytes(10240)),
    ),
    "no zip": ("w.npz", lambda path: path.write_bytes(b"PK\3\4" + random.Random(0).randbytes(999))),
}


@pytest.mark.parametrize("case", ILL_MEANT)
def test_a_malicious_checkpoint_is_refused_at_once(tmp_path: Path, case: str) -> None:
    name, write = ILL_MEANT[case]
    path = tmp_path / name
    write(path)
    assert path.stat().st_size < 1 << 20
    assert attempt(read, path) is None
    with pytest.raises(MoexportError):
        load(path)


def test_shards_that_are_small_alone_are_counted_together(tmp_path: Path) -> None:
    """40 archives of 100 kB, each of which unpacks to 100 MB of zeros: 3.9 GB."""
    first = tmp_path / "model-01.npz"
    np.savez_compressed(first, w=np.zeros((100, 1 << 18), np.float32))
    names = [f"model-{number:02}.npz" for number in range(1, 41)]
    for name in names[1:]:
        (tmp_path / name).hardlink_to(first)
    index = {"weight_map": {f"w{i}" if i else "w": name for i, name in enumerate(names)}}
    (tmp_path / "model.npz.index.json").write_text(json.dumps(index))
    with pytest.raises(MoexportError, match=r"40 shards: its .* bytes would unpack to"):
        load(tmp_path / "model.npz.index.json")


def test_a_deep_config_beside_the_weights_is_refused(tmp_path: Path) -> None:
    torch.save(vit_state(), tmp_path / "w.pt")
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(MoexportError, match=r"config\.json: not valid JSON"):
        load(tmp_path)
