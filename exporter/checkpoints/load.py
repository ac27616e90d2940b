"""From what the user names, a checkpoint or a factory, to a `Model`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...common.user_code import names_code
from ...errors import CheckpointError, FamilyError, UsageError
from ..families import Family, detect, family_named
from ..model import Model, Source
from .config import read_config
from .factory import load_factory
from .state_dict import Checkpoint, read_checkpoint

__all__ = ["load", "read_config"]


def load(
    source: str | os.PathLike[str],
    *,
    family: str | None = None,
    config: Mapping[str, Any] | None = None,
    weights: str | os.PathLike[str] | None = None,
    example: np.ndarray | None = None,
    values: bool = True,
) -> Model:
    """Returns the trained model that `source` names, ready to trace.

    `source` is a checkpoint (a file, an index of shards, a folder) or `package.module:factory`,
    which may take `weights` from a checkpoint. `config` says what shapes cannot tell: the
    constructor arguments of the published code, or of the factory. `example` [b, …] is an input to
    check a factory's model with. Without `values` a checkpoint's weights are neither checked nor
    converted (`checkpoint.read_checkpoint`): enough to look at a model, not to run or export it.

    Raises CheckpointError, FamilyError, ParityError or UsageError: what was wrong, where, and what
    to do.
    """
    given = dict(config or {})
    if names_code(str(source)):
        if family is not None:
            raise UsageError(
                f"--family {family}: a factory's layers are found by their structure",
                hint="leave --family out",
            )
        return load_factory(str(source), given, None if weights is None else Path(weights), example)
    if weights is not None:
        raise UsageError(
            f"--weights goes with package.module:factory, and {source} is a checkpoint already",
            hint="leave --weights out",
        )
    return _load_checkpoint(Path(source), family, given, example, values=values)


def _load_checkpoint(
    path: Path,
    name: str | None,
    given: dict[str, Any],
    example: np.ndarray | None,
    *,
    values: bool,
) -> Model:
    chosen = None if name is None else family_named(name)
    checkpoint = read_checkpoint(path, values=values)
    family = chosen or _detect(path, checkpoint)
    beside, notes = _config_beside(checkpoint, family.options)
    try:
        built = family.build(checkpoint.tensors, {**beside, **given})
    except (CheckpointError, FamilyError) as error:
        raise type(error)(f"{path}: {error.message}", hint=error.hint) from error
    return Model(
        module=built.module,
        family=family.name,
        config={key: built.config[key] for key in family.options if key in built.config},
        source=Source(str(path), checkpoint.files, mapped=checkpoint.mapped),
        input=built.input,
        output=built.output,
        notes=(*checkpoint.notes, *notes, *built.notes),
        example=example,
    )


def _detect(path: Path, checkpoint: Checkpoint) -> Family:
    try:
        return detect(checkpoint.tensors)
    except FamilyError as error:
        raise FamilyError(f"{path}: {error.message}", hint=error.hint) from error


def _config_beside(
    checkpoint: Checkpoint, options: tuple[str, ...]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What the family understands of the file's own arguments and of a `config.json` beside it.

    Such files describe more than the constructor, so keys that it does not take are no error.
    """
    inside = {
        key: value
        for key, value in checkpoint.arguments.items()
        if key in options and value is not None
    }
    told = (
        (f"read {', '.join(inside)} from the file's {checkpoint.arguments_key}",) if inside else ()
    )
    if checkpoint.config is None:
        return inside, told
    content = read_config(checkpoint.config)
    inner = content.get("model_args")
    flat = {**content, **inner} if isinstance(inner, dict) else content
    known = {key: flat[key] for key in options if key in flat}
    note = f"read {', '.join(known) or 'nothing'} from {checkpoint.config.name}"
    return {**known, **inside}, (*told, note)
