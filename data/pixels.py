"""The scales by which the pixels of images are converted to numbers."""

from __future__ import annotations

from typing import Literal, get_args

from ..errors import UsageError

Pixels = Literal["unit", "symmetric", "imagenet"]
"""The scale of pixel values: 0..1, −1..1, or standardised as for ImageNet models."""

SCALES = "--pixels unit (0 to 1), symmetric (−1 to 1) or imagenet (mean and deviation)"

UNKNOWN = "the weights do not show how images were scaled in training"
"""Why a scale must be given."""


def check_pixels(pixels: str, *, given: bool = True) -> None:
    """Raises `UsageError` for an unknown scale, or if no images are `given`."""
    if pixels not in get_args(Pixels):
        raise UsageError(f"--pixels {pixels}: there is no such scale; {UNKNOWN}", hint=SCALES)
    if not given:
        raise UsageError(
            f"--pixels {pixels}: the data are not a folder of images", hint="give one with --data"
        )
