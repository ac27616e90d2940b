"""A language model in each engine that generates text; each engine has its own process.

An engine stays open while the others take their turns, but its threads are then asleep.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter, sleep
from typing import Any, Literal

import numpy as np
from moexport.common.timing import WAIT_S
from numpy.typing import NDArray

Ids = NDArray[np.int64]
EngineName = Literal["genai", "llama.cpp", "openvino-genai", "transformers"]

PACKAGES: Mapping[EngineName, tuple[str, ...]] = {
    "genai": ("onnxruntime_genai",),
    "llama.cpp": ("llama_cpp", "gguf"),
    "openvino-genai": ("openvino_genai",),
    "transformers": ("transformers",),
}
"""The modules of each engine; for llama.cpp also the module that writes its files."""

CONVERTER = "optimum-cli"
"""The program that converts models for OpenVINO GenAI, from another environment if necessary."""

DISTRIBUTIONS = ("onnxruntime-genai", "llama-cpp-python", "openvino-genai", "transformers")


def missing(name: EngineName) -> str | None:
    """Returns the modules of an engine that this environment lacks."""
    absent = [each for each in PACKAGES[name] if importlib.util.find_spec(each) is None]
    if name == "openvino-genai" and shutil.which(CONVERTER) is None:
        absent.append(CONVERTER)
    return f"not installed: {', '.join(absent)}" if absent else None


@dataclass(frozen=True, slots=True)
class TextCase:
    """A model in the form that an engine opens: a bundle, a GGUF file or a folder."""

    engine: EngineName
    precision: str
    k: int
    path: Path
    threads: int


class TextEngine(ABC):
    """An open language model."""

    @abstractmethod
    def generate(self, prompts: Ids, new: int) -> tuple[Ids, list[float]]:
        """Returns the next tokens [b, new] of prompts [b, m], greedily, and the seconds of each.

        The time of the first token includes computing the prompts, but not allocating the cache.
        """

    @abstractmethod
    def logits(self, ids: Ids) -> NDArray[np.float32]:
        """Returns the scores [m, v] of the token after each of ids [m]."""


class SteppedEngine(TextEngine):
    """An engine that generates one token per call."""

    @abstractmethod
    def steps(self, prompts: Ids, new: int) -> Callable[[], Ids]:
        """Returns a function that generates the next token [b] of every prompt [b, m], greedily.

        The first call computes the prompts; there are `new` calls in all.
        """

    def generate(self, prompts: Ids, new: int) -> tuple[Ids, list[float]]:
        """Returns the tokens of the steps and the seconds of each step."""
        step = self.steps(prompts, new)
        sleep(WAIT_S)
        tokens, times = [], []
        for _ in range(new):
            began = perf_counter()
            tokens.append(step())
            times.append(perf_counter() - began)
        return np.stack(tokens, axis=1), times


class GenAIEngine(SteppedEngine):
    """A bundle in ONNX Runtime GenAI."""

    def __init__(self, case: TextCase) -> None:
        from moexport.plugins.text.generate import genai_library

        self._genai = genai_library()
        config = self._genai.Config(str(case.path))
        options = {"session_options": {"intra_op_num_threads": case.threads}}
        config.overlay(json.dumps({"model": {"decoder": options}}))
        self._model = self._genai.Model(config)

    def _generator(self, prompts: Ids, new: int) -> Any:
        b, m = prompts.shape
        params = self._genai.GeneratorParams(self._model)
        # Random weights may yield an end token, which is ignored, so that all tokens are generated.
        length = m + new
        params.set_search_options(
            batch_size=b, max_length=length, min_length=length, do_sample=False
        )
        return self._genai.Generator(self._model, params)

    def steps(self, prompts: Ids, new: int) -> Callable[[], Ids]:
        """Returns the generator's own step."""
        generator, rest = self._generator(prompts, new), [prompts.astype(np.int32)]

        def step() -> Ids:
            if rest:
                generator.append_tokens(rest.pop())
            generator.generate_next_token()
            tokens: Ids = generator.get_next_tokens()
            return tokens

        return step

    def logits(self, ids: Ids) -> NDArray[np.float32]:
        """Returns the graph's output."""
        generator = self._generator(ids[None], 1)
        generator.append_tokens(ids[None].astype(np.int32))
        scores: NDArray[np.float32] = np.array(generator.get_output("logits")[0])
        return scores


