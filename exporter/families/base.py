"""The definition of a family, and shared helpers: sizes, checks, configuration, experts.

A family is one published training code. From top to bottom, its module has: how to recognise its
checkpoints, the sizes that their shapes determine, its MoE layer, the network around it if it is
known, and the record `FAMILY`. To add a family, write such a module, list it in `__init__.py` or as
an entry point in the group `moexport.families`, and record a case in `tests/data`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from ...common.text import near_miss
from ...errors import CheckpointError, FamilyError, MissingSettingsError
from ...graphs.layers.base import Matrices, MoELayer
from ...graphs.layers.expert import Activation
from ...graphs.layers.soft_moe import SoftMoE
from ...graphs.names import PAST, PRESENT
from ..inputs import PAST_AXIS
from ..model import CORE_HOST, Host, TensorSpec

Tensors = Mapping[str, Tensor]
TensorShape = tuple[int, ...]
Config = Mapping[str, Any]
T = TypeVar("T")
AnyLayer = TypeVar("AnyLayer", bound=MoELayer)
AnyNetwork = TypeVar("AnyNetwork", bound=nn.Module)

INCOMPLETE = (
    "check that the file is complete and that --family names the implementation that trained it"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyModel:
    """A module built from a checkpoint, with the facts that `Model` needs."""

    module: nn.Module
    config: dict[str, Any]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    notes: tuple[str, ...] = ()
    rounded: bool = False
    host: Host = CORE_HOST


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One published training code: how its checkpoints are recognised and rebuilt.

    `options` are the configuration keys that `build` accepts; `questions` are those options that
    shapes never determine. `published` converts a configuration file of the training code to
    options. In lists, a plugin's family follows the family named by `after`, or comes last.
    """

    name: str
    summary: str
    options: tuple[str, ...]
    detect: Callable[[Tensors], bool]
    build: Callable[[Tensors, Config], FamilyModel]
    layer: PublishedLayer[Any]
    questions: tuple[str, ...] = ()
    published: Callable[[Config], Config] = dict
    after: str = ""


def renamed(family: Family, *, name: str, summary: str, keys: Mapping[str, str]) -> Family:
    """Returns a family like `family` for checkpoints with other key names.

    `keys` maps regular expressions to replacements that, applied in this order, convert the
    checkpoint's names to those of `family`. Messages use the converted names.
    """

    def converted(tensors: Tensors) -> dict[str, Tensor]:
        names = {key: key for key in tensors}
        for pattern, replacement in keys.items():
            names = {key: re.sub(pattern, replacement, name) for key, name in names.items()}
        return {name: tensors[key] for key, name in names.items()}

    def detect(tensors: Tensors) -> bool:
        new = converted(tensors)
        changed = new.keys() != tensors.keys()
        return changed and len(new) == len(tensors) and family.detect(new)

    def build(tensors: Tensors, settings: Config) -> FamilyModel:
        new = converted(tensors)
        if len(new) < len(tensors):
            raise CheckpointError(
                f"not the weights of a {name} model: several keys become one key of {family.name}",
                hint=INCOMPLETE,
            )
        return family.build(new, settings)

    return replace(family, name=name, summary=summary, detect=detect, build=build)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedLayer(Generic[AnyLayer]):
    """How a published code stores a MoE layer.

    `family` names the code, and `title` the kind of layer, in messages. `mark` is a key of every
    such layer, and `match` decides from local names and shapes whether tensors form one.
    `make(prefix, tensors, name)` checks keys and shapes under the prefix, and returns the layer.
    """

    family: str
    mark: str
    match: Callable[[Tensors], bool]
    make: Callable[[str, Tensors, str], AnyLayer]
    title: str


