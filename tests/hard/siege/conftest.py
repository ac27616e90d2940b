"""The small language model and its bundle, which tests of text share."""

from __future__ import annotations

from moexport.plugins.text.tests.conftest import folder, out

__all__ = ["folder", "out"]
