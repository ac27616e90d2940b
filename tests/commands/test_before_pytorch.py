"""What is typed wrongly is refused before PyTorch is imported, which takes seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from moexport.common.locations import is_missing_checkpoint

WEIGHTS = Path(__file__).parents[1] / "data" / "soft_moe_mnist" / "weights.pt"

PROGRAM = """
import sys
sys.argv[0] = "moexport"
from moexport.__main__ import main
try:
    main()
except SystemExit as end:
    print("code", end.code, "with PyTorch" if "torch" in sys.modules else "without PyTorch")
"""


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("inspect nope.pt", "nope.pt: no such file"),
        ("export nope.pt -o out", "nope.pt: no such file"),
        ("bench nope.pt -o out", "nope.pt: no such file"),
        ("calibrate nope.pt --data WEIGHTS -o out.json", "nope.pt: no such file"),
        pytest.param(
            "tune nope.pt --data WEIGHTS -o out", "nope.pt: no such file", marks=pytest.mark.plugins
        ),
        pytest.param(
            "specialise nope.pt --data WEIGHTS -o out",
            "nope.pt: no such file",
            marks=pytest.mark.plugins,
        ),
        ("export WEIGHTS -o out --data nope.npz", "nope.npz: no such feed"),
        ("inspect WEIGHTS --data nope.npz", "nope.npz: no such feed"),
        ("bench WEIGHTS -o out --data nope.npz", "nope.npz: no such file"),
        ("export WEIGHTS -o out --config nope.yaml", "nope.yaml: cannot be read"),
        ("inspect nowhere.net:build", "nowhere.net:build: no module named nowhere"),
        ("export WEIGHTS -o out --data nowhere:batches", "nowhere:batches: no module named"),
        ("export WEIGHTS -o out --calibration nope.json", "nope.json: no such calibration table"),
        ("bench WEIGHTS -o out --calibration nope.json", "nope.json: no such calibration table"),
        pytest.param(
            "export WEIGHTS -o out --recipe nope.yaml",
            "--recipe nope.yaml: cannot be read",
            marks=pytest.mark.plugins,
        ),
        ("bench WEIGHTS -o out --k 0", "--k 0: at least one expert must be kept"),
        ("bench WEIGHTS -o out --batch x", "--batch x: not a list of sizes"),
        ("export WEIGHTS -o .", ".: the folder exists but is not a bundle"),
        ("bench WEIGHTS -o out --calibrate-data nope.npz", "nope.npz: no such feed"),
        ("bench WEIGHTS -o notes.txt", "FOLDER/notes.txt: not a folder"),
        ("export WEIGHTS -o out --set dim", "--set dim: not KEY=VALUE"),
        ("calibrate WEIGHTS -o notes.txt --data WEIGHTS", "notes.txt: the file exists but is not"),
        pytest.param(
            "specialise WEIGHTS -o out --data nope.npz",
            "nope.npz: no such file",
            marks=pytest.mark.plugins,
        ),
        pytest.param(
            "demo -o notes.txt", "FOLDER/notes.txt: not a folder", marks=pytest.mark.plugins
        ),
        pytest.param(
            "adapt json:JSONDecoder -o . --set d=1",
            ".: cannot be written: it is a folder",
            marks=pytest.mark.plugins,
        ),
        pytest.param(
            "bench WEIGHTS -o out --scenario serve",
            "--scenario serve: there is no such scenario",
            marks=pytest.mark.plugins,
        ),
        pytest.param(
            "bench WEIGHTS -o out --latency-bound 5ms",
            "--latency-bound: this option needs --scenario",
            marks=pytest.mark.plugins,
        ),
        ("export WEIGHTS -o out --k 0.0", "--k 0.0: a share must be above 0"),
        ("verify nope", "nope: there is no such folder"),
        ("run nope -i x.npz -o y.npz", "nope: there is no such folder"),
    ],
)
def test_what_is_not_there_is_refused_without_pytorch(
    typed: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    arguments = typed.replace("WEIGHTS", str(WEIGHTS)).split()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"error: {words.replace('FOLDER', str(tmp_path))}" in done.stderr
    assert "hint: " in done.stderr
    assert done.stdout.splitlines()[-1].endswith("without PyTorch")
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.slow
def test_shards_in_a_range_and_urls_are_not_looked_for_as_files(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "moexport", "export", str(WEIGHTS), "-o", "out"),
            *("--data", "part-{000..002}.tar"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "part-000.tar: no such file" in done.stderr


def test_the_prefix_of_a_checkpoints_files_is_not_looked_for_as_a_file(tmp_path: Path) -> None:
    (tmp_path / "model.index").touch()
    assert not is_missing_checkpoint(tmp_path / "model")
    assert is_missing_checkpoint(tmp_path / "mode")
    assert is_missing_checkpoint(tmp_path / "[m]odel")


IN_TURN = """
import contextlib, io, json, sys
from moexport.__main__ import main
found = []
for words in json.load(sys.stdin):
    sys.argv = ["moexport", *words]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            main()
        code = 0
    except SystemExit as end:
        code = end.code
    found.append([code, said.getvalue(), "torch" in sys.modules])