def soft_moe_layer(
    family: str,
    mark: str,
    match: Callable[[Tensors], bool],
    shapes: Callable[[Tensors], dict[str, TensorShape]],
    read: Callable[[str, Tensors], SoftMoE],
    leftovers: tuple[str, ...] = (),
) -> PublishedLayer[SoftMoE]:
    """Returns how a published code stores a Soft MoE layer.

    `shapes` returns the required names and shapes; `read` turns tensors of those shapes into a
    named layer, without copying expert weights. The code does not use local keys that begin with
    one of `leftovers`.
    """

    def make(prefix: str, tensors: Tensors, name: str) -> SoftMoE:
        local = {k: t for k, t in under(tensors, prefix).items() if not k.startswith(leftovers)}
        check_tensors(family, prefixed(local, prefix), prefixed(shapes(local), prefix))
        return read(name, local)

    return PublishedLayer(family=family, mark=mark, match=match, make=make, title="Soft MoE")


# --- keys and shapes ---------------------------------------------------------------------------


def under(tensors: Tensors, prefix: str) -> dict[str, Tensor]:
    """Returns the tensors whose keys start with `prefix`, by the rest of their keys."""
    return {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}


def prefixed(entries: Mapping[str, T], prefix: str) -> dict[str, T]:
    return {prefix + key: value for key, value in entries.items()}


def find_layers(tensors: Tensors, layer: PublishedLayer[Any]) -> list[str]:
    """Returns the prefixes (`blocks.3.mlp.`, or '') of the layers of this kind among tensors."""
    pattern = re.compile(rf"(.*\.)?{re.escape(layer.mark)}")
    matches = (pattern.fullmatch(key) for key in tensors)
    prefixes = [m.group(1) or "" for m in matches if m]
    return [prefix for prefix in prefixes if layer.match(under(tensors, prefix))]


def shape_of(family: str, tensors: Tensors, key: str, axes: str) -> TensorShape:
    """Returns the shape of a required tensor with given axes, such as `d, n, p`.

    Raises CheckpointError if the tensor is missing or empty, or has another rank.
    """
    tensor = tensors.get(key)
    if tensor is None or tensor.ndim != axes.count(",") + 1 or 0 in tensor.shape:
        present = (
            f"{key} has shape {list(tensor.shape)}" if tensor is not None else f"missing key {key}"
        )
        raise CheckpointError(
            f"not the weights of a {family} model: {present}, expected [{axes}]", hint=INCOMPLETE
        )
    return tuple(tensor.shape)


def block_numbers(family: str, tensors: Tensors, prefix: str) -> range:
    """Returns the numbers of a network's blocks, whose keys begin with `prefix` and a number.

    Raises CheckpointError if a number is missing.
    """
    # No file has 10^9 blocks; a forged number must not cost time or memory.
    pattern = re.compile(rf"{re.escape(prefix)}(\d{{1,9}})\.")
    numbers = sorted({int(match[1]) for match in map(pattern.match, tensors) if match})
    if numbers != list(range(len(numbers))) or not numbers:
        listed = first_keys([str(number) for number in numbers])
        raise CheckpointError(f"not the weights of a {family} model: {prefix}* are [{listed}]")
    return range(len(numbers))


def check_tensors(family: str, tensors: Tensors, expected: Mapping[str, TensorShape]) -> None:
    """Raises CheckpointError unless `tensors` has exactly the expected keys and shapes."""
    problems = []
    for keys, noun in (
        ([key for key in expected if key not in tensors], "missing key"),
        ([key for key in tensors if key not in expected], "unexpected key"),
    ):
        if keys:
            problems.append(f"{len(keys)} {noun}{'s' * (len(keys) > 1)}: {first_keys(keys)}")
    for key, shape in expected.items():
        tensor = tensors.get(key)
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape:
            problems.append(f"{key} has shape {list(tensor.shape)}, expected {list(shape)}")
        elif tensor.is_meta:
            problems.append(f"{key} has no data (a meta tensor)")
        elif not tensor.is_floating_point():
            problems.append(f"{key} has dtype {tensor.dtype}, expected a floating-point one")
    if problems:
        shown = problems[:6] + ([f"and {len(problems) - 6} more"] if len(problems) > 6 else [])
        raise CheckpointError(
            f"not the weights of a {family} model: {'; '.join(shown)}", hint=INCOMPLETE
        )


