"""How every command behaves: quick help, an example, results on stdout and the rest on stderr."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from shlex import split

import numpy as np
import pytest
from moexport import cli, errors
from moexport.commands.program import declared_command
from moexport.tests.command import PROGRAM, run, run_program, start
from moexport.tests.recorded import DATA
from moexport.tests.terminal import Screen

COMMANDS = [
    "inspect",
    "adapt",
    "export",
    "build",
    "calibrate",
    "verify",
    "run",
    "generate",
    "serve",
    "triton",
    "bench",
    "specialise",
    "tune",
    "report",
    "demo",
    "doctor",
]
LAYER = DATA / "soft_moe_fkodom" / "weights.pt"
SET = ("--set", "version=0.2.0")

HEAVY = {"torch", "onnx", "onnx_ir", "onnxscript", "onnxruntime", "numpy", "vl_convert", "sklearn"}


def printed(before: str, code: str) -> str:
    """What a process of its own that runs the code prints after a word that begins a line."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(before)]
    return line.removeprefix(before)


def test_help_does_little_beside_loading_its_parser() -> None:
    code = (
        "import sys, typer.core, importlib.metadata\n"
        "calls = []\n"
        "sys.setprofile(lambda frame, event, _: event == 'call' and calls.append(event))\n"
        "from moexport.__main__ import main\n"
        "sys.argv = ['moexport', '--help']\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "sys.setprofile(None)\n"
        "print('calls:', len(calls))\n"
    )
    # Counted, not timed (`python -m perf startup` does that): loading Typer takes 45,000.
    assert int(printed("calls:", code)) < 15_000


def test_help_lists_every_command() -> None:
    listed = run("--help").out.partition("Commands:")[2].splitlines()
    assert sorted(line.split()[0] for line in listed if line[2:3].isalpha()) == sorted(COMMANDS)


@pytest.mark.parametrize("arguments", [["--help"], ["export", "--help"], ["export", "--k", "0"]])
def test_help_and_the_parser_import_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from moexport.__main__ import main\n"
        f"sys.argv = ['moexport', *{arguments!r}]\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print('modules:', *sorted({name.split('.')[0] for name in sys.modules}))\n"
    )
    assert HEAVY.isdisjoint(printed("modules:", code).split())


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_every_command_has_help_with_an_example(command: str, flag: str) -> None:
    outcome = run(command, flag)
    assert (outcome.code, outcome.err) == (0, "")
    assert f"Example: moexport {command}" in outcome.out
    assert "--verbose" in outcome.out
    assert "--quiet" in outcome.out


@pytest.mark.parametrize("command", sorted({*COMMANDS} - {"demo", "doctor"}))
def test_every_example_that_needs_files_is_understood_by_the_parser(
    command: str, tmp_path: Path
) -> None:
    text = " ".join(run(command, "--help").out.split())
    _, _, rest = text.partition("Example: moexport ")
    words = [str(tmp_path / w) if "." in w and w[0].isalpha() else w for w in split(rest)]
    outcome = run(*words)
    # Its files are not here: it ends with that (1), not with what the parser does not know (2).
    assert outcome.code == (2 if "no module named mynet" in outcome.error else 1)
    assert "option" not in outcome.error


def test_the_version_is_that_of_the_package() -> None:
    outcome = run("--version")
    assert (outcome.code, outcome.out, outcome.err) == (0, f"moexport {version('moexport')}\n", "")


def headings(lines: Sequence[str]) -> list[str]:
    found = [line for line in lines if re.fullmatch(r"[A-Z][A-Za-z ]+:", line)]
    return [heading.rstrip(":") for heading in found]


