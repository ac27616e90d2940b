"""An option that would do nothing in a call is refused: every option of every command is decided.

Refused is what asks for something that does not take place. What only gives leave (`--force`), or
asks for what is so anyway (`--no-engine`, a default), is not.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from moexport.cli import COMMANDS
from moexport.commands.program import declared_command
from moexport.tests.command import run
from moexport.tests.recorded import DATA, TABLE

LAYER = DATA / "soft_moe_lucidrains" / "weights.pt"
MUMOE = (DATA / "mumoe_cp" / "weights.pt", "--set", "act=entmax15", "--set", "rest=default")
VIT = (DATA / "soft_moe_vit" / "weights.pt", "--set", "num_heads=4", "--set", "rest=default")

EXPORT = ("export", LAYER, "-o", "out")
FACTORY = ("export", "json:loads", "-o", "out")
INT8 = ("--precision", "int8", "--data", "x.npz")
CALIBRATE = ("calibrate", LAYER, "--data", "x.npz", "-o", "t.json")
BENCH = ("bench", LAYER, "-o", "out")
TUNE = ("tune", LAYER, "--data", "x.npz", "-o", "out")
BUNDLES = ("bench", "bundle", "-o", "out")
SPECIALISE = ("specialise", LAYER, "--data", __file__)
TRITON = ("triton", "bundle", "-o", "models")
RUN = ("run", "bundle", "-i", "x.npz", "-o", "y.npz")

READING = {
    "family": ("--family", "soft-moe-vit"),
    "config": ("--config", "c.json"),
    "sets": ("--set", "a=1"),
    "weights": ("--weights", "w.pt"),
    "adapter": ("--adapter", "json:loads"),
}
SERVING: dict[str, tuple[object, ...]] = {
    "latency_bound": ("--latency-bound", "50ms"),
    "offered_rate": ("--offered-rate", "10"),
    "max_delay": ("--max-delay", "2ms"),
    "duration": ("--duration", "2s"),
    "library": ("--library", "8"),
    "triton": ("--triton", "127.0.0.1:8001/vit"),
    "price_per_hour": ("--price-per-hour", "1.2"),
}
BUILDING = {
    "profiles": ("--profile", "batch=1:2:4"),
    "compute_capabilities": ("--compute-capability", "8.9"),
    "timing_cache": ("--timing-cache", "t.cache"),
    "workspace": ("--workspace", "2GiB"),
    "optimization_level": ("--optimization-level", "1"),
    "version_compatible": ("--version-compatible",),
    "hardware_compatible": ("--hardware-compatible", "ampere-plus"),
    "strip_plan": ("--strip-plan",),
    "weight_streaming": ("--weight-streaming", "auto"),
    "bind_weights": ("--bind-weights",),
    "expose_routing": ("--expose-routing",),
    "tf32": ("--tf32",),
    "cache": ("--engine-cache", "off"),
}
MEASURED = {
    "target": ("--target", "ort-cpu"),
    "lowering": ("--lowering", "dense"),
    "precision": ("--precision", "fp16"),
    "data": ("--data", "x.npz"),
    "pixels": ("--pixels", "unit"),
    "tokens": ("--tokens", "4"),
    "max_subsets": ("--max-subsets", "5"),
}

IDLE: dict[str, dict[str, tuple[tuple[object, ...], ...]]] = {
    "export": {
        "family": ((*FACTORY, *READING["family"]),),
        "weights": ((*EXPORT, *READING["weights"]),),
        "adapter": ((*EXPORT, *READING["adapter"]),),
        "tokens": (("export", *VIT, "-o", "out", "--tokens", "4"),),
        "renormalize": (("export", *MUMOE, "-o", "out", "--renormalize"),),
        "quantize": ((*EXPORT, "--quantize", "all"), (*EXPORT, *INT8, "--quantize", "all")),
        "rest": ((*EXPORT, "--rest", "fp16"),),
        "weight_bits": ((*EXPORT, "--weight-bits", "8"),),
        "io_precision": ((*EXPORT, "--io-precision", "fp16"),),
        "min_retention": ((*EXPORT, "--min-retention", "0.9"),),
        "method": ((*EXPORT, "--method", "mse"),),
        "calibration": (
            (*EXPORT, "--calibration", TABLE),
            (*EXPORT, "--precision", "bf16", "--target", "ort-cuda", "--calibration", TABLE),
        ),
        "data": (
            (*EXPORT, "--data", "x.npz", "--no-verify"),
            (*EXPORT, *INT8, "--no-verify", "--calibration", "table.json"),
        ),
        "atol": ((*EXPORT, "--atol", "1", "--no-verify"),),
        "rtol": ((*EXPORT, "--rtol", "1", "--no-verify"),),
        "verify_samples": (
            (*EXPORT, "--verify-samples", "4"),
            (*EXPORT, *INT8, "--verify-samples", "4", "--no-verify"),
        ),
        "engine": ((*EXPORT, "--engine"),),
    }
    | {name: ((*EXPORT, *words),) for name, words in BUILDING.items()},
    "inspect": {
        name: (("inspect", "bundle", *words), ("inspect", "e.plan", *words))
        for name, words in {**READING, **{n: MEASURED[n] for n in ("data", "tokens")}}.items()
    }
    | {"trust_engine": (("inspect", LAYER, "--trust-engine"),)},
    "calibrate": {
        "family": ((*CALIBRATE[:1], "json:loads", *CALIBRATE[2:], *READING["family"]),),
        "weights": ((*CALIBRATE, *READING["weights"]),),
        "adapter": ((*CALIBRATE, *READING["adapter"]),),
        "percentile": ((*CALIBRATE, "--method", "mse", "--percentile", "99"),),
        "renormalize": (("calibrate", *MUMOE, *CALIBRATE[2:], "--renormalize"),),
        "on": ((*CALIBRATE, "--on", "CPU"),),
    },
    "triton": {"k": ((*TRITON, "--k", "2"),)},
    "run": {
        "k": ((*RUN, "--k", "2"),),
        "threads": ((*RUN, "--engine", "tensorrt-rtx", "--threads", "2"),),
        "provider": ((*RUN, "--engine", "tensorrt-rtx", "--provider", "cuda"),),
        "cuda_graphs": (
            (*RUN, "--no-cuda-graphs"),
            (*RUN, "--provider", "tensorrt", "--no-cuda-graphs"),
            (*RUN, "--engine", "tensorrt-rtx", "--no-cuda-graphs"),
        ),
        "device": ((*RUN, "--engine", "onnxruntime", "--device", "gpu"),),
        "cache": ((*RUN, "--runtime", "onnxruntime", "--cache", "cache"),),
        "trust_engine": ((*RUN, "--trust-engine"),),
        "host_weights": ((*RUN, "--host-weights"),),
    },
    "generate": {"system": (("generate", "bundle", "text", "--system", "Be brief."),)},
    "bench": {name: ((*BUNDLES, *words),) for name, words in READING.items()}
    | {name: ((*BUNDLES, *MEASURED[name]),) for name in ("lowering", "precision", "target")}
    | {name: ((*BENCH, *MEASURED[name]),) for name in ("pixels", "tokens")}
    | {
        "calibrate_data": ((*BENCH, "--calibrate-data", __file__),),
        "calibration": ((*BENCH, "--calibration", TABLE),),
        "quantize": ((*BENCH, "--quantize", "all"), (*BUNDLES, "--quantize", "all")),
    }
    | {
        "max_subsets": (
            (*BENCH, *MEASURED["max_subsets"]),
            (*BENCH, *MEASURED["max_subsets"], "--analysis", "random"),
        ),
        "on": ((*BENCH, "--on", "CPU"),),
    }
    | {name: ((*BENCH, *words),) for name, words in SERVING.items()},
    "tune": {
        "family": (("tune", "json:loads", *TUNE[2:], *READING["family"]),),
        "weights": ((*TUNE, *READING["weights"]),),
        "adapter": ((*TUNE, *READING["adapter"]),),
        "tokens": (("tune", *VIT, *TUNE[2:], "--tokens", "4"),),
        "pixels": ((*TUNE, *MEASURED["pixels"]),),
        "on": ((*TUNE, "--on", "CPU"),),
    },
    "specialise": {
        "family": (("specialise", "json:loads", "--data", __file__, *READING["family"]),),
        "weights": (("specialise", LAYER, "--data", __file__, *READING["weights"]),),
        "adapter": (("specialise", LAYER, "--data", __file__, *READING["adapter"]),),
        "rewrite_class": ((*SPECIALISE, "--rewrite-class", "1"),),
        "rewrite_group": ((*SPECIALISE, "--rewrite-group", "a"),),
        "strength": ((*SPECIALISE, "--strength", "3"),),
        "budget": ((*SPECIALISE, "--budget", "0.1"),),
    },
}
"""Calls in which an option does nothing."""

EVERYWHERE = {"as_json", "verbose", "quiet", "force", "rebuild", "output"}
ACTING = {
    "export": {"config", "sets", "k", "target", "lowering", "batch", "opset", "precision"}
    | {"ablate", "rewrite", "steer", "recipe", "verify", "dry_run", "model", "threads"}
    | {"layout"},
    "inspect": {"model"},
    "calibrate": {"model", "config", "sets", "data", "k", "method", "samples", "batch"}
    | {"sensitivity", "ray"},
    # What a backend lacks and what its profiles leave no room for is refused in its own tests.
    "build": {"bundle", "target", "graph", "batch", "tokens", "dry_run", *BUILDING},
    "verify": {"bundle", "atol", "rtol", "data", "trust_engine"},
    "run": {"bundle", "input_file", "graph", "batch_size", "engine", "check"},
    "generate": {
        "bundle",
        "prompt",
        "chat",
        "max_tokens",
        "context",
        "temperature",
        "top_p",
        "top_k",
    }
    | {"seed", "stop", "threads"},
    "serve": {"bundle", "host", "port", "name", "max_tokens", "context", "threads"},
    "bench": {
        "models",
        "threads",
        "k",
        "engine",
        "batch",
        "data",
        "rounds",
        "samples",
        "memory",
        "ray",
        "scenario",
    }
    | {"compare", "fail_if_slower", "analysis", "group_by"},
    "tune": {"model", "config", "sets", "data", "keep", "max_latency", "max_bytes", "metric"}
    | {
        "scenario",
        "target",
        "batch",
        "precision",
        "all_experts",
        "time",
        "threads",
        "report",
        "dry_run",
        "ray",
    },
    "specialise": {"models", "config", "sets", "data", "layer", "k", "group_by", "examples"},
    # What a backend does not take, or what makes no batches, is refused in its own tests.
    "triton": {"bundles", "name", "backend", "device", "version", "instances", "threads"}
    | {"delay_us"},
    "report": {"results", "compare"},
    "demo": {"family"},
    "doctor": set[str](),
}
"""Options that do something in every call, or ask for a check that names them."""


@pytest.mark.parametrize("command", ACTING)
def test_every_option_is_decided(command: str) -> None:
    names = {each.name for each in declared_command(COMMANDS[command]).params} - EVERYWHERE
    assert names == IDLE.get(command, {}).keys() | ACTING[command]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a bundle, inputs and a table."""
    folder = tmp_path_factory.mktemp("idle")
    x = np.random.default_rng(0).standard_normal((4, 5, 32)).astype(np.float32)
    np.savez(folder / "x.npz", input=x)
    (folder / "w.pt").write_bytes(b"")
    (folder / "c.json").write_text("{}")
    (folder / "e.plan").write_bytes(b"")
    assert run("export", LAYER, "-o", folder / "bundle").code == 0
    table = ("--data", folder / "x.npz", "-o", folder / "table.json")
    assert run("calibrate", LAYER, *table).code == 0
    return folder


