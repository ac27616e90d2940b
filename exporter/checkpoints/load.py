"""Loads a `Model` from what the user names: a checkpoint or a factory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...common.documents import document, read_document
from ...common.locations import named_by_url, url_of
from ...common.option import takes
from ...common.user_code import names_code
from ...errors import (
    CheckpointError,
    FamilyError,
    MissingSettingsError,
    PluginError,
    UsageError,
)
from ..families import Family, detect, family_named
from ..families.base import FamilyModel
from ..inputs import Example
from ..model import Model, Source
from ..requests import LoadRequest
from .files import local_checkpoint
from .loaders import LOADERS, MISSING, loader_of
from .state_dict import Checkpoint, read_checkpoint


def read_config(
    source: Mapping[str, Any] | str | Path | None = None, sets: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns settings, or those of a file (JSON, YAML, TOML), with `KEY=VALUE` pairs over them.

    Raises UsageError for a file that cannot be read as a mapping, or a pair without a key.
    """
    config = _read_file(Path(source)) if isinstance(source, str | Path) else dict(source or {})
    for pair in sets:
        key, equals, text = pair.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"--set {pair}: not KEY=VALUE", hint="for example --set num_heads=12")
        config[key.strip()] = parse_value(text)
    return config


def parse_value(text: str) -> Any:
    """Returns what a value on the command line means: `12`, `true`, `null`, `1,3`, text."""
    text = text.strip()
    if "," in text and not text.startswith(("[", "{", '"', "'")):
        return [parse_value(part) for part in text.split(",") if part.strip()]
    if not text:
        return ""
    for kind in ("json", "yaml"):  # YAML has plainer words than JSON
        with suppress(UsageError):
            return document(text, kind, "a value", UsageError)
    return text


KINDS = {".json": "json", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml"}


def _read_file(file: Path) -> dict[str, Any]:
    kind = KINDS.get(file.suffix.lower())
    if kind is None:
        raise UsageError(
            f"{file}: configuration is read from .json, .yaml or .toml, not {file.suffix!r}"
        )
    try:
        content = read_document(file, kind, UsageError)
    except OSError as error:
        raise UsageError(
            f"{file}: cannot be read: {error.strerror}", hint="check --config"
        ) from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"{file}: holds a {type(content).__name__}, not keys and values")
    return {str(key): value for key, value in content.items()}


def load_as(source: str | os.PathLike[str], request: LoadRequest) -> Model:
    """Returns the trained model that `source` names, ready to trace.

    `source` is a checkpoint (a file, an index of shards, a folder) or `package.module:factory`.
    Its configuration says what shapes cannot tell: the constructor arguments of the published
    code, or of the factory. Without `values` a checkpoint's weights are neither checked nor
    converted (`checkpoint.read_checkpoint`): enough to look at a model, not to run or export it.

    Each of them may be a URL. Raises CheckpointError, FamilyError, ParityError or UsageError: what
    was wrong, where, and what to do.
    """
    with named_by_url():
        return _load(source, request)


load = takes(LoadRequest)(load_as)
"""`load_as` with the fields of the request as keywords."""


def _load(source: str | os.PathLike[str], request: LoadRequest) -> Model:
    family, example, values = request.family, request.example, request.values
    file, sets = read_config(request.config), read_config(sets=request.sets)
    _check_options(os.fspath(source), request)
    if names_code(str(source)):
        return _load_code(str(source), {**file, **sets}, request)
    path = local_checkpoint(source)
    found = None if family is not None else loader_of(path)
    if found is not None and _is_unknown(path):
        model = found[0].loads(path, {**file, **sets}, request)
    else:
        model = _load_checkpoint(path, family, (file, sets), example, values=values)
    url = url_of(os.fspath(source))
    return model if url is None else replace(model, source=replace(model.source, path=url))


