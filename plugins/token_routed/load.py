"""Loads a folder with `config.json` and safetensors as a `Model`, through `transformers`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ...common.documents import object_in, read_document
from ...common.files import Reading, Watched
from ...errors import CheckpointError, FamilyError, MissingExtraError, UsageError, install, one_line
from ...exporter.checkpoints.weight_files import INDEX
from ...exporter.families.base import cache_specs
from ...exporter.model import Model, Source, TensorSpec
from ...graphs.layers.base import sharing_weights
from ...graphs.names import PAST
from . import CONFIG_FILE
from .budget import MISMATCH, WeightSizes
from .experts import canonical, check_layer, experts_modules
from .host import HOST
from .network import (
    DECODED,
    TOKENS,
    TransformersNetwork,
    cache_shapes,
    decoder_specs,
    encoded,
    token_specs,
)
from .own_modules import canonical_block, check_block, sparse_blocks
from .routers import Routers, find_routers, k_of
from .weights import attention_of, folder_files, load_weights

HEADS: Mapping[str, tuple[str, ...]] = {
    "ForCausalLM": (*TOKENS, "vocabulary"),
    "ForTokenClassification": (*TOKENS, "labels"),
    "ForSequenceClassification": ("batch", "labels"),
    "Model": (*TOKENS, "hidden"),
}
"""Endings of the names of classes of `transformers`, and the axes of what they return: `logits`, or
for `Model` hidden states."""

ENCODER_DECODER_HEADS: Mapping[str, tuple[str, ...]] = {
    "ForConditionalGeneration": ("batch", "decoder_tokens", "vocabulary"),
    "Model": ("batch", "decoder_tokens", "hidden"),
}
"""The same for classes with an encoder and a decoder."""

EXTRA_OUTPUTS = ("output_router_logits", "output_attentions", "output_hidden_states")
"""Outputs that a configuration may request in addition, for training or inspection."""

UNSUPPORTED_EXPERTS = (
    "the experts of dbrx, jetmoe, llama4, longcat_flash and step3p7, which have their own classes, "
    "are not supported"
)

ModelPart = Literal["encoder", "decoder"]


SETTINGS = ("use_cache", "part")
"""The settings of a model that `--set` accepts; the others are in `config.json`."""


@dataclass(frozen=True, slots=True)
class _Architecture:
    """The class of a model, with its output and that output's axes.

    `encoder_decoder`: it has an encoder and a decoder; `part` is the one that is exported, or None
    for both.
    """

    name: str
    output: str
    axes: tuple[str, ...]
    encoder_decoder: bool = False
    part: ModelPart | None = None

    @property
    def cached(self) -> bool:
        return self.name.endswith("ForCausalLM") or self.part == "decoder"


def architecture_of(path: Path) -> str | None:
    """Returns the `model_type` in a folder's `config.json`; None if there is none.

    `path` is the folder, or the weights in it: a safetensors file or an index. Raises
    CheckpointError for a file that is not JSON or is too long.
    """
    weights = path.name.endswith((".safetensors", f".safetensors{INDEX}")) and path.is_file()
    file = (path.parent if weights else path) / CONFIG_FILE
    content = read_document(file, "json", CheckpointError) if file.is_file() else None
    name = content.get("model_type") if isinstance(content, dict) else None
    return name if isinstance(name, str) else None


def load_transformers(source: Path, settings: Mapping[str, Any], *, values: bool = True) -> Model:
    """Returns the model of a folder, or of a file in it, with its experts replaced by our layers.

    `settings` may contain `use_cache`, and the `part` of an encoder-decoder model. Without `values`
    no weights are read. Raises `CheckpointError` for weights that are missing or damaged, and
    `FamilyError` for unsupported architectures.
    """
    _check_settings(settings)
    version = transformers_library().__version__
    found = folder_files(source)
    folder, files = found.folder, found.files
    sizes = WeightSizes.of(folder, found.weights.files)
    sizes.check_config()
    config = _config(folder)
    _check_padding(folder, config)
    _check_positions(folder / CONFIG_FILE, config.get_text_config())
    with sizes.building(version):
        output_notes = _remove_extra_outputs(config)
        class_ = _class(folder, config)
        arch = _architecture(folder, class_.__name__, config, settings.get("part"))
        build = _builder(class_, arch)
        skeleton = build(config)
        packed = getattr(config, "quantization_config", None) is not None
        sizes.check_built(skeleton, packed=packed)
        paths = _experts(folder, skeleton, config)
        experts = [int(skeleton.get_submodule(path).num_experts) for path in paths]
    with sizes.building(version):
        routers = find_routers(build, config, max(experts)) if paths else None
        inputs, outputs, notes = _inputs_and_outputs(
            skeleton, config, arch, cached=arch.cached and settings.get("use_cache", True)
        )
    has_cache = any(spec.name.startswith(PAST) for spec in inputs)
    if has_cache:
        notes = (*_cache_note(folder, settings), *notes)
    names = [spec.name for spec in inputs], [spec.name for spec in outputs]
    watched = Watched.now(files)
    model, mapped = skeleton, files
    if values:
        loaded = load_weights(found, class_, config, watched)
        model, mapped, notes = _part(loaded.module, arch), loaded.mapped, (*notes, *loaded.notes)
    # A model that scans its tokens has a cache with more than keys and values.
    loops = values and not arch.encoder_decoder and not has_cache and _has_loop(skeleton)
    original = TransformersNetwork(model.eval().requires_grad_(False), *names, loops=loops)
    network = sharing_weights(original)
    k, reading = k_of(config.get_text_config()), Reading(mapped, watched)
    if k and experts and k[1] > min(experts):
        raise CheckpointError(
            f"{folder / CONFIG_FILE}: {k[0]} is {k[1]}, but a layer has {min(experts)} experts",
            hint=MISMATCH,
        )
    with sizes.building(version):
        for path in paths:
            module = original.get_submodule(path)
            layer = canonical(path, module, k[1] if k else max(experts))
            if values:
                check_layer(layer, module)
                reading.advance(sum(weight.nbytes for weight in layer.parameters()))
            network.set_submodule(path, layer)
    reading.end()
    block_note = _replace_blocks(network, original, check=values)
    if block_note is not None:
        notes = (*notes, block_note)
    network.routers = routers  # type: ignore[assignment]
    return Model(
        module=network,
        family=str(config.model_type),
        config=_configuration(config, routers, arch, cached=original.cached),
        source=Source(
            str(source),
            files,
            mapped=mapped,
            watched=watched.hashed() if values else None,
            host=HOST,
        ),
        inputs=inputs,
        outputs=outputs,
        notes=(f"{class_.__name__} of transformers", *output_notes, *notes),
        original=original if block_note is None else None,
    )


def _replace_blocks(network: nn.Module, original: nn.Module, *, check: bool) -> str | None:
    """Replaces the sparse blocks of a network with our layers, in place.

    Returns a note if the library's blocks do not compute what their routers and experts specify.
    """
    class_name = ""
    for path, block in sparse_blocks(network).items():
        replacement = canonical_block(path, block)
        network.set_submodule(path, replacement)
        if check and not check_block(path, replacement, original.get_submodule(path)):
            class_name = type(block).__name__
    if not class_name:
        return None
    version = transformers_library().__version__
    return (
        f"{class_name} of transformers {version} does not send tokens to the experts "
        "that its router chooses; the exported model does, and is compared with PyTorch's "
        "experts on these tokens"
    )


def _configuration(
    config: Any, routers: Routers | None, arch: _Architecture, *, cached: bool
) -> dict[str, Any]:
    """Returns the configuration for the manifest: the usual sizes, k, and the cache."""
    text = config.get_text_config()
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    record = {name: getattr(text, name) for name in names if hasattr(text, name)}
    if routers is not None:
        record[routers.field] = routers.trained
    if arch.part is not None:
        record["part"] = arch.part
    return {**record, "use_cache": cached}


def _check_settings(settings: Mapping[str, Any]) -> None:
    unknown = sorted(settings.keys() - {*SETTINGS})
    if unknown:
        raise UsageError(
            f"--set {unknown[0]}: the settings of a transformers model are in its config.json",
            hint="supported are only use_cache=false, which exports a language model without its "
            "cache, and part=encoder or part=decoder, which export a part of a model that has both",
        )
    if settings.get("part", "encoder") not in get_args(ModelPart):
        raise UsageError(
            f"--set part={settings['part']}: it must be {' or '.join(get_args(ModelPart))}"
        )
    if not isinstance(settings.get("use_cache", True), bool):
        raise UsageError(f"--set use_cache={settings['use_cache']}: it must be true or false")


def transformers_library() -> Any:
    """Returns the library, without progress bars and warnings, or raises `MissingExtraError`."""
    try:
        import transformers
    except ImportError as error:
        raise MissingExtraError(
            f"models of this kind need transformers, which is not installed ({error})",
            hint=install("transformers"),
        ) from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def _config(folder: Path) -> Any:
    library = transformers_library()
    try:
        return library.AutoConfig.from_pretrained(
            str(folder), trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # every configuration class raises its own errors
        custom_code = "auto_map" in object_in(folder / CONFIG_FILE)
        raise FamilyError(
            f"{folder}: transformers {library.__version__} cannot read its config.json: "
            f"{one_line(error)}",
            hint="the checkpoint comes with code for its architecture, which is never run: "
            "pass the network as package.module:factory, with --adapter"
            if custom_code
            else "a newer version of transformers may support the architecture",
        ) from error


def _check_padding(folder: Path, config: Any) -> None:
    """Raises CheckpointError for a padding token outside the vocabulary, given or by default."""
    text = config.get_text_config()
    token, size = getattr(text, "pad_token_id", None), getattr(text, "vocab_size", None)
    if isinstance(token, int) and isinstance(size, int) and not -size <= token < size:
        named = "pad_token_id" in object_in(folder / CONFIG_FILE)
        raise CheckpointError(
            f"{folder / CONFIG_FILE}: pad_token_id is {token}{'' if named else ' by default'}, but "
            f"the vocabulary ends at {size - 1}",
            hint='set "pad_token_id" to a token of the vocabulary, or to null for none',
        )


def _cache_note(folder: Path, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns a note on `use_cache: false` in `config.json`, an ignored leftover of training."""
    if "use_cache" in settings or object_in(folder / CONFIG_FILE).get("use_cache", True):
        return ()
    return (
        f'"use_cache": false in {CONFIG_FILE} is a setting for training, so the model is exported '
        "with a cache (--set use_cache=false exports it without one)",
    )


