"""Measures the tokens per second of a muMoE GPT-2 with a cache, by the number of earlier tokens.

The model has the size of GPT-2 small, with CP blocks, and generates one token at a time: as an
exported graph with its cache, in PyTorch with the same cache, and in PyTorch without a cache.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import torch
from moexport.common.console import Progress
from moexport.common.text import markdown
from moexport.common.threads import with_threads
from moexport.common.timing import IndexedCall, Protocol
from moexport.common.timing import measure as measure_calls
from moexport.exporter.families.mumoe_gpt2 import GPT2Spec
from moexport.plugins.demo.mumoe import save, trainable_gpt2

from .measure import measured_on, threads

SPEC = GPT2Spec(1024, 50304, depth=12, heads=12, dim=768, bias=True)
EXPERTS, HIDDEN, RANK = 64, 3072, 512
CONTEXTS = (16, 128, 512, 1000)
PROTOCOL = Protocol(warmup=1)


def measure(
    progress: Progress,
    spec: GPT2Spec = SPEC,
    contexts: tuple[int, ...] = CONTEXTS,
    sizes: tuple[int, int, int] = (EXPERTS, HIDDEN, RANK),
    protocol: Protocol = PROTOCOL,
) -> dict[str, object]:
    """Times the step to the next token in the three forms, which take turns.

    `tokens_per_s` is computed from the medians of all calls.
    """
    experts, hidden, rank = sizes
    with tempfile.TemporaryDirectory(prefix="moexport-cache-") as folder, with_threads(threads()):
        progress.step("a GPT-2 with random weights")
        checkpoint = Path(folder) / "gpt2.pt"
        network = trainable_gpt2(spec, experts, hidden, rank)
        save(network, checkpoint, n_layer=spec.depth, n_head=spec.heads, n_embd=spec.dim)
        model = moexport.load(checkpoint, config={"use_cache": True})
        progress.step("exporting it with a cache")
        bundle = moexport.export(model, Path(folder) / "out", verify=False, target="ort-cpu")
        session = bundle.session()
        rows = []
        for context in contexts:
            progress.step(f"after {context} tokens")
            cache = (1, spec.heads, context, spec.dim // spec.heads)
            past = np.random.default_rng(0).standard_normal(cache).astype(np.float32)
            names = [each.name for each in bundle.manifest.inputs]
            feed = dict.fromkeys(names[1:], past) | {names[0]: np.zeros((1, 1), np.int64)}
            tensors = [torch.from_numpy(feed[name]) for name in names]
            whole = torch.zeros((1, context + 1), dtype=torch.int64)
            exported = session.bound(feed, outputs=session.output_names)
            steps: dict[str, IndexedCall] = {
                "exported": lambda index, call=exported: call(),  # type: ignore[misc]
                "pytorch": lambda index, given=tensors: model.module(*given),  # type: ignore[misc]
                "pytorch_again": lambda index, given=whole: model.module(given),  # type: ignore[misc]
            }
            rows.append({"context": context, "tokens_per_s": _in_turn(steps, protocol)})
    return {"contexts": rows, "spec": {"experts": experts, "hidden": hidden, "rank": rank}}


@torch.inference_mode()
def _in_turn(steps: Mapping[str, IndexedCall], protocol: Protocol) -> dict[str, float]:
    """Returns the steps per second of each, from the median of calls in rounds of turns."""
    found = measure_calls(steps, protocol).latencies
    return {name: 1e3 / latency.median for name, latency in found.items()}


def table(body: Any) -> str:
    """Returns the results as Markdown, with the machine that measured them."""
    heads = (
        "tokens in context",
        "exported, with the cache",
        "PyTorch, with a cache",
        "PyTorch, without",
    )
    rows = [
        (str(row["context"]), *(f"{rate:.1f}" for rate in row["tokens_per_s"].values()))
        for row in body["contexts"]
    ]
    return f"{markdown(heads, rows, words=0)}\n\n{measured_on(body)}"
