"""Every call of a published constructor: its checkpoint loads to the same forward, or asks.

For each family the arguments that change the output are combined. With the call itself, the model
computes what the published formula does in float64; with the weights alone, it does so too or asks
for the arguments that keys and shapes leave open. So nothing is ever guessed.
"""

# ruff: noqa: B023  the functions inside a `forward` are called within the call that made them

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from moexport.errors import FamilyError
from moexport.exporter.checkpoints.load import load
from moexport.graphs.layers.mumoe import FactorisedSpec, Form, GateActivation, MuMoE, MuMoESpec
from moexport.tests.exporter.families.reference import (
    ACTIVATIONS,
    Array,
    gelu,
    gelu_tanh,
    layer_norm,
    linear,
    soft_moe,
    softmax,
    unit,
    vit,
    vit_moe_layer,
)
from moexport.tests.exporter.families.states import (
    State,
    lucidrains_state,
    random_state,
    vit_layer_shapes,
    vit_state,
    vmoe_state,
)
from moexport.tests.graphs.mumoe_layers import formula, random_layer, state_of, tensor

pytestmark = pytest.mark.slow

Formula = Callable[[Array, dict[str, Array]], Array]


@dataclass(frozen=True)
class Case:
    """A checkpoint, the call that made its model, the published forward, and an input's shape.

    `open` are the arguments that the weights alone leave open.
    """

    name: str
    state: State
    call: dict[str, Any]
    forward: Formula
    shape: tuple[int, ...]
    open: tuple[str, ...] = ()


def product(**options: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*options.values()):
        yield dict(zip(options, values, strict=True))


def named(options: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in options.items())


# --- soft-moe-vit ------------------------------------------------------------------------------

VIT_CALL: dict[str, Any] = {
    "img_size": 12,
    "patch_size": 4,
    "embed_dim": 12,
    "depth": 2,
    "num_heads": 3,
}
VIT_CALL |= {"moe_layer_index": 1, "num_experts": 4, "slots_per_expert": 2, "num_classes": 5}
VIT_CALL |= {"mlp_ratio": 20 / 12, "moe_mlp_ratio": 16 / 12}
VIT_DEFAULTS: dict[str, Any] = {"class_token": True, "global_pool": "token", "fc_norm": None}
VIT_DEFAULTS |= {"no_embed_class": False, "pre_norm": False, "act_layer": "gelu"}
VIT_DEFAULTS |= {"norm_eps": 1e-6, "qk_norm": False, "qkv_bias": True, "init_values": None}