def _remove_extra_outputs(config: Any) -> tuple[str, ...]:
    """Removes all outputs but the model's result from a configuration; returns a note of them.

    The other outputs do not affect the result. Some of them, such as the load-balancing loss,
    cannot be traced.
    """
    removed = set()
    for part in (config, config.get_text_config()):
        part.return_dict = True
        for name in EXTRA_OUTPUTS:
            if getattr(part, name, False):
                removed.add(name)
                setattr(part, name, False)
    if not removed:
        return ()
    return (f"ignored {', '.join(sorted(removed))} in config.json: the graph has no such outputs",)


def _class(folder: Path, config: Any) -> Any:
    library = transformers_library()
    names = list(getattr(config, "architectures", None) or ())
    for name in names:
        class_ = getattr(library, name, None)
        if class_ is not None:
            return class_
    if names:
        raise FamilyError(
            f"{folder}: transformers {library.__version__} has no {names[0]}",
            hint="code that comes with a checkpoint is never run: pass the network as "
            "package.module:factory",
        )
    try:
        return library.AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError:
        raise FamilyError(
            f'{folder}: its config.json has no "architectures"',
            hint='add the class that was saved: "architectures": ["…ForCausalLM"]',
        ) from None


def _check_positions(file: Path, text: Any) -> None:
    """Raises `FamilyError` for rotary embeddings that branch on the text's length.

    `dynamic` recomputes its frequencies beyond the trained length; PhiMoE multiplies by one of two
    scales if its type is not the default. A traced graph takes one branch for all lengths.
    """
    parameters = getattr(text, "rope_parameters", None) or {}
    tables = [parameters, *(each for each in parameters.values() if isinstance(each, Mapping))]
    for rope in (table.get("rope_type", "default") for table in tables):
        model_type = getattr(text, "model_type", None)  # some configurations have none
        scaled = model_type == "phimoe" and rope != "default"
        if rope == "dynamic" or scaled:
            what = f"{model_type} with rope_type" if scaled else "rope_type"
            same = "the same up to the trained length" if rope == "dynamic" else "different"
            raise FamilyError(
                f"{file}: {what} {rope!r} is not supported: its rotary embedding branches on the "
                "length of the text, but a graph has one form for all lengths",
                hint='with "rope_type": "default" in config.json the model can be exported; its '
                f"results are then {same}",
            )


