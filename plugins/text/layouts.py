"""Writes a language model's files as another program expects them, in a folder of the bundle.

The folder contains a copy of the weights, because ONNX does not open weights that are links.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ...common.documents import object_in
from ...common.option import Mistake
from ...exporter.bundle.manifest import FileRecord, Manifest
from ...exporter.bundle.steps import Export, Step
from ...graphs.names import PAST
from ..token_routed import CONFIG_FILE, GENERATION_FILE
from .files import (
    TEMPLATE_FILE,
    TOKENIZER_BYTES,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    TOKENIZER_FILES,
    write_object,
)
from .request import LayoutOptions, TextLayout

if TYPE_CHECKING:
    from onnx import ModelProto

    from ...exporter.model import Model
    from ...exporter.options import ExportOptions
    from ...graphs.targets import Precision

API = 1

GRAPHS = "onnx"
"""The subfolder for the graphs."""

CLASSES = {"TokenizersBackend": "PreTrainedTokenizerFast"}
"""The class name of all tokenizers in transformers 5, and its name in earlier versions."""

BATCH = "batch_size"
"""The name of the batch axis in these programs: transformers.js needs it to create the cache."""


@dataclass(frozen=True, slots=True)
class LayoutRecord:
    """How a program reads a folder.

    For the model types in `known`, the program finds the sizes of the cache in the model's own
    `config.json`; for all others, `alias` is a type for which it reads exactly the sizes that the
    layout writes. `suffixes` has the endings of the graphs' names by precision.
    """

    known: frozenset[str]
    alias: str
    suffixes: Mapping[Precision, str]


SUFFIXES: Mapping[Precision, str] = {
    "fp32": "",
    "fp16": "_fp16",
    "int8": "_quantized",
    "int4": "_q4",
}

DTYPES: Mapping[Precision, str] = {"fp32": "fp32", "fp16": "fp16", "int8": "q8", "int4": "q4"}
"""The names of precisions in transformers.js."""

LAYOUTS: Mapping[TextLayout, LayoutRecord] = {
    "transformers-js": LayoutRecord(
        known=frozenset({"deepseek_v3", "gpt_oss", "qwen2_moe", "qwen3_moe"}),
        alias="llama",
        suffixes=SUFFIXES,
    ),
    "optimum": LayoutRecord(
        known=frozenset({"deepseek_v3", "gpt_oss"}),
        alias="gemma",
        suffixes={**SUFFIXES, "bf16": "_bf16"},
    ),
}


def _check(layout: TextLayout, options: ExportOptions, model: Model | None) -> Iterator[Mistake]:
    """Yields the reasons why a bundle cannot have a layout, with hints."""
    precision, suffixes = options.precision, LAYOUTS[layout].suffixes
    if precision not in suffixes:
        yield (
            f"--layout {layout} does not support --precision {precision}",
            f"use one of the precisions {', '.join(suffixes)}",
        )
    if model is None:
        return
    from ...exporter.job import writes_text  # loads PyTorch, as the model did

    if not writes_text(model, options):
        yield (f"--layout {layout} needs a causal language model with a cache", "omit --layout")
    folder = model.source.files[0].parent
    if not (folder / TOKENIZER_FILE).is_file():
        yield (
            f"--layout {layout}: {folder} has no {TOKENIZER_FILE}",
            "save the model's tokenizer there",
        )


def with_layout(
    layout: TextLayout, export: Export, directory: Path, manifest: Manifest
) -> Manifest:
    """Writes the folder of a layout into a bundle; returns the manifest that lists it."""
    del export
    import onnx

    record, precision = LAYOUTS[layout], cast("Precision", manifest.precision)
    folder = directory / layout
    (folder / GRAPHS).mkdir(parents=True)
    file = f"{GRAPHS}/model{record.suffixes[precision]}.onnx"
    weights = f"{file}_data"
    model = onnx.load(directory / manifest.graph_for(1).file, load_external_data=False)
    (weights_file,) = _rename_weights_and_batch(model, Path(weights).name)
    onnx.save(model, folder / file)
    shutil.copyfile(directory / weights_file, folder / weights)
    for name in (GENERATION_FILE, *TOKENIZER_FILES):
        if (directory / name).is_file():
            shutil.copyfile(directory / name, folder / name)
    tokenizer = object_in(directory / TOKENIZER_CONFIG_FILE, TOKENIZER_BYTES)
    class_ = str(tokenizer.get("tokenizer_class", ""))
    if class_ in CLASSES:
        tokenizer["tokenizer_class"] = CLASSES[class_]
    if (directory / TEMPLATE_FILE).is_file():
        tokenizer["chat_template"] = (directory / TEMPLATE_FILE).read_text(encoding="utf-8")
    write_object(tokenizer, folder / TOKENIZER_CONFIG_FILE)
    config = object_in(directory / CONFIG_FILE)
    if config["model_type"] not in record.known:
        keys = [port for port in manifest.inputs if re.fullmatch(rf"{PAST}\..*key", port.name)]
        config |= {
            "model_type": record.alias,
            "num_hidden_layers": len(keys),
            "num_key_value_heads": keys[0].shape[1],
            "head_dim": keys[0].shape[3],
        }
    if layout == "transformers-js":
        config["transformers.js_config"] = {
            "dtype": DTYPES[precision],
            "use_external_data_format": {Path(file).name: 1},
        }
    write_object(config, folder / CONFIG_FILE)
    files = {
        path.relative_to(directory).as_posix(): FileRecord.of(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path != folder / weights
    }
    files[f"{layout}/{weights}"] = manifest.files[weights_file]
    return replace(manifest, files={**manifest.files, **files})


def _rename_weights_and_batch(model: ModelProto, weights: str) -> set[str]:
    """Renames a graph's weights file and batch axis; returns the previous files."""
    previous = set()
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                previous.add(entry.value)
                entry.value = weights
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for axis in value.type.tensor_type.shape.dim:
            if axis.dim_param:
                axis.dim_param = re.sub(r"\bbatch\b", BATCH, axis.dim_param)
    return previous


def _step(layout: TextLayout) -> Step:
    return Step(
        layout,
        requested=lambda options: options.asked(LayoutOptions).layout == layout,
        check=partial(_check, layout),
        finish=partial(with_layout, layout),
        copies=1,
    )


OPTIMUM = _step("optimum")
TRANSFORMERS_JS = _step("transformers-js")
