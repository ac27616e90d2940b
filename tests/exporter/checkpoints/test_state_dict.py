"""Every kind of file, wrapper and prefix is read; every damaged or unsafe one is refused."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from moexport.errors import CheckpointError
from moexport.exporter.checkpoints.state_dict import read_checkpoint
from moexport.tests.command import run
from moexport.tests.exporter.families.states import VIT, vit_state
from safetensors.torch import save_file
from torch import Tensor, nn

MAPS = Path("/proc/self/maps")
WEIGHTS = {"head.weight": torch.arange(6.0).reshape(2, 3), "head.bias": torch.tensor([1.0, -2.0])}


class RunsCode:
    """What an attacker would put into a checkpoint: unpickling it creates a file."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.proof),)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)


def saved(path: Path, content: Any, **options: Any) -> Path:
    torch.save(content, path, **options)
    return path


def file_mapped_at(address: int) -> str | None:
    """The file whose pages lie at an address of this process."""
    for line in MAPS.read_text().splitlines():
        span, _, _, _, _, *name = line.split(maxsplit=5)
        low, high = (int(end, 16) for end in span.split("-"))
        if low <= address < high:
            return name[0] if name else None
    return None


def same(found: dict[str, Tensor], expected: dict[str, Tensor] = WEIGHTS) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[key], expected[key]) for key in expected
    )


def assert_refused(source: Path, *words: str) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(source)
    for word in words:
        assert word in caught.value.message
    assert "\n" not in caught.value.message
    return caught.value


# --- files -------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".ckpt", ".PT"])
def test_a_pickled_state_dict_is_read_and_memory_mapped(tmp_path: Path, suffix: str) -> None:
    path = saved(tmp_path / f"weights{suffix}", WEIGHTS)
    checkpoint = read_checkpoint(path)
    assert same(checkpoint.tensors)
    assert checkpoint.files == (path,)
    assert checkpoint.notes == ()
    if MAPS.exists():
        assert file_mapped_at(checkpoint.tensors["head.weight"].data_ptr()) == str(path)


def test_a_file_of_before_torch_1_6_is_read(tmp_path: Path) -> None:
    path = saved(tmp_path / "old.pt", WEIGHTS, _use_new_zipfile_serialization=False)
    assert same(read_checkpoint(path).tensors)


def test_safetensors_are_read(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    assert same(read_checkpoint(tmp_path / "model.safetensors").tensors)


def test_a_flat_npz_is_read_and_its_slashes_become_dots(tmp_path: Path) -> None:
    arrays = {key.replace(".", "/"): value.numpy() for key, value in WEIGHTS.items()}
    np.savez(tmp_path / "w.npz", allow_pickle=False, **arrays)
    assert same(read_checkpoint(tmp_path / "w.npz").tensors)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_shards_are_read_through_their_index_or_their_folder(tmp_path: Path, kind: str) -> None:
    write_shards(tmp_path, kind)
    index = next(tmp_path.glob("*.index.json"))
    for source in (index, tmp_path):
        checkpoint = read_checkpoint(source)
        assert same(checkpoint.tensors)
        assert len(checkpoint.files) == 2


def write_shards(folder: Path, kind: str) -> None:
    weight_map = {}
    for i, (key, tensor) in enumerate(WEIGHTS.items()):
        name = f"model-0000{i + 1}-of-00002.{kind}"
        if kind == "safetensors":
            save_file({key: tensor}, folder / name)
        else:
            torch.save({key: tensor}, folder / name)
        weight_map[key] = name
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / f"model.{kind}.index.json").write_text(json.dumps(index))


def test_a_folder_gives_its_weights_and_its_config(tmp_path: Path) -> None:
    saved(tmp_path / "checkpoint.pth", WEIGHTS)
    (tmp_path / "config.json").write_text("{}")
    checkpoint = read_checkpoint(tmp_path)
    assert same(checkpoint.tensors)
    assert checkpoint.config == tmp_path / "config.json"