def _architecture(folder: Path, name: str, config: Any, part: ModelPart | None) -> _Architecture:
    encoder_decoder = config.is_encoder_decoder and not name.endswith("EncoderModel")
    if part is not None and not encoder_decoder:
        raise UsageError(
            f"--set part={part}: a {name} does not have an encoder and a decoder",
            hint="leave --set part out",
        )
    endings = ENCODER_DECODER_HEADS if encoder_decoder else HEADS
    ending = next((ending for ending in endings if name.endswith(ending)), None)
    if ending is None:
        raise _unsupported(folder, name)
    axes = endings[ending]
    if part == "encoder":
        ending, axes = "Model", HEADS["Model"]
    elif part == "decoder":
        axes = (*TOKENS, axes[-1])
    output = "last_hidden_state" if ending == "Model" else "logits"
    return _Architecture(
        name=name, output=output, axes=axes, encoder_decoder=encoder_decoder, part=part
    )


def _unsupported(folder: Path, name: str) -> FamilyError:
    if name.endswith("ForConditionalGeneration"):
        return FamilyError(
            f"{folder}: a {name} is not supported, because its input is more than text",
            hint="save only its text part (model.language_model.save_pretrained) and export that, "
            f'or set "architectures" in {CONFIG_FILE} to the class that was saved',
        )
    return FamilyError(
        f"{folder}: a {name} is not supported",
        hint="supported are causal language models, encoders, classifiers, and encoder-decoder "
        "models: classes whose names end in "
        f"{', '.join({**HEADS, **ENCODER_DECODER_HEADS})}",
    )