def first_keys(keys: Sequence[str]) -> str:
    """Returns the first six keys, and how many others there are."""
    return ", ".join(keys[:6]) + (f", … ({len(keys) - 6} more)" if len(keys) > 6 else "")


def filled(network: AnyNetwork, tensors: Tensors, layers: Mapping[str, nn.Module]) -> AnyNetwork:
    """Loads weights into a network from the meta device, and sets layers at their paths."""
    network.load_state_dict({key: tensors[key] for key in network.state_dict()}, assign=True)
    for path, layer in layers.items():
        network.set_submodule(path, layer)
    return network.requires_grad_(False).eval()


def shapes_of(network: nn.Module) -> dict[str, TensorShape]:
    return {key: tuple(tensor.shape) for key, tensor in network.state_dict().items()}


# --- configuration -----------------------------------------------------------------------------


REST = "rest"
"""The key with which a user accepts the published defaults for missing settings."""


@dataclass(frozen=True, slots=True)
class Question:
    """A setting that the user must give: its published default, and why no shape determines it.

    If the default does not fit these shapes (`fits` is False), `value` is only an example.
    """

    value: Any
    why: str
    fits: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Constructor:
    """The arguments of a published constructor, by their sources.

    `shapes` are those that keys and shapes determine, with the constructor's defaults (`...` for
    those without a comparable default). `questions` change the output, and only the user knows
    their answers. `free` ones are optional, and map to their values when left out. `aliases` are
    other names; `write` converts the user's settings to the names and form of those from shapes. A
    user who names all of `sizes` has given a complete call, with defaults for missing arguments.
    """

    family: str
    shapes: Config
    questions: Mapping[str, Question] = field(default_factory=dict)
    free: Config = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    write: Callable[[Config, Config], Config] = lambda settings, _: settings

    @property
    def options(self) -> tuple[str, ...]:
        return (*self.shapes, *self.questions, *self.free, *self.aliases, REST)

    def settle(
        self, settings: Config, read: Config, questions: Mapping[str, Question] | None = None
    ) -> dict[str, Any]:
        """Returns the complete configuration: what shapes determine (`read`), and users' settings.

        The user cannot contradict shapes, and need not repeat them. `questions` replace the
        constructor's if they depend on the checkpoint. Published defaults apply if the user accepts
        them (`rest=default`), or gives a complete call that results in these shapes. Raises
        FamilyError for an unknown, contradictory or missing key.
        """
        questions = self.questions if questions is None else questions
        questions = {key: q for key, q in questions.items() if key not in read}
        self._check(settings)
        rest, settings = REST in settings, self.write(settings, read)
        for key, value in read.items():
            if key in settings and not _same(settings[key], value):
                raise FamilyError(
                    f"{self.family}: {key}={_shown(settings[key])} was given, but the shapes in "
                    f"the checkpoint imply {key}={_shown(value)}",
                    hint=f"leave {key} out, or check that this is the right checkpoint",
                )
        answers = {key: settings[key] for key in questions if key in settings}
        if rest or self._is_complete(settings, read):
            answers = {key: q.value for key, q in questions.items() if q.fits} | answers
        missing = {key: q for key, q in questions.items() if key not in answers}
        if missing:
            options = " ".join(f"--set {key}={_shown(q.value)}" for key, q in missing.items())
            default = f"; --set {REST}=default uses the published defaults"
            raise MissingSettingsError(
                f"{self.family}: the shapes do not determine "
                + "; ".join(f"{key} ({q.why})" for key, q in missing.items()),
                hint=f"add your model's values: {options}{default if self.sizes else ''}",
                examples={key: q.value for key, q in missing.items()},
            )
        free = {key: settings.get(key, default) for key, default in self.free.items()}
        return {**read, **answers, **free}

    def _check(self, settings: Config) -> None:
        """Raises FamilyError for an unknown key, with the closest one, or an invalid `rest`."""
        for key in settings:
            if key not in self.options:
                raise FamilyError(
                    f"{self.family}: unknown configuration key {key!r}",
                    hint=near_miss(key, self.options),
                )
        if settings.get(REST, "default") != "default":
            raise FamilyError(
                f"{self.family}: {REST}={_shown(settings[REST])} is not valid",
                hint=f"--set {REST}=default uses the published default for each missing setting",
            )

    def _is_complete(self, settings: Config, read: Config) -> bool:
        """Whether the arguments are a complete call that results in these shapes."""
        omitted = (key for key in self.shapes if key not in settings)
        return (
            bool(self.sizes)
            and all(key in settings for key in self.sizes)
            and all(self.shapes[key] in (..., read.get(key)) for key in omitted)
        )


