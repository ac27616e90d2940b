"""Writes the files that programs need to generate text into a bundle.

The tokenizer's files and the configuration are copied from the model's folder as data, and no code
in them is run. ONNX Runtime GenAI opens a folder with a `genai_config.json`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from ...common.documents import LARGE_BITS, object_in, read_document
from ...errors import CheckpointError
from ...exporter.bundle.manifest import FileRecord, Manifest
from ...exporter.bundle.steps import Export, Step
from ...exporter.session import CUDA, NO_KLEIDIAI
from ...graphs.names import PAST, PRESENT
from ...graphs.targets import TARGETS, Target
from ..token_routed import CONFIG_FILE, GENERATION_FILE
from .compare_tokens import different_tokens
from .files import (
    CONTENTS,
    GENAI_FILE,
    TOKENIZER_BYTES,
    TOKENIZER_FILES,
    tokenizer_problem,
    write_object,
)

if TYPE_CHECKING:
    from ...exporter.model import Model

API = 1

CODE_KEY = "auto_map"
"""The key that names code from the checkpoint's author, which loaders would run."""

DEFAULT_CONTEXT = 32_768
"""The context if a configuration does not state the largest number of positions."""

DEFAULT_TOKENS = 4096
"""The default largest length of a text, for which the cache is allocated at the start."""

GENAI_PROVIDERS: Mapping[str, str] = {CUDA: "cuda"}
"""ONNX Runtime GenAI's names for ONNX Runtime's providers; the CPU's has none."""

SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty")
"""The settings of a `generation_config.json` that ONNX Runtime GenAI supports."""


def with_generation(job: Export, directory: Path, manifest: Manifest) -> Manifest:
    """Writes the files for text generation if a job's graphs can generate text.

    Returns the manifest with these files, and with notes on what prevents text generation.
    """
    if not job.writes_text:
        return manifest
    file, target = manifest.graphs[0].file, manifest.target
    notes = write_generation(job.model, target, file, ir.load(directory / file), directory)
    written = [directory / name for name in CONTENTS if (directory / name).is_file()]
    files = {**manifest.files, **{file.name: FileRecord.of(file) for file in written}}
    return replace(manifest, files=dict(sorted(files.items())), notes=[*manifest.notes, *notes])


def write_generation(
    model: Model, target: Target, file: str, graph: ir.Model, directory: Path
) -> tuple[str, ...]:
    """Writes the files for text generation with a model's graph for a target.

    Returns notes on what prevents it or makes other programs generate different text.
    """
    from ...graphs.fusion.fuse import appends_in_place  # these load PyTorch, as the model did
    from ..token_routed.network import TransformersNetwork
    from ..token_routed.routers import FIELDS

    network, vocabulary = model.module, model.input.below
    folder = model.source.files[0].parent
    assert isinstance(network, TransformersNetwork) and vocabulary is not None
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            _copy(folder / name, directory / name)
    config = _without_code(object_in(folder / CONFIG_FILE))
    config.pop("quantization_config", None)  # the graph's weights are not those of the folder
    for field in FIELDS:
        k = model.config.get(field)
        if field in config and isinstance(k, int):  # the k of the router in the graph
            config[field] = k
    write_object(config, directory / CONFIG_FILE)
    generation = network.wrapped.generation_config.to_json_string()
    write_object(json.loads(generation), directory / GENERATION_FILE)
    keys, values = (_cache(model, part) for part in ("key", "value"))
    if keys != values:
        return (
            "no text can be generated: ONNX Runtime GenAI needs keys and values of the same size",
        )
    content = genai_config(model, target, file, in_place=appends_in_place(graph))
    write_object(content, directory / GENAI_FILE)
    problem = tokenizer_problem(folder, vocabulary)
    if problem is not None:
        return (f"no text can be generated: {problem}",)
    different = different_tokens(directory)
    return () if different is None else (different,)


def _cache(model: Model, part: str) -> list[tuple[int, int]]:
    """Returns the number of heads and the width of each layer's keys or values."""
    specs = [spec for spec in model.inputs if spec.name.startswith(f"{PAST}.")]
    return [(spec.shape[1], spec.shape[3]) for spec in specs if spec.name.endswith(part)]  # type: ignore[misc]


def genai_config(model: Model, target: Target, file: str, *, in_place: bool) -> dict[str, Any]:
    """Returns the content of `genai_config.json` for a graph of a `transformers` model.

    `in_place`: the graph appends to the cache in place.
    """
    from ..token_routed.network import TransformersNetwork  # loads PyTorch

    network, vocabulary = model.module, model.input.below
    assert isinstance(network, TransformersNetwork) and vocabulary is not None
    text, generation = network.wrapped.config.get_text_config(), network.wrapped.generation_config
    keys = _cache(model, "key")
    heads, width = keys[0]
    end = generation.eos_token_id
    # Without an end token GenAI's loop would stop at the padding token, so the last token of the
    # vocabulary, which is rarely used, becomes the end token.
    ends = end if isinstance(end, list) else [vocabulary - 1 if end is None else end]
    pad = ends[0] if generation.pad_token_id is None else generation.pad_token_id
    context = getattr(text, "max_position_embeddings", None) or DEFAULT_CONTEXT
    provider = GENAI_PROVIDERS.get(TARGETS[target].provider or "")
    tokens = {"bos_token_id": generation.bos_token_id, "eos_token_id": ends, "pad_token_id": pad}
    search = {name: getattr(generation, name, None) for name in SAMPLING}
    return {
        "model": {
            "type": "decoder",
            **_without_none(tokens),
            "vocab_size": vocabulary,
            "context_length": context,
            "decoder": {
                "filename": file,
                "session_options": {
                    "provider_options": [] if provider is None else [{provider: {}}],
                    **dict([NO_KLEIDIAI]),
                },
                "head_size": width,
                "hidden_size": text.hidden_size,
                "num_attention_heads": text.num_attention_heads,
                "num_key_value_heads": heads,
                "num_hidden_layers": len(keys),
                "inputs": {
                    **{name: name for name in ("input_ids", "attention_mask", "position_ids")},
                    "past_key_names": f"{PAST}.%d.key",
                    "past_value_names": f"{PAST}.%d.value",
                },
                "outputs": {
                    "logits": model.output.name,
                    "present_key_names": f"{PRESENT}.%d.key",
                    "present_value_names": f"{PRESENT}.%d.value",
                },
            },
        },
        "search": {
            "do_sample": False,
            **_without_none(search),
            "max_length": min(context, DEFAULT_TOKENS),
            "past_present_share_buffer": in_place,
        },
    }


def _without_none(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


def _copy(source: Path, target_file: Path) -> None:
    """Copies a file unchanged except for names of code, which are removed.

    Raises `CheckpointError` for broken JSON.
    """
    content = None
    if source.suffix == ".json":
        content = read_document(source, "json", CheckpointError, TOKENIZER_BYTES, LARGE_BITS)
    if isinstance(content, dict) and CODE_KEY in content:
        write_object(_without_code(content), target_file)
    else:
        shutil.copyfile(source, target_file)


def _without_code(content: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in content.items() if key != CODE_KEY}


GENERATION = Step("generation", finish=with_generation, contents=CONTENTS)
"""The export step that writes these files."""
