"""Compiles a graph to an engine in a separate process, and explains failures.

Two kinds of memory can run out, with different remedies. The machine's memory holds several copies
of the weights and little else, which no build option changes (`docs/engines.md`). The GPU's memory
is used by the kernels that TensorRT tries for the largest sizes of the profiles, with as much
scratch memory as the workspace allows.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...common.console import Progress
from ...common.documents import from_data
from ...common.environment import memory_bytes, python_environment
from ...common.text import size
from ...errors import EngineError
from . import cuda
from .records import EnginePlan
from .worker import PER_MILLE, Compiled

WORKER = "moexport.exporter.tensorrt.worker"

GRACE_S = 5.0
"""How long a cancelled build may take to stop by itself."""


def build_engine(
    plan: EnginePlan, bundle: Path, output: Path, progress: Progress, model: Path | None = None
) -> Compiled:
    """Compiles a graph of a bundle to the file `output`; returns the facts of the build.

    `model` is a rewritten graph to compile instead, with the same weights file. Raises
    `EngineError` if the graph cannot be compiled. An interrupt cancels the build. Neither failure
    leaves a file behind.
    """
    options = {name: getattr(plan.options, name) for name in plan.options.changed()}
    for name in ("profiles", "compute_capabilities"):
        options.pop(name, None)
    if "timing_cache" in options:
        options["timing_cache"] = str(Path(options["timing_cache"]).absolute())
    request = {
        "flavour": plan.backend.name,
        "graph": str((bundle / plan.graph).absolute()),
        "model": None if model is None else str(model.absolute()),
        "output": str(output.absolute()),
        "profiles": [profile.as_json() for profile in plan.profiles],
        "cards": list(plan.cards),
        "options": options,
        "gpu": plan.on_gpu,
    }
    progress.step(f"compiling {output.name} with {plan.backend.title}", total=PER_MILLE)
    with ExitStack() as unfinished:
        unfinished.callback(output.unlink, missing_ok=True)
        event, status, printed = _run(request, progress)
        if event.get("event") == "built" and status == 0:
            compiled = from_data(Compiled, event, WORKER)
            unfinished.pop_all()
            return compiled
    if event.get("event") == "failed":
        raise build_failed(event["lines"], plan)
    if sys.platform != "win32" and status == -signal.SIGKILL:
        raise build_killed(plan)
    raise build_ended(status, printed.splitlines(), plan)


def _run(request: Mapping[str, Any], progress: Progress) -> tuple[dict[str, Any], int, str]:
    """Runs the worker; returns its last event, its exit status and its output."""
    event: dict[str, Any] = {}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as printed:
        process = subprocess.Popen(
            [sys.executable, "-m", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=printed,
            text=True,
            env=python_environment(),
            start_new_session=True,  # Ctrl-C reaches only this process, which stops the worker
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            with process.stdin as stdin:
                stdin.write(json.dumps(request) + "\n")
            reported = 0
            for line in process.stdout:
                event = json.loads(line)
                if event["event"] == "step":
                    progress.advance(event["done"] - reported)
                    reported = event["done"]
            status = process.wait()
        except BrokenPipeError:  # the worker ended before it read the request; see its status
            status = process.wait()
        finally:
            _stop(process)
        printed.seek(0)
        return event, status, printed.read()


def _stop(process: subprocess.Popen[str]) -> None:
    """Ends a running worker, first with a signal that lets the builder cancel cleanly."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.stdout is not None:
        process.stdout.close()


DEFAULT_LEVEL = 3
"""TensorRT's default optimisation level (`IBuilderConfig.builder_optimization_level`)."""


def build_failed(lines: Sequence[str], plan: EnginePlan) -> EngineError:
    """Returns the error for a failed build from the messages of TensorRT and Polygraphy."""
    title = plan.backend.title
    reported = [line for line in lines if "Invalid Engine. Please ensure" not in line] or list(
        lines
    )
    found = explanation(reported, plan)
    if found is not None:
        line, entry = found
        hint = entry.hint if isinstance(entry.hint, str) else entry.hint(plan)
        return EngineError(f"{title}: {entry.meaning}: {_short(line)}", hint=hint)
    first = _short(reported[0]) if reported else "no reason was given"
    return EngineError(
        f"{title} cannot compile the graph: {first}",
        hint="try another --lowering; --verbose shows all messages",
    )


def explanation(lines: Sequence[str], plan: EnginePlan) -> tuple[str, Explanation] | None:
    """Returns the first known message and its explanation; None if no message is known."""
    for entry in EXPLANATIONS:
        if entry.on_gpu is None or entry.on_gpu == plan.on_gpu:
            for line in lines:
                if re.search(entry.words, line):
                    return line, entry
    return None


def build_ended(status: int, printed: Sequence[str], plan: EnginePlan) -> EngineError:
    reported = [line.strip() for line in printed if line.strip()]
    if explanation(reported, plan) is not None:
        return build_failed(reported, plan)
    return EngineError(
        f"{plan.backend.title}: the build ended with status {status}"
        + (f": {_short(reported[-1])}" if reported else ""),
        hint="--verbose shows more; another --lowering may avoid a crash inside TensorRT",
    )


