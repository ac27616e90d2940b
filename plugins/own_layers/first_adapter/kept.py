"""Caches the results of searches in the user's cache folder, because a search takes time."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, TypeGuard

from torch import nn

from ....common.documents import object_in
from ....common.files import cache_folder, sha256, why_not_private
from ....common.writing import write_text
from ....errors import OutputError
from .readings import TriedSizes
from .seen import own_files


def key_of(layer: nn.Module, source: str, config: Mapping[str, Any], sizes: TriedSizes) -> str:
    """Returns a hash of a search's inputs: code, arguments, sizes, and generated values."""
    own = sorted(own_files(layer))
    folders = {Path(file).parent for file in own}
    modules = [getattr(module, "__file__", None) or "" for module in [*sys.modules.values()]]
    near = {Path.cwd(), *folders}
    neighbours = sorted({file for file in modules if near & {*Path(file).parents}})
    here = sorted(map(str, Path(__file__).parents[1].rglob("*.py")))
    digest = hashlib.sha256()
    for file in dict.fromkeys([*own, *neighbours, *here]):
        with suppress(OSError):
            digest.update(sha256(Path(file)).encode())
    inputs = [source, sorted(config.items(), key=str), sizes, metadata.version("torch")]
    digest.update(repr(inputs).encode())
    for name, value in layer.state_dict().items():
        digest.update(f"{name} {list(value.shape)}".encode())
        digest.update(value.detach().contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()


MOST_KEPT = 200
"""The number of layers whose adapters stay in the cache, the latest."""


def kept_adapter(key: str) -> dict[str, Any] | None:
    """Returns the entry of a key; None if it is missing, damaged, or writable by others."""
    file = _file(key)
    if file is None or not file.is_file() or why_not_private(file.parents[1]) is not None:
        return None
    content = object_in(file)
    lists = {name: content.get(name) for name in ("missing", "notes")}
    if not isinstance(content.get("code"), str) or not all(map(_are_texts, lists.values())):
        return None
    return {"code": content["code"], **{name: tuple(content[name]) for name in lists}}


def _are_texts(value: Any) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def keep_adapter(key: str, **found: Any) -> None:
    """Stores results under a key if the cache folder can be written."""
    file = _file(key)
    if file is None:
        return
    with suppress(OSError, OutputError):  # the cache is optional
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_text(json.dumps(found, indent=1) + "\n", file)
        kept = sorted(file.parent.glob("*.json"), key=lambda each: each.stat().st_mtime)
        for old in kept[:-MOST_KEPT]:
            old.unlink(missing_ok=True)


def _file(key: str) -> Path | None:
    folder = cache_folder()
    return None if folder is None else folder / "adapters" / f"{key[:32]}.json"
