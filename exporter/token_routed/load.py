"""From a folder with `config.json` and safetensors to a `Model`, through `transformers`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...common.files import Watched
from ...errors import CheckpointError, FamilyError, MissingExtraError, UsageError
from ...graphs.layers.base import sharing_weights
from ..checkpoints.files import find_files
from ..model import Model, Source, TensorSpec
from .experts import canonical, check_layer, experts_modules
from .network import TOKENS, Network, cache_shapes, cache_specs, token_specs
from .routers import Routers, find_routers, k_of

EXTRA = "pip install 'moexport[transformers]'"

HEADS: Mapping[str, tuple[str, ...]] = {
    "ForCausalLM": (*TOKENS, "vocabulary"),
    "ForTokenClassification": (*TOKENS, "labels"),
    "ForSequenceClassification": ("batch", "labels"),
    "Model": (*TOKENS, "hidden"),
}
"""What classes of `transformers` return, by how their names end: `logits`, or hidden states."""

OWN_MODULES = (
    "dbrx, jetmoe, llama4, longcat_flash, nllb_moe, step3p7 and switch_transformers have experts "
    "of their own"
)


@dataclass(frozen=True, slots=True)
class _Kind:
    """An architecture as its class says: what it returns, and whether it may have a cache."""

    name: str
    output: str
    axes: tuple[str, ...]

    @property
    def causal(self) -> bool:
        return self.name.endswith("ForCausalLM")


def architecture_of(folder: Path) -> str | None:
    """Returns the `model_type` that a folder's `config.json` names; None where there is none."""
    found = _json(folder).get("model_type")
    return found if isinstance(found, str) else None


def load_transformers(folder: Path, given: Mapping[str, Any], *, values: bool = True) -> Model:
    """Returns the model in a folder, with a layer of ours at the place of each layer's experts.

    `given` may say `use_cache`. Without `values` nothing of the weights is read. Raises
    `CheckpointError` for weights that are missing or damaged, and `FamilyError` for architectures
    that cannot be served.
    """
    _check_given(given)
    config = _config(folder)
    found = _weight_files(folder)
    class_ = _class(folder, config)
    kind = _kind(folder, class_.__name__)
    build = _builder(class_)
    skeleton = _built(folder, build, config)
    paths = _experts(folder, skeleton, config)
    experts = max(int(skeleton.get_submodule(path).num_experts) for path in paths)  # type: ignore[arg-type]
    routers = find_routers(build, config, experts)
    cached = bool(kind.causal and given.get("use_cache", getattr(config, "use_cache", True)))
    inputs, outputs, note = _ports(skeleton, config, kind, paths, cached=cached)
    takes, gives = [each.name for each in inputs], [each.name for each in outputs]
    watched = Watched.now(found)
    model = _weights(folder, class_, config) if values else skeleton
    original = Network(model.eval().requires_grad_(False), takes, gives)
    network = sharing_weights(original)
    k = k_of(config.get_text_config())
    for path in paths:
        module = original.get_submodule(path)
        layer = canonical(path, module, k[1] if k else experts)
        if values:
            check_layer(layer, module)
        network.set_submodule(path, layer)
    _keep_routers(network, routers)
    return Model(
        module=network,
        family=str(config.model_type),
        config=_told(config, routers, cached=network_cached(network)),
        source=Source(str(folder), found, watched=watched.hashed() if values else None),
        inputs=inputs,
        outputs=outputs,
        notes=(f"{class_.__name__} of transformers", *note),
        original=original,
    )


def network_cached(network: nn.Module) -> bool:
    """Whether a network takes and returns a cache."""
    return isinstance(network, Network) and network.cached


def _keep_routers(network: nn.Module, routers: Routers | None) -> None:
    network.routers = routers  # type: ignore[assignment]


def _told(config: Any, routers: Routers | None, *, cached: bool) -> dict[str, Any]:
    """What a manifest says of the configuration: sizes that a reader looks for, and the cache."""
    text = config.get_text_config()
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    told = {name: getattr(text, name) for name in names if hasattr(text, name)}
    if routers is not None:
        told[routers.field] = routers.trained
    return {**told, "use_cache": cached}


def _check_given(given: Mapping[str, Any]) -> None:
    unknown = sorted(given.keys() - {"use_cache"})
    if unknown:
        raise UsageError(
            f"--set {unknown[0]}: what a model of transformers is its config.json says",
            hint="only use_cache can be given: false exports a language model without its cache",
        )
    if not isinstance(given.get("use_cache", True), bool):
        raise UsageError(f"--set use_cache={given['use_cache']}: true or false is expected")


def _library() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise MissingExtraError(
            f"transformers, which models of this kind need, is not installed ({error})", hint=EXTRA
        ) from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def _config(folder: Path) -> Any:
    library = _library()
    try:
        return library.AutoConfig.from_pretrained(
            str(folder), trust_remote_code=False, local_files_only=True
        )
    except (ValueError, OSError, KeyError, TypeError) as error:
        own = "auto_map" in _json(folder)
        raise FamilyError(
            f"{folder}: transformers {library.__version__} cannot read its config.json: "
            f"{_first(error)}",
            hint="the architecture is code that comes with the checkpoint, which is never run: "
            "give the network as package.module:factory, with --adapter"
            if own
            else "a newer transformers may know the architecture",
        ) from error


def _json(folder: Path) -> Mapping[str, Any]:
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}  # whoever reads it next says what is wrong
    return content if isinstance(content, dict) else {}