def test_a_trainers_folder_gives_the_weights_under_their_standard_name(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    torch.save({"state": {}}, tmp_path / "optimizer.pt")
    (tmp_path / "training_args.bin").write_bytes(b"a pickle of code, which nobody opens")
    (tmp_path / "config.json").write_text("{}")
    for source in (tmp_path, tmp_path / "model.safetensors"):
        checkpoint = read_checkpoint(source)
        assert same(checkpoint.tensors)
        assert checkpoint.files == (tmp_path / "model.safetensors",)
        assert checkpoint.config == tmp_path / "config.json"


# --- wrappers, prefixes, types -----------------------------------------------------------------


@pytest.mark.parametrize("key", ["model", "state_dict", "model_ema", "state_dict_ema", "module"])
def test_wrappers_of_training_scripts_are_opened_and_noted(tmp_path: Path, key: str) -> None:
    content = {"epoch": 3, key: WEIGHTS, "optimizer": {"state": {}}}
    checkpoint = read_checkpoint(saved(tmp_path / "c.pt", content))
    assert same(checkpoint.tensors)
    assert repr(key) in checkpoint.notes[0]


def test_wrappers_within_wrappers_are_opened(tmp_path: Path) -> None:
    path = saved(tmp_path / "c.pt", {"state_dict": {"module": WEIGHTS}})
    assert same(read_checkpoint(path).tensors)


def test_the_trained_weights_come_before_their_moving_average(tmp_path: Path) -> None:
    average = {key: value + 1 for key, value in WEIGHTS.items()}
    content = {"model_ema": average, "model": WEIGHTS}
    checkpoint = read_checkpoint(saved(tmp_path / "c.pt", content))
    assert same(checkpoint.tensors)
    assert "model_ema" in " ".join(checkpoint.notes)


def test_a_namespace_of_options_beside_the_weights_is_no_obstacle(tmp_path: Path) -> None:
    content = {"model": WEIGHTS, "args": argparse.Namespace(lr=1e-3, heads=[1, 2])}
    assert same(read_checkpoint(saved(tmp_path / "deit.pth", content)).tensors)


@pytest.mark.parametrize(
    "prefix",
    ["module.", "_orig_mod.", "model.", "net.", "module._orig_mod.", "model.model.module."],
)
def test_prefixes_that_all_keys_share_are_removed_and_noted(tmp_path: Path, prefix: str) -> None:
    content = {prefix + key: value for key, value in WEIGHTS.items()}
    checkpoint = read_checkpoint(saved(tmp_path / "c.pt", content))
    assert same(checkpoint.tensors)
    assert "".join(checkpoint.prefixes) == prefix
    assert prefix in checkpoint.notes[0]


def test_a_lightning_modules_losses_and_metrics_are_left_out_with_a_note(tmp_path: Path) -> None:
    state = {f"model.{key}": value for key, value in WEIGHTS.items()}
    beside = {"criterion.weight": torch.ones(3), "train_acc.total": torch.tensor(1)}
    content = {"state_dict": {**state, **beside}, "hyper_parameters": {"num_heads": 4}}
    checkpoint = read_checkpoint(saved(tmp_path / "c.ckpt", content))
    assert same(checkpoint.tensors)
    assert "criterion.weight, train_acc.total" in " ".join(checkpoint.notes)
    assert checkpoint.arguments == {"hyper_parameters": {"num_heads": 4}}


def test_a_loss_in_a_state_dict_without_a_prefix_stays(tmp_path: Path) -> None:
    content = {**WEIGHTS, "loss.weight": torch.ones(1)}
    assert same(read_checkpoint(saved(tmp_path / "c.pt", content)).tensors, content)


def test_a_prefix_that_one_key_lacks_stays(tmp_path: Path) -> None:
    content = {"module.a": torch.ones(1), "b": torch.ones(1)}
    assert same(read_checkpoint(saved(tmp_path / "c.pt", content)).tensors, content)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_types_become_float32_with_a_note(tmp_path: Path, dtype: torch.dtype) -> None:
    content = {key: value.to(dtype) for key, value in WEIGHTS.items()}
    checkpoint = read_checkpoint(saved(tmp_path / "c.pt", content))
    assert same(checkpoint.tensors)
    assert str(dtype).removeprefix("torch.") in checkpoint.notes[0]


def test_meta_tensors_and_integers_are_kept_as_they_are(tmp_path: Path) -> None:
    content = {**WEIGHTS, "left": torch.empty(2, device="meta"), "steps": torch.tensor(3)}
    tensors = read_checkpoint(saved(tmp_path / "c.pt", content)).tensors
    assert tensors["left"].is_meta
    assert tensors["steps"].dtype == torch.int64


def test_what_is_no_tensor_is_skipped_with_a_note(tmp_path: Path) -> None:
    path = saved(tmp_path / "c.pt", {**WEIGHTS, "version": 2})
    assert read_checkpoint(path).notes == ("skipped entries that are not tensors: version",)


# --- bad files ---------------------------------------------------------------------------------


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert_refused(tmp_path / "none.pt", "none.pt", "no such file")


def test_an_unknown_suffix_lists_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "w.h5").write_bytes(b"x")
    assert_refused(tmp_path / "w.h5", ".safetensors", ".h5")


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert_refused(tmp_path, "no weights")