print(json.dumps(found))
"""

CODE = """
import torch

def build(dim=4):
    return torch.nn.Linear(dim, dim)
"""

REFUSED = {
    "export": {
        "--lowering denss": "--lowering denss: there is no lowering 'denss'",
        "--lowering slot": "--lowering slot: there is no lowering 'slot'",
        "--lowering dense,dense": "--lowering dense,dense: a name is repeated",
        "--precision int8 --target tensorrt": "--precision int8: its ranges need real inputs",
        "--precision fp8 --target tensorrt": "--precision fp8: its ranges need real inputs",
        "--precision int8 --calibration broken.json": "broken.json: not valid JSON",
        "--precision int8 --calibration list.json": "list.json: schema None, but this version",
        "--precision int8 --calibration notes.txt": "notes.txt: not valid JSON",
        "--precision int8 --calibration folder": "folder: cannot be read",
        "--k 1.0": "--k 1.0 is ambiguous: one expert, or all of them?",
        "--k al": "--k al: not a number of experts",
        "--k 4,x": "--k 4,x: not a number of experts",
        "--k n/0": "--k n/0: not a number of experts",
        "--opset 12": "--opset 12: opsets 20 to 23 are supported",
        "--family soft-moe-vitt": "unknown family 'soft-moe-vitt'",
        "--config broken.json": "broken.json: not valid JSON",
        "--config list.json": "list.json contains a list, not keys and values",
        "--config notes.txt": "notes.txt: configuration is read from .json, .yaml or .toml",
        "--data broken.npz": "broken.npz: not a readable .npz file",
        "--data folder": "folder: the folder contains no .npy file",
        "--data absent.tar": "absent.tar: no such file",
        "--data code:batches": "code:batches: code has no batches",
        "--target onnx --engine": "--target onnx: engines are built for tensorrt",
        "--target tensorrt --compute-capability x": "--compute-capability",
        "--target tensorrt --optimization-level 9": "--optimization-level 9",
        "--target tensorrt --timing-cache folder": "--timing-cache",
    },
    "inspect": {
        "--family mumo": "unknown family 'mumo'",
        "--tokens 0": "--tokens 0: must be at least 1",
        "--config list.json": "list.json contains a list",
    },
    "calibrate": {
        "--k 1.0": "--k 1.0 is ambiguous: one expert, or all of them?",
        "--k input": "--k input: ranges depend on the number of kept experts",
        "--samples 0": "--samples 0: must be at least 1",
        "--batch 0": "--batch 0: must be at least 1",
        "--method mse --percentile 99": "--percentile 99: the method mse has",
        "--percentile 3": "--percentile 3: the value must be above 50",
    },
    "bench": {
        "--lowering denss": "--lowering denss: there is no lowering 'denss'",
        "--lowering tune": "--lowering tune belongs to export",
        "--precision fp12": "--precision fp12: there is no such precision",
        "--pixels rgb": "--pixels rgb: there is no such scale",
        "--pixels unit": "--pixels unit: the data are not a folder of images",
        "--quantize all": "--quantize all belongs to --precision int8",
        "--calibrate-data IO": "--calibrate-data: --precision fp32 needs no ranges",
        "--compare list.json": "list.json",
        "--fail-if-slower x": "--fail-if-slower x: not a share",
    },
    "adapter": {
        "--adapter code:adapt": "code:adapt: code has no adapt",
        "--layout transformers-js --precision bf16": "transformers-js does not support",
        "--ablate x": "--ablate x",
        "--steer layer:1:x": "--steer layer:1:x: x is not a number",
        "--rewrite broken.json": "broken.json: not valid JSON",
        "--recipe list.json": "--recipe list.json: schema None",
    },
    "studies": {
        "--analysis foo": "--analysis foo: there is no such analysis",
        "--max-subsets 3": "--max-subsets 3: no subsets are tried",
        "--group-by age": "--group-by age names an array of a file",
    },
    "tune": {
        "--keep 2": "--keep 2: the share must be above 0 and below 1",
        "--max-latency x": "--max-latency x: not a time",
        "--max-bytes x": "--max-bytes x: not a number of bytes",
        "--scenario server": "--scenario server: the latency bound is missing",
        "--metric f1": "--metric f1: there is no such metric",
        "--metric code:f1": "code:f1: code has no f1",
        "--target tensorrt": "--target tensorrt: tune measures graphs",
        "--target foo": "--target foo: there is no such target",
        "--batch x": "--batch x: expected MIN:OPT:MAX",
        "--precision fp12": "--precision fp12: tune tries",
        "--time x": "--time x: not a time",
        "--pixels rgb": "--pixels rgb: there is no such scale",
        "--report notes.txt": "notes.txt: not a folder",
        "--dry-run --keep 3": "--keep 3: the share must be above 0",
    },
    "specialise": {
        "--k 1.0": "--k 1.0 is ambiguous: one expert, or all of them?",
        "--k input": "--k input: experts are counted at one k",
        "--examples 0": "--examples 0: must be at least 1",
        "--rewrite-class 1": "--rewrite-class: a rewrite needs",
    },
}
"""By command, what is typed behind a model that is there, and how it is refused."""

TYPED = {
    "export": "export WEIGHTS -o out",
    "inspect": "inspect WEIGHTS",
    "calibrate": "calibrate WEIGHTS --data IO -o out.json",
    "bench": "bench WEIGHTS -o out",
    "adapter": "export code:build -o out",
    "studies": "bench WEIGHTS -o out",
    "tune": "tune WEIGHTS --data IO -o out",
    "specialise": "specialise WEIGHTS --data IO",
}

OF_PLUGINS = ("adapter", "studies", "tune", "specialise")


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(name, marks=[pytest.mark.plugins] if name in OF_PLUGINS else [])
        for name in TYPED
    ],
)
def test_a_value_that_no_model_makes_right_is_refused_without_pytorch(
    command: str, tmp_path: Path
) -> None:
    for name, text in {
        "notes.txt": "mine",
        "broken.json": "{not json",
        "list.json": "[1]",
        "broken.npz": "no archive",
        "code.py": CODE,
    }.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.iterdir())
    places = {"WEIGHTS": str(WEIGHTS), "IO": str(WEIGHTS.with_name("io.npz"))}
    typed = [
        [places.get(word, word) for word in f"{TYPED[command]} {options}".split()]
        for options in REFUSED[command]
    ]
    done = subprocess.run(
        [sys.executable, "-c", IN_TURN],
        input=json.dumps(typed),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    for (options, words), (code, said, loaded) in zip(REFUSED[command].items(), found, strict=True):
        assert code in (1, 2), options
        error, _, hint = said.partition("\nhint: ")
        assert words in error, options
        assert hint, options
        assert not loaded, options
    assert [file for file in sorted(tmp_path.iterdir()) if file.name != "__pycache__"] == before


def test_a_module_that_makes_its_names_while_it_runs_is_not_refused_by_its_text(
    tmp_path: Path,
) -> None:
    (tmp_path / "made.py").write_text("globals()['build'] = 1\n")
    (tmp_path / "stars.py").write_text("from made import *\n")
    (tmp_path / "plain.py").write_text("if True:\n    from made import build\n")
    program = "from moexport.data.typed_code import check_code\n" + "\n".join(
        f"check_code('{module}:build')" for module in ("made", "stars", "plain")
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