class TransformersEngine(SteppedEngine):
    """The untouched model in float32, one token at a time with the cache of `transformers`."""

    def __init__(self, case: TextCase) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(case.threads)
        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(case.path, dtype=torch.float32).eval()

    def steps(self, prompts: Ids, new: int) -> Callable[[], Ids]:
        """Returns a call of the model that computes only the last token's scores."""
        given, cache = self._torch.from_numpy(prompts), None

        def step() -> Ids:
            nonlocal given, cache
            with self._torch.inference_mode():
                out = self._model(given, past_key_values=cache, use_cache=True, logits_to_keep=1)
                given, cache = out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values
            tokens: Ids = given[:, 0].numpy()
            return tokens

        return step

    def logits(self, ids: Ids) -> NDArray[np.float32]:
        """Returns the scores of one call without a cache."""
        with self._torch.inference_mode():
            scores = self._model(self._torch.from_numpy(ids[None]), use_cache=False).logits
        found: NDArray[np.float32] = scores[0].numpy()
        return found


class LlamaCppEngine(SteppedEngine):
    """A GGUF file in llama.cpp through its C interface, with the default settings.

    The cache has 16 bits.
    """

    def __init__(self, case: TextCase) -> None:
        import llama_cpp

        self._lib, self._threads = llama_cpp, case.threads
        self._log = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._log, None)
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(case.path).encode(), params)
        if self._model is None:
            raise RuntimeError(f"{case.path}: llama.cpp cannot open it")
        self._words = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._context: Any = None
        self._contexts: dict[tuple[int, int, int], Any] = {}

    def _open(self, sequences: int, length: int, tokens: int) -> None:
        """Opens an empty context for sequences of a length; a call has at most `tokens` tokens."""
        key = sequences, length, tokens
        if key not in self._contexts:
            self._contexts[key] = self._new_context(sequences, length, tokens)
        self._context = self._contexts[key]
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)

    def _new_context(self, sequences: int, length: int, tokens: int) -> Any:
        params = self._lib.llama_context_default_params()
        params.n_ctx = sequences * (-(-length // 256) * 256)
        params.n_batch, params.n_seq_max = max(tokens, 32), sequences
        params.n_threads = params.n_threads_batch = self._threads
        context = self._lib.llama_init_from_model(self._model, params)
        if context is None:
            raise RuntimeError(f"llama.cpp: no context of {sequences} sequences of {length} tokens")
        return context

    def _call(self, ids: Ids, start: int, *, every: bool = False) -> NDArray[np.float32]:
        """Returns the scores after ids [b, m] from `start` on: after the last [b, v], or all."""
        m = ids.shape[1]
        batch = self._lib.llama_batch_init(ids.size, 0, 1)
        batch.n_tokens = ids.size
        column = np.arange(ids.size) % m
        for array, values in (
            (batch.token, ids.ravel()),
            (batch.pos, start + column),
            (batch.n_seq_id, 1),
            (batch.logits, every | (column == m - 1)),
        ):
            np.ctypeslib.as_array(array, (ids.size,))[:] = values
        for index in range(ids.size):
            batch.seq_id[index][0] = index // m
        status = self._lib.llama_decode(self._context, batch)
        self._lib.llama_batch_free(batch)
        if status:
            raise RuntimeError(f"llama.cpp: decode failed with {status}")
        wanted = range(ids.size) if every else range(m - 1, ids.size, m)
        rows = [self._lib.llama_get_logits_ith(self._context, index) for index in wanted]
        return np.array([np.ctypeslib.as_array(row, (self._words,)) for row in rows])

    def steps(self, prompts: Ids, new: int) -> Callable[[], Ids]:
        """Returns a function that decodes the prompts in one batch, and then one token of each."""
        self._open(len(prompts), prompts.shape[1] + new, prompts.size)
        given, start = prompts, 0

        def step() -> Ids:
            nonlocal given, start
            best = self._call(given, start).argmax(-1)
            given, start = best[:, None].astype(np.int64), start + given.shape[1]
            tokens: Ids = given[:, 0]
            return tokens

        return step

    def logits(self, ids: Ids) -> NDArray[np.float32]:
        """Returns the scores at every position of one batch."""
        self._open(1, len(ids), len(ids))
        return self._call(ids[None], 0, every=True)


class OpenVinoGenAIEngine(TextEngine):
    """A folder that `optimum-cli export openvino` wrote, in OpenVINO GenAI.

    Its settings are the defaults, including BF16 if the CPU has it, except that it caches no
    prompts, because the same prompts come in several rounds.
    """

    def __init__(self, case: TextCase) -> None:
        import openvino
        import openvino_genai

        self._openvino, self._genai = openvino, openvino_genai
        self._settings = {"INFERENCE_NUM_THREADS": case.threads}
        schedule = openvino_genai.SchedulerConfig()
        schedule.enable_prefix_caching = False
        schedule.max_num_batched_tokens = (
            1 << 20
        )  # a prompt is computed in one call, as in the other engines
        self._folder = case.path
        self._pipeline = openvino_genai.LLMPipeline(
            case.path, "CPU", scheduler_config=schedule, **self._settings
        )
        self._graph: Any = None

    def generate(self, prompts: Ids, new: int) -> tuple[Ids, list[float]]:
        """Returns the tokens, and the times between them as OpenVINO GenAI records them."""
        config = self._genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = new
        config.ignore_eos, config.do_sample = True, False
        tensors = (self._openvino.Tensor(each) for each in (prompts, np.ones_like(prompts)))
        sleep(WAIT_S)
        found = self._pipeline.generate(self._genai.TokenizedInputs(*tensors), config)
        raw = found.perf_metrics.raw_metrics
        first_us, ms = raw.m_times_to_first_token[0], np.array(raw.m_new_token_times)
        return np.array(found.tokens), [first_us / 1e6, *(np.diff(ms) / 1e3).tolist()]

    def logits(self, ids: Ids) -> NDArray[np.float32]:
        """Returns the outputs of the same graph file in OpenVINO, without the pipeline."""
        if self._graph is None:
            file = self._folder / "openvino_model.xml"
            compiled = self._openvino.Core().compile_model(file, "CPU", self._settings)
            self._graph = compiled.create_infer_request()
        self._graph.reset_state()
        feeds = {
            "input_ids": ids[None],
            "attention_mask": np.ones((1, ids.size), np.int64),
            "position_ids": np.arange(ids.size)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        names = {name for port in self._graph.model_inputs for name in port.names}
        found = self._graph.infer({name: feeds[name] for name in feeds if name in names})
        scores: NDArray[np.float32] = np.array(found["logits"][0])
        return scores


ENGINES: Mapping[EngineName, Callable[[TextCase], TextEngine]] = {
    "genai": GenAIEngine,
    "llama.cpp": LlamaCppEngine,
    "openvino-genai": OpenVinoGenAIEngine,
    "transformers": TransformersEngine,
}

_OPEN: list[TextEngine] = []
"""The engine of this process, once it is open."""


class EngineProcess:
    """An engine in its own process, which ends with `close` and then frees its memory."""

    def __init__(self, case: TextCase) -> None:
        self.case = case
        context = get_context("spawn")
        self._pool = ProcessPoolExecutor(1, context, initializer=_open, initargs=(case,))

    def seconds(self, prompts: Ids, new: int) -> list[float]:
        """Returns the time of each new token."""
        return self._pool.submit(_seconds, prompts, new).result()

    def logits(self, ids: Ids) -> NDArray[np.float32]:
        """Returns the scores of the token after each of ids [m]."""
        return self._pool.submit(_logits, ids).result()

    def close(self) -> None:
        """Ends the process."""
        self._pool.shutdown()


def _open(case: TextCase) -> None:
    _OPEN.append(ENGINES[case.engine](case))


def _seconds(prompts: Ids, new: int) -> list[float]:
    return _OPEN[0].generate(prompts, new)[1]


def _logits(ids: Ids) -> NDArray[np.float32]:
    return _OPEN[0].logits(ids)
