"""Continues a text with the loop and the samplers of ONNX Runtime GenAI.

GenAI's tokenizer is not used, because it recurses for each character and crashes on long texts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ...common.documents import object_in
from ...common.environment import available_bytes
from ...common.libraries import library
from ...errors import BundleError, CacheMemoryError, EngineError, install, is_out_of_memory
from ...exporter.bundle.bundle import Bundle
from ...graphs.names import PAST
from .files import CONTENTS, GENAI_FILE, TOKENIZER_BYTES, TOKENIZER_FILE, tokenizer_problem
from .prompts import Prompts
from .request import GenerateRequest

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.decoders import DecodeStream

Message = Mapping[str, str]
"""A message in a chat: its `role` and its `content`."""

Finish = Literal["stop", "length"]
"""Why a text ended: at an end token or a stop text, or at the largest number of tokens."""


PROMPT_TOKENS = 128
"""The number of prompt tokens that one step computes; no other text advances meanwhile."""


class TextModel:
    """A bundle that is ready to generate text, with the model's context or a smaller one.

    Raises `BundleError` if the bundle cannot generate text or its files have changed, and
    `MissingExtraError` without ONNX Runtime GenAI.
    """

    def __init__(
        self, bundle: Bundle, threads: int | None = None, context: int | None = None
    ) -> None:
        check_generates(bundle)
        genai = genai_library()
        try:
            config = genai.Config(str(bundle.path))
            if threads is not None:
                options = {"session_options": {"intra_op_num_threads": threads}}
                config.overlay(json.dumps({"model": {"decoder": options}}))
            self._model = genai.Model(config)
        except RuntimeError as error:
            raise EngineError(
                f"{bundle.path}: ONNX Runtime GenAI cannot open the bundle: {error}",
                hint="`moexport verify` checks the bundle, `moexport doctor` this machine",
            ) from error
        self._genai = genai
        model = object_in(bundle.path / GENAI_FILE)["model"]
        self._ends, self._vocabulary = frozenset(model["eos_token_id"]), model["vocab_size"]
        self.context = min(model["context_length"], context or model["context_length"])
        self.prompts = Prompts(bundle.path, self.context)
        self._tokenizer = _tokenizer(bundle.path)
        self._token_bytes = sum(
            math.prod(size for size in spec.shape if isinstance(size, int))
            * (4 if spec.dtype == "float32" else 2)
            for spec in bundle.manifest.inputs
            if spec.name.startswith(f"{PAST}.")
        )

    def generate(self, prompt: str | Sequence[Message], request: GenerateRequest) -> GeneratedText:
        """Returns the text that follows a prompt, or the answer to the messages of a chat.

        Raises `UsageError` for a prompt that fills the context, or a chat without a template.
        """
        return self.start(self.tokens(prompt, request), request)

    def tokens(self, prompt: str | Sequence[Message], request: GenerateRequest) -> list[int]:
        """Returns the tokens of a prompt; at least one more must fit into the context."""
        if not request.chat and isinstance(prompt, str):
            return self.prompts.tokens(prompt)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
        if request.system is not None:
            messages.insert(0, {"role": "system", "content": request.system})
        return self.prompts.tokens(messages)

    def start(self, tokens: list[int], request: GenerateRequest) -> GeneratedText:
        """Starts the text that follows these tokens, with its own cache.

        Raises `CacheMemoryError` if the cache does not fit into the memory.
        """
        length = min(len(tokens) + request.max_tokens, self.context)
        if self._token_bytes * length > available_bytes():
            raise self.memory_error(length)
        params = self._genai.GeneratorParams(self._model)
        params.set_search_options(max_length=length, **self._search_options(request))
        try:
            generator = self._genai.Generator(self._model, params)
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                raise self.memory_error(length) from error
            raise
        return GeneratedText(
            generator,
            Decoder(self._tokenizer),
            np.array(tokens, np.int32),
            tuple(request.stop),
            self._ends,
            partial(self.memory_error, length),
        )

    def _search_options(self, request: GenerateRequest) -> dict[str, Any]:
        """Returns GenAI's search options for the sampling of a request."""
        temperature = None if request.temperature is None else np.float32(request.temperature)
        sampled = None if (request.top_p, request.top_k) == (None, None) else True
        settings = {
            "do_sample": sampled if temperature is None else bool(temperature > 0),
            "temperature": float(temperature) if temperature else None,
            "top_p": request.top_p,
            "top_k": request.top_k and min(request.top_k, self._vocabulary),
            "random_seed": request.seed,
        }
        return {name: value for name, value in settings.items() if value is not None}

    def memory_error(self, length: int) -> CacheMemoryError:
        """Returns the error for a cache that does not fit into the memory."""
        return CacheMemoryError(
            f"there is not enough memory for the cache of {length:,} tokens: it needs "
            f"{self._token_bytes * length / 2**20:,.1f} MiB, but "
            f"{available_bytes() / 2**20:,.0f} MiB are free"
        )