@pytest.mark.parametrize(
    ("name", "call"),
    [
        pytest.param(name, call, id=f"{command}-{name}-{index}")
        for command, options in IDLE.items()
        for name, calls in options.items()
        for index, call in enumerate(calls)
    ],
)
def test_an_option_that_would_do_nothing_is_refused(
    name: str, call: tuple[object, ...], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    before = sorted(folder.iterdir())
    outcome = run(*map(str, call))
    assert outcome.code == 2, outcome.err
    assert outcome.out == ""
    said = {"sets": "--set", "profiles": "--profile", "memory": "--no-memory"}
    said |= {"cuda_graphs": "--no-cuda-graphs"}
    said |= {"compute_capabilities": "--compute-capability"}
    said |= {"engine": "engines?", "cache": "(engines|--cache)", "k": "k"}
    wanted = said.get(name, f"--{name.replace('_', '-')}")
    assert re.search(rf"{wanted}(?![\w-])", outcome.error)
    assert outcome.hint
    assert sorted(folder.iterdir()) == before


def test_a_default_that_is_given_is_not_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    given = ("--quantize", "experts", "--io-precision", "fp32", "--tokens", "1:196:1024")
    outcome = run(*map(str, (*EXPORT, *given, "--no-engine", "--force", "--dry-run")))
    assert outcome.code == 0, outcome.err
