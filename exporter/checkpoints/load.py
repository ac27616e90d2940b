"""Loads a `Model` from a checkpoint, a factory or a module."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from ...common.locations import named_by_url, url_of
from ...common.option import takes
from ...data.batches import Feed
from ...data.user_code import names_code
from ...errors import CheckpointError, FamilyError, MissingSettingsError, PluginError, UsageError
from ..families import detect, family_named
from ..families.base import Family, FamilyModel
from ..model import Model, Source
from ..requests import LoadRequest
from .loaders import LOADERS, MISSING, loader_of
from .state_dict import Checkpoint, read_checkpoint
from .weight_files import local_checkpoint

AnyModel = Model | nn.Module | str | Path | Callable[[], Model | nn.Module]
"""The `model` argument of calls: a loaded model, an argument of `load`, or a function."""


@takes(LoadRequest)
def load(source: str | os.PathLike[str] | nn.Module, options: LoadRequest) -> Model:
    """Returns the trained model at `source`, ready to export.

    `source` is a checkpoint (a file, an index of shards, a folder, or the URL of one),
    `package.module:factory`, or the network itself: an `nn.Module`, with `example` inputs. A
    network is not modified; its float32 weights on the CPU are shared. The configuration has the
    settings that shapes do not determine: constructor arguments of the published code, or of the
    factory. Without `values` a checkpoint's weights are neither checked nor converted
    (`state_dict.read_checkpoint`), which is enough to inspect a model, but not to run or export it.

    Raises:
        CheckpointError: the file cannot be read, or is not a checkpoint.
        FamilyError: the family is unknown or ambiguous, or settings are missing.
        ParityError: a factory's network does not compute the same as its layers.
        UsageError: an argument is invalid.
    """
    if not isinstance(source, str | os.PathLike | nn.Module):
        raise UsageError(
            f"expected a model, not {type(source).__name__}",
            hint="give a checkpoint's path or URL, package.module:factory, or an nn.Module",
        )
    name = type(source).__name__ if isinstance(source, nn.Module) else source
    if options.progress is not None:
        options.progress.step(f"loading {name}")
    if isinstance(source, nn.Module):
        return _load_by_plugin(source, _settings(options), options)
    with named_by_url():
        return _load(source, options)


def model_of(model: AnyModel, options: LoadRequest, data: Feed | None = None) -> Model:
    """Returns the model for the `model` argument of a call, loading it if necessary.

    A user's own network is also checked on the first inputs of `data`.
    """
    if callable(model) and not isinstance(model, nn.Module):
        model = model()
    if isinstance(model, Model):
        return model
    example = options.example
    if example is None and data is not None:
        from ...data.feeds import head_of  # needed for data only

        example = head_of(data)
    return load(model, replace(options, example=example))


def _load(source: str | os.PathLike[str], request: LoadRequest) -> Model:
    settings = _settings(request)
    for loader in LOADERS if request.further else ():
        if loader.refuses is not None:  # options of a loader that do not apply to this source
            loader.refuses(os.fspath(source), request)
    if names_code(str(source)):
        return _load_by_plugin(str(source), settings, request)
    path = local_checkpoint(source)
    found = None if request.family is not None else loader_of(path)
    if found is not None and _is_unknown(path):
        model = found[0].loads(path, {**settings[0], **settings[1]}, request)
    else:
        model = _load_checkpoint(path, settings, request)
    url = url_of(os.fspath(source))
    return model if url is None else replace(model, source=replace(model.source, path=url))


Settings = tuple[dict[str, Any], dict[str, Any]]
"""The settings of a file, and those that override them."""


def _load_by_plugin(source: str | nn.Module, settings: Settings, request: LoadRequest) -> Model:
    found = loader_of(source)
    if found is None:
        name, kind = (
            (type(source).__name__, "in memory")
            if isinstance(source, nn.Module)
            else (source, "from code")
        )
        raise PluginError(f"{name}: no installed plugin loads networks {kind}", hint=MISSING)
    return found[0].loads(source, {**settings[0], **settings[1]}, request)


def _settings(request: LoadRequest) -> Settings:
    if request.config is None and not request.sets:
        return {}, {}
    from .settings import read_config  # loaded only if there are any

    return read_config(request.config), read_config(sets=request.sets)


def _is_unknown(folder: Path) -> bool:
    """Whether the names and shapes of the weights in a folder match no known family."""
    try:
        detect(read_checkpoint(folder, values=False).tensors)
    except FamilyError:
        return True
    return False


def _load_checkpoint(path: Path, settings: Settings, request: LoadRequest) -> Model:
    chosen = None if request.family is None else family_named(request.family)
    checkpoint = read_checkpoint(path, values=request.values)
    notes: list[str] = []
    where = ""
    try:
        family = chosen or _detect_family(checkpoint)
        config = {**family.published(settings[0]), **settings[1]}
        recorded, notes = _recorded_settings(checkpoint, family, config)
        where = f" ({'; '.join(notes)}; --set overrides it)" if recorded else ""
        model = _build(family, checkpoint, {**recorded, **config}, notes, values=request.values)
    except (CheckpointError, FamilyError) as error:
        raise type(error)(f"{path}: {error.message}{where}", hint=error.hint) from error
    shape, odd = model.inputs[0].shape, list[str]()
    if len(shape) == len("bchw"):
        from ..checks.shapes import odd_sizes

        odd += odd_sizes(shape)
    return Model(
        module=model.module,
        family=family.name,
        config={key: model.config[key] for key in family.options if key in model.config},
        source=Source(
            path=str(path),
            files=checkpoint.files,
            mapped=checkpoint.mapped,
            watched=checkpoint.watched,
            host=model.host,
        ),
        inputs=model.inputs,
        outputs=model.outputs,
        notes=(*checkpoint.notes, *notes, *model.notes, *odd),
        example=None if isinstance(request.example, str | Path) else request.example,
        rounded=model.rounded,
    )


def _detect_family(checkpoint: Checkpoint) -> Family:
    """Returns a checkpoint's family; an error tells users if no plugin loads other models."""
    try:
        return detect(checkpoint.tensors)
    except FamilyError as error:
        if LOADERS.names:
            raise
        raise FamilyError(error.message, hint=f"{error.hint}; {MISSING}") from error


