"""Measures the export and the decoding of a language model with 24 layers of routed experts.

The model is a Granite-MoE of 1.3 B parameters with random weights, compared with the graph of
`transformers`' own exporter. Each step runs in its own process, which then frees its memory:
`python -m perf.granite ours FOLDER OUT` exports a folder in each precision, `theirs` exports it
with `transformers`, and `decode GRAPH LAYERS THREADS` times one token. Each prints its figures as
its last line.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from moexport.bench.measure.roofline import Microbenchmarks
from moexport.common import timing
from moexport.common.console import Progress, Silent
from moexport.common.text import markdown
from moexport.errors import install
from moexport.plugins.token_routed.load import transformers_library

from .measure import measured_on, peak_bytes

CONFIG: Mapping[str, Any] = {
    "vocab_size": 49155,
    "hidden_size": 1024,
    "intermediate_size": 512,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.015625,
    "logits_scaling": 6.0,
}
"""The sizes and multipliers of granite-3.0-1b-a400m. With the multipliers of `transformers`, all 1,
random weights double a rounding error every few tokens."""

LAYERS = 24
PAST = 128
"""The number of tokens in the cache before the timed token."""

THEIRS = "OnnxExporter"
BYTES: Mapping[str, float] = {THEIRS: 4, "fp32": 4, "int8": 1, "int4": 4.5 / 8}
"""The bytes per weight in each graph; for four bits, with the share of its block's scale."""

TURNS = 3
"""How often each graph is opened and timed, in turn with the others, because memory can be faster
or slower by a fifth for minutes."""

GRAPHS: Mapping[str, tuple[str, str]] = {
    "fp32": ("auto", "experts"),
    "int8": ("fused", "all"),
    "int4": ("fused", "all"),
}
"""The lowering and the quantised parts for each precision; `fused` is the faster lowering for one
token."""


def measure(progress: Progress, layers: int = LAYERS) -> dict[str, object] | None:
    """Returns tokens per second of each graph, and seconds and peak memory of each export."""
    if importlib.util.find_spec("transformers") is None:
        progress.step(f"transformers is not installed: {install('transformers')}")
        return None
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory(prefix="moexport-granite-") as folder:
        checkpoint, place = Path(folder) / "model", Path(folder) / "out"
        progress.step(f"writing a checkpoint of {layers} layers")
        parameters = write_checkpoint(checkpoint, layers)
        progress.step("exporting in FP32, INT8 and INT4")
        ours = _itself("ours", checkpoint, place)
        progress.step("exporting with transformers")
        theirs = _itself("theirs", checkpoint, place)
        files = {name: place / name / "model.onnx" for name in (THEIRS, *GRAPHS)}
        turns: dict[str, list[Any]] = {name: [] for name in files}
        streams = []
        for turn in range(1, TURNS + 1):
            for name, file in files.items():
                progress.step(f"decoding, turn {turn} of {TURNS}: {name}")
                turns[name].append(_itself("decode", file, layers, threads))
            machine = Microbenchmarks(threads)
            found = timing.measure(machine.calls, timing.Protocol(round_s=0.3, warmup=2))
            streams.append(machine.rates(found.latencies).stream_gb_s)
    return {
        "layers": layers,
        "parameters": parameters,
        "active": active_weights(layers),
        "ours": ours,
        "theirs": theirs,
        "decode": {name: together(found) for name, found in turns.items()},
        "stream_gb_s": statistics.median(streams),
        "threads": threads,
    }


def write_checkpoint(folder: Path, layers: int) -> int:
    """Writes the model in bfloat16 with random weights; returns its parameter count."""
    library = transformers_library()
    with torch.device("meta"):
        model = library.GraniteMoeForCausalLM(
            library.GraniteMoeConfig(num_hidden_layers=layers, **CONFIG)
        )
    return save_random(model, folder)


def save_random(model: Any, folder: Path) -> int:
    """Writes a model of the device `meta` with random bfloat16 weights; returns their count."""
    model.to(torch.bfloat16).to_empty(device="cpu").tie_weights()
    random = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data.normal_(0, weight.shape[-1] ** -0.5, generator=random)
        else:
            weight.data.fill_(1.0)
    model.save_pretrained(folder, max_shard_size="2GB")
    return sum(weight.numel() for weight in model.parameters())


def active_weights(layers: int) -> int:
    """Returns the number of weights that multiply a token."""
    d = CONFIG["hidden_size"]
    expert = 3 * d * CONFIG["intermediate_size"]
    shared = CONFIG["num_key_value_heads"] / CONFIG["num_attention_heads"]
    attention = round(2 * d * d * (1 + shared))
    router = d * CONFIG["num_local_experts"]
    of_layer = CONFIG["num_experts_per_tok"] * expert + attention + router
    active: int = layers * of_layer + d * CONFIG["vocab_size"]
    return active