def _load_code(source: str, config: Mapping[str, Any], request: LoadRequest) -> Model:
    """The network that a user's own code makes: a plugin loads it."""
    found = loader_of(source)
    if found is None:
        raise PluginError(
            f"{source}: no plugin that is installed loads networks that code names", hint=MISSING
        )
    return found[0].loads(source, config, request)


def _check_options(source: str, request: LoadRequest) -> None:
    """Raises `UsageError` for options of a loader beside a source that they are not for."""
    for loader in LOADERS if request.further else ():
        if loader.refuses is not None:
            loader.refuses(source, request)


def _is_unknown(folder: Path) -> bool:
    """Whether the weights in a folder are of no family of ours, by their names and shapes."""
    try:
        detect(read_checkpoint(folder, values=False).tensors)
    except FamilyError:
        return True
    return False


def _load_checkpoint(
    path: Path,
    name: str | None,
    settings: tuple[dict[str, Any], dict[str, Any]],
    example: Example | None,
    *,
    values: bool,
) -> Model:
    """The model of a checkpoint; `settings`: a file's, and those that override them."""
    chosen = None if name is None else family_named(name)
    checkpoint = read_checkpoint(path, values=values)
    notes: list[str] = []
    where = ""
    try:
        family = chosen or _detected(checkpoint)
        config = {**family.published(settings[0]), **settings[1]}
        recorded, notes = _recorded_settings(checkpoint, family, config)
        where = f" ({'; '.join(notes)}; --set overrides it)" if recorded else ""
        model = _built(family, checkpoint, {**recorded, **config}, notes, values=values)
    except (CheckpointError, FamilyError) as error:
        raise type(error)(f"{path}: {error.message}{where}", hint=error.hint) from error
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
        notes=(*checkpoint.notes, *notes, *model.notes),
        example=None if isinstance(example, str | Path) else example,
        rounded=model.rounded,
    )


def _detected(checkpoint: Checkpoint) -> Family:
    """The family of a checkpoint; where no plugin loads other models, the error says so."""
    try:
        return detect(checkpoint.tensors)
    except FamilyError as error:
        if LOADERS.names:
            raise
        raise FamilyError(error.message, hint=f"{error.hint}; {MISSING}") from error


def _built(
    family: Family,
    checkpoint: Checkpoint,
    config: dict[str, Any],
    notes: list[str],
    *,
    values: bool,
) -> FamilyModel:
    """The model of a checkpoint.

    Who only looks at what a training in JAX left sees it with examples of the settings that are
    missing: its files say what it is, and nothing of those.
    """
    try:
        return family.build(checkpoint.tensors, config)
    except MissingSettingsError as error:
        if values or not checkpoint.by_jax:
            raise
        model = family.build(checkpoint.tensors, {**config, **error.examples})
        taken = ", ".join(f"{key}={value}" for key, value in error.examples.items())
        notes.append(f"no parameter says these settings, which an export asks for; here {taken}")
        return model


def _recorded_settings(
    checkpoint: Checkpoint, family: Family, config: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """What the family understands of what the file and a `config.json` beside it say, and notes.

    The arguments of the constructor come first, then the `config.json`. A training script's own
    options are taken only for what shapes cannot tell: others may mean something else. Such places
    describe more than the constructor, so keys that the family does not take are no error.
    """
    places = [
        (f"the file's {key}", value, family.options) for key, value in checkpoint.arguments.items()
    ]
    if checkpoint.config is not None:
        content = read_config(checkpoint.config)
        inner = content.get("model_args")
        flat = {**content, **inner} if isinstance(inner, dict) else content
        places.append((checkpoint.config.name, flat, family.options))
    places += [
        (f"the file's {key}", value, family.questions) for key, value in checkpoint.options.items()
    ]
    settings: dict[str, Any] = {}
    notes = []
    for place, values, options in places:
        new = {
            key: values[key]
            for key in options
            if values.get(key) is not None and key not in settings and key not in config
        }
        settings |= new
        if new or not place.startswith("the file's"):
            notes.append(f"read {', '.join(new) or 'nothing'} from {place}")
    return settings, notes
