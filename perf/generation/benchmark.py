"""Time to the first token and tokens per second of a bundle in GenAI, compared with other engines.

Speed is measured on Qwen3-MoE models with random weights, quality on the demo's small Mixtral. All
engines are open at once and take turns; llama.cpp and OpenVINO GenAI only if they are installed.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import torch
from moexport.common.console import Progress
from moexport.common.environment import usable_cores, versions
from moexport.common.text import markdown
from moexport.exporter.export import write_bundle
from moexport.exporter.job import export_job
from moexport.exporter.options import ExportOptions
from moexport.exporter.trace import trace
from moexport.plugins.demo import experts as demo
from moexport.plugins.token_routed.load import transformers_library

from ..granite import save_random
from ..measure import measured_on
from .engines import CONVERTER, DISTRIBUTIONS, EngineName, EngineProcess, TextCase, missing
from .gguf_files import GGUFType, write_gguf

SHAPE: Mapping[str, Any] = {
    "vocab_size": 16_384,
    "hidden_size": 1024,
    "intermediate_size": 512,
    "moe_intermediate_size": 512,
    "num_experts": 32,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}

GGUF_TYPES: Mapping[str, GGUFType] = {"int8": "Q8_0", "int4": "Q4_0"}
"""The type of GGUF file to compare with each precision."""

PEERS: tuple[EngineName, ...] = ("llama.cpp", "openvino-genai")
"""Engines that are measured if they are installed."""

WIDTHS = {"hidden_size": 128, "intermediate_size": 128}
"""The widths of the model whose quality is measured: multiples of a large model's blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedCase:
    """The number of layers of a model, and its measurements.

    `graphs` are pairs of precision and k. `batches` are measured with prompts of the first context.
    """

    layers: int
    graphs: tuple[tuple[str, int], ...]
    batches: tuple[int, ...] = ()
    untouched: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSizes:
    """The measurements and their time: no part begins a round after its share of `minutes`."""

    shape: Mapping[str, Any] = field(default_factory=lambda: SHAPE)
    speed: tuple[SpeedCase, ...] = (
        SpeedCase(
            layers=8,
            graphs=(("fp32", 8), ("int8", 8), ("int4", 8), ("int8", 4), ("int4", 4), ("int4", 2)),
            batches=(4, 8),
            untouched=True,
        ),
        SpeedCase(layers=24, graphs=(("int8", 8), ("int4", 8))),
    )
    contexts: tuple[int, ...] = (128, 1024, 4096)
    new: int = 33
    rounds: int = 3
    steps: int = 4 * demo.STEPS
    ks: tuple[int, ...] = (4, 2, 1)
    windows: int = demo.TEST_WINDOWS
    minutes: float = 35.0


QUICK = GenerationSizes(
    shape={
        **SHAPE,
        **{"vocab_size": 512, "hidden_size": 64, "intermediate_size": 32},
        **{"moe_intermediate_size": 32, "head_dim": 32, "max_position_embeddings": 128},
        **{"num_attention_heads": 4, "num_key_value_heads": 2},
    },
    speed=(
        SpeedCase(layers=1, graphs=(("fp32", 8), ("int4", 2)), batches=(2,), untouched=True),
        SpeedCase(layers=2, graphs=(("int4", 8),)),
    ),
    contexts=(8, 40),
    new=3,
    rounds=1,
    steps=8,
    ks=(4, 1),
    windows=2,
)
"""A run that only tests the code; its figures mean nothing."""


def measure(progress: Progress, sizes: GenerationSizes = GenerationSizes()) -> dict[str, object]:
    """Returns speed by layers, context and batch, and the quality of each engine on one text."""
    transformers_library()
    began = time.monotonic()
    parts = len(sizes.speed)
    speed, threads = [], usable_cores()
    with tempfile.TemporaryDirectory(prefix="moexport-generation-") as folder:
        quality = measure_quality(Path(folder), progress, sizes, threads)
    for part, case in enumerate(sizes.speed, 1):
        # The quality, which was measured before, has the first share of the time.
        deadline = began + 60 * sizes.minutes * (part + 1) / (parts + 1)
        with tempfile.TemporaryDirectory(prefix="moexport-generation-") as folder:
            speed.append(measure_speed(Path(folder), progress, sizes, case, threads, deadline))
    peers = {name: missing(name) for name in PEERS}
    return {
        "speed": speed,
        "quality": quality,
        "shape": dict(sizes.shape),
        "threads": threads,
        "new": sizes.new,
        "engines": versions(DISTRIBUTIONS),
        "absent": {name: reason for name, reason in peers.items() if reason is not None},
        "minutes": (time.monotonic() - began) / 60,
    }


