"""Continues a text: the loop, the samplers and the tokenizer are those of ONNX Runtime GenAI."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

from ...common.documents import object_in
from ...errors import BundleError, EngineError, MissingExtraError, UsageError, install
from ..bundle.bundle import Bundle
from ..requests import GenerateRequest
from .files import CONFIGURED, GENAI_FILE, TEMPLATE_FILE, tokenizer_problem

Message = Mapping[str, str]
"""What somebody says in a chat: its `role` and its `content`."""

Finish = Literal["stop", "length"]
"""Why a text ends: at a token or text that ends it, or after as many tokens as were asked for."""


class TextModel:
    """A bundle that is ready to generate text.

    Raises `BundleError` for a bundle that cannot, or whose files have changed, and
    `MissingExtraError` without ONNX Runtime GenAI.
    """

    def __init__(self, bundle: Bundle, threads: int | None = None) -> None:
        check_generates(bundle)
        self.path = bundle.path
        genai = genai_library()
        try:
            config = genai.Config(str(bundle.path))
            if threads is not None:
                options = {"session_options": {"intra_op_num_threads": threads}}
                config.overlay(json.dumps({"model": {"decoder": options}}))
            self._model = genai.Model(config)
            self._tokenizer, self._chat = (genai.Tokenizer(self._model) for _ in range(2))
            # A template writes the special tokens of a chat itself.
            self._chat.update_options(add_special_tokens="false")
        except RuntimeError as error:
            raise EngineError(
                f"{bundle.path}: ONNX Runtime GenAI cannot open it: {error}",
                hint="`moexport verify` checks the bundle, `moexport doctor` this machine",
            ) from error
        self._genai = genai
        model = object_in(bundle.path / GENAI_FILE)["model"]
        self.context, self._ends = model["context_length"], frozenset(model["eos_token_id"])

    def generate(self, prompt: str | Sequence[Message], request: GenerateRequest) -> GeneratedText:
        """Returns the text that follows a prompt, or the answer to the messages of a chat.

        Raises `UsageError` for a prompt that leaves no room, or a chat without a template.
        """
        tokens = self._tokens(prompt, request)
        if len(tokens) >= self.context:
            raise UsageError(
                f"the prompt has {len(tokens):,} tokens, and the model's context holds "
                f"{self.context:,}",
                hint="shorten the prompt",
            )
        if not len(tokens):
            raise UsageError("the prompt is empty", hint="give some text to continue")
        settings: dict[str, Any] = {
            "max_length": min(len(tokens) + request.max_tokens, self.context)
        }
        if request.temperature is not None:
            settings["do_sample"] = request.temperature > 0
        elif (request.top_p, request.top_k) != (None, None):
            settings["do_sample"] = True
        arguments = {
            "temperature": request.temperature or None,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "random_seed": request.seed,
        }
        settings |= {name: value for name, value in arguments.items() if value is not None}
        params = self._genai.GeneratorParams(self._model)
        params.set_search_options(**settings)
        generator = self._genai.Generator(self._model, params)
        return GeneratedText(
            generator, self._tokenizer.create_stream(), tokens, tuple(request.stop), self._ends
        )

    def _tokens(self, prompt: str | Sequence[Message], request: GenerateRequest) -> Any:
        if not request.chat and isinstance(prompt, str):
            return self._tokenizer.encode(prompt)
        if not _has_template(self.path):
            raise UsageError(
                f"--chat: {self.path} has no chat template: its model was not trained to chat",
                hint="leave --chat out, and the model continues the prompt",
            )
        said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
        if request.system is not None:
            said.insert(0, {"role": "system", "content": request.system})
        try:
            text = self._chat.apply_chat_template(json.dumps(said), add_generation_prompt=True)
        except RuntimeError as error:
            raise UsageError(
                f"--chat: the chat template of {self.path} does not take these messages: {error}",
                hint="leave --system out: some templates have no system messages",
            ) from error
        return self._chat.encode(text)


class GeneratedText(Iterator[str]):
    """A text, piece by piece as it is generated; what it took is known when it has ended.

    A piece that may begin a text to stop at is held back until that is known.
    """

    def __init__(
        self, generator: Any, stream: Any, prompt: Any, stop: tuple[str, ...], ends: frozenset[int]
    ) -> None:
        self.prompt_tokens, self.tokens = len(prompt), 0
        self.finish: Finish | None = None
        self.first_token_s = self.decode_s = 0.0
        self._generator, self._stream, self._prompt = generator, stream, prompt
        self._stop, self._ends, self._held = stop, ends, ""

    def __next__(self) -> str:
        """Returns the next piece, which is not empty."""
        while self.finish is None:
            piece = self._piece()
            if piece:
                return piece
        raise StopIteration

    @property
    def tokens_per_second(self) -> float | None:
        """The rate of the tokens after the first; None where there are none."""
        return (self.tokens - 1) / self.decode_s if self.tokens > 1 and self.decode_s else None

    def _piece(self) -> str:
        """The text of one more token, as far as it is known not to be a text to stop at."""
        started = perf_counter()
        if not self.tokens:
            self._generator.append_tokens(self._prompt)
        self._generator.generate_next_token()
        token = int(self._generator.get_next_tokens()[0])
        took = perf_counter() - started
        self.tokens += 1
        if self.tokens == 1:
            self.first_token_s = took
        else:
            self.decode_s += took
        if token in self._ends:
            self.finish = "stop"
            return self._held
        text: str = self._held + self._stream.decode(token)
        at = min((place for stop in self._stop if (place := text.find(stop)) >= 0), default=None)
        if at is not None:
            self.finish = "stop"
            return text[:at]
        if self._generator.is_done():
            self.finish = "length"
            return text
        kept = max((_begun(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]


def _begun(text: str, stop: str) -> int:
    """How many characters at the end of a text are the first of another one."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)


def check_generates(bundle: Bundle) -> None:
    """Raises `BundleError` for a bundle that no text is generated from, with the reason."""
    files = bundle.manifest.files
    vocabulary = bundle.manifest.inputs[0].below
    if GENAI_FILE not in files or vocabulary is None:
        reason = next((n for n in bundle.manifest.notes if n.startswith("no text")), None)
        raise BundleError(
            reason or f"{bundle.path}: no language model with a cache: it holds no {GENAI_FILE}",
            hint="export a causal language model, from its folder of transformers",
        )
    bundle.graph_file()
    bundle.check_whole(name for name in files if name in CONFIGURED)
    problem = tokenizer_problem(bundle.path, vocabulary)
    if problem is not None:
        raise BundleError(
            problem, hint="copy the tokenizer's files into the model's folder, and export again"
        )


def genai_library() -> Any:
    """Returns ONNX Runtime GenAI, which reports to nobody, or raises `MissingExtraError`."""
    try:
        import onnxruntime_genai
    except ImportError as error:
        raise MissingExtraError(
            f"ONNX Runtime GenAI, which generates text, is not installed ({error})",
            hint=install("generate"),
        ) from error
    onnxruntime_genai.disable_telemetry_events()
    return onnxruntime_genai


def _has_template(folder: Path) -> bool:
    written = object_in(folder / "tokenizer_config.json")
    return (folder / TEMPLATE_FILE).is_file() or "chat_template" in written
