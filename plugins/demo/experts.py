"""`moexport demo --family experts`: a small language model with routed experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...bench.data import LabelledData
from ...bench.engines import (
    ONNXRUNTIME,
    PYTORCH_EXPERTS_EAGER,
    PYTORCH_GROUPED_MM,
    TRANSFORMERS_ONNX,
)
from ...common.console import Progress
from ...common.threads import with_threads
from ...common.writing import replace_folder, temporary_folder, write_text
from ...graphs.targets import Precision
from ..text.language import python_topics
from ..token_routed.load import transformers_library
from . import digits
from .demo import THREADS, Demo, Exported, Group, TrainedNetwork, save_data
from .mumoe import random_windows

NAME = "mixtral"
VOCABULARY = 512
LENGTH = 128
"""The number of tokens in a prompt and in a training sequence."""

CONFIG: Mapping[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 16,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 2 * LENGTH,
    "tie_word_embeddings": True,
    "output_router_logits": True,  # the weight of the load-balancing loss
}

STEPS, BATCH, RATE = 300, 8, 4e-3
TEST_WINDOWS = 48
HELD_OUT = 10
"""One in this many topics is held out for the test."""

BUNDLES: tuple[tuple[str, str, Precision], ...] = (
    ("k4", "trained", "fp32"),
    ("k4-int8", "trained", "int8"),
    ("k2-int8", "2", "int8"),
    ("k1-int8", "1", "int8"),
)
"""The bundles to export: folder, k and precision."""

ENGINES = (ONNXRUNTIME, PYTORCH_GROUPED_MM, PYTORCH_EXPERTS_EAGER, TRANSFORMERS_ONNX)

CAVEAT = """The model is so small that its weights stay in the cache and the overhead of calls
dominates its time. INT8 and a smaller k save more in a larger model."""


def trained(
    directory: Path, progress: Progress, *, steps: int = STEPS, config: Mapping[str, Any] = CONFIG
) -> Sequence[Group]:
    """Trains the model and saves it with its data; returns the group to measure."""
    topics = python_topics()
    test = "\n\n".join(topics[::HELD_OUT])
    train = "\n\n".join(topic for index, topic in enumerate(topics) if index % HELD_OUT)
    folder = directory / NAME
    tokenizer = trained_tokenizer(train, VOCABULARY)
    tokens = {
        name: np.asarray(tokenizer(text, verbose=False)["input_ids"], np.int64)
        for name, text in (("train", train), ("test", test))
    }
    progress.step(f"training {NAME} on {len(tokens['train'])} tokens of Python's help", total=steps)
    with torch.random.fork_rng(devices=[]), with_threads(THREADS):
        torch.manual_seed(0)
        model = _fit(new_model(config), tokens["train"], steps, progress)
    with temporary_folder(folder) as partial:
        tokenizer.save_pretrained(str(partial))
        model.save_pretrained(str(partial))
        replace_folder(partial, folder)
    write_text(test, directory / "test.txt")
    length = LENGTH + 1
    windows = tokens["test"][: TEST_WINDOWS * length].reshape(-1, length)
    data = LabelledData(windows, None, "input_ids")
    file = save_data(data, directory / "test.npz")
    bundles = tuple(
        Exported(f"{NAME}-{name}", k, file, precision) for name, k, precision in BUNDLES
    )
    network = TrainedNetwork(NAME, folder, bundles, target="ort-cpu")
    return [Group("report", data, (network,), engines=ENGINES)]


def trained_tokenizer(text: str, size: int) -> Any:
    """Returns a byte-pair tokenizer with `size` tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def new_model(config: Mapping[str, Any]) -> Any:
    """Returns an untrained Mixtral with the vocabulary of the demo's tokenizer."""
    from transformers import MixtralConfig, MixtralForCausalLM

    none = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    return MixtralForCausalLM(MixtralConfig(vocab_size=VOCABULARY, **none, **config))


def _fit(model: Any, ids: np.ndarray, steps: int, progress: Progress) -> Any:
    """Trains a model to predict the next token; returns it in eval mode."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, total_steps=steps)
    batches = islice(random_windows(ids, BATCH, LENGTH), steps)
    losses = (model(input_ids=batch, labels=batch).loss for batch, _ in batches)
    digits.descend(optimiser, losses, schedule, progress)
    model.config.output_router_logits = False  # only training uses them
    return model.eval()


DEMO = Demo(
    "moexport demo --family experts", trained, remarks=(CAVEAT,), check=transformers_library
)
