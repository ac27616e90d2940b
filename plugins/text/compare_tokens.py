"""Compares the tokens of ONNX Runtime GenAI's tokenizer with Hugging Face's.

`generate` and `serve` use Hugging Face's; other programs that open a bundle's folder with GenAI use
GenAI's. GenAI's supports fewer kinds of files and may crash, so it runs in a separate process.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ...common.documents import object_in
from ...common.environment import python_environment
from .files import GENAI_FILE, TOKENIZER_FILE, TOKENIZER_FILES, write_object

TEXTS = (
    "The graph chooses 12 of 345,678 experts, doesn't it?",
    "  two spaces\tand a tab \n\n\n  and lines\r\n",
    "def f(x):\n    return {'a': x[0] ** 2}  # code",
    "ÀÉÎ naïve Straße",
    "e\u0301 combined, \ufb01 a ligature, Ⅻ ½",
    "Привет, мир! Γειά σου",
    "你好，世界。日本語のテキスト 한국어",
    "नमस्ते दुनिया مرحبا بالعالم שלום",
    "🙂👩‍👩‍👧🇩🇪 and ©™",
    "CamelCase HTTPServer snake_case 3.14e-10 0xFF",
    "I'LL we've 'quoted' “curly” — dash…",
    "https://example.com/a?b=c&d=%20",
)

LIMIT_S = 60
"""The time limit for loading and using both tokenizers."""


def different_tokens(folder: Path) -> str | None:
    """Returns how GenAI's tokenizer differs for a bundle's folder, or None if it does not.

    It also returns None if GenAI or `tokenizers` is not installed.
    """
    if any(importlib.util.find_spec(name) is None for name in ("onnxruntime_genai", "tokenizers")):
        return None
    try:
        result = subprocess.run(
            [sys.executable, "-m", __name__, str(folder.absolute())],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=python_environment(),
            start_new_session=True,
            timeout=LIMIT_S,
            check=True,
        )
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
        return f"ONNX Runtime GenAI's own tokenizer cannot read {TOKENIZER_FILE}; {_ADVICE}"
    texts = [TEXTS[index] for index in json.loads(result.stdout)]
    if not texts:
        return None
    return (
        f"ONNX Runtime GenAI's own tokenizer returns different tokens for {len(texts)} of "
        f"{len(TEXTS)} texts, such as {texts[0]!r}; {_ADVICE}"
    )


_ADVICE = "moexport does not use it; in other programs, pass GenAI the tokens of transformers"


def _write_small_model(folder: Path, target: Path) -> None:
    """Copies the files for GenAI's tokenizer, and writes a graph of one node as the model."""
    import onnx
    from onnx import TensorProto, helper

    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, target / name)
    ids, logits = "input_ids", "logits"
    graph = helper.make_graph(
        [helper.make_node("Cast", [ids], [logits], to=TensorProto.FLOAT)],
        "none",
        [helper.make_tensor_value_info(ids, TensorProto.INT64, ["batch", "tokens"])],
        [helper.make_tensor_value_info(logits, TensorProto.FLOAT, ["batch", "tokens"])],
    )
    opset = helper.make_opsetid("", 17)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=8), target / "model.onnx")
    config: dict[str, Any] = object_in(folder / GENAI_FILE)
    decoder = {"filename": "model.onnx", "inputs": {ids: ids}, "outputs": {logits: logits}}
    config["model"]["decoder"] |= decoder | {"session_options": {"provider_options": []}}
    write_object(config, target / GENAI_FILE)


def main() -> None:
    """Prints the indices of texts whose tokens differ."""
    import onnxruntime_genai
    from tokenizers import Tokenizer

    folder = Path(sys.argv[1])
    onnxruntime_genai.disable_telemetry_events()
    tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    with tempfile.TemporaryDirectory() as target:
        _write_small_model(folder, Path(target))
        genai_tokenizer = onnxruntime_genai.Tokenizer(onnxruntime_genai.Model(target))
        different = [
            index
            for index, text in enumerate(TEXTS)
            if genai_tokenizer.encode(text).tolist() != tokenizer.encode(text).ids
        ]
    print(json.dumps(different))


if __name__ == "__main__":
    main()