def _builder(class_: Any, arch: _Architecture) -> Any:
    def build(config: Any) -> nn.Module:
        with torch.device("meta"):
            model = class_._from_config(config, attn_implementation=attention_of(class_))
        assert isinstance(model, nn.Module)
        return _part(model.eval(), arch)

    return build


def _part(model: nn.Module, arch: _Architecture) -> nn.Module:
    """Returns the part of a model to export: the model, its encoder, or the model without that."""
    if arch.part is None:
        return model
    encoder: nn.Module = model.get_encoder()  # type: ignore[operator]
    if arch.part == "encoder":
        return encoder
    path = next(name for name, module in model.named_modules() if module is encoder)
    model.set_submodule(path, nn.Identity())
    return model


def _experts(folder: Path, skeleton: nn.Module, config: Any) -> list[str]:
    paths = list(experts_modules(skeleton))
    if paths or sparse_blocks(skeleton):
        return paths
    raise FamilyError(
        f"{folder}: {config.model_type} has no experts that use the experts interface of "
        "transformers",
        hint=f"{UNSUPPORTED_EXPERTS}; optimum exports architectures without experts",
    )


def _inputs_and_outputs(
    skeleton: nn.Module, config: Any, arch: _Architecture, *, cached: bool
) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...], tuple[str, ...]]:
    """Returns the inputs and outputs, and a note if there is no cache although one is expected."""
    text = config.get_text_config()
    sizes = {
        "vocabulary": text.vocab_size,
        "labels": getattr(config, "num_labels", 0),
        "hidden": text.hidden_size,
    }
    shape = tuple(sizes.get(axis, axis) for axis in arch.axes)
    output = TensorSpec(arch.output, "float32", shape)
    positions = getattr(text, "max_position_embeddings", None)
    shapes = _cache_shapes(skeleton, arch, text.hidden_size) if cached else None
    if arch.part == "decoder":
        inputs = decoder_specs(text.vocab_size, text.hidden_size)
    else:
        inputs = token_specs(text.vocab_size, positions, cached=shapes is not None)
    if arch.encoder_decoder and arch.part is None:
        limits = {} if positions is None else {"decoder_tokens": positions}
        axes = ("batch", "decoder_tokens")
        decoder_input = TensorSpec(DECODED, "int64", axes, limits, below=text.vocab_size)
        note = (
            "exported without a cache; to generate text, export both --set part=encoder and "
            "--set part=decoder"
        )
        return (*inputs, decoder_input), (output,), (note,)
    if shapes is None:
        note = "exported without a cache, because that contains more than keys and values"
        return inputs, (output,), (note,) if cached else ()
    pasts, presents = cache_specs(shapes)
    return (*inputs, *pasts), (output, *presents), ()