def _build(
    family: Family,
    checkpoint: Checkpoint,
    config: dict[str, Any],
    notes: list[str],
    *,
    values: bool,
) -> FamilyModel:
    """Returns the model of a checkpoint.

    For inspection, missing settings of a model from JAX are replaced by examples: its files
    identify the family, but do not contain these settings.
    """
    try:
        return family.build(checkpoint.tensors, config)
    except MissingSettingsError as error:
        if values or not checkpoint.from_jax:
            raise
        model = family.build(checkpoint.tensors, {**config, **error.examples})
        used = ", ".join(f"{key}={value}" for key, value in error.examples.items())
        notes.append(f"no parameter determines settings that an export needs; used here: {used}")
        return model


def _recorded_settings(
    checkpoint: Checkpoint, family: Family, config: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Returns the family's settings from the checkpoint and its `config.json`, and notes.

    The constructor's arguments come first, then the `config.json`. A training script's own options
    are used only for settings that shapes do not determine: others may have another meaning.
    Unknown keys are ignored, because these sources describe more than the constructor.
    """
    sources = [
        (f"the file's {key}", value, family.options) for key, value in checkpoint.arguments.items()
    ]
    if checkpoint.config is not None:
        from .settings import read_config

        content = read_config(checkpoint.config)
        inner = content.get("model_args")
        flat = {**content, **inner} if isinstance(inner, dict) else content
        sources.append((checkpoint.config.name, flat, family.options))
    sources += [
        (f"the file's {key}", value, family.questions) for key, value in checkpoint.options.items()
    ]
    settings: dict[str, Any] = {}
    notes = []
    for origin, values, options in sources:
        new = {
            key: values[key]
            for key in options
            if values.get(key) is not None and key not in settings and key not in config
        }
        settings |= new
        if new or not origin.startswith("the file's"):
            notes.append(f"read {', '.join(new) or 'nothing'} from {origin}")
    return settings, notes
