"""Compiles one engine in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...common.progress import Progress
from .backends import Flavour
from .build import Circumstances, ended, explained, killed
from .device import first_gpu
from .engines_worker import PER_MILLE
from .options import EngineOptions
from .profiles import Profile

WORKER = "moexport.exporter.tensorrt.engines_worker"
GRACE_S = 5.0
"""How long a build that is to stop may take to stop by itself."""


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
        facts = _checked(
            answer, Circumstances(graph, flavour, options, profiles, bool(request["gpu"]))
        )
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


def _checked(answer: Answer, about: Circumstances) -> Mapping[str, Any]:
    """The facts of a build that went well; otherwise an `EngineError` that says what to do."""
    if answer.event.get("event") == "built" and answer.status == 0:
        return answer.event
    if answer.event.get("event") == "failed":
        raise explained(answer.event["lines"], about)
    if answer.status == -signal.SIGKILL:
        raise killed(about)
    raise ended(answer.status, answer.printed.splitlines(), about)
