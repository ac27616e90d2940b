"""Caches the results of searches in the user's cache folder, because a search takes time."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeGuard

from torch import nn

from ....common.documents import object_in
from ....common.files import cache_folder, sha256, why_not_private
from ....common.writing import write_text
from ....errors import OutputError
from .coverage import own_files
from .request import TriedSizes


def key_of(layer: nn.Module, source: str, config: Mapping[str, Any], sizes: TriedSizes) -> str:
    """Returns a hash of a search's inputs: code, arguments, sizes and initial weights."""
    own = sorted(own_files(layer))
    folders = {Path(file).parent for file in own}
    modules = [getattr(module, "__file__", None) or "" for module in [*sys.modules.values()]]
    parents = {Path.cwd(), *folders}
    neighbours = sorted({file for file in modules if parents & {*Path(file).parents}})
    plugin = sorted(map(str, Path(__file__).parents[1].rglob("*.py")))
    digest = hashlib.sha256()
    for file in dict.fromkeys([*own, *neighbours, *plugin]):
        with suppress(OSError):
            digest.update(sha256(Path(file)).encode())
    inputs = [source, sorted(config.items(), key=str), sizes, metadata.version("torch")]
    digest.update(repr(inputs).encode())
    for name, value in layer.state_dict().items():
        digest.update(f"{name} {list(value.shape)}".encode())
        digest.update(value.detach().contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()


MAX_ENTRIES = 200
"""The largest number of entries in the cache; the oldest are removed."""


@dataclass(frozen=True, slots=True)
class FirstAdapter:
    """An adapter as Python code.

    `missing` lists what was not recognised; it is empty if the adapter matches. `notes` list the
    parts of the layer's forward that no input reached, which the adapter may lack.
    """

    code: str
    missing: tuple[str, ...]
    notes: tuple[str, ...] = ()


def cached_adapter(key: str) -> FirstAdapter | None:
    """Returns the entry of a key; None if it is missing, damaged, or writable by others."""
    file = _file(key)
    if file is None or not file.is_file() or why_not_private(file.parents[1]) is not None:
        return None
    content = object_in(file)
    code, missing, notes = (content.get(name) for name in ("code", "missing", "notes"))
    if not isinstance(code, str) or not _is_string_list(missing) or not _is_string_list(notes):
        return None
    return FirstAdapter(code, tuple(missing), tuple(notes))


def _is_string_list(value: Any) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def store_adapter(key: str, found: FirstAdapter) -> None:
    """Stores a result under a key if the cache folder can be written."""
    file = _file(key)
    if file is None:
        return
    with suppress(OSError, OutputError):  # the cache is optional
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_text(json.dumps(asdict(found), indent=1) + "\n", file)
        entries = sorted(file.parent.glob("*.json"), key=lambda entry: entry.stat().st_mtime)
        for old in entries[:-MAX_ENTRIES]:
            old.unlink(missing_ok=True)


def _file(key: str) -> Path | None:
    folder = cache_folder()
    return None if folder is None else folder / "adapters" / f"{key[:32]}.json"
