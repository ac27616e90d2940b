"""Small models with an encoder and a decoder, and their comparison with PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import moexport
import numpy as np
import torch
from moexport.exporter.bundle.bundle import Bundle
from moexport.plugins.token_routed.tests.architectures import (
    check_values,
    random_weights,
    session_of,
    transformers,
)
from transformers.models.nllb_moe.modeling_nllb_moe import NllbMoeExperts

VOCABULARY, BATCH = 61, 3

STEPS = (4, 2, 1)
"""The numbers of tokens in a decoder's steps; 7 after 5 were traced."""


@dataclass(frozen=True)
class EncoderDecoder:
    """A class of `transformers`, a small configuration, and the changes for a second one."""

    type: str
    name: str
    config: Mapping[str, Any]
    second: Mapping[str, Any] = field(default_factory=dict)


ENCODER_DECODERS: Mapping[str, EncoderDecoder] = {
    each.type: each
    for each in (
        EncoderDecoder(
            "switch_transformers",
            "SwitchTransformersForConditionalGeneration",
            {
                "d_model": 32,
                "d_kv": 8,
                "d_ff": 24,
                "num_heads": 4,
                "num_layers": 2,
                "num_decoder_layers": 2,
                "num_sparse_encoder_layers": 1,
                "num_sparse_decoder_layers": 2,
                "num_experts": 4,
                "expert_capacity": 2,  # tokens are left out
            },
            {"dense_act_fn": "gelu_new", "router_bias": True, "num_experts": 8},
        ),
        EncoderDecoder(
            "nllb-moe",
            "NllbMoeForConditionalGeneration",
            {
                "d_model": 32,
                "encoder_layers": 2,
                "decoder_layers": 2,
                "encoder_ffn_dim": 24,
                "decoder_ffn_dim": 40,
                "encoder_attention_heads": 4,
                "decoder_attention_heads": 4,
                "encoder_sparse_step": 2,
                "decoder_sparse_step": 1,
                "num_experts": 4,
                "max_position_embeddings": 64,
            },
            {
                "activation_function": "gelu",
                "normalize_router_prob_before_dropping": True,
                "moe_token_dropout": 0.0,
                "router_ignore_padding_tokens": True,
            },
        ),
    )
}


def save(case: EncoderDecoder, folder: Path, *, second: bool = False, **more: Any) -> Path:
    """Writes a model with random weights."""
    torch.manual_seed(1 if second else 0)
    settings = {**case.config, **(case.second if second else {}), **more}
    config = transformers.AutoConfig.for_model(case.type, vocab_size=VOCABULARY, **settings)
    model = getattr(transformers, case.name)(config).eval()
    random_weights(model)
    model.save_pretrained(folder)
    return folder


def _by_gates(self: Any, x: torch.Tensor, mask: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """NLLB-MoE's experts as in the paper: each token's sum of gate · expert, scaled.

    The library's own forward uses the mask of the first choices as indices, and computes experts 0
    and 1 for every token.
    """
    del mask
    outputs = torch.stack([self[f"expert_{e}"](x) for e in range(self.num_experts)], dim=1)
    scale: float = 1 - self.moe_token_dropout
    return (gates[:, :, None] * outputs).sum(dim=1) * scale


@contextmanager
def reference(case: EncoderDecoder, folder: Path) -> Iterator[Any]:
    """Yields the library's model with experts that follow its router."""
    model = getattr(transformers, case.name).from_pretrained(folder, dtype=torch.float32).eval()
    with mock.patch.object(NllbMoeExperts, "forward", _by_gates), torch.no_grad():
        yield model


def check_parts(case: EncoderDecoder, folder: Path, out: Path, parts: tuple[str, ...]) -> None:
    """Exports parts of a model (`whole`, `encoder`, `decoder`) and compares each."""
    checks = {"whole": _check_whole, "encoder": _check_encoder, "decoder": _check_decoder}
    for part in parts:
        config = {} if part == "whole" else {"part": part}
        bundle = moexport.export(moexport.load(folder, config=config), out / part)
        with reference(case, folder) as model:
            checks[part](bundle, model)


def _ids(random: np.random.Generator, *shape: int) -> np.ndarray:
    return random.integers(3, VOCABULARY, shape)


def _encoder_inputs(random: np.random.Generator) -> dict[str, np.ndarray]:
    mask = np.ones((BATCH, 9), dtype=np.int64)
    mask[1:, 6:] = 0
    return {"input_ids": _ids(random, BATCH, 9), "attention_mask": mask}


def _tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _check_whole(bundle: Bundle, model: Any) -> None:
    random = np.random.default_rng(0)
    given = {**_encoder_inputs(random), "decoder_input_ids": _ids(random, BATCH, 6)}
    expected = model(**_tensors(given), use_cache=False)
    check_values(session_of(bundle).run(given)["logits"], expected.logits.numpy())


def _check_encoder(bundle: Bundle, model: Any) -> None:
    given = _encoder_inputs(np.random.default_rng(0))
    expected = model.get_encoder()(**_tensors(given))
    y = session_of(bundle).run(given)["last_hidden_state"]
    check_values(y, expected.last_hidden_state.numpy())


def _check_decoder(bundle: Bundle, model: Any) -> None:
    """Runs the decoder step by step with its cache, on the encoder's output."""
    random, session = np.random.default_rng(0), session_of(bundle)
    encoder = _encoder_inputs(random)
    encoded = model.get_encoder()(**_tensors(encoder))
    about = {
        "encoder_hidden_states": encoded.last_hidden_state.numpy(),
        "encoder_attention_mask": encoder["attention_mask"],
    }
    cache = transformers.EncoderDecoderCache(
        transformers.DynamicCache(), transformers.DynamicCache()
    )
    past: dict[str, np.ndarray] = {}
    for tokens in STEPS:
        ids = _ids(random, BATCH, tokens)
        values = session.run({"decoder_input_ids": ids, **about, **past})
        expected = model(
            attention_mask=torch.from_numpy(encoder["attention_mask"]),
            encoder_outputs=encoded,
            decoder_input_ids=torch.from_numpy(ids),
            past_key_values=cache,
            use_cache=True,
        )
        check_values(values["logits"], expected.logits.numpy())
        past = {
            name.replace("present", "past_key_values"): value
            for name, value in values.items()
            if name.startswith("present.")
        }
