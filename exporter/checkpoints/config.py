"""Configuration that people give beside their weights: a file and KEY=VALUE pairs."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from ...errors import UsageError


def read_config(file: Path | None = None, sets: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the configuration in `file` (JSON, YAML or TOML) with the `KEY=VALUE` pairs over it.

    Raises UsageError for a file that cannot be read as a mapping, or a pair without a key.
    """
    config = {} if file is None else _read_file(file)
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
    for parse in (json.loads, yaml.safe_load):  # YAML has plainer words than JSON
        try:
            return parse(text)
        except (ValueError, yaml.YAMLError):
            continue
    return text


def _read_file(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{file}: cannot be read: {reason}", hint="check --config") from error
    try:
        match file.suffix.lower():
            case ".json":
                content: Any = json.loads(text)
            case ".toml":
                content = tomllib.loads(text)
            case ".yaml" | ".yml":
                content = yaml.safe_load(text)
            case suffix:
                raise UsageError(
                    f"{file}: configuration is read from .json, .yaml or .toml, not {suffix!r}"
                )
    except (ValueError, yaml.YAMLError) as error:
        line = str(error).replace("\n", " ")
        raise UsageError(f"{file}: not valid {file.suffix[1:].upper()}: {line}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"{file}: holds a {type(content).__name__}, not keys and values")
    return {str(key): value for key, value in content.items()}