def measure_speed(
    folder: Path,
    progress: Progress,
    sizes: GenerationSizes,
    speed: SpeedCase,
    threads: int,
    deadline: float,
) -> dict[str, object]:
    """Returns the seconds of the first and of later tokens of one model in every engine."""
    library = transformers_library()
    progress.step(f"writing a Qwen3-MoE of {speed.layers} layers")
    with torch.device("meta"):
        config = library.Qwen3MoeConfig(num_hidden_layers=speed.layers, **sizes.shape)
        model = library.Qwen3MoeForCausalLM(config)
    parameters = save_random(model, folder / "model")
    cases = text_cases(folder, speed.graphs, progress, threads, untouched=speed.untouched)
    loads = [(1, context) for context in sizes.contexts]
    loads += [(batch, sizes.contexts[0]) for batch in speed.batches]
    random_ids = np.random.default_rng(0)
    prompts = {(b, m): random_ids.integers(0, sizes.shape["vocab_size"], (b, m)) for b, m in loads}
    with opened(cases, progress) as processes:
        rows = in_rounds(processes, prompts, sizes, deadline, progress)
    return {"layers": speed.layers, "parameters": parameters, "rows": rows}


def in_rounds(
    processes: Sequence[EngineProcess],
    prompts: Mapping[tuple[int, int], np.ndarray],
    sizes: GenerationSizes,
    deadline: float,
    progress: Progress,
) -> list[dict[str, object]]:
    """Returns a row per engine and load: the medians over the rounds in which they take turns.

    The longest prompts are computed only in the first round. Another round begins only if it would
    end before the deadline.
    """
    longest = max(prompts, key=lambda load: load[1])
    turns = [(process, load) for process in processes for load in prompts]
    later_turns = [(process, load) for process, load in turns if load != longest]
    seconds: dict[tuple[int, tuple[int, int]], list[tuple[float, float]]] = {}
    order = random.Random(0)
    for process in processes:
        process.seconds(next(iter(prompts.values()))[:, :8], 3)  # warm
    for number in range(1, sizes.rounds + 1):
        progress.step(f"round {number} of {sizes.rounds}")
        listed, repeated = (turns if number == 1 else later_turns), 0.0
        order.shuffle(listed)
        for process, load in listed:
            began = time.monotonic()
            first, *further = process.seconds(prompts[load], sizes.new)
            repeated += 0.0 if load == longest else time.monotonic() - began
            key = (processes.index(process), load)
            seconds.setdefault(key, []).append((first, statistics.median(further)))
        if time.monotonic() + repeated > deadline:
            break
    return [
        {
            **_identity(process.case),
            "batch": batch,
            "context": context,
            "first_s": statistics.median(first for first, _ in rounds),
            "token_s": statistics.median(token for _, token in rounds),
            "rounds": rounds,
        }
        for (index, (batch, context)), rounds in sorted(seconds.items())
        for process in [processes[index]]
    ]


def measure_quality(
    folder: Path, progress: Progress, sizes: GenerationSizes, threads: int
) -> list[dict[str, object]]:
    """Returns a row per engine: its perplexity, and how often its top token equals PyTorch's."""
    demo.trained(folder, progress, steps=sizes.steps, config={**demo.CONFIG, **WIDTHS})
    (folder / demo.NAME).rename(folder / "model")
    windows = np.load(folder / "test.npz")["input_ids"][: sizes.windows]
    graphs = [(precision, k) for k in sizes.ks for precision in ("fp32", "int8", "int4")]
    cases = text_cases(folder, graphs, progress, threads, untouched=True)
    with opened(cases, progress) as processes:
        scores = {
            process: np.stack([process.logits(window[:-1]) for window in windows])
            for process in processes
        }
    best = next(iter(scores.values())).argmax(-1)  # the untouched model is the first
    return [
        {
            **_identity(process.case),
            "perplexity": perplexity(logits, windows[:, 1:]),
            "same_token": float((logits.argmax(-1) == best).mean()),
            "tokens": best.size,
        }
        for process, logits in scores.items()
    ]