def test_the_help_of_a_command_with_many_options_has_sections_and_fits_two_screens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    lines = run("export", "--help").out.splitlines()
    assert headings(lines) == [
        *("Arguments", "Reading MODEL", "Your own network", "Graph", "Precision"),
        *("Inputs and parity check", "Options"),
    ]
    assert len(lines) <= 80
    assert max(map(len, lines)) <= 100
    more = "--help-all shows further options: Numbers (4), Edits (3), Text (1), Engines (10)"
    assert any(line.startswith(more) for line in lines)
    most = max(text.count("\n  -") for text in "\n".join(lines).split(":\n"))
    assert most <= 12


def test_help_all_leaves_out_no_option() -> None:
    lines = run("export", "--help-all").out.splitlines()
    last = ["Numbers", "Edits", "Text", "Engines", "Weights of engines", "Options"]
    assert headings(lines)[-6:] == last
    listed = {word for line in lines for word in re.findall(r"^  (?:-\w, )?(--[a-z-]+)", line)}
    names = declared_command(cli.COMMANDS["export"]).params
    assert len(listed) == len(names)  # --help takes the place of MODEL
    assert run("verify", "--help-all").out == run("verify", "--help").out


def test_verbosity_may_stand_before_the_command(tmp_path: Path) -> None:
    outcome = run("-q", "export", LAYER, *SET, "-o", tmp_path / "out")
    assert (outcome.code, outcome.err) == (0, "")
    outcome = run("--verbose", "verify", tmp_path)
    assert outcome.code == 1
    assert "Traceback" in outcome.err


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (("export", LAYER, "-o", "x", "--target", "cpu"), "'ort-cpu'"),
        (("export", LAYER, "-o", "x", "--target", "rtx"), "'tensorrt-rtx'"),
        (("export", LAYER, "-o", "x", "--precision", "FP-16"), "'fp16'"),
        (("export", LAYER, "-o", "x", "--lowering", "group"), "'grouped'"),
        (("export", LAYER, "-o", "x", "--method", "entropi"), "'entropy'"),
        (("export", LAYER, "-o", "x", "--family", "soft-moe-vitt"), "'soft-moe-vit'"),
        (("export", LAYER, "-o", "x", "--set", "versoin=0.2.0"), "'version'"),
        (("export", LAYER, "-o", "x", "--targe", "onnx"), "'--target'"),
        (("export", LAYER, "-o", "x", "--k", "25%"), "0.25"),
        (("export", LAYER, "-o", "x", "--k", "half"), "n/2"),
        (("export", LAYER, "-o", "x", "--k", "all"), "n"),
        (("exprot", LAYER), "'export'"),
        (("run", "b", "-i", "x", "-o", "y", "--provider", "gpu"), "'cpu'"),
        (("bench", LAYER, *SET, "-o", "x", "--engine", "onnx-runtime"), "'onnxruntime'"),
        (("bench", LAYER, *SET, "-o", "x", "--precision", "fp32,int"), "'int8'"),
        (("bench", LAYER, *SET, "-o", "x", "--analysis", "retension"), "'retention'"),
    ],
)
def test_what_may_have_been_meant_is_named(arguments: tuple[str, ...], meant: str) -> None:
    outcome = run(*arguments)
    assert outcome.code in (1, 2)
    assert outcome.hint.startswith(f"did you mean {meant}? ")


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("google/vit-base", "`hf download google/vit-base --local-dir vit-base`"),
        ("google/vit-base", "hf://google/vit-base"),
        ("models/vit.pt", "check the path"),
    ],
)
def test_a_name_on_hugging_face_is_told_as_a_url_and_as_a_download(source: str, what: str) -> None:
    outcome = run("inspect", source)
    assert outcome.code == 1
    assert f"{source}: no such file" in outcome.error
    assert what in outcome.hint


@pytest.mark.parametrize("page", ["", "/tree/main", "/blob/main/model.safetensors"])
def test_a_web_page_of_hugging_face_is_told_as_a_url_of_its_files(page: str) -> None:
    outcome = run("inspect", f"https://huggingface.co/google/vit-base{page}")
    assert outcome.code == 1
    assert "a web page of Hugging Face" in outcome.error
    assert "give hf://google/vit-base, or" in outcome.hint


