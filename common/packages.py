"""A package that is called like the function of its name: Python binds packages to their names."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any


class CallablePackage(ModuleType):
    """A folder of the package that, called, is the function of the same name in `calls`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function of the package's name."""
        root, _, name = self.__name__.rpartition(".")
        return getattr(import_module(f"{root}.calls"), name)(*args, **kwargs)