def test_a_folder_with_several_candidates_names_them(tmp_path: Path) -> None:
    saved(tmp_path / "a.pt", WEIGHTS)
    saved(tmp_path / "b.pt", WEIGHTS)
    assert "path" in str(assert_refused(tmp_path, "a.pt", "b.pt").hint)


def test_a_bundle_is_told_from_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    (tmp_path / "weights.bin").write_bytes(b"\0" * 64)
    error = assert_refused(tmp_path, "a bundle, which contains no checkpoint")
    assert "moexport inspect" in str(error.hint)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("part", [0.0, 0.1, 0.5, 0.98])
def test_a_file_cut_short_is_refused(tmp_path: Path, part: float, legacy: bool) -> None:
    content = {"w": torch.ones(1000)}
    path = saved(tmp_path / "c.pt", content, _use_new_zipfile_serialization=not legacy)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * part)])
    assert_refused(path, "c.pt")


def test_a_file_with_garbage_inside_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.pt").write_bytes(b"<html>404 not found</html>" * 9)
    assert_refused(tmp_path / "c.pt", "damaged")


@pytest.mark.parametrize("part", [0.0, 0.3, 0.9])
def test_safetensors_cut_short_are_refused(tmp_path: Path, part: float) -> None:
    save_file({"w": torch.ones(1000)}, tmp_path / "m.safetensors")
    whole = (tmp_path / "m.safetensors").read_bytes()
    (tmp_path / "m.safetensors").write_bytes(whole[: int(len(whole) * part)])
    assert_refused(tmp_path / "m.safetensors", "m.safetensors")


@pytest.mark.parametrize("part", [0.0, 0.3, 0.9])
def test_an_npz_cut_short_is_refused(tmp_path: Path, part: float) -> None:
    np.savez(tmp_path / "m.npz", w=np.ones(1000))
    whole = (tmp_path / "m.npz").read_bytes()
    (tmp_path / "m.npz").write_bytes(whole[: int(len(whole) * part)])
    assert_refused(tmp_path / "m.npz", "m.npz")


def test_an_array_that_is_no_npz_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "m.npz").open("wb") as file:
        np.save(file, np.ones(3))
    assert_refused(tmp_path / "m.npz", "not a readable .npz file")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float8_e5m2fnuz"])
def test_weights_of_8_bits_are_inspected_and_exported_as_others_are(
    name: str, tmp_path: Path
) -> None:
    state = {key: x.to(getattr(torch, name)) for key, x in vit_state().items()}
    save_file(state, tmp_path / "w.safetensors")
    (tmp_path / "vit.json").write_text(json.dumps(VIT))
    options = (tmp_path / "w.safetensors", "--config", tmp_path / "vit.json")
    inspected = run("inspect", *options)
    assert inspected.code == 0, inspected.err
    assert f"converted {name} weights to float32" in inspected.out + inspected.err
    exported = run("export", *options, "-o", tmp_path / "out", "--k", "1")
    assert exported.code == 0, exported.err


@pytest.mark.parametrize("name", ["float8_e8m0fnu", "float4_e2m1fn_x2"])
def test_weights_of_which_a_byte_is_no_number_are_refused_by_name(
    name: str, tmp_path: Path
) -> None:
    bits = torch.ones(2, 2, dtype=torch.uint8).view(getattr(torch, name))
    torch.save({**vit_state(), "head.weight": bits}, tmp_path / "w.pt")
    for command in (("inspect",), ("export", "-o", tmp_path / "out")):
        outcome = run(command[0], tmp_path / "w.pt", *command[1:])
        assert outcome.code == 1
        assert f"head.weight is of type {name}" in outcome.error


