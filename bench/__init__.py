"""How good and how fast: accuracy, routing and latency against the PyTorch original.

`moexport.bench` is this package and, called, the benchmark itself: Python binds a subpackage to its
parent's name as soon as anything in it is imported, so the call must live on the module.
"""

from __future__ import annotations

import sys

from ..common.option import CallablePackage

sys.modules[__name__].__class__ = CallablePackage
