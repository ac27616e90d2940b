"""The files of a bundle for text generation, and checks of a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...common.documents import object_in
from ..token_routed import CONFIG_FILE, GENERATION_FILE

GENAI_FILE = "genai_config.json"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"

TOKENIZER_BYTES = 128 << 20
"""The largest size of a tokenizer; one with 200,000 words has 30 MB."""

TEMPLATE_BYTES = 1 << 20
"""The largest size of a chat template; long ones have 20 kB."""

TOKENIZER_FILES = (
    TOKENIZER_FILE,
    TOKENIZER_CONFIG_FILE,
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    TEMPLATE_FILE,
    "chat_template.json",
)
"""The names of the files of a tokenizer and of a chat template."""

CONTENTS = {
    GENAI_FILE: "opens this folder in ONNX Runtime GenAI, which generates text from it",
    GENERATION_FILE: "the model's own settings for generation",
    CONFIG_FILE: "the model's configuration, as in transformers",
    **dict.fromkeys(TOKENIZER_FILES, "a file of the tokenizer, unchanged"),
}
"""A bundle's files for programs that generate text, with their descriptions for its README."""


def write_object(content: Mapping[str, Any], file: Path) -> None:
    """Writes an indented JSON file."""
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def tokenizer_problem(folder: Path, vocabulary: int) -> str | None:
    """Returns why a tokenizer in a folder does not fit a vocabulary, or None if it does."""
    file = folder / TOKENIZER_FILE
    if not file.is_file():
        return f"{folder} has no {TOKENIZER_FILE}"
    content = object_in(file, TOKENIZER_BYTES)
    model, added = content.get("model"), content.get("added_tokens")
    words = model.get("vocab") if isinstance(model, dict) else None
    ids = [entry.get("id") for entry in added or () if isinstance(entry, dict)]
    # Some tokenizers have a list of words, whose indices are the ids.
    ids += [*words.values()] if isinstance(words, dict) else [len(words or ()) - 1]
    largest = max((token_id for token_id in ids if isinstance(token_id, int)), default=-1)
    if largest < 0:
        return f"{file} is not a tokenizer"
    if largest >= vocabulary:
        return (
            f"{file} belongs to a different model: it has the token {largest}, but this model's "
            f"vocabulary ends at {vocabulary - 1}"
        )
    return None


def template_in(folder: Path) -> str | None:
    """Returns the chat template of the model in a folder; of several, the one named `default`."""
    file = folder / TEMPLATE_FILE
    if file.is_file():
        with file.open("rb") as opened:
            return opened.read(TEMPLATE_BYTES).decode("utf-8", errors="replace")
    for name in (TOKENIZER_CONFIG_FILE, "chat_template.json"):
        value = object_in(folder / name).get("chat_template")
        if isinstance(value, list):
            named = {
                each.get("name"): each.get("template") for each in value if isinstance(each, dict)
            }
            value = named.get("default")
        if isinstance(value, str):
            return value
    return None
