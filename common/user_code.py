"""Code of the user's own, named `package.module:attribute`: a network's factory, or a feed."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

_NAME = re.compile(r"[A-Za-z_]\w*(\.\w+)*:[A-Za-z_][\w.]*")


def names_code(text: str) -> bool:
    """Whether a text reads as `package.module:attribute` and is no file."""
    return _NAME.fullmatch(text) is not None and not Path(text).exists()


def module_of(name: str) -> ModuleType:
    """Imports the module of a name, also from the current directory; raises what that raises."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    return importlib.import_module(name.partition(":")[0])


def attribute_of(module: ModuleType, name: str) -> Any:
    """Returns what a name stands for in its module; raises AttributeError where it is not there."""
    found: Any = module
    for part in name.partition(":")[2].split("."):
        found = getattr(found, part)
    return found