def test_the_kinds_of_failure_have_codes_of_their_own() -> None:
    kinds = {"MoexportError": 1, "UsageError": 2, "CheckError": 3, "ParityError": 3}
    assert {name: getattr(errors, name).EXIT_CODE for name in kinds} == kinds
    assert "3 a check failed" in " ".join(run("--help").out.split())


def test_without_arguments_the_help_is_shown_and_the_exit_code_is_that_of_bad_usage() -> None:
    outcome = run()
    assert (outcome.code, outcome.out) == (2, "")
    assert "Usage: moexport" in outcome.err


def test_results_go_to_stdout_and_the_rest_to_stderr(tmp_path: Path) -> None:
    outcome = run("export", LAYER, *SET, "-o", tmp_path / "out", "--k", "2")
    assert outcome.code == 0
    (line,) = outcome.out.splitlines()
    assert line.startswith(f"{tmp_path / 'out'}: model.onnx, parity")
    assert ", parity.npz, weights.bin, README.md (" in line
    for word in ("loading", "tracing", "writing", "checking", "k = 2 of 6", "max |difference|"):
        assert word in outcome.err


def test_quiet_leaves_the_result_alone(tmp_path: Path) -> None:
    outcome = run("export", LAYER, *SET, "-o", tmp_path / "out", "-q")
    assert (outcome.code, outcome.err) == (0, "")
    assert len(outcome.out.splitlines()) == 1
    np.savez(tmp_path / "x.npz", input=np.zeros((2, 5, 24), np.float32))
    files = ("-i", tmp_path / "x.npz", "-o", tmp_path / "y.npz")
    outcome = run("run", tmp_path / "out", *files, "--quiet")
    assert (outcome.code, outcome.out, outcome.err) == (0, "", "")
    outcome = run("inspect", LAYER, *SET, "-q")
    assert outcome.err == ""
    assert "experts n" in outcome.out


def test_json_is_all_that_stdout_holds(tmp_path: Path) -> None:
    out = tmp_path / "out"
    inspected = json.loads(run("inspect", LAYER, *SET, "--json").out)
    assert inspected["family"] == "soft-moe-fkodom"
    assert [cost["k"] for cost in inspected["costs"]] == ["n = 6", "n/2 = 3", "n/4 = 2"]
    planned = json.loads(run("export", LAYER, *SET, "-o", out, "--dry-run", "--json").out)
    assert sorted(planned) == ["files", "graphs", "output"]
    written = json.loads(run("export", LAYER, *SET, "-o", out, "--json").out)
    assert written == json.loads((out / "manifest.json").read_text())
    assert json.loads(run("verify", out, "--json").out)["passed"] is True
    np.savez(tmp_path / "x.npz", input=np.zeros((2, 5, 24), np.float32))
    files = ("-i", tmp_path / "x.npz", "-o", tmp_path / "y.npz")
    ran = json.loads(run("run", out, *files, "--json").out)
    assert ran == {"output": str(tmp_path / "y.npz"), "shape": [2, 5, 20], "not_finite": 0}
    diagnosis = json.loads(run("doctor", "--json").out)
    assert {ability["name"] for ability in diagnosis["abilities"]} >= {"export to ONNX"}


def test_doctor_says_yes_or_no_and_why() -> None:
    outcome = run("doctor")
    assert (outcome.code, outcome.err) == (0, "")
    rows = [line for line in outcome.out.splitlines() if line.startswith(("yes", "no "))]
    assert len(rows) >= 5
    assert any("run on CPU" in row and row.startswith("yes") for row in rows)


