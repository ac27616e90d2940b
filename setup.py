"""Adapts the README for a package index, and builds without leaving files in the sources."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from setuptools import setup

FIGURE = re.compile(r"!\[[^\]]*\]\((?!https?:)[^)]*\)\n*")
LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#)([^)#]*)[^)]*\)")


def without_url(link: re.Match[str]) -> str:
    """Returns the replacement for a link to a source file: its text, and the file's name."""
    text, file = link.groups()
    return text if file in text else f"{text} ({file})"


readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
scratch = tempfile.TemporaryDirectory(prefix="moexport-build-")  # a checkout may be read-only
setup(
    options={"egg_info": {"egg_base": scratch.name}, "build": {"build_base": scratch.name}},
    script_name="setup.py",  # so that it is left out of the wheel, whose root is this folder
    long_description=f"{LINK.sub(without_url, FIGURE.sub('', readme))}\n"
    "The pages named here are part of the source distribution.\n",
    long_description_content_type="text/markdown",
)
