"""Options of `run` for OpenVINO."""

from __future__ import annotations

from ...commands.options import options_of
from .request import OpenVinoOptions

openvino_options = options_of(OpenVinoOptions, cache={"metavar": "FOLDER"})