@pytest.mark.slow
def test_a_reader_that_leaves_early_gets_no_traceback() -> None:
    shell = f"'{sys.executable}' -m moexport doctor | head -c 3"
    done = subprocess.run(
        ["bash", "-c", shell], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout == "   "
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


def test_the_program_ends_with_the_code_of_the_error(tmp_path: Path) -> None:
    outcome = run_program("verify", tmp_path)
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.error.endswith("not a bundle (there is no manifest.json)")
    assert outcome.hint
    outcome = run_program("export", LAYER, "-o", tmp_path / "out", "--k", "0")
    assert (outcome.code, outcome.out) == (2, "")
    assert "Traceback" not in outcome.err


def test_a_full_disk_behind_stdout_is_an_error_in_words() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    shell = f"'{sys.executable}' -m moexport doctor --json > /dev/full"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "cannot be written: No space left on device" in done.stderr
    assert "defect" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [("doctor",), ("export", "--help"), ("inspect", LAYER, *SET)])
def test_a_reader_that_has_enough_ends_the_program_quietly(arguments: tuple[object, ...]) -> None:
    command = shlex.join(map(str, (*PROGRAM, *arguments)))
    shell = f"{command} | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False)
    assert done.stdout == "0\n"
    assert [line for line in done.stderr.splitlines() if not line.startswith("moexport: ")] == []


def test_a_bundle_that_is_not_there_is_said_to_be_no_folder(tmp_path: Path) -> None:
    for command in ("verify", "build"):
        outcome = run(command, tmp_path / "nothere")
        assert outcome.code == 1
        assert outcome.error == f"{tmp_path / 'nothere'}: there is no such folder"


def test_an_input_that_does_not_exist_is_said_before_what_is_not_measured(tmp_path: Path) -> None:
    for data in ("nothere.npz", "nothere"):
        outcome = run("bench", LAYER, *SET, "-o", tmp_path / "out", "--data", tmp_path / data)
        assert outcome.code == 1
        assert f"{tmp_path / data}: no such" in outcome.error
        assert "not measured" not in outcome.err


@pytest.mark.slow
def test_an_interrupted_benchmark_says_that_the_same_command_goes_on(tmp_path: Path) -> None:
    asked = ("bench", LAYER, *SET, "-o", "out", "--engine", "onnxruntime", "--rounds", "500")
    process = start(*asked, cwd=tmp_path)
    assert process.stderr is not None
    for line in process.stderr:
        if ": timing: " in line:
            break
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "hint: run the same command again to continue where it stopped" in err.splitlines()


def test_why_a_lowering_was_chosen_is_for_who_asks(tmp_path: Path) -> None:
    short = run("export", LAYER, *SET, "-o", tmp_path / "a", "--k", "2", "--no-verify")
    long = run("export", LAYER, *SET, "-o", tmp_path / "b", "--k", "2", "--no-verify", "-v")
    assert re.search(r"^note: layer: k = 2 of \d+, \w+$", short.err, re.MULTILINE)
    assert "predicted" not in short.err
    assert re.search(r"^note: layer: \w+: predicted .* \(others: ", long.err, re.MULTILINE)


@pytest.mark.skipif(sys.platform == "win32", reason="a terminal as Linux and macOS have it")
def test_an_error_on_a_terminal_is_all_that_stays(tmp_path: Path) -> None:
    import pty

    master, slave = pty.openpty()
    data = tmp_path / "x.npz"
    np.savez(data, input=np.zeros((2, 3), np.float32))
    command = [*PROGRAM, "export", LAYER, *SET, "-o", tmp_path / "out", "--data", data]
    seen = b""
    with subprocess.Popen(
        [*map(str, command)],
        stderr=slave,
        stdout=subprocess.DEVNULL,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "200"},
    ) as process:
        os.close(slave)
        with contextlib.suppress(OSError):  # what Linux makes of a terminal that nobody writes to
            while part := os.read(master, 4096):
                seen += part
    os.close(master)
    lines = Screen(seen.decode()).lines
    assert process.returncode == 1
    assert [line.partition(":")[0] for line in lines] == ["error", "hint"]