class _Steps(Silent):
    """Records the time of each step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._name, self._began = "loading", time.monotonic()

    def step(self, text: str, total: int | None = None, unit: str | None = None) -> None:
        """Ends the previous step and starts the next one."""
        del total, unit
        self.end()
        self._name = text.split(maxsplit=1)[0]

    def end(self) -> None:
        """Ends the last step."""
        now = time.monotonic()
        self.seconds[self._name] = self.seconds.get(self._name, 0.0) + now - self._began
        self._began = now


def ours(folder: Path, place: Path) -> dict[str, object]:
    """Exports in each precision from one trace; verifies FP32 and times the steps of its export."""
    import moexport
    from moexport.exporter.export import write_bundle
    from moexport.exporter.job import export_job
    from moexport.exporter.options import ExportOptions
    from moexport.exporter.trace import trace

    steps = _Steps()
    model = moexport.load(folder)
    traced = None
    for name, (lowering, scope) in GRAPHS.items():
        options = ExportOptions(
            target="ort-cpu",
            lowering=lowering,
            precision=name,  # type: ignore[arg-type]
            quantize=scope,  # type: ignore[arg-type]
            verify=name == "fp32",
            destination=place / name,
        )
        job = export_job(model, options)
        if traced is None:
            steps.step("tracing")
            traced = trace(job.model, opset=options.least_opset, fixed=job.fixed)
        write_bundle(job, steps, traced)
        if name == "fp32":
            steps.end()
            found = {"steps": dict(steps.seconds), "peak_bytes": peak_bytes()}
    return found


def theirs(folder: Path, place: Path) -> dict[str, object]:
    """Exports the model with `transformers`; returns the seconds and the peak memory."""
    import moexport
    from moexport.bench.runners.other_exporters import library_graph

    began = time.monotonic()
    model = moexport.load(folder)
    (place / THEIRS).mkdir(parents=True, exist_ok=True)
    trained = {name: layer.spec.trained_k for name, layer in model.layers.items()}
    library_graph(model, trained, place / THEIRS)
    return {"seconds": time.monotonic() - began, "peak_bytes": peak_bytes()}


def decode(graph: Path, layers: int, threads: int) -> dict[str, object]:
    """Times one token with `PAST` tokens in the cache, whose keys and values are not copied."""
    from moexport.common.timing import Protocol
    from moexport.common.timing import measure as measure_calls
    from moexport.exporter.session import Session, SessionOptions

    began = time.monotonic()
    session = Session(graph, SessionOptions(threads=threads))
    opened = time.monotonic() - began
    random = np.random.default_rng(0)
    width = CONFIG["hidden_size"] // CONFIG["num_attention_heads"]
    shape = (1, CONFIG["num_key_value_heads"], PAST, width)
    cache = {
        f"past_key_values.{layer}.{part}": random.standard_normal(shape, np.float32)
        for layer in range(layers)
        for part in ("key", "value")
    }
    calls = [
        session.bound_values({"input_ids": np.array([[token]]), **cache})
        for token in random.integers(0, CONFIG["vocab_size"], 8)
    ]
    protocol = Protocol(rounds=5, warmup=3, round_s=1.0, inputs=len(calls))
    latency = measure_calls({"decode": lambda index: calls[index]()}, protocol).latencies["decode"]
    return {"ms": latency.median, "opened_s": opened, "peak_bytes": peak_bytes()}


def together(turns: Sequence[Mapping[str, float]]) -> dict[str, object]:
    """Returns the results of a graph's turns: the median time, all times, and the peak memory."""
    ms = [each["ms"] for each in turns]
    return {
        "ms": statistics.median(ms),
        "turns_ms": ms,
        "opened_s": statistics.median(each["opened_s"] for each in turns),
        "peak_bytes": max(each["peak_bytes"] for each in turns),
    }


def table(body: Any) -> str:
    """Returns the results as Markdown."""
    stream, active = body["stream_gb_s"], body["active"]
    least = {name: 1e-6 * active * size / stream for name, size in BYTES.items()}
    found = {name: each["ms"] for name, each in body["decode"].items()}
    turns = {name: each["turns_ms"] for name, each in body["decode"].items()}
    rows = [
        (
            name,
            f"{1e3 / ms:.1f}",
            f"{ms:.1f}",
            f"{min(turns[name]):.1f} to {max(turns[name]):.1f}",
            f"{found[THEIRS] / ms:.2f}",
            f"{ms / least[name]:.2f}",
            f"{body['decode'][name]['peak_bytes'] / 1e9:.1f} GB",
        )
        for name, ms in found.items()
    ]
    header = ("graph", "tokens/s", "ms", "turns", f"× {THEIRS}", "× its bytes", "peak memory")
    steps = body["ours"]["steps"]
    seconds = sum(steps.values())
    listed = ", ".join(f"{name} {s:.0f} s" for name, s in steps.items())
    weights = 4 * body["parameters"]
    return (
        f"Measured on {measured_on(body)}, {body['threads']} threads. A Granite-MoE of "
        f"{body['layers']} layers and {body['parameters'] / 1e9:.2f} B parameters, random weights; "
        f"one token after {PAST}, medians of {TURNS} turns, each in a separate process. "
        "`× its bytes` is that time divided by the time to read the weights for one token at "
        f"{stream:.0f} GB/s.\n\n"
        f"{markdown(header, rows)}"
        f"\n\nThe verified FP32 export took {seconds:.0f} s ({listed}) and at most "
        f"{body['ours']['peak_bytes'] / weights:.2f} times the FP32 weights in memory; "
        f"{THEIRS} took {body['theirs']['seconds']:.0f} s and "
        f"{body['theirs']['peak_bytes'] / weights:.2f} times."
    )


def _itself(what: str, *arguments: object) -> Any:
    """Runs a step of this module in its own process; returns its last line of output."""
    command = [sys.executable, "-m", "perf.granite", what, *map(str, arguments)]
    return json.loads(subprocess.check_output(command, text=True).splitlines()[-1])


def main(what: str, *arguments: str) -> None:
    """Runs one step and prints its figures."""
    if what == "decode":
        graph, layers, threads = arguments
        found = decode(Path(graph), int(layers), int(threads))
    else:
        steps: Mapping[str, Callable[[Path, Path], dict[str, object]]] = {
            "ours": ours,
            "theirs": theirs,
        }
        folder, place = arguments
        found = steps[what](Path(folder), Path(place))
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
