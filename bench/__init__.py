"""Benchmarks: accuracy, routing and latency compared with the PyTorch original.

`moexport.bench` is both this package and a function: importing any module of the package binds the
package to that name, so the package itself must be callable.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class CallablePackage(ModuleType):
    """A subpackage that can be called as the function of the same name in its `calls` module."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = self.__name__.rpartition(".")[2]
        return getattr(import_module(f"{self.__name__}.calls"), name)(*args, **kwargs)


sys.modules[__name__].__class__ = CallablePackage