def _weight_files(folder: Path) -> tuple[Path, ...]:
    files = find_files(folder).files
    for file in files:
        if file.suffix != ".safetensors":
            raise CheckpointError(
                f"{file}: weights of transformers' models are read from safetensors alone",
                hint="save it again: model.save_pretrained(folder)",
            )
    return files


def _class(folder: Path, config: Any) -> Any:
    library = _library()
    names = list(getattr(config, "architectures", None) or ())
    for name in names:
        found = getattr(library, name, None)
        if found is not None:
            return found
    if names:
        raise FamilyError(
            f"{folder}: transformers {library.__version__} has no {names[0]}",
            hint="code that comes with a checkpoint is never run: give the network as "
            "package.module:factory",
        )
    try:
        return library.AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError:
        raise FamilyError(
            f"{folder}: its config.json names no architectures",
            hint='add "architectures": ["…ForCausalLM"], the class that was saved',
        ) from None


def _kind(folder: Path, name: str) -> _Kind:
    for end, axes in HEADS.items():
        if name.endswith(end):
            return _Kind(name, "last_hidden_state" if end == "Model" else "logits", axes)
    raise FamilyError(
        f"{folder}: a {name} is not served",
        hint="served are causal language models, encoders and classifiers of tokens: classes that "
        f"end in {', '.join(HEADS)}",
    )


def _attention(class_: Any) -> str:
    """PyTorch's own attention, where an architecture has no parts that it lacks."""
    return "sdpa" if class_._supports_sdpa else "eager"


def _builder(class_: Any) -> Any:
    def build(config: Any) -> nn.Module:
        with torch.device("meta"):
            model = class_._from_config(config, attn_implementation=_attention(class_))
        assert isinstance(model, nn.Module)
        return model.eval()

    return build


def _built(folder: Path, build: Any, config: Any) -> nn.Module:
    try:
        model = build(config)
    except (ValueError, TypeError, AttributeError, KeyError, ImportError) as error:
        raise FamilyError(
            f"{folder}: its config.json makes no model: {_first(error)}",
            hint="the file should be the one that was saved with the weights",
        ) from error
    assert isinstance(model, nn.Module)
    return model


def _experts(folder: Path, skeleton: nn.Module, config: Any) -> list[str]:
    paths = list(experts_modules(skeleton))
    if paths:
        return paths
    raise FamilyError(
        f"{folder}: {config.model_type} has no experts that go through the experts interface of "
        "transformers",
        hint=f"{OWN_MODULES}; other architectures have none: optimum exports those",
    )


def _ports(
    skeleton: nn.Module, config: Any, kind: _Kind, paths: list[str], *, cached: bool
) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...], tuple[str, ...]]:
    """The inputs and outputs, and a note where there is no cache that one might expect."""
    text = config.get_text_config()
    sizes = {
        "vocabulary": text.vocab_size,
        "labels": getattr(config, "num_labels", 0),
        "hidden": text.hidden_size,
    }
    shape = tuple(sizes.get(axis, axis) for axis in kind.axes)
    output = TensorSpec(kind.output, "float32", shape)
    positions = getattr(text, "max_position_embeddings", None)
    shapes = _shapes(skeleton, paths) if cached else None
    inputs = token_specs(text.vocab_size, positions, cached=shapes is not None)
    if shapes is None:
        missing = ("its cache holds more than keys and values: exported without",) if cached else ()
        return inputs, (output,), missing
    pasts, presents = cache_specs(shapes)
    return (*inputs, *pasts), (output, *presents), ()


def _shapes(skeleton: nn.Module, paths: list[str]) -> dict[str, tuple[int, int]] | None:
    """The heads and width of each part of the cache, from a run without weights."""

    class Nothing(nn.Module):
        def forward(self, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            return x

    held = {path: skeleton.get_submodule(path) for path in paths}
    try:
        for path in paths:
            skeleton.set_submodule(path, Nothing())
        with torch.no_grad():
            ids = torch.zeros((2, 3), dtype=torch.int64, device="meta")
            found = skeleton(input_ids=ids, use_cache=True)
    except (RuntimeError, NotImplementedError):
        return None
    finally:
        for path, module in held.items():
            skeleton.set_submodule(path, module)
    return cache_shapes(getattr(found, "past_key_values", None))


def _weights(folder: Path, class_: Any, config: Any) -> nn.Module:
    """The model with its weights in float32; `CheckpointError` where they are not all there."""
    if getattr(config, "quantization_config", None) is not None:
        raise CheckpointError(
            f"{folder}: its weights are quantised already",
            hint="export the checkpoint in bfloat16 or float32 that they were made from",
        )
    try:
        model, told = class_.from_pretrained(
            str(folder),
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            attn_implementation=_attention(class_),
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise CheckpointError(
            f"{folder}: transformers cannot load its weights: {_first(error)}",
            hint="copy or download the folder again; it may not be whole",
        ) from error
    missing = sorted(told["missing_keys"])
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} weights are missing, the first is {missing[0]}",
            hint="copy or download the folder again; it may not be whole",
        )
    if told.get("mismatched_keys"):
        raise CheckpointError(
            f"{folder}: weights are of other shapes than config.json says: "
            f"{sorted(map(str, told['mismatched_keys']))[0]}",
            hint="config.json and the weights are of different models",
        )
    assert isinstance(model, nn.Module)
    return model


def _first(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
