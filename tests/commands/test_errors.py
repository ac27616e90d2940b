"""What cannot be meant is refused before any work, with one clear line and what to do."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from moexport.calibration.table import CalibrationTable, Origin
from moexport.tests.command import Outcome, run
from moexport.tests.recorded import DATA, VIT_SETS, read_case

LAYER = DATA / "soft_moe_lucidrains" / "weights.pt"  # one MoE layer of 4 experts
VIT = DATA / "soft_moe_vit" / "weights.pt"  # two of 8


def assert_refused(outcome: Outcome, message: str, hint: str, code: int = 2) -> None:
    assert outcome.code == code, outcome.err
    assert outcome.out == ""
    assert message in outcome.error
    assert hint in outcome.hint
    assert "Traceback" not in outcome.err
    assert "defect" not in outcome.err


def refuse(folder: Path, *options: str, weights: Path = LAYER) -> Outcome:
    outcome = run("export", weights, "-o", folder / "out", *options)
    assert list(folder.iterdir()) == []
    return outcome


@pytest.mark.parametrize(
    ("k", "message", "hint"),
    [
        ("0", "--k 0: at least one expert must be kept", "1 ≤ k ≤ n"),
        ("-3", "--k -3: at least one expert must be kept", "1 ≤ k ≤ n"),
        ("0.0", "--k 0.0: a share must be above 0", "--k 0.25 keeps a quarter"),
        ("1.5", "--k 1.5: a share must be above 0", "--k 0.25 keeps a quarter"),
        ("-0.5", "--k -0.5: a share must be above 0", "--k 0.25 keeps a quarter"),
        ("4/0", "--k 4/0: not a number of experts", "a share (0.25 or n/4)"),
        ("many", "--k many: not a number of experts", "a share (0.25 or n/4)"),
        ("", "--k : not a number of experts", "a share (0.25 or n/4)"),
        ("nan", "--k nan: not a number of experts", "a share (0.25 or n/4)"),
        ("1e400", "--k 1e400: not a number of experts", "a share (0.25 or n/4)"),
        ("4,", "--k 4,: not a number of experts", "a number per layer"),
        ("4,x", "--k 4,x: not a number of experts", "a number per layer"),
        ("4,0", "--k 0: at least one expert must be kept", "1 ≤ k ≤ n"),
        ("n,4", "--k n,4: not a number of experts", "a number per layer"),
        ("n/0", "--k n/0: not a number of experts", "n/4"),
        ("n/x", "--k n/x: not a number of experts", "n/4"),
    ],
)
def test_a_k_that_cannot_be_meant(k: str, message: str, hint: str, tmp_path: Path) -> None:
    outcome = refuse(tmp_path, f"--k={k}")
    assert_refused(outcome, message, hint)
    assert "loading" not in outcome.err


@pytest.mark.parametrize(
    ("k", "message", "hint"),
    [
        ("5", "--k 5: layer layer has 4 experts", "use 1 ≤ k ≤ 4, or n for all"),
        ("2,2", "--k 2,2: 2 values for 1 MoE layers", "or one for each of: layer"),
    ],
)
def test_a_k_that_does_not_fit_the_model(k: str, message: str, hint: str, tmp_path: Path) -> None:
    outcome = refuse(tmp_path, "--k", k)
    assert_refused(outcome, message, hint)
    assert "tracing" not in outcome.err


def test_a_list_of_k_names_the_layers_that_it_must_fit(tmp_path: Path) -> None:
    outcome = refuse(tmp_path, *VIT_SETS, "--k", "4,4,4", weights=VIT)
    assert_refused(outcome, "3 values for 2 MoE layers", "blocks.2.mlp, blocks.3.mlp")
    outcome = refuse(tmp_path, *VIT_SETS, "--k", "4,9", weights=VIT)
    assert_refused(outcome, "--k 9: layer blocks.3.mlp has 8 experts", "1 ≤ k ≤ 8")


@pytest.mark.parametrize("option", ["--batch", "--tokens"])
@pytest.mark.parametrize(
    ("sizes", "message", "hint"),
    [
        ("32:8:1", "needs 1 ≤ MIN ≤ OPT ≤ MAX", "the sizes in order are 1:8:32"),
        ("1:64:32", "needs 1 ≤ MIN ≤ OPT ≤ MAX", "the sizes in order are 1:32:64"),
        ("0:1:2", "needs 1 ≤ MIN ≤ OPT ≤ MAX", "sizes"),
        ("0", "needs 1 ≤ MIN ≤ OPT ≤ MAX", "sizes start at 1"),
        ("-4", "needs 1 ≤ MIN ≤ OPT ≤ MAX", "sizes"),
        ("1:2", "expected MIN:OPT:MAX or one size", "1:8:32"),
        ("1:2:3:4", "expected MIN:OPT:MAX or one size", "1:8:32"),
        ("1:x:3", "expected MIN:OPT:MAX or one size", "1:8:32"),
        ("", "expected MIN:OPT:MAX or one size", "1:8:32"),
    ],
)
def test_sizes_that_cannot_be_meant(
    option: str, sizes: str, message: str, hint: str, tmp_path: Path
) -> None:
    outcome = refuse(tmp_path, f"{option}={sizes}")
    assert_refused(outcome, f"{option} {sizes}: {message}", hint)


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        (("--target", "npu"), "'npu' is not one of 'onnx', 'ort-cpu'", "export --help"),
        (("--lowering", "fast"), "there is no lowering 'fast'", "auto, dense, gather, grouped"),
        (("--lowering", ","), "--lowering is empty", "--lowering auto"),
        (("--lowering", "dense,dense"), "a name is repeated", "once"),
        (("--opset", "19"), "--opset 19: opsets 20 to 23", "20 is the first"),
        (("--opset", "99"), "--opset 99: opsets 20 to 23", "20 is the first"),
        (("--opset", "x"), "Input should be a valid integer", "export --help"),
        (("--method", "mse"), "--method belongs to --precision int8, not to fp32", "leave"),
        (
            ("--method", "mse", "--precision", "int8", "--calibration", "t.json"),
            "--method mse: the ranges are those of the table t.json",
            "calibrate --method",
        ),
        (("--io-precision", "fp16"), "the graph computes in fp32", "leave --io-precision out"),
        (("--rtol", "-1"), "bounds must be finite and not negative", "--rtol 1e-4"),
        (("--atol", "nan"), "bounds must be finite and not negative", "--rtol 1e-4"),
        (("--rtol", "inf"), "bounds must be finite and not negative", "--no-verify"),
        (("--nonsense",), "No such option", "export --help"),
        (("another.pt",), "unexpected extra argument", "export --help"),
    ],
)
def test_options_that_cannot_be_meant(
    options: tuple[str, ...],
    message: str,
    hint: str,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("here"))
    origin = Origin(model="", feed="", samples=1, k={}, method="minmax")
    CalibrationTable(origin, {}).write(Path("t.json"))  # what is no table is refused first
    assert_refused(refuse(tmp_path, *options), message, hint)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("export",), "Missing argument 'MODEL'"),
        (("export", __file__), "Missing option '--output'"),
        (("explode",), "No such command 'explode'"),
        (("run", "b", "-o", "y.npz"), "Missing option '--input'"),
        (("run", "b", "-i", "x", "-o", "y", "--k", "two"), "Input should be a valid integer"),
        (("run", "b", "-i", "x", "-o", "y", "--threads", "0"), "greater than or equal to 1"),
        (("bench", __file__, "-o", "d", "--batch", "0"), "--batch 0: not a list of sizes"),
        (("bench", __file__, "-o", "d", "--batch", "a,2"), "--batch a,2: not a list of sizes"),
        (("bench", __file__, "-o", "d", "--rounds", "1"), "should be greater than or equal to 5"),
    ],
)
def test_bad_usage_of_any_command_exits_with_2(arguments: tuple[str, ...], message: str) -> None:
    outcome = run(*arguments)
    assert outcome.code == 2
    assert outcome.out == ""
    assert message in outcome.error
    assert outcome.hint


@pytest.mark.parametrize(
    ("k", "message"),
    [("input", "--k input: a benchmark needs numbers"), ("", "--k is empty"), ("n,9", "--k 9")],
)
def test_a_benchmark_of_no_number_of_experts(k: str, message: str, tmp_path: Path) -> None:
    outcome = run("bench", LAYER, "-o", tmp_path / "out", "--k", k, "--engine", "onnxruntime", "-q")
    assert_refused(outcome, message, "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["inspect", "export"])
def test_a_model_that_is_not_there(command: str, tmp_path: Path) -> None:
    options = ("-o", tmp_path / "out") if command == "export" else ()
    outcome = run(command, tmp_path / "none.pt", *options)
    assert_refused(outcome, "none.pt: no such file", "check the path", code=1)
    assert list(tmp_path.iterdir()) == []


def test_a_value_that_shapes_cannot_tell_is_asked_for_by_name(tmp_path: Path) -> None:
    outcome = refuse(tmp_path, weights=VIT)
    assert_refused(outcome, "num_heads", "--set num_heads=", code=1)


@pytest.mark.parametrize("command", ["verify", "run"])
def test_a_bundle_that_is_not_there(command: str, tmp_path: Path) -> None:
    files = ("-i", tmp_path / "x.npz", "-o", tmp_path / "y.npz") if command == "run" else ()
    outcome = run(command, tmp_path / "none", *files)
    assert_refused(outcome, "none: there is no such folder", "moexport export", code=1)


@pytest.fixture(scope="module")
def k_input(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("k_input")
    outcome = run("export", LAYER, "-o", folder / "out", "--k", "input", "--lowering", "gather")
    assert outcome.code == 0, outcome.err
    return folder / "out"


def run_layer(bundle: Path, folder: Path, *options: str, x: object = None) -> Outcome:
    if x is None:
        x = read_case("soft_moe_lucidrains").x
    np.savez(folder / "x.npz", input=np.asarray(x))
    outcome = run("run", bundle, "-i", folder / "x.npz", "-o", folder / "y.npz", *options)
    assert [p.name for p in folder.iterdir()] == ["x.npz", "y.npz"][: 2 - bool(outcome.code)]
    return outcome


def test_run_asks_for_k_where_it_is_an_input(k_input: Path, tmp_path: Path) -> None:
    outcome = run_layer(k_input, tmp_path)
    assert_refused(outcome, "k is an input of this graph, but no k was given", "add --k K")


@pytest.mark.parametrize("k", ["0", "-1", "5"])
def test_run_refuses_a_k_that_does_not_fit(k: str, k_input: Path, tmp_path: Path) -> None:
    outcome = run_layer(k_input, tmp_path, "--k", k)
    assert_refused(outcome, f"--k {k}: the model has 4 experts", "use 1 ≤ k ≤ 4")


def test_run_with_k_given_computes_that_k(k_input: Path, tmp_path: Path) -> None:
    case = read_case("soft_moe_lucidrains")
    assert run_layer(k_input, tmp_path, "--k", "2").code == 0
    with np.load(tmp_path / "y.npz") as arrays:
        y = arrays["output"]
    assert np.abs(y - case.y(2)).max() <= 1e-4 * np.abs(case.y(2)).max()


def test_run_refuses_k_where_it_is_baked(exported: Path, tmp_path: Path) -> None:
    x = np.zeros((1, 3, 32, 32), np.float32)
    outcome = run_layer(exported, tmp_path, "--k", "2", x=x)
    assert_refused(outcome, "k = 2 was given, but the graph's k is baked in", "--k input")


def test_run_lists_the_graphs_there_are(exported: Path, tmp_path: Path) -> None:
    x = np.zeros((1, 3, 32, 32), np.float32)
    outcome = run_layer(exported, tmp_path, "--graph", "dense", x=x)
    assert_refused(outcome, "has no graph 'dense'", "model.onnx, model-grouped.onnx")
    (tmp_path / "x.npz").unlink()
    assert run_layer(exported, tmp_path, "--graph", "grouped", x=x).code == 0


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros((2, 3, 32, 31), np.float32), "float32 (batch, 3, 32, 32), not float32 (2, 3,"),
        (np.zeros((3, 32, 32), np.float32), "not float32 (3, 32, 32)"),
        (np.zeros((1, 3, 32, 32), np.uint8), "not uint8 (1, 3, 32, 32)"),
        (np.zeros((1, 3, 32, 32), np.complex64), "complex64 (1, 3, 32, 32), not an array"),
        (np.array(["a"]), "contains str32 (1,), not an array of inputs"),
        (np.float32(3), "contains float32 (), not an array of inputs"),
    ],
)
def test_run_refuses_inputs_that_do_not_fit(
    x: np.ndarray, message: str, exported: Path, tmp_path: Path
) -> None:
    outcome = run_layer(exported, tmp_path, x=x)
    assert_refused(outcome, message, "", code=1)


@pytest.mark.parametrize("name", ["y.npy", "y.txt", "y", "-"])
def test_run_writes_nothing_but_archives(name: str, exported: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", input=np.zeros((1, 3, 32, 32), np.float32))
    out = name if name == "-" else tmp_path / name
    outcome = run("run", exported, "-i", tmp_path / "x.npz", "-o", out)
    assert_refused(outcome, "outputs are written as an .npz archive", "y.npz")
    assert [p.name for p in tmp_path.iterdir()] == ["x.npz"]


def test_run_does_not_write_over_its_input(exported: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", input=np.zeros((1, 3, 32, 32), np.float32))
    (tmp_path / "same.npz").symlink_to("x.npz")
    before = (tmp_path / "x.npz").read_bytes()
    for name in ("x.npz", "same.npz"):
        outcome = run("run", exported, "-i", tmp_path / "x.npz", "-o", tmp_path / name)
        assert_refused(outcome, "is the input, which would be lost", "choose another -o")
    assert (tmp_path / "x.npz").read_bytes() == before


def test_run_says_when_outputs_are_not_numbers(exported: Path, tmp_path: Path) -> None:
    x = np.zeros((2, 3, 32, 32), np.float32)
    assert "NaN" not in run_layer(exported, tmp_path, x=x).err
    (tmp_path / "y.npz").unlink()
    x[1] = np.nan
    assert "10 values of the output are NaN or infinite" in run_layer(exported, tmp_path, x=x).err


def test_run_of_no_inputs_is_refused(exported: Path, tmp_path: Path) -> None:
    outcome = run_layer(exported, tmp_path, x=np.zeros((0, 3, 32, 32), np.float32))
    assert_refused(outcome, "input 'input' is empty", "at least one input", code=1)


def test_run_takes_all_inputs_of_a_folder(exported: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        np.save(tmp_path / f"{name}.npy", np.zeros((1, 3, 32, 32), np.float32))
    outcome = run("run", exported, "-i", tmp_path, "-o", tmp_path / "y.npz")
    assert outcome.code == 0, outcome.err
    with np.load(tmp_path / "y.npz") as arrays:
        assert arrays["output"].shape == (2, 10)
    np.save(tmp_path / "c.npy", np.zeros((1, 3, 16, 16), np.float32))
    outcome = run("run", exported, "-i", tmp_path, "-o", tmp_path / "z.npz")
    shapes = "have the shapes (3, 16, 16), (3, 32, 32)"
    assert_refused(outcome, f"do not stack; their inputs {shapes}", "each size", code=1)
    assert not (tmp_path / "z.npz").exists()


@pytest.mark.parametrize("bad", ["--k=0", "--batch=3:2:1"])
def test_verbose_adds_the_traceback_and_keeps_the_exit_code(bad: str, tmp_path: Path) -> None:
    for flag in ("-v", "--verbose"):
        outcome = refuse(tmp_path, bad, flag)
        assert outcome.code == 2
        assert "Traceback (most recent call last)" in outcome.err
        assert outcome.err.splitlines()[-2].startswith("error: ")
        assert outcome.hint


def test_quiet_keeps_the_error(tmp_path: Path) -> None:
    outcome = refuse(tmp_path, "--k", "9", "-q")
    assert outcome.code == 2
    assert [line.split(":")[0] for line in outcome.err.splitlines()] == ["error", "hint"]


def test_an_export_that_misses_its_bounds_names_the_layer_and_writes_nothing(
    tmp_path: Path,
) -> None:
    outcome = refuse(tmp_path, "--rtol=0", "--atol=0", "--k=2")
    assert_refused(outcome, "model.onnx differs from PyTorch, starting in layer", "", code=3)
    assert "--rtol" in outcome.hint
    assert "--no-verify" in outcome.hint


def test_the_lowering_that_is_not_exact_misses_tight_bounds(tmp_path: Path) -> None:
    options = ("--lowering=dense,fused", "--target=ort-cpu", "--k=2", "--rtol=1e-5", "--atol=0")
    outcome = refuse(tmp_path, *options)
    assert_refused(outcome, "model-fused.onnx differs from PyTorch, starting in layer", "", code=3)


@pytest.mark.parametrize(
    ("arguments", "name", "content", "message", "hint"),
    [
        (("report", "-o", "page.html"), "r.json", "{}", "field schema is missing", "bench"),
        (("report", "-o", "page.html"), "r.json", "{", "not valid JSON", "give a results.json"),
        (("inspect",), "vit.xyz", "", "weights are read from .pt", "training code saved"),
        (("verify",), "manifest.json", '{"schema": 1}', "not a complete manifest", "copy it again"),
        (("verify",), "manifest.json", "{", "not valid JSON", "export the bundle again"),
    ],
)
def test_an_error_without_words_of_its_own_says_what_to_do_by_its_kind(
    arguments: tuple[str, ...],
    name: str,
    content: str,
    message: str,
    hint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(content)
    outcome = run(*arguments, "." if arguments[0] == "verify" else name)
    assert_refused(outcome, message, hint, code=1)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_path_that_the_system_refuses_is_no_defect(tmp_path: Path) -> None:
    for command in (("inspect",), ("export", "-o", tmp_path / "out"), ("verify",)):
        outcome = run(*command, "x" * 300)
        assert_refused(outcome, "File name too long", "check the path", code=1)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_model_is_not_the_current_folder() -> None:
    for command in (("inspect", ""), ("bench", "", "-o", "report"), ("export", "", "-o", "out")):
        assert_refused(run(*command), "MODEL is empty", "name a checkpoint")


@pytest.mark.parametrize(
    "command",
    [
        ("export", LAYER, "-o", ""),
        ("calibrate", LAYER, "--data", __file__, "-o", ""),
        ("run", "out", "-i", "x.npz", "-o", ""),
        ("bench", LAYER, "-o", ""),
        ("specialise", LAYER, "--data", __file__, "-o", ""),
        ("report", "results.json", "-o", ""),
        ("demo", "-o", ""),
        ("verify", ""),
        ("build", ""),
        ("run", "", "-i", "x.npz", "-o", "y.npz"),
    ],
)
def test_an_empty_name_is_not_the_current_folder(
    command: tuple[str | Path, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = run(*command)
    named = "'BUNDLE'" if command[1] == "" else "'--output' / '-o'"
    assert_refused(outcome, f"Invalid value for {named}: ", f"{command[0]} --help")
    assert "it is empty: name a file or a folder" in outcome.error
    assert list(tmp_path.iterdir()) == []


def test_sizes_of_an_axis_that_is_not_there_are_refused(tmp_path: Path) -> None:
    outcome = refuse(tmp_path, *VIT_SETS, "--tokens", "1:8:64", weights=VIT)
    message = (
        "--tokens 1:8:64: the model has no token axis: its input 'input' is (batch, 3, 32, 32)"
    )
    assert_refused(outcome, message, "leave --tokens out")
    assert "tracing" not in outcome.err


def test_sizes_of_an_axis_that_a_graph_has_not_are_refused(exported: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    outcome = run("build", exported, "--target", "tensorrt-rtx", "--tokens", "8", "--dry-run")
    message = "--tokens 8: the graph's input 'input' has no axis tokens"
    assert_refused(outcome, message, "its dynamic axes are batch")


def test_k_may_be_written_as_inspect_shows_it(tmp_path: Path) -> None:
    outcome = run("export", LAYER, "-o", tmp_path / "out", "--k", "n/2", "--dry-run", "--json")
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["graphs"]["model.onnx"][0]["k"] == 2


def test_errors_of_a_config_file_name_it(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(json.dumps([1, 2]))
    outcome = run("export", VIT, "--config", tmp_path / "bad.json", "-o", tmp_path / "out")
    assert outcome.code != 0
    assert "bad.json" in outcome.error
    assert "defect" not in outcome.err
    outcome = run("export", VIT, "--config", tmp_path / "none.json", "-o", tmp_path / "out")
    assert outcome.code != 0
    assert "none.json" in outcome.error
    assert "defect" not in outcome.err
    outcome = run("export", VIT, "--set", "num_heads", "-o", tmp_path / "out")
    assert_refused(outcome, "num_heads", "=")