class Decoder:
    """Decodes tokens to text, one after another."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = self._new_stream()

    def text(self, token: int) -> str:
        """Returns the text of the next token, which is empty until a character is complete."""
        try:
            return self._stream.step(self._tokenizer, token) or ""
        except Exception:  # noqa: BLE001 - what it raises for bytes that are not text
            self._stream = self._new_stream()
            return self._stream.step(self._tokenizer, token) or ""

    def _new_stream(self) -> DecodeStream:
        from tokenizers.decoders import DecodeStream

        return DecodeStream(skip_special_tokens=True)


class GeneratedText(Iterator[str]):
    """An iterator over the pieces of a text as it is generated, with statistics at the end.

    A piece that may be the start of a stop text is held back until the next tokens decide.
    """

    def __init__(
        self,
        generator: Any,
        decoder: Decoder,
        prompt: Any,
        stop: tuple[str, ...],
        ends: frozenset[int],
        memory_error: Callable[[], CacheMemoryError],
    ) -> None:
        self.prompt_tokens, self.tokens = len(prompt), 0
        self.finish: Finish | None = None
        self.first_token_s = self.decode_s = 0.0
        self._generator, self._decoder, self._prompt = generator, decoder, prompt
        self._stop, self._ends, self._pending = stop, ends, ""
        self._memory_error = memory_error

    def __next__(self) -> str:
        """Returns the next nonempty piece."""
        while self.finish is None:
            piece = self.step()
            if piece:
                return piece
        raise StopIteration

    def close(self) -> None:
        """Frees the cache and ends the text."""
        self._generator = None
        self.finish = self.finish or "length"

    @property
    def tokens_per_second(self) -> float | None:
        """The rate of the tokens after the first, or None if there are none."""
        return (self.tokens - 1) / self.decode_s if self.tokens > 1 and self.decode_s else None

    def step(self) -> str:
        """Computes one more token or a part of the prompt.

        Returns the new text that cannot be part of a stop text; it may be empty.
        """
        started = perf_counter()
        try:
            token = self._token()
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                raise self._memory_error() from error
            raise
        took = perf_counter() - started
        if self.tokens > 1:
            self.decode_s += took
        else:
            self.first_token_s += took
        return "" if token is None else self._piece(token)

    def _token(self) -> int | None:
        """Returns the next token, or None while more of the prompt must be computed."""
        if len(self._prompt):
            chunk, self._prompt = np.split(self._prompt, [PROMPT_TOKENS])
            self._generator.append_tokens(chunk)
            if len(self._prompt):
                return None
        self._generator.generate_next_token()
        self.tokens += 1
        return int(self._generator.get_next_tokens()[0])

    def _piece(self, token: int) -> str:
        """Returns the pending text and that of a token, up to what may begin a stop text."""
        if token in self._ends:
            self.finish = "stop"
            return self._pending
        text = self._pending + self._decoder.text(token)
        end = min((at for stop in self._stop if (at := text.find(stop)) >= 0), default=None)
        if end is not None:
            self.finish = "stop"
            return text[:end]
        if self._generator.is_done():
            self.finish = "length"
            return text
        size = max((_partial_stop_size(text, stop) for stop in self._stop), default=0)
        self._pending = text[len(text) - size :]
        return text[: len(text) - size]


def _partial_stop_size(text: str, stop: str) -> int:
    """Returns how many characters at the end of a text may begin a stop text."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)


def check_generates(bundle: Bundle) -> None:
    """Raises `BundleError` with the reason if a bundle cannot generate text."""
    files = bundle.manifest.files
    vocabulary = bundle.manifest.inputs[0].below
    if GENAI_FILE not in files or vocabulary is None:
        reason = next((n for n in bundle.manifest.notes if n.startswith("no text")), None)
        raise BundleError(
            reason or f"{bundle.path} has no language model with a cache: {GENAI_FILE} is missing",
            hint="export a causal language model from its transformers folder; `moexport run` runs "
            "all other bundles",
        )
    bundle.graph_file()
    bundle.check_files(name for name in files if name in CONTENTS)
    problem = tokenizer_problem(bundle.path, vocabulary)
    if problem is not None:
        raise BundleError(
            problem, hint="copy the tokenizer's files into the model's folder and export again"
        )


def genai_library() -> Any:
    """Returns ONNX Runtime GenAI with its log turned off, or raises `MissingExtraError`."""
    what = "generating text needs ONNX Runtime GenAI"
    genai = library("onnxruntime_genai", what, install("generate"))
    genai.disable_telemetry_events()
    return genai


def _tokenizer(folder: Path) -> Tokenizer:
    """Loads a tokenizer without the steps that only encoding needs, such as splitting a text."""
    from tokenizers import Tokenizer

    content = object_in(folder / TOKENIZER_FILE, TOKENIZER_BYTES)
    omitted = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer"))
    return Tokenizer.from_str(json.dumps({**content, **omitted, "post_processor": None}))