def whole_number(family: str, key: str, value: Any) -> int:
    """Returns a given size; raises FamilyError unless it is a whole number above 0."""
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if not is_whole or isinstance(value, bool) or value < 1:
        raise FamilyError(
            f"{family}: {key}={_shown(value)} is not a whole number above 0",
            hint="give the value that the model was trained with",
        )
    return int(value)


def height_width(family: str, key: str, value: Any) -> tuple[int, int]:
    """Returns a given height and width, from a pair or from one number for both.

    Raises FamilyError for anything else.
    """
    pair = value if isinstance(value, list | tuple) else (value, value)
    if len(pair) != 2:
        raise FamilyError(
            f"{family}: {key}={_shown(value)} is neither one size nor a height and a width",
            hint=f"for example --set {key}=224 or --set {key}=224,192",
        )
    return whole_number(family, key, pair[0]), whole_number(family, key, pair[1])


ACT_LAYERS: dict[str, Activation] = {
    **dict.fromkeys(("gelu", "GELU", "nn.GELU", "torch.nn.GELU"), "gelu"),
    **dict.fromkeys(("gelu-tanh", "gelu_tanh", "GELUTanh"), "gelu-tanh"),
    **dict.fromkeys(("relu", "ReLU", "nn.ReLU", "torch.nn.ReLU"), "relu"),
}
"""The values of `act_layer`: timm's names, and the names of classes."""

ACT_LAYER = Question("gelu", "the activation of the MLPs and experts: gelu, gelu_tanh or relu")


def activation_of(family: str, value: Any) -> Activation:
    """Returns the activation for `act_layer`; raises FamilyError for an unknown one."""
    if not isinstance(value, str) or value not in ACT_LAYERS:
        raise FamilyError(
            f"{family}: act_layer={_shown(value)} is not one of gelu, gelu_tanh and relu",
            hint="give a network with another activation as package.module:factory",
        )
    return ACT_LAYERS[value]


def number_above_zero(family: str, key: str, value: Any) -> float:
    """Returns a given number; raises FamilyError unless it is above 0."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise FamilyError(
            f"{family}: {key}={_shown(value)} is not a number above 0",
            hint=f"for example --set {key}=1e-5",
        )
    return float(value)


def one_or_pair(height: int, width: int) -> int | list[int]:
    """Returns a height and a width in a constructor's form: one number if they are equal."""
    return height if height == width else [height, width]


def check_heads(family: str, key: str, value: Any, dim: int) -> int:
    """Returns a number of attention heads; raises FamilyError if it does not divide the width."""
    heads = whole_number(family, key, value)
    if dim % heads:
        raise FamilyError(
            f"{family}: {key}={heads} does not divide the width {dim}",
            hint=f"give the value that the model was trained with: --set {key}=12",
        )
    return heads


def _same(value: Any, read: Any) -> bool:
    """Whether two values are equal, where a tuple equals a list."""
    value = list(value) if isinstance(value, list | tuple) else value
    read = list(read) if isinstance(read, list | tuple) else read
    return bool(value == read)


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


# --- Soft MoE layers ---------------------------------------------------------------------------

ExpertMatrices = tuple[Matrices, Tensor | None, Matrices, Tensor | None]
"""w1, b1, w2 and b2 of experts, as in `SoftMoEWeights`."""