def _cache_shapes(
    skeleton: nn.Module, arch: _Architecture, hidden: int
) -> dict[str, tuple[int, int]] | None:
    """Returns the heads and width of each part of the cache, from a run without weights."""
    with _without_weights(skeleton):
        ids = torch.zeros((2, 3), dtype=torch.int64)
        arguments: dict[str, Any] = {"input_ids": ids}
        if arch.part == "decoder":
            arguments = {DECODED: ids, "encoder_outputs": encoded(torch.zeros(2, 3, hidden))}
        try:
            outputs = skeleton(**arguments, use_cache=True)
        except _RUN_ERRORS:  # the model needs more than a cache of keys and values
            return None
    return cache_shapes(getattr(outputs, "past_key_values", None))


_RUN_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)
"""Errors that a model of `transformers` may raise in a run without weights."""

_LENGTHS = (2, 257, 513)
"""Lengths in tokens; each has more blocks than the one before, for blocks of up to 256 tokens."""

_LOOP_RATIO = 4
"""There is a loop if a longer input calls this many times the operators of the shortest."""


def _has_loop(skeleton: nn.Module) -> bool:
    """Returns whether a model calls more operators for more tokens.

    Such a loop over tokens, or over blocks of them, is unrolled in a trace, so the graph has only
    one length. A branch changes the number of operators at most once, but a loop each time.
    """
    counts: list[int] = []
    with _without_weights(skeleton):
        for length in _LENGTHS:
            calls = _Calls(_LOOP_RATIO * counts[0] if counts else None)
            try:
                # The library does not read the values of fake tensors.
                with FakeTensorMode(allow_non_fake_inputs=True), calls:
                    skeleton(input_ids=torch.zeros((2, length), dtype=torch.int64), use_cache=False)
            except _TooManyError:
                return True
            except _RUN_ERRORS:  # tracing will report what is wrong
                return False
            if counts and calls.count <= counts[-1]:
                return False
            counts.append(calls.count)
    return True


class _TooManyError(Exception):
    """Raised when there are more operators than the limit."""


class _Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators called within the context; raises an error if they exceed `limit`."""

    def __init__(self, limit: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count, self.limit = 0, limit

    def __torch_dispatch__(
        self, function: Any, _: Any, arguments: tuple[Any, ...] = (), named: Any = None
    ) -> Any:
        self.count += 1
        if self.limit is not None and self.count > self.limit:
            raise _TooManyError
        return function(*arguments, **(named or {}))


@contextmanager
def _without_weights(skeleton: nn.Module) -> Iterator[None]:
    """Within the context, a skeleton runs without its experts, on tensors without values."""

    class Identity(nn.Module):
        def forward(self, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            return x

    replaced = experts_modules(skeleton) | sparse_blocks(skeleton)
    try:
        for path in replaced:
            skeleton.set_submodule(path, Identity())
        with torch.no_grad(), torch.device("meta"):
            yield
    finally:
        for path, module in replaced.items():
            skeleton.set_submodule(path, module)