def test_a_program_without_stderr_works(tmp_path: Path) -> None:
    shell = f"'{sys.executable}' -m moexport export '{LAYER}' --k 9 {' '.join(SET)} -o x 2>&-"
    done = subprocess.run(
        ["bash", "-c", shell], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")


def test_an_interrupt_while_the_parser_loads_is_no_traceback() -> None:
    code = (
        "import sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'typer': raise KeyboardInterrupt\n"
        "from moexport.__main__ import main\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 130
    assert done.stderr == "error: interrupted; no partial files remain\n"


@pytest.mark.skipif(sys.platform == "win32", reason="sends signals as Unix does")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_an_interrupt_while_a_model_is_traced_is_reported_as_one(name: str, tmp_path: Path) -> None:
    """PyTorch's tracer swallows what interrupts its imports, and fails on what it lacks then."""
    code = (
        "import os, signal, sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, module, *_):\n"
        "        if module == 'torch._dynamo.exc':\n"
        f"            os.kill(os.getpid(), signal.{name})\n"
        "from moexport.__main__ import main\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "main()\n"
    )
    arguments = ("export", LAYER, *SET, "-q", "-o", tmp_path / "out")
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    # Python ends by the signal where an interrupt came out of the `exec` that makes dataclasses.
    assert done.returncode in (130, -signal.SIGINT)
    assert done.stderr == "error: interrupted; no partial files remain\n"
    assert [*tmp_path.iterdir()] == []


@pytest.mark.skipif(sys.platform == "win32", reason="sends signals as Unix does")
def test_a_hangup_that_is_ignored_ends_no_command() -> None:
    code = (
        "import os, signal, sys\n"
        "from moexport.__main__ import main\n"
        "from moexport.bench import engines\n"
        "real = engines.doctor\n"
        "def hung_up():\n"
        "    os.kill(os.getpid(), signal.SIGHUP)\n"
        "    return real()\n"
        "engines.doctor = hung_up\n"
        "main()\n"
    )
    shell = f"trap '' HUP; exec {shlex.join([sys.executable, '-c', code, 'doctor'])}"  # as nohup
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_command_that_a_report_shows_can_be_typed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    typed = ["moexport", "bench", "my models/vit.pt", "--k", "n,0.5", "--data", "größe.npz"]
    monkeypatch.setattr(sys, "argv", typed)
    from moexport.commands.options import command_line

    assert shlex.split(command_line()) == typed


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
def test_memory_that_runs_out_while_libraries_load_is_no_defect() -> None:
    command = shlex.join([*PROGRAM, "inspect", __file__])
    done = subprocess.run(
        ["bash", "-c", f"ulimit -v 350000; exec {command}"],  # kB; PyTorch alone maps more
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: the machine's memory ran out (ImportError: ")
    assert "hint: " in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
@pytest.mark.parametrize("megabytes", [680, 765, 820, 850])
def test_an_export_without_enough_memory_reports_it_and_leaves_nothing(
    megabytes: int, tmp_path: Path
) -> None:
    layer = str(DATA / "soft_moe_fkodom" / "weights.pt")
    command = shlex.join([*PROGRAM, "export", layer, "--set", "version=0.2.0", "-q", "-o", "out"])
    done = subprocess.run(
        ["bash", "-c", f"ulimit -v {megabytes}000; exec {command}"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    whole = ["out"] if done.returncode == 0 else []
    assert [path.name for path in tmp_path.iterdir()] == whole
    if done.returncode == -signal.SIGABRT or ": ABORT" in done.stderr:
        pytest.skip("a library's own start ended the process, before Python could say anything")
    # onnx prints that a schema failed before it raises: what moexport says comes after that.
    said = re.sub(r"\A(Schema error: std::bad_alloc\n)+", "", done.stderr)
    assert done.returncode == 0 or said.startswith("error: the machine's memory ran out (")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "module", ["bundle.bundle", "tensorrt.engines", "session", "bundle.parity"]
)
def test_what_runs_and_builds_a_bundle_needs_no_pytorch(module: str) -> None:
    code = f"import sys, moexport.exporter.{module}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