@dataclass(frozen=True, slots=True)
class SeparateExperts:
    """Names of the experts' two linear layers, such as `experts.{}.fc1` and `experts.{}.fc2`.

    `kernel` has the sizes that follow a weight's [out, in]: (1, 1) for 1x1 convolutions. `gated`
    experts have 2h rows in their first weight (GEGLU).
    """

    first: str
    second: str
    kernel: TensorShape = ()
    gated: bool = False

    def any_of(self, tensors: Tensors, which: str, kind: str) -> Tensor | None:
        """Returns the `kind` (weight or bias) of any expert's linear layer `which`, or None."""
        pattern = re.compile(re.escape(which).replace(r"\{\}", r"\d+") + re.escape(f".{kind}"))
        return next((t for key, t in tensors.items() if pattern.fullmatch(key)), None)

    def hidden(self, tensors: Tensors) -> int:
        """Returns the hidden width, from any expert; 0 if there is none."""
        weight = self.any_of(tensors, self.first, "weight")
        if weight is None or weight.ndim < 2:
            return 0
        return weight.shape[0] // 2 if self.gated else weight.shape[0]

    def out(self, tensors: Tensors, default: int) -> int:
        """Returns the output width, from any expert; `default` if there is none."""
        weight = self.any_of(tensors, self.second, "weight")
        return default if weight is None else weight.shape[0]

    def shapes(
        self, tensors: Tensors, n: int, d: int, out: int | None = None
    ) -> dict[str, TensorShape]:
        """Returns the keys and shapes of n experts from d to `out` (or d), and of any biases."""
        if n > len(tensors):
            raise CheckpointError(
                f"the shapes imply {n} experts, but there are only {len(tensors)} tensors in total",
                hint=INCOMPLETE,
            )
        h = self.hidden(tensors)
        inner = 2 * h if self.gated else h
        expected: dict[str, TensorShape] = {}
        for name, rows, columns in ((self.first, inner, d), (self.second, out or d, h)):
            has_bias = self.any_of(tensors, name, "bias") is not None
            for i in range(n):
                expected[f"{name.format(i)}.weight"] = (rows, columns, *self.kernel)
                if has_bias:
                    expected[f"{name.format(i)}.bias"] = (rows,)
        return expected

    def matrices(self, tensors: Tensors, n: int) -> ExpertMatrices:
        """Returns the matrices and biases of n experts; the matrices are transposed views."""
        pairs = []
        for name in (self.first, self.second):
            weights = tuple(tensors[f"{name.format(i)}.weight"].flatten(1).T for i in range(n))
            biases = [tensors.get(f"{name.format(i)}.bias") for i in range(n)]
            present = [bias for bias in biases if bias is not None]
            pairs.append((weights, torch.stack(present) if present else None))
        (w1, b1), (w2, b2) = pairs
        return w1, b1, w2, b2


def unit_phi(phi: Tensor, scale: Tensor | None, *, eps: float, kind: str = "l2") -> Tensor:
    """Returns phi [d, n, p] as float32, normalised over d in float64 and multiplied by `scale`.

    `kind` is one of `soft_moe.NormKind`: `l2` clamps the length to eps, `l2-plus` adds eps to it,
    and `l2-rsqrt` adds eps to its square.
    """
    phi = phi.double()
    length = phi.square().sum(dim=0, keepdim=True)
    match kind:
        case "l2":
            length = length.sqrt().clamp_min(eps)
        case "l2-plus":
            length = length.sqrt() + eps
        case "l2-rsqrt":
            length = (length + eps).sqrt()
    phi = phi / length
    return (phi if scale is None else phi * scale.double()).float()


def cache_specs(
    shapes: Mapping[str, tuple[int, int]],
) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Returns the inputs and outputs of a cache from the heads and width of each part.

    `shapes` has a part for each layer's keys and one for its values: `0.key`, `0.value` …
    """
    inputs, outputs = [], []
    for part, (heads, width) in shapes.items():
        past = ("batch", heads, PAST_AXIS, width)
        inputs.append(TensorSpec(f"{PAST}.{part}", "float32", past, default="empty"))
        both = ("batch", heads, f"{PAST_AXIS} + tokens", width)
        outputs.append(TensorSpec(f"{PRESENT}.{part}", "float32", both))
    return tuple(inputs), tuple(outputs)
