"""Exported graphs parse and compile in TensorRT-RTX, which needs no GPU for that."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from moexport.tests.command import run
from moexport.tests.recorded import DATA, read_case

ABLE = ("dense", "gather", "conditional")
Sizes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]

needs_rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None,
    reason="TensorRT-RTX is not installed: pip install 'moexport[rtx]'",
)


def export(name: str, folder: Path, *options: str) -> Path:
    sets = [f"--set={key}={value}" for key, value in SETS[name].items()]
    outcome = run(
        *("export", DATA / name / "weights.pt", "-o", folder / "out", "--target", "tensorrt-rtx"),
        *sets,
        *options,
    )
    assert outcome.code == 0, outcome.err
    return folder / "out"


SETS: Mapping[str, Mapping[str, str]] = {
    "soft_moe_vit": {"num_heads": "4"},
    "soft_moe_fkodom": {"version": "0.2.0"},
    "soft_moe_conv": {},
    "soft_moe_lucidrains_geglu_ln": {},
    "soft_moe_mnist_normalized": {},
}

PROFILES: Mapping[str, Sizes] = {
    "soft_moe_vit": ((1, 3, 32, 32), (4, 3, 32, 32), (16, 3, 32, 32)),
    "soft_moe_fkodom": ((1, 4, 24), (4, 16, 24), (8, 64, 24)),
    "soft_moe_conv": ((1, 32, 2, 3), (4, 32, 8, 8), (8, 32, 16, 16)),
    "soft_moe_lucidrains_geglu_ln": ((1, 4, 32), (4, 16, 32), (8, 64, 32)),
    "soft_moe_mnist_normalized": ((1, 1, 28, 28), (8, 1, 28, 28), (64, 1, 28, 28)),
}


def collecting_logger(trt: Any, messages: list[str]) -> Any:
    """A logger that keeps what the builder reports as errors, so that a failure says why."""

    class Logger(trt.ILogger):  # type: ignore[misc]  # the package carries no types
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                messages.append(message)

    return Logger()


def compile_graph(graph: Path, sizes: Sizes, k: Sizes | None = None) -> bytes:
    """Builds an engine for compute capability 8.9 and returns it; fails with TensorRT's words."""
    trt = importlib.import_module("tensorrt_rtx")
    messages: list[str] = []
    logger = collecting_logger(trt, messages)
    builder = trt.Builder(logger)
    typed = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(typed)
    parser = trt.OnnxParser(network, logger)
    parsed = parser.parse_from_file(str(graph))  # the path, so that weights.bin is found
    errors = [parser.get_error(index).desc() for index in range(parser.num_errors)]
    assert parsed, f"{graph.name} does not parse: {errors} {messages}"
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM89, 0)
    profile = builder.create_optimization_profile()
    profile.set_shape("input", *sizes)
    if k is not None:
        profile.set_shape_input("k", *k)
    config.add_optimization_profile(profile)
    engine = builder.build_serialized_network(network, config)
    assert engine is not None, f"{graph.name} does not build: {messages}"
    return bytes(engine)


def graph_of(bundle: Path, lowering: str) -> Path:
    found = bundle / f"model-{lowering}.onnx"
    return found if found.exists() else bundle / "model.onnx"


@needs_rtx
@pytest.mark.parametrize("name", list(PROFILES))
def test_every_lowering_for_the_target_compiles_with_k_baked(name: str, tmp_path: Path) -> None:
    bundle = export(name, tmp_path, "--k", "2", "--lowering", ",".join(ABLE))
    for lowering in ABLE:
        engine = compile_graph(graph_of(bundle, lowering), PROFILES[name])
        assert len(engine) > 0


@needs_rtx
@pytest.mark.parametrize("name", ["soft_moe_vit", "soft_moe_fkodom"])
def test_every_lowering_for_the_target_compiles_with_k_as_an_input(
    name: str, tmp_path: Path
) -> None:
    bundle = export(name, tmp_path, "--k", "input", "--lowering", ",".join(ABLE))
    experts = int(read_case(name).config["num_experts"])
    for lowering in ABLE:
        graph = graph_of(bundle, lowering)
        engine = compile_graph(graph, PROFILES[name], ((1,), (2,), (experts,)))
        assert len(engine) > 0


@needs_rtx
@pytest.mark.parametrize("name", ["soft_moe_mnist_normalized", "soft_moe_lucidrains_geglu_ln"])
def test_a_graph_that_keeps_every_expert_compiles(name: str, tmp_path: Path) -> None:
    bundle = export(name, tmp_path, "--k", "n", "--lowering", "dense,conditional")
    for lowering in ("dense", "conditional"):
        assert len(compile_graph(graph_of(bundle, lowering), PROFILES[name])) > 0


@needs_rtx
def test_what_is_refused_for_the_target_would_indeed_not_parse(tmp_path: Path) -> None:
    weights = DATA / "soft_moe_fkodom" / "weights.pt"
    outcome = run(
        *("export", weights, "--set=version=0.2.0", "-o", tmp_path / "out"),
        *("--k", "2", "--lowering", "grouped"),
    )
    assert outcome.code == 0, outcome.err
    with pytest.raises(AssertionError, match=r"does not parse: .*NonZero"):
        compile_graph(tmp_path / "out" / "model.onnx", PROFILES["soft_moe_fkodom"])


@pytest.mark.parametrize("target", ["tensorrt", "tensorrt-rtx"])
@pytest.mark.parametrize("lowering", ["grouped", "fused"])
def test_a_lowering_that_the_target_does_not_run_is_refused_with_the_able_ones(
    lowering: str, target: str, tmp_path: Path
) -> None:
    outcome = run(
        *("export", DATA / "soft_moe_mnist" / "weights.pt", "-o", tmp_path / "out"),
        *("--lowering", lowering, "--target", target),
    )
    assert (outcome.code, outcome.out) == (1, "")
    assert f"the lowering '{lowering}' cannot serve it" in outcome.error
    assert f"the target {target} does not run it" in outcome.error
    assert outcome.hint == f"for --target {target} choose auto or one of: {', '.join(ABLE)}"
    assert list(tmp_path.iterdir()) == []