def build_killed(plan: EnginePlan) -> EngineError:
    """Returns the error for a build that the system killed, usually for lack of memory."""
    return EngineError(
        f"{plan.backend.title}: the system killed the build, as it does when memory runs out "
        f"(this machine has {size(memory_bytes())})",
        hint=less_host_memory(plan),
    )


def less_host_memory(plan: EnginePlan) -> str:
    several, elsewhere = (
        ("about three", "build on a machine with more memory, which needs no GPU")
        if plan.backend.builds_without_gpu
        else ("several", "close other programs, or give the machine more memory")
    )
    return (
        f"a build needs {several} times the weights ({size(plan.weights_bytes)}) and 0.3 GB: "
        f"export with --precision fp16, which halves them; {elsewhere}; --workspace and the "
        "profile make little difference"
    )


def less_gpu_memory(plan: EnginePlan) -> str:
    """Returns advice for a build with less GPU memory, including the current settings."""
    workspace = plan.options.workspace
    level = plan.options.optimization_level
    largest = "; ".join("×".join(map(str, profile.max)) for profile in plan.profiles)
    return (
        f"lower --workspace (now {'all of the GPU' if workspace is None else size(workspace)}), "
        f"the profile's MAX (now {largest or 'as exported'}) or --optimization-level (now "
        f"{DEFAULT_LEVEL if level is None else level}); export with --lowering conditional, which "
        "copies no weights, or --precision fp16; close other programs that use the GPU (nvidia-smi)"
    )


def more_workspace(plan: EnginePlan) -> str:
    workspace = plan.options.workspace
    if workspace is None:
        return "lower the profile's MAX, or export with --lowering conditional or --precision fp16"
    return f"raise --workspace ({size(workspace)}), or leave it out"


def _short(line: str) -> str:
    return line if len(line) <= 300 else line[:299] + "…"


@dataclass(frozen=True, slots=True)
class Explanation:
    """A pattern of failure messages, with their meaning and a remedy.

    `on_gpu` restricts the pattern to builds with a GPU (True) or without one (False).
    """

    words: str
    meaning: str
    hint: str | Callable[[EnginePlan], str]
    on_gpu: bool | None = None


OUT_OF_MEMORY = r"[Oo]ut ?[Oo]f ?[Mm]emory"

EXPLANATIONS = (
    # Our own messages come first: TensorRT has often reported another error before.
    Explanation(
        r"OptionNotAppliedError: timing_cache",
        "the timing cache cannot be used, and was left unchanged",
        "name a new file with --timing-cache, which the build will create, or remove this one",
    ),
    Explanation(r"OptionNotAppliedError", "an option was not applied", "leave this option out"),
    Explanation(
        r"bad_alloc|MemoryError|Cannot allocate memory|LLVM ERROR: out of memory",
        "the machine's memory ran out",
        less_host_memory,
    ),
    Explanation(OUT_OF_MEMORY, "the machine's memory ran out", less_host_memory, on_gpu=False),
    Explanation(
        r"Resource temporarily unavailable",
        "a thread could not be started: memory ran out, or the number of processes is limited",
        less_host_memory,
    ),
    # TensorRT skips kernels that need too much memory, and fails if none is left. Its last message
    # is then about the workspace, which is the whole GPU if it has no limit.
    Explanation(
        OUT_OF_MEMORY + r"|cudaErrorMemory|GPU memory|[Ii]nsufficient (device |GPU )?memory",
        "the GPU's memory ran out",
        less_gpu_memory,
    ),
    Explanation(
        r"within workspace limit|insufficient workspace",
        "the workspace is too small",
        more_workspace,
    ),
    Explanation(
        r"No space left on device|Disk quota exceeded",
        "the disk has no space for the engine",
        "free some space on the bundle's disk; an engine is about as large as the weights",
    ),
    Explanation(
        r"FP32 GEMM is not supported|check_turing_op_compatibility",
        "this graph does not compile for compute capability 7.5",
        "leave 7.5 out of --compute-capability: a router computes in FP32 in every precision, "
        "which TensorRT-RTX does not support on these cards; ONNX Runtime runs the graph on them",
    ),
    Explanation(
        r"HW-specific datatypes",
        "one of the cards does not support a type in the graph",
        "leave this card out of --compute-capability (BF16 needs 8.0, FP8 8.9 or newer), or export "
        "in another --precision",
    ),
    Explanation(
        r"libnvinfer_lean|lean runtime",
        "the lean runtime, which version-compatible engines need, is not installed",
        "install it with TensorRT, or leave --version-compatible out",
    ),
    Explanation(
        r"driver version is insufficient|no CUDA-capable device|CUDA initialization failure",
        "there is no NVIDIA GPU, or its driver is too old",
        "build on the machine that will run the engine; `moexport doctor` shows what is installed; "
        + cuda.NEEDED,
    ),
    Explanation(
        r"No importer registered|UNSUPPORTED_NODE|[Cc]ould not parse ONNX|Failed to parse ONNX",
        "its ONNX importer refused the graph",
        "export with the --target of the engine",
    ),
)
