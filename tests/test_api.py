"""The Python calls do the same as the command line."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import pytest
import torch
from moexport import errors
from moexport.bench.request import BenchRequest
from moexport.calibration.table import CalibrationTable, Origin
from moexport.cli import COMMANDS
from moexport.commands.program import declared_command
from moexport.common.console import Silent
from moexport.common.option import declared, misfits, panels_of
from moexport.errors import UsageError
from moexport.exporter.options import ExportOptions
from moexport.exporter.requests import LoadRequest
from moexport.exporter.tensorrt.options import EngineOptions
from moexport.tests.recorded import DATA, VIT_CONFIG

CONFIG = VIT_CONFIG
CHECKPOINT = DATA / "soft_moe_vit" / "weights.pt"


QUICK: dict[str, Any] = {"engine": "pytorch-algorithm-2,onnxruntime", "memory": False, "threads": 1}


@pytest.fixture(scope="module")
def model() -> moexport.Model:
    return moexport.load(CHECKPOINT, config=CONFIG)


@pytest.fixture(scope="module")
def recorded() -> dict[str, np.ndarray]:
    with np.load(DATA / "soft_moe_vit" / "io.npz") as arrays:
        return dict(arrays)


def test_importing_the_package_loads_no_heavy_module() -> None:
    code = (
        "import sys, moexport; "
        "print([m for m in ('torch', 'onnx', 'onnxruntime', 'numpy') if m in sys.modules])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout
    assert shown.strip() == "[]"


def test_every_error_is_public() -> None:
    kinds = {
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.MoexportError)
    }
    assert kinds <= {*moexport.__all__} and {"MoexportError", "ParityError"} <= kinds
    assert all(getattr(moexport, name) is getattr(errors, name) for name in kinds)
    with pytest.raises(moexport.CheckpointError, match=r"missing\.pt: no such file"):
        moexport.load("missing.pt")


@pytest.mark.parametrize(("precision", "rtol"), [("fp32", 1e-4), ("fp16", 1e-2)])
def test_load_export_and_run_give_the_recorded_outputs(
    precision: Any, rtol: float, model: moexport.Model, recorded: dict[str, Any], tmp_path: Path
) -> None:
    bundle = moexport.export(model, tmp_path / "out", k=4, data=recorded["x"], precision=precision)
    y = bundle.session()(recorded["x"])
    wanted = recorded["y_k4"]
    assert np.abs(y - wanted).max() <= rtol * np.abs(wanted).max()


@pytest.mark.parametrize(("k", "kept"), [("n", 8), (0.25, 2), (0.5, 4), (3, 3), ([2, 5], [2, 5])])
def test_k_may_be_a_number_a_share_or_a_list(
    model: moexport.Model, tmp_path: Path, k: int | float | str | list[int], kept: int | list[int]
) -> None:
    bundle = moexport.export(model, tmp_path / "out", k=k, verify=False)
    wanted = kept if isinstance(kept, list) else [kept] * 2
    assert [layer.k for layer in bundle.manifest.layers] == wanted


def test_one_graph_serves_every_k_that_is_an_input(
    model: moexport.Model, recorded: dict[str, np.ndarray], tmp_path: Path
) -> None:
    session = moexport.export(model, tmp_path / "out", k="input", data=recorded["x"]).session()
    for k in (6, 4, 2, 1):
        wanted = recorded[f"y_k{k}"]
        assert np.abs(session(recorded["x"], k) - wanted).max() <= 1e-4 * np.abs(wanted).max()


def test_bench_of_a_model_and_its_bundle_includes_the_untouched_model(
    model: moexport.Model, recorded: dict[str, np.ndarray], tmp_path: Path
) -> None:
    bundle = moexport.export(model, tmp_path / "out", k=2, data=recorded["x"])
    results = moexport.bench([model, bundle], data=recorded["x"], round_s=0.0, **QUICK)
    engines = {(row.engine, row.k) for row in results.rows}
    assert engines == {("pytorch-eager", 8), ("pytorch-algorithm-2", 2), ("onnxruntime", 2)}
    (exported,) = [row for row in results.rows if row.engine == "onnxruntime"]
    assert exported.error is None
    assert exported.routing is not None
    assert exported.routing.exact == 1.0


@pytest.mark.slow
def test_bench_of_a_model_exports_every_k_and_writes_the_report(
    model: moexport.Model, recorded: dict[str, np.ndarray], tmp_path: Path
) -> None:
    results = moexport.bench(
        model,
        data=recorded["x"],
        k=["n", 2],
        lowering="dense,gather",
        out=tmp_path / "report",
        round_s=0.0,
        **QUICK,
    )
    exported = {(row.lowering, row.k) for row in results.rows if row.engine == "onnxruntime"}
    assert exported == {("dense", 8), ("dense", 2), ("gather", 8), ("gather", 2)}
    assert all(row.error is None for row in results.rows)
    assert 1 << 18 < (tmp_path / "report" / "report.html").stat().st_size < 1_500_000
    assert (tmp_path / "report" / "results.json").is_file()


def test_bench_of_a_bundle_alone_finds_its_checkpoint(
    model: moexport.Model, recorded: dict[str, np.ndarray], tmp_path: Path
) -> None:
    bundle = moexport.export(model, tmp_path / "out", k=2, data=recorded["x"])
    results = moexport.bench(
        moexport.Bundle.open(bundle.path), data=recorded["x"], round_s=0.0, **QUICK
    )
    assert any(row.engine == "pytorch-eager" for row in results.rows)


def test_bench_of_a_bundle_without_its_checkpoint_hints_what_to_name(
    recorded: dict[str, np.ndarray], tmp_path: Path
) -> None:
    checkpoint = tmp_path / "vit.pt"
    checkpoint.write_bytes(CHECKPOINT.read_bytes())
    model = moexport.load(checkpoint, config=CONFIG)
    bundle = moexport.export(model, tmp_path / "out", k=2, data=recorded["x"])
    checkpoint.unlink()
    with pytest.raises(UsageError, match=r"vit\.pt does not exist") as caught:
        moexport.bench(bundle, data=recorded["x"])
    assert "moexport.bench([checkpoint, " in str(caught.value.hint)


def test_bench_of_a_mumoe_has_no_loop_over_experts_to_compare(tmp_path: Path) -> None:
    model = moexport.load(DATA / "mumoe_cp" / "weights.pt", config={"act": "entmax15"})
    results = moexport.bench(model, k=["n", 8], out=tmp_path / "report", round_s=0.0, **QUICK)
    assert [(row.engine, row.k, row.error) for row in results.rows] == [
        ("pytorch-eager", 32, None),
        ("onnxruntime", 32, None),
        ("onnxruntime", 8, None),
    ]
    assert (tmp_path / "report" / "report.html").is_file()


CALLS = ["load", "inspect", "calibrate", "sensitivity", "export", "build", "verify", "run"]
CALLS += ["bench", "specialise", "tune", "report", "demo"]


def function(call: str) -> Any:
    """Returns the function `moexport.NAME`; `moexport.bench` is also a package once imported."""
    found = getattr(moexport, call)
    return importlib.import_module(f"{found.__name__}.calls").bench if call == "bench" else found


def parameters(call: str) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function(call)).parameters)


@pytest.mark.parametrize("call", CALLS)
def test_every_option_of_a_call_is_a_keyword_and_explained_with_its_default(call: str) -> None:
    keywords = {n: p for n, p in parameters(call).items() if p.kind is p.KEYWORD_ONLY}
    listed = (inspect.getdoc(function(call)) or "").partition("\nOptions:\n")[2]
    explained = re.findall(r"^ {4}(\w+): ([A-Z].*\S) \[(.*)\]$", listed, flags=re.MULTILINE)
    assert [name for name, *_ in explained] == [*keywords]
    for name, meaning, default in explained:
        assert meaning.endswith((".", "…")), name
        assert default not in ("", "None", "()"), f"{call}({name}=): what does None stand for?"
    assert "progress" in keywords


def test_a_keyword_that_a_call_does_not_have_is_an_error() -> None:
    with pytest.raises(TypeError, match="presicion"):
        moexport.export(
            moexport.load(DATA / "soft_moe_mnist" / "weights.pt"), "x", presicion="int8"
        )


@pytest.mark.parametrize(
    ("keyword", "value", "told"),
    [
        ("lowering", ["gather"], "lowering=['gather']: not a string"),
        ("target", None, "target=None: not a string"),
        ("precision", 16, "precision=16: not one of fp32, fp16"),
        ("precision", "FP16", 'precision="FP16": unknown value'),
        ("method", "mean", 'method="mean": unknown value'),
        ("verify", "no", "verify='no': not True or False"),
        ("threads", "2", "threads='2': not a whole number or None"),
        ("threads", True, "threads=True: not a whole number or None"),
        ("opset", 20.5, "opset=20.5: not a whole number or None"),
        ("rtol", "1e-3", "rtol='1e-3': not a number or None"),
        ("keep_floating", "layer", "keep_floating='layer': not a list"),
        ("keep_floating", [3], "keep_floating=[3]: not a list"),
        ("k", float("nan"), 'k="nan": not a number of experts'),
        ("k", float("inf"), 'k="inf": not a number of experts'),
        ("k", b"4", "k=\"b'4'\": not a number of experts"),
    ],
)
def test_a_value_of_another_type_is_refused_before_the_work_begins(
    keyword: str, value: Any, told: str, tmp_path: Path
) -> None:
    calls: list[Callable[[], Any]] = [lambda: moexport.export(never, tmp_path, **{keyword: value})]
    calls.append(lambda: moexport.export(never, tmp_path, ExportOptions(**{keyword: value})))
    for call in calls:
        with pytest.raises(UsageError) as refused:
            call()
        assert refused.value.message.startswith(told)
        assert refused.value.hint


def never() -> Any:
    pytest.fail("the model is not loaded for what is refused")


@pytest.mark.parametrize(
    "values",
    [
        {"k": np.int64(2), "threads": np.int32(1), "verify": np.bool_(False)},
        {"renormalize": 0, "min_retention": np.float32(0.9), "rest": None},
        {"keep_floating": frozenset({"layer"}), "min_retention": 1, "k": [2]},
    ],
)
def test_numbers_of_numpy_and_lists_of_any_kind_are_accepted(values: dict[str, Any]) -> None:
    assert list(misfits(ExportOptions, values)) == []


@pytest.mark.parametrize(
    ("call", "arguments", "options", "told"),
    [
        ("load", ("x.pt",), {"sets": "num_heads=4"}, "sets='num_heads=4': not a list"),
        ("load", ("x.pt",), {"config": 4}, "config=4: not a mapping or a string or a path or None"),
        ("inspect", ("x.pt",), {"tokens": "4"}, "tokens='4': not a whole number or None"),
        ("calibrate", ("x.pt", "x.npz"), {"batch": 2.5}, "batch=2.5: not a whole number"),
        ("calibrate", ("x.pt", "x.npz"), {"k": " input "}, 'k="input": ranges depend'),
        ("sensitivity", ("x.pt", None, "x.npz"), {"k": "input"}, 'k="input": ranges depend'),
        ("sensitivity", ("x.pt", None, "x.npz"), {"samples": 0}, "samples=0: must be at least 1"),
        ("run", ("x", "x.npz", "y.npz"), {"provider": "gpu"}, 'provider="gpu": unknown value'),
        (
            "run",
            ("x", "x.npz", "y.npz"),
            {"engine": "onnxruntime", "trust_engine": True},
            'trust_engine=True: no engine is loaded with engine="onnxruntime"',
        ),
        ("verify", ("x",), {"rtol": float("inf")}, 'rtol="inf": not a finite number'),
        ("verify", ("x",), {"atol": float("nan")}, 'atol="nan": not a finite number'),
        ("bench", ("x.pt",), {"samples": 0}, "samples=0: must be at least 1"),
        ("bench", ("x.pt",), {"threads": 0}, "threads=0: must be at least 1"),
        ("tune", ("x.pt", "x.npz", "out"), {"threads": "1"}, "threads='1': not a whole number"),
        ("load", ("x.pt",), {"progress": print}, "progress=<built-in function print>: not a Prog"),
        ("build", ("x",), {"options": 3}, "options=3: not an EngineOptions or None"),
        ("build", (3,), {}, "bundle=3: not a Bundle or a string or a path"),
        ("calibrate", ("x.pt", "x.npz"), {"loading": 3}, "loading=3: not a LoadRequest"),
        ("export", ("x.pt", 3), {}, "destination=3: not a string or a path"),
        ("export", ("x.pt", "x"), {"data": 3}, "data=3: not a string or a path or an array or"),
        ("export", ("x.pt", "x"), {"engine": "on"}, "engine='on': not an EngineOptions or True or"),
        ("verify", ("x",), {"data": 3}, "data=3: not a string or a path or an array"),
        ("bench", ("x.pt",), {"before": 3}, "before=3: not a Results or a mapping or None"),
        ("bench", ("x.pt",), {"data": 3}, "data=3: not a string or a path or a LabelledData"),
        ("bench", (3,), {}, "3: not a path"),
        ("report", ("x", "y"), {"beside": [3]}, "beside=[3]: not a list in which each entry"),
    ],
)
def test_every_call_refuses_invalid_values(
    call: str, arguments: tuple[Any, ...], options: dict[str, Any], told: str
) -> None:
    with pytest.raises(UsageError) as refused:
        function(call)(*arguments, **options)
    assert refused.value.message.startswith(told)
    assert refused.value.hint


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"profile": 3}, "profile=3: not a path or a string or None"),
        ({"prepack": "no"}, "prepack='no': not True or False"),
        ({"options": 3}, "options=3: not a SessionOptions or None"),
        ({"provider": 3}, "provider=3: not a string"),
        ({"threads": 0}, "threads=0: not a number of threads"),
    ],
)
def test_a_session_refuses_values_of_another_type(
    options: dict[str, Any], told: str, tmp_path: Path
) -> None:
    weights = DATA / "soft_moe_lucidrains" / "weights.pt"
    bundle = moexport.export(weights, tmp_path / "out", lowering="dense", verify=False)
    with pytest.raises(UsageError) as refused:
        bundle.session(**options)
    assert refused.value.message.startswith(told)
    assert refused.value.hint
    with pytest.raises(UsageError, match="atol='x': not a number or None"):
        bundle.verify(atol="x")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="3: not a path"):
        moexport.Bundle.open(3)  # type: ignore[arg-type]


def test_objects_of_types_that_only_checkers_import_are_values() -> None:
    table = CalibrationTable(
        Origin("m", "f", 1, {}, "minmax", None, renormalize=False), {}, {}, "1"
    )
    values = {
        "calibration": table,
        "engine": EngineOptions(),
        "data": torch.zeros(1),
        "progress": Silent(),
    }
    assert list(misfits(ExportOptions, values)) == []
    assert list(misfits(BenchRequest, {"data": torch.zeros(1), "calibrate_data": [[1.0]]})) == []


def test_invalid_ranges_are_refused() -> None:
    with pytest.raises(UsageError, match="calibration=3: not a CalibrationTable or a string"):
        moexport.export(never, "x", precision="int8", calibration=3)


def test_layers_to_keep_floating_where_all_are_is_refused() -> None:
    with pytest.raises(UsageError, match='keep_floating: with precision="fp16" every layer is'):
        moexport.export(never, "x", precision="fp16", keep_floating=["layer"])


ELSEWHERE = {
    "output": "`destination`, as it is no file to be typed after -o",
    "dry_run": "`moexport.plan`, which returns a plan and no bundle",
    "as_json": "what is returned is no text",
}
"""Options of `export` without a parameter of the same name, and why."""


def test_every_option_of_export_is_a_parameter_of_the_python_call() -> None:
    ours = {each.name for each in declared_command(COMMANDS["export"]).params}
    loading = {*declared(LoadRequest)}  # of `moexport.load`
    loading |= {name for panel in panels_of(LoadRequest) for name in declared(panel.options)}
    building = declared(EngineOptions).keys() - {"expose_routing"}
    saying = {"verbose", "quiet"}  # what `progress` does with it
    # Keywords as well, which are looked up when they are used.
    theirs = {name for panel in panels_of(ExportOptions) for name in declared(panel.options)}
    options = ours - loading - building - saying - theirs - ELSEWHERE.keys()
    keywords = parameters("export").keys() - {"destination", "progress"}
    assert options <= keywords
    # A list of layers, which a search finds; and what plugins add.
    assert keywords - options == {"keep_floating", "of_plugins"}
    assert declared(LoadRequest).keys() <= parameters("load").keys()