@pytest.mark.parametrize("header", [b"-" * 7000 + b"1", b"(" * 900 + b")" * 900])
def test_a_header_in_an_npz_that_nests_too_deep_is_no_lack_of_memory(
    header: bytes, tmp_path: Path
) -> None:
    member = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header) + 1) + header + b"\n"
    with zipfile.ZipFile(tmp_path / "m.npz", "w") as archive:
        archive.writestr("w.npy", member)
    assert_refused(tmp_path / "m.npz", "m.npz: not a readable .npz file (", "header")


def test_bfloat16_arrays_that_numpy_cannot_name_are_refused_by_key(tmp_path: Path) -> None:
    np.savez(tmp_path / "m.npz", a=np.zeros(2, np.float32), b=np.zeros(3, "V2"))
    assert_refused(tmp_path / "m.npz", "b has dtype", "|V2")


def test_texts_in_an_npz_are_skipped_with_a_note(tmp_path: Path) -> None:
    np.savez(tmp_path / "m.npz", w=np.ones(2, np.float32), run=np.array("first"))
    checkpoint = read_checkpoint(tmp_path / "m.npz")
    assert list(checkpoint.tensors) == ["w"]
    assert checkpoint.notes == ("skipped entries that are not tensors: run",)


def test_a_file_that_may_not_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    path = saved(tmp_path / "c.pt", WEIGHTS)
    monkeypatch.setattr(torch, "load", forbidden)
    assert_refused(path, "c.pt", "Permission denied")


def test_an_npz_with_pickled_objects_is_refused_unread(tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    np.savez(tmp_path / "m.npz", w=np.array([RunsCode(proof)], dtype=object))
    assert_refused(tmp_path / "m.npz", "contains Python objects", "never loaded")
    assert not proof.exists()


@pytest.mark.parametrize("kind", ["zip", "legacy", "plain"])
def test_a_pickle_that_would_run_code_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    proof, path = tmp_path / "proof", tmp_path / "c.pt"
    content = {"w": torch.ones(1), "x": RunsCode(proof)}
    if kind == "plain":
        path.write_bytes(pickle.dumps({"x": RunsCode(proof)}))
    else:
        saved(path, content, _use_new_zipfile_serialization=kind == "zip")
    error = assert_refused(path, f"{os.mkdir.__module__}.mkdir", "never executes")
    assert "safetensors" in str(error.hint)
    assert not proof.exists()


def test_a_whole_pickled_module_is_refused_as_such(tmp_path: Path) -> None:
    path = saved(tmp_path / "c.pt", Net())
    error = assert_refused(path, "whole pickled module", "Net")
    assert "state_dict" in str(error.hint)


def test_only_the_namespace_is_allowed_beside_tensors(tmp_path: Path) -> None:
    content = {"model": WEIGHTS, "args": argparse.Namespace(path=Path("data"))}
    assert_refused(saved(tmp_path / "c.pt", content), "Path")


@pytest.mark.parametrize("content", [{}, {"epoch": 3}, {"model": {}}])
def test_a_file_without_tensors_says_what_it_holds(tmp_path: Path, content: Any) -> None:
    assert_refused(saved(tmp_path / "c.pt", content), "no tensors")


@pytest.mark.parametrize("content", [[1, 2], torch.ones(3), 5])
def test_a_file_that_is_no_state_dict_is_refused(tmp_path: Path, content: Any) -> None:
    assert_refused(saved(tmp_path / "c.pt", content), "not a state dict")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_not_finite_is_named(tmp_path: Path, value: float) -> None:
    content = {**WEIGHTS, "bad.weight": torch.ones(50, 50)}
    content["bad.weight"][31, 7] = value
    assert_refused(saved(tmp_path / "c.pt", content), "bad.weight")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path, "safetensors")
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert_refused(tmp_path, "1 of 2 shards", "model-00002-of-00002.safetensors")


def test_a_shard_that_lacks_a_key_of_the_index_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path, "safetensors")
    save_file({"other": torch.ones(1)}, tmp_path / "model-00002-of-00002.safetensors")
    assert_refused(tmp_path, "model-00002-of-00002.safetensors", "head.bias")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": [1]}'])
def test_an_index_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert_refused(tmp_path, "index.json")


def test_an_index_may_not_point_outside_its_folder(tmp_path: Path) -> None:
    text = json.dumps({"weight_map": {"a": "../secret.safetensors"}})
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert_refused(tmp_path, "in the index's folder")
