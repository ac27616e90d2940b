"""What a user chooses a graph by, beside its target: words that mean the same in every room."""

from __future__ import annotations

from typing import Literal

Precision = Literal["fp32", "fp16", "bf16", "int8", "int4"]
"""What a graph computes in. INT8 is for matrix products; the rest is a float then, too. INT4 is
what weights are stored in, a scale for every 32 of them; what they multiply is a float."""

FloatName = Literal["fp32", "fp16", "bf16"]
"""The float types among them."""

Scope = Literal["experts", "all"]
"""What INT8 is for: the experts, or all linear layers."""

Method = Literal["minmax", "percentile", "entropy", "mse"]
"""How a calibration chooses ranges from what was observed."""