def vit_case(**said: Any) -> Case:
    options = {**VIT_DEFAULTS, **said}
    call = VIT_CALL | {key: value for key, value in said.items() if value != VIT_DEFAULTS.get(key)}
    pool, fc_norm = options["global_pool"], options["fc_norm"]
    keys = ("class_token", "no_embed_class", "pre_norm", "qk_norm", "qkv_bias")
    height, width = said.get("img_size", (12, 12))
    state = vit_state(
        grid=(height // 4, width // 4),
        fc_norm=pool == "avg" if fc_norm is None else fc_norm,
        layer_scale=options["init_values"] is not None,
        **{key: options[key] for key in keys},
    )

    def forward(x: Array, w: dict[str, Array]) -> Array:
        return vit(
            x,
            w,
            heads=3,
            pool=pool,
            no_embed_class=options["no_embed_class"],
            act=options["act_layer"],
            eps=options["norm_eps"],
        )

    heads = () if options["qk_norm"] else ("num_heads",)
    asked = (*heads, "img_size", "global_pool", "act_layer", "norm_eps")
    return Case(named(said), state, call, forward, (2, 3, height, width), asked)


def vit_cases() -> Iterator[Case]:
    for options in product(
        class_token=(True, False),
        global_pool=("token", "avg", ""),
        fc_norm=(None, True, False),
        no_embed_class=(False, True),
        pre_norm=(False, True),
    ):
        if options["class_token"] or options["global_pool"] != "token":
            yield vit_case(**options)
    for options in product(
        act_layer=("gelu", "relu", "gelu_tanh"),
        norm_eps=(1e-6, 1e-2),
        qk_norm=(False, True),
        qkv_bias=(True, False),
        init_values=(None, 1e-5),
    ):
        yield vit_case(**options)
    for size in ((8, 32), (16, 16), (8, 12), (4, 36)):
        yield vit_case(img_size=size)


# --- the other networks and layers ---------------------------------------------------------------


def mnist_cases() -> Iterator[Case]:
    for normalize, slots, out, patch in itertools.product((False, True), (1, 3), (16, 9), (4, 7)):
        d, n, h = patch * patch, 4, 6
        grid = 28 // patch
        shapes: dict[str, tuple[int, ...]] = {"phi": (d, n * slots)}
        shapes["decoder.1.weight"] = (10, grid * grid * out)
        for i in range(n):
            shapes |= {f"experts.{i}.1.weight": (h, d), f"experts.{i}.3.weight": (out, h)}
        if normalize:
            shapes["normalization_scale_param"] = (1,)

        def forward(x: Array, w: dict[str, Array], n: int = n) -> Array:
            d, columns = w["phi"].shape
            side = round(np.sqrt(d))
            b, grid = len(x), x.shape[2] // side
            tokens = x.reshape(b, grid, side, grid, side).transpose(0, 1, 3, 2, 4).reshape(b, -1, d)
            phi = w["phi"].reshape(d, n, columns // n)
            if "normalization_scale_param" in w:
                tokens = tokens / (np.sqrt((tokens**2).sum(-1, keepdims=True)) + 1e-6)
                phi = phi / (np.sqrt((phi**2).sum(0, keepdims=True)) + 1e-6)
                phi = phi * w["normalization_scale_param"]

            def expert(i: int, slots: Array) -> Array:
                hidden = np.maximum(slots @ w[f"experts.{i}.1.weight"].T, 0)
                y: Array = hidden @ w[f"experts.{i}.3.weight"].T
                return y

            y = soft_moe(tokens, tokens, phi, expert)
            return linear(y.reshape(b, -1), w, "decoder.1")

        call = {"num_experts": n, "num_slots": slots, "expert_out_dim": out}
        name = named({"normalize": normalize, "patch": patch, **call})
        yield Case(name, random_state(shapes), call, forward, (2, 1, grid * patch, grid * patch))


def conv_cases() -> Iterator[Case]:
    for act, normalised, slots in itertools.product(ACTIVATIONS, (True, False), (1, 2)):
        shapes = vit_layer_shapes("", d=6, n=3, p=slots, h=5, normalised=normalised)
        plain = random_state(shapes)
        state = {
            k: t[..., None, None] if ".fc" in k and t.ndim == 2 else t for k, t in plain.items()
        }

        def forward(x: Array, w: dict[str, Array], act: str = act) -> Array:
            flat = {f"m.{k}": v.reshape(v.shape[:2]) if v.ndim == 4 else v for k, v in w.items()}
            b, d, height, width = x.shape
            tokens = x.reshape(b, d, -1).transpose(0, 2, 1)
            y = vit_moe_layer(tokens, flat, "m", act).transpose(0, 2, 1)
            return y.reshape(b, d, height, width)

        call: dict[str, Any] = {"dim": 6, "num_experts": 3, "hidden": 5}
        call |= {} if act == "gelu" else {"act_layer": act}
        call |= {} if slots == 1 else {"slots_per_expert": slots}
        yield Case(
            f"{act} {normalised} {slots}", state, call, forward, (2, 6, 3, 4), ("act_layer",)
        )


def lucidrains_cases() -> Iterator[Case]:
    for options in product(geglu=(False, True), use_layernorm=(False, True), num_slots=(1, 3)):
        geglu, normed, p = options.values()
        n, d, h = 3, 8, 16
        shapes = {k: tuple(t.shape) for k, t in lucidrains_state(n=n, p=p, d=d, h=h).items()}
        for i in range(n if geglu else 0):
            shapes |= {f"experts.experts.{i}.0.weight": (2 * h, d)}
            shapes |= {f"experts.experts.{i}.0.bias": (2 * h,)}
        if normed:
            shapes |= {"norm.beta": (d,), "slot_norm.beta": (d,)}

        def forward(x: Array, w: dict[str, Array], geglu: bool = geglu) -> Array:
            def norm(x: Array, name: str) -> Array:
                gamma = w[f"{name}.gamma"]
                if f"{name}.beta" in w:
                    return layer_norm(x, gamma, w[f"{name}.beta"], 1e-5)
                y: Array = unit(x, -1) * np.sqrt(x.shape[-1]) * gamma
                return y

            def expert(i: int, slots: Array) -> Array:
                hidden = linear(slots, w, f"experts.experts.{i}.0")
                if geglu:
                    first, gate = np.split(hidden, 2, axis=-1)
                    hidden = first * gelu(gate)
                else:
                    hidden = gelu(hidden)
                return linear(hidden, w, f"experts.experts.{i}.3")

            x = norm(x, "norm")
            phi = norm(w["slot_embeds"], "slot_norm").transpose(2, 0, 1)
            return soft_moe(x, x, phi, expert)

        call = {"dim": d, "num_experts": n, **options, "offload_unused_experts_to_cpu": True}
        call["expert_mult"] = 3 if geglu else 2
        yield Case(named(options), random_state(shapes), call, forward, (2, 5, d))


def fkodom_cases() -> Iterator[Case]:
    for bias, out, p in itertools.product((True, False), (6, 9), (1, 2)):
        shapes: dict[str, tuple[int, ...]] = {"phi": (6, 3, p), "experts.weight": (3, 6, out)}
        shapes |= {"experts.bias": (3, out)} if bias else {}

        def forward(x: Array, w: dict[str, Array]) -> Array:
            def expert(i: int, slots: Array) -> Array:
                y: Array = slots @ w["experts.weight"][i] + w.get("experts.bias", np.zeros(9))[i]
                return y

            return soft_moe(x, x, w["phi"], expert)

        call = {"in_features": 6, "out_features": out, "bias": bias, "version": "0.2.0"}
        state = random_state(shapes)
        yield Case(f"{bias} {out} {p}", state, call, forward, (2, 5, 6), ("version",))


def vmoe_cases() -> Iterator[Case]:
    for p, group in itertools.product((1, 3), (None, 5)):
        state = {key.replace("/", "."): t for key, t in vmoe_state(p=p).items()}

        def forward(x: Array, w: dict[str, Array]) -> Array:
            def unit(v: Array, axis: int) -> Array:
                y: Array = v / np.sqrt((v**2).sum(axis=axis, keepdims=True) + 1e-6)
                return y

            def expert(i: int, slots: Array) -> Array:
                hidden = slots @ w["Mlp.Dense_0.kernel"][i] + w["Mlp.Dense_0.bias"][i]
                y: Array = gelu_tanh(hidden) @ w["Mlp.Dense_1.kernel"][i] + w["Mlp.Dense_1.bias"][i]
                return y

            return soft_moe(unit(x, -1), x, unit(w["Router.mu"], 0) * w["Router.scale"], expert)

        call = {"num_experts": 4, "mlp_dim": 16, "group_size": group}
        yield Case(f"{p} {group}", state, call, forward, (2, 5, 8))


# --- muMoE ---------------------------------------------------------------------------------------


def mumoe_layer(
    form: Form, levels: tuple[int, ...], second: bool, bias: bool, norm: str, act: str, ln: bool
) -> tuple[MuMoE, State]:
    widths = (6, 8, 5) if second else (6, 8)
    tensors = tuple(tensor(form, levels, d, o, bias=bias) for d, o in itertools.pairwise(widths))
    return published(MuMoESpec("layer", tensors, norm, act, ln))  # type: ignore[arg-type]


def published(spec: MuMoESpec) -> tuple[MuMoE, State]:
    """A layer with random weights, and its state dict as the released code saves it."""
    layer = random_layer(spec)
    state = state_of(layer)
    for level in range(len(spec.levels) if spec.norm == "bn" else 0):
        state[f"bn.{level}.num_batches_tracked"] = torch.tensor(7)
    if layer.gain is not None and layer.shift is not None:
        state |= {"input_ln.weight": layer.gain.data, "input_ln.bias": layer.shift.data}
    return layer, state


def mumoe_cases() -> Iterator[Case]:
    for form, levels, second, bias, norm, act, ln in itertools.product(
        ("cp", "tr"),
        ((4,), (3, 2)),
        (False, True),
        (True, False),
        ("bn", "ln"),
        ("entmax15", "softmax"),
        (False, True),
    ):
        options = (form, levels, second, bias, norm, act, ln)
        layer, state = mumoe_layer(*options)  # type: ignore[arg-type]
        ranks = 7 if form == "cp" else [[r, None, r + 1] for r in range(3, 4 + len(levels))]
        call: dict[str, Any] = {"input_dim": 6, "output_dim": 8, "expert_dims": list(levels)}
        call["MuMoE_layer"] = {"cp": "CPMuMoE", "tr": "TRMuMoE"}[form]
        call["ranks"] = ranks if form == "cp" else [*ranks, [4 + len(levels), None, 3]]  # type: ignore[misc]
        call |= {"second_dim": 5} if second else {}
        call |= {"hierarchy": 2} if len(levels) > 1 else {}
        call |= {} if bias else {"use_bias": False}
        call |= {"normalization": "ln"} if norm == "ln" else {}
        call |= {"apply_ln": True} if ln else {}
        call |= {"act": act} if act != "entmax15" else {}
        name = " ".join(map(str, options))
        yield Case(name, state, call, lambda x, _, at=layer: formula(at, x), (2, 3, 6), ("act",))  # type: ignore[misc]


def block(spec_name: str, widths: tuple[int, ...], act: GateActivation, norm: str, ln: bool) -> Any:
    ranks = {"cp": (7,), "tr": (3, 4, 5)}
    form: Form = "cp" if spec_name == "CPMuMoE" else "tr"
    tensors = tuple(
        FactorisedSpec(form, (4,), d, o, ranks[form], True) for d, o in itertools.pairwise(widths)
    )
    return published(MuMoESpec("layer", tensors, norm, act, ln))  # type: ignore[arg-type]


def mixer_cases() -> Iterator[Case]:
    for layer, patch, act in itertools.product(
        ("CPMuMoE", "TRMuMoE"), (1, 2, 4), ("entmax15", "softmax")
    ):
        m, d, channels = 4, 6, 16 // (patch * patch)
        tokens, inner = block(layer, (m, 9, m), act, "bn", False)  # type: ignore[arg-type]
        features, outer = block(layer, (d, 10, d), act, "bn", False)  # type: ignore[arg-type]
        shapes: dict[str, tuple[int, ...]] = {"stem.1.weight": (d, 16), "stem.1.bias": (d,)}
        for name in ("mixer_blocks.0.0.norm", "mixer_blocks.0.1.norm", "head.0"):
            shapes |= {f"{name}.weight": (d,), f"{name}.bias": (d,)}
        shapes |= {"head.2.weight": (5, d), "head.2.bias": (5,)}
        state = random_state(shapes)
        state |= {f"mixer_blocks.0.0.fn.1.{key}": t for key, t in inner.items()}
        state |= {f"mixer_blocks.0.1.fn.{key}": t for key, t in outer.items()}

        def forward(
            x: Array,
            w: dict[str, Array],
            layers: tuple[MuMoE, MuMoE] = (tokens, features),
            p: int = patch,
        ) -> Array:
            def norm(x: Array, name: str) -> Array:
                return layer_norm(x, w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)

            b, c, height, width = x.shape
            x = x.reshape(b, c, height // p, p, width // p, p).transpose(0, 2, 4, 3, 5, 1)
            x = linear(x.reshape(b, -1, p * p * c), w, "stem.1")
            y = norm(x, "mixer_blocks.0.0.norm").transpose(0, 2, 1)
            x = x + formula(layers[0], y).transpose(0, 2, 1)
            x = x + formula(layers[1], norm(x, "mixer_blocks.0.1.norm"))
            return linear(norm(x, "head.0").mean(axis=1), w, "head.2")

        call: dict[str, Any] = {"image_size": 2 * patch, "channels": channels, "patch_size": patch}
        call |= {"dim": d, "depth": 1, "num_classes": 5, "layer": layer, "n_experts": 4}
        call |= {"expansion_factor": 10, "expansion_factor_token": 9}
        call |= {"act": act} if act != "entmax15" else {}
        shape = (2, channels, 2 * patch, 2 * patch)
        yield Case(f"{layer} {patch} {act}", state, call, forward, shape, ("act", "patch_size"))


def gpt2_cases() -> Iterator[Case]:
    for layer, heads, bias in itertools.product(("CPMuMoE", "TRMuMoE"), (1, 2, 3), (True, False)):
        d, vocabulary = 6, 11
        mumoe, inner = block(layer, (d, 8, d), "entmax15", "ln", True)
        shapes: dict[str, tuple[int, ...]] = {
            "transformer.wte.weight": (vocabulary, d),
            "transformer.wpe.weight": (8, d),
            "transformer.h.0.attn.c_attn.weight": (3 * d, d),
            "transformer.h.0.attn.c_proj.weight": (d, d),
            "transformer.h.0.ln_1.weight": (d,),
            "transformer.ln_f.weight": (d,),
        }
        if bias:
            named = [key.replace("weight", "bias") for key in list(shapes)[2:]]
            shapes |= {key: (3 * d if "c_attn" in key else d,) for key in named}
        state = random_state(shapes)
        state["lm_head.weight"] = state["transformer.wte.weight"]
        state |= {f"transformer.h.0.mlp.MuMoE_layer.{key}": t for key, t in inner.items()}

        def forward(
            ids: Array, w: dict[str, Array], at: MuMoE = mumoe, heads: int = heads
        ) -> Array:
            def norm(x: Array, name: str) -> Array:
                shift = w.get(f"{name}.bias", np.zeros(x.shape[-1]))
                return layer_norm(x, w[f"{name}.weight"], shift, 1e-5)

            b, m = ids.shape
            wte = w["transformer.wte.weight"]
            x = wte[ids.astype(int)] + w["transformer.wpe.weight"][:m]
            qkv = linear(norm(x, "transformer.h.0.ln_1"), w, "transformer.h.0.attn.c_attn")
            q, k, v = (
                part.reshape(b, m, heads, -1).transpose(0, 2, 1, 3)
                for part in np.split(qkv, 3, axis=-1)
            )
            scores = q @ k.transpose(0, 1, 3, 2) / np.sqrt(q.shape[-1])
            scores = np.where(np.tril(np.ones((m, m))) > 0, scores, -np.inf)
            y = (softmax(scores, -1) @ v).transpose(0, 2, 1, 3).reshape(b, m, -1)
            x = x + linear(y, w, "transformer.h.0.attn.c_proj")
            x = x + formula(at, x)
            z: Array = norm(x, "transformer.ln_f") @ wte.T
            return z

        call = {"n_head": heads, "n_embd": d, "n_layer": 1, "vocab_size": vocabulary, "bias": bias}
        yield Case(f"{layer} {heads} {bias}", state, call, forward, (2, 5), ("n_head",))


CASES: dict[str, Callable[[], Iterator[Case]]] = {
    "soft-moe-vit": vit_cases,
    "soft-moe-mnist": mnist_cases,
    "soft-moe-conv": conv_cases,
    "soft-moe-pytorch": lucidrains_cases,
    "soft-moe-fkodom": fkodom_cases,
    "soft-moe-vmoe": vmoe_cases,
    "mumoe": mumoe_cases,
    "mumoe-mixer": mixer_cases,
    "mumoe-gpt2": gpt2_cases,
}


def inputs(case: Case) -> Array:
    random = np.random.default_rng(0)
    if len(case.shape) == 2:
        return random.integers(0, 11, case.shape).astype(np.float64)
    return random.standard_normal(case.shape).astype(np.float32).astype(np.float64)


def assert_same(path: Path, case: Case, config: dict[str, Any]) -> None:
    model = load(path, config=config)
    assert len(model.input.shape) == len(case.shape)
    for declared, size in zip(model.input.shape, case.shape, strict=True):
        assert declared == size or isinstance(declared, str), case.name
    x = inputs(case)
    given = torch.from_numpy(x).to(torch.int64 if len(case.shape) == 2 else torch.float32)
    with torch.no_grad():
        y = model.module(given).numpy()
    arrays = {key: t.double().numpy() for key, t in case.state.items()}
    expected = case.forward(x, arrays)
    assert y.shape == expected.shape, case.name
    assert np.abs(y - expected).max() <= 2e-5 * np.abs(expected).max(), case.name


@pytest.mark.parametrize("family", CASES)
def test_every_call_of_the_constructor_loads_right_or_asks(family: str, tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    for case in CASES[family]():
        torch.save(case.state, path)
        assert_same(path, case, case.call)
        if not case.open:
            assert_same(path, case, {})
            continue
        with pytest.raises(FamilyError) as caught:
            load(path)
        for key in case.open:
            assert f"{key} (" in caught.value.message, case.name
            assert f'"{key}": ' in str(caught.value.hint), case.name