def perplexity(logits: np.ndarray, targets: np.ndarray) -> float:
    """Returns the perplexity of targets [s, m] from scores [s, m, v], in float64."""
    scores = torch.from_numpy(logits.astype(np.float64)).flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(scores, torch.from_numpy(targets).flatten())
    return math.exp(float(loss))


def text_cases(
    folder: Path,
    graphs: Iterable[tuple[str, int]],
    progress: Progress,
    threads: int,
    *,
    untouched: bool,
) -> list[TextCase]:
    """Returns the model in `folder/model` for every engine, exported and converted next to it."""
    model = folder / "model"
    cases = []
    exported = list(exports(model, folder, graphs, progress))
    trained = max(k for _, k, _ in exported)
    if untouched:
        cases.append(TextCase("transformers", "fp32", trained, model, threads))
    cases += [TextCase("genai", precision, k, path, threads) for precision, k, path in exported]
    if missing("llama.cpp") is None:
        for kind in GGUF_TYPES.values():
            progress.step(f"converting to {kind}")
            file = folder / f"{kind}.gguf"
            write_gguf(model, file, kind)
            cases.append(TextCase("llama.cpp", kind, trained, file, threads))
    if missing("openvino-genai") is None:
        for precision in GGUF_TYPES:
            progress.step(f"converting to {precision} for OpenVINO")
            converted = folder / f"openvino-{precision}"
            convert_for_openvino(model, converted, precision)
            cases.append(TextCase("openvino-genai", precision, trained, converted, threads))
    return cases


def convert_for_openvino(model: Path, place: Path, precision: str) -> None:
    """Converts a transformers model for OpenVINO GenAI, with the converter's defaults."""
    options = ["--task", "text-generation-with-past", "--weight-format", precision]
    if precision == "int4":  # blocks of 128, and smaller ones for narrower matrices
        options += ["--group-size-fallback", "adjust"]
    command = (CONVERTER, "export", "openvino", "--model", str(model), *options, str(place))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{CONVERTER}: {done.stderr[-2000:]}")


def exports(
    folder: Path, place: Path, graphs: Iterable[tuple[str, int]], progress: Progress
) -> Iterator[tuple[str, int, Path]]:
    """Yields each precision and k with its bundle; the model is traced once per k."""
    model = moexport.load(folder)
    traced: dict[int, Any] = {}
    for precision, k in graphs:
        progress.step(f"exporting {precision} at k = {k}")
        bundle = place / f"{precision}-k{k}"
        integers = precision in GGUF_TYPES
        options = ExportOptions(
            k=k,
            target="ort-cpu",
            precision=precision,  # type: ignore[arg-type]
            quantize="all" if integers else "experts",
            verify=False,
            destination=bundle,
        )
        job = export_job(model, options)
        if k not in traced:
            traced[k] = trace(job.model, opset=options.least_opset, fixed=job.fixed)
        write_bundle(job, progress, traced[k])
        yield precision, k, bundle


@contextmanager
def opened(cases: Sequence[TextCase], progress: Progress) -> Iterator[list[EngineProcess]]:
    """Yields a process for each case."""
    processes: list[EngineProcess] = []
    try:
        for case in cases:
            progress.step(f"opening {case.engine}, {case.precision}, k = {case.k}")
            processes.append(EngineProcess(case))
        yield processes
    finally:
        for process in processes:
            process.close()


def _identity(case: TextCase) -> dict[str, object]:
    found = asdict(case)
    return {name: found[name] for name in ("engine", "precision", "k")}


TITLES: Mapping[EngineName, str] = {
    "genai": "moexport in GenAI",
    "transformers": "transformers",
    "llama.cpp": "llama.cpp",
    "openvino-genai": "OpenVINO GenAI",
}


