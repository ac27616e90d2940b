"""Compiles one engine in a process of its own, and says in the user's words what went wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import EngineError
from ..environment import memory_bytes
from ..progress import Progress
from .device import first_gpu
from .flavours import Flavour
from .options import EngineOptions
from .profiles import Profile
from .worker import PER_MILLE

WORKER = "moexport.exporter.engines.worker"
GRACE_S = 5.0
"""How long a build that is to stop may take to stop by itself."""

LOWER = (
    "lower the largest sizes of the profile (--batch, --tokens, --profile), --optimization-level "
    "or --workspace; --precision fp16 halves the weights; one --lowering at a time needs less"
)


@dataclass(frozen=True, slots=True)
class Built:
    """A compiled engine: where it lies and what was read back from the build."""

    path: Path
    version: str
    settings: Mapping[str, Any]
    layers: Sequence[Mapping[str, str]]
    precision: Mapping[str, int]
    inspector: Mapping[str, Any] | None
    seconds: float
    peak_memory_bytes: int


def build_engine(
    graph: Path,
    flavour: Flavour,
    profiles: Sequence[Profile],
    options: EngineOptions,
    cards: Sequence[str],
    output: Path,
    progress: Progress,
) -> Built:
    """Compiles `graph` into the file `output` and returns what was read back.

    Raises `EngineError` when it cannot be compiled; the file is not there then. An interrupt
    cancels the build and leaves nothing behind either.
    """
    request = {
        "flavour": flavour.name,
        "graph": str(graph.absolute()),
        "output": str(output.absolute()),
        "profiles": [each.as_json() for each in profiles],
        "compute_capabilities": list(cards),
        "options": _worker_options(options),
        "gpu": first_gpu() is not None,
    }
    progress.step(f"compiling {output.name} with {flavour.title}", total=PER_MILLE)
    done = False
    try:
        answer = _run(request, progress)
        facts = _checked(answer, flavour, options)
        done = True
    finally:
        if not done:
            output.unlink(missing_ok=True)
    return Built(
        path=output,
        version=facts["version"],
        settings=facts["settings"],
        layers=facts["layers"],
        precision=facts["precision"],
        inspector=facts["inspector"],
        seconds=facts["seconds"],
        peak_memory_bytes=facts["peak_memory_bytes"],
    )


def _worker_options(options: EngineOptions) -> dict[str, Any]:
    content = {name: getattr(options, name) for name in options.asked()}
    content.pop("profiles", None)
    content.pop("compute_capabilities", None)
    if "timing_cache" in content:
        content["timing_cache"] = str(Path(content["timing_cache"]).absolute())
    return content


@dataclass(frozen=True, slots=True)
class Answer:
    """How the worker ended: its last event, its exit status and the end of what it printed."""

    event: Mapping[str, Any]
    status: int
    printed: str


def _run(request: Mapping[str, Any], progress: Progress) -> Answer:
    """Starts the worker, follows its events and returns how it ended."""
    path = os.pathsep.join(each for each in sys.path if each)
    last: dict[str, Any] = {}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as printed:
        process = subprocess.Popen(
            [sys.executable, "-m", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=printed,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # a Ctrl-C reaches this process, which stops that one
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            with process.stdin as stdin:
                stdin.write(json.dumps(request) + "\n")
            said = 0
            for line in process.stdout:
                last = json.loads(line)
                if last["event"] == "step":
                    progress.advance(last["done"] - said)
                    said = last["done"]
            status = process.wait()
        except BrokenPipeError:  # it ended before it read the request; its status says how
            status = process.wait()
        finally:
            _stop(process)
        printed.seek(0)
        return Answer(last, status, printed.read())


def _stop(process: subprocess.Popen[str]) -> None:
    """Ends a worker that is still running: asks first, since the builder can cancel cleanly."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _checked(answer: Answer, flavour: Flavour, options: EngineOptions) -> Mapping[str, Any]:
    """The facts of a build that went well; otherwise an `EngineError` that says what to do."""
    if answer.event.get("event") == "built" and answer.status == 0:
        return answer.event
    if answer.event.get("event") == "failed":
        raise explained(answer.event["lines"], flavour, options)
    if answer.status == -signal.SIGKILL:
        raise EngineError(
            f"{flavour.title}: the build was killed, as the system does when memory runs out "
            f"({_memory()})",
            hint=LOWER,
        )
    end = [line for line in answer.printed.splitlines() if line.strip()][-1:]
    raise EngineError(
        f"{flavour.title}: the build ended with status {answer.status}"
        + (f": {end[0].strip()}" if end else ""),
        hint="--verbose shows more; a crash inside TensorRT may go with another --lowering",
    )


def _memory() -> str:
    total = memory_bytes()
    return "its size is not known" if total is None else f"this machine has {total / 1e9:.0f} GB"


@dataclass(frozen=True, slots=True)
class Explanation:
    """Words by which a failure is known, what it means and what to do."""

    words: str
    meaning: str
    hint: str


EXPLANATIONS = (
    Explanation(r"within workspace limit", "the workspace is too small", "raise --workspace"),
    Explanation(
        r"FP32 GEMM is not supported|check_turing_op_compatibility",
        "compute capability 7.5 does not compile this graph",
        "leave 7.5 out of --compute-capability, or export with --precision fp16",
    ),
    Explanation(
        r"[Oo]ut ?[Oo]f ?[Mm]emory|bad_alloc|insufficient memory|MemoryError|cudaErrorMemory",
        "memory ran out",
        LOWER,
    ),
    Explanation(
        r"libnvinfer_lean|lean runtime",
        "the lean runtime, which version-compatible engines need, is not installed",
        "install it beside TensorRT, or leave --version-compatible out",
    ),
    Explanation(
        r"driver version is insufficient|no CUDA-capable device|CUDA initialization failure",
        "there is no NVIDIA GPU, or its driver is too old",
        "build on the machine that will run the engine; `moexport doctor` says what is here",
    ),
    Explanation(
        r"DishonouredError",
        "it did not take over what was asked",
        "leave that option out",
    ),
    Explanation(
        r"No importer registered|UNSUPPORTED_NODE|[Cc]ould not parse ONNX|Failed to parse ONNX",
        "its ONNX importer refused the graph",
        "export with the --target that the engine is for",
    ),
)


def explained(lines: Sequence[str], flavour: Flavour, options: EngineOptions) -> EngineError:
    """Returns the error for a failed build, from what TensorRT and Polygraphy reported."""
    del options
    said = [line for line in lines if "Invalid Engine. Please ensure" not in line] or list(lines)
    for each in EXPLANATIONS:
        for line in said:
            if re.search(each.words, line):
                return EngineError(
                    f"{flavour.title}: {each.meaning}: {_short(line)}", hint=each.hint
                )
    first = _short(said[0]) if said else "it did not say why"
    return EngineError(
        f"{flavour.title} cannot compile the graph: {first}",
        hint="another --lowering may compile; --verbose shows everything it said",
    )


def _short(line: str, most: int = 300) -> str:
    return line if len(line) <= most else line[: most - 1] + "…"
