"""A small language model and its bundle for the tests of text."""

from __future__ import annotations

from pathlib import Path

import moexport
import pytest
from moexport.plugins.text.tests.serving import CONTEXT
from moexport.tests.bench.conftest import deterministic
from safetensors.torch import load_file, save_file

__all__ = ["deterministic", "folder", "out"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that never ends by itself, and generates no parts of characters: they score zero."""
    # Skips tests without transformers or GenAI, which a conftest cannot do on import.
    from moexport.plugins.text.tests.test_generation import END, text_model
    from moexport.plugins.token_routed.tests.architectures import transformers

    place = tmp_path_factory.mktemp("text")
    folder = text_model("mixtral", place / "model", max_position_embeddings=CONTEXT)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    head = weights["lm_head.weight"]
    for token in range(len(head)):
        text = tokenizer.decode([token])
        if token == END or not (text and text.isascii() and text.isprintable()):
            head[token] = 0
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def out(folder: Path) -> Path:
    model = moexport.load(folder)
    return moexport.export(model, folder.parent / "out", target="ort-cpu", verify=False).path