def table(body: Any) -> str:
    """Returns the results as Markdown: speed by layers, the comparison, and quality."""
    shape, engines = body["shape"], body["engines"]
    listed = ", ".join(f"{name} {version}" for name, version in engines.items())
    absent = "".join(f" {name} was {reason}." for name, reason in body["absent"].items())
    first = body["speed"][0]["rows"]
    contexts = sorted({row["context"] for row in first})
    parts = [
        f"Measured on {measured_on(body)}, {body['threads']} threads; {listed}.{absent} Qwen3-MoE "
        f"with random weights: width {shape['hidden_size']:,}, {shape['num_experts']} experts of "
        f"{shape['moe_intermediate_size']}, k = {shape['num_experts_per_tok']}, vocabulary "
        f"{shape['vocab_size']:,}. Per context, the milliseconds to the first token and the tokens "
        "per second after it; medians of rounds in which the programs take turns. The longest "
        "prompts were measured once."
    ]
    for model in body["speed"]:
        parts.append(f"**{model['layers']} layers, {model['parameters'] / 1e9:.2f} B parameters**")
        parts.append(_speed_table(model["rows"], contexts, [1]))
    batches = sorted({row["batch"] for row in first} - {1})
    if batches:
        layers = body["speed"][0]["layers"]
        parts.append(
            f"Batches of prompts of {contexts[0]} tokens ({layers} layers), tokens per second of "
            "the whole batch:"
        )
        parts.append(_speed_table(first, contexts[:1], batches))
    present = [name for name in PEERS if name not in body["absent"]]
    if present:
        names = " and over ".join(TITLES[name] for name in present)
        parts.append(f"Speed-up over {names}, INT8 against Q8_0 and INT4 against Q4_0, batch 1:")
        parts.append(_ratio_table(body["speed"], contexts, present))
    tokens = body["quality"][0]["tokens"]
    parts.append(
        f"Quality: the demo's Mixtral, trained longer, on {tokens:,} tokens that it was not "
        "trained on. `same token` is how often the most likely next token is the same as in "
        "`transformers`."
    )
    header = ("program", "precision", "k", "perplexity", "same token")
    rows = [
        (*_named(row), f"{row['perplexity']:.3f}", f"{row['same_token']:.1%}")
        for row in body["quality"]
    ]
    return "\n\n".join([*parts, markdown(header, rows, words=2)])


def _named(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return TITLES[row["engine"]], row["precision"], str(row["k"])


def _speed_table(rows: Sequence[Any], contexts: Sequence[int], batches: Sequence[int]) -> str:
    loads = [(batch, context) for batch in batches for context in contexts]
    heads = [f"batch {b}" if batches != [1] else f"{c:,}" for b, c in loads]
    found = {(_named(row), row["batch"], row["context"]): row for row in rows}
    lines = []
    for name in dict.fromkeys(_named(row) for row in rows):
        cells: list[str] = []
        for batch, context in loads:
            row = found[name, batch, context]
            cells += [f"{1e3 * row['first_s']:,.0f}", f"{batch / row['token_s']:,.1f}"]
        lines.append((*name, *cells))
    header = ("program", "precision", "k")
    pairs = [part for head in heads for part in (f"{head}: first, ms", "tokens/s")]
    return markdown((*header, *pairs), lines, words=2)


def _ratio_table(
    models: Sequence[Any], contexts: Sequence[int], peers: Sequence[EngineName]
) -> str:
    lines = []
    for model in models:
        alone = [row for row in model["rows"] if row["batch"] == 1]
        found = {(row["engine"], row["precision"], row["k"], row["context"]): row for row in alone}
        trained = max(row["k"] for row in alone)
        for peer, (precision, kind) in itertools.product(peers, GGUF_TYPES.items()):
            if ("genai", precision, trained, contexts[0]) not in found:
                continue
            theirs = kind if peer == "llama.cpp" else precision
            pairs = [
                (found[peer, theirs, trained, c], found["genai", precision, trained, c])
                for c in contexts
            ]
            for name, part in (("first token", "first_s"), ("later tokens", "token_s")):
                cells = [f"{slow[part] / fast[part]:.2f}" for slow, fast in pairs]
                lines.append((TITLES[peer], str(model["layers"]), precision, name, *cells))
    header = ("compared with", "layers", "precision", "", *(f"{c:,}" for c in contexts))
    return markdown(header, lines, words=4)
