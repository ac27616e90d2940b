"""Settings of a model that its weights do not determine: `--config` files and `--set KEY=VALUE`.

This module is cheap to import: unreadable settings are refused before PyTorch is imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ...common.documents import document, read_document
from ...errors import UsageError


def read_config(
    source: Mapping[str, Any] | str | Path | None = None, sets: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns settings, given or from a file (JSON, YAML, TOML), overridden by `KEY=VALUE` pairs.

    Raises UsageError for a file that cannot be read as a mapping, or a pair without a key.
    """
    config = _read_file(Path(source)) if isinstance(source, str | Path) else dict(source or {})
    for pair in sets:
        key, text = split_setting(pair)
        config[key] = parse_value(text)
    return config


def parse_value(text: str) -> Any:
    """Parses a value of the command line: `12`, `true`, `null`, `1,3`, text."""
    text = text.strip()
    if "," in text and not text.startswith(("[", "{", '"', "'")):
        return [parse_value(part) for part in text.split(",") if part.strip()]
    if not text:
        return ""
    for kind in ("json", "yaml"):  # plain words are valid YAML
        with suppress(UsageError):
            return document(text, kind, "a value", UsageError)
    return text


KINDS = {".json": "json", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml"}


def _read_file(file: Path) -> dict[str, Any]:
    kind = KINDS.get(file.suffix.lower())
    if kind is None:
        raise UsageError(
            f"{file}: configuration is read from .json, .yaml or .toml, not {file.suffix!r}",
            hint="change its suffix to match the format, or use --set KEY=VALUE for each setting",
        )
    try:
        content = read_document(file, kind, partial(UsageError, hint="check --config"))
    except OSError as error:
        raise UsageError(
            f"{file}: cannot be read: {error.strerror}", hint="check --config"
        ) from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(
            f"{file} contains a {type(content).__name__}, not keys and values",
            hint='for example {"num_heads": 12}',
        )
    return {str(key): value for key, value in content.items()}


def split_setting(pair: str) -> tuple[str, str]:
    """Returns the key and the value of `KEY=VALUE`; raises `UsageError` for anything else."""
    key, equals, text = pair.partition("=")
    if not equals or not key.strip():
        raise UsageError(f"--set {pair}: not KEY=VALUE", hint="for example --set num_heads=12")
    return key.strip(), text
