"""Finds the pages of the site: in `docs/`, and in the folder `docs/` of each plugin."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
EVIDENCE = "evidence/"
"""The folder for pages of measurements and of tests, on the site and in each `docs/`."""

LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#:\s]+)(#[^)]*)?\)")
"""Matches a link to a file: the `!` of an image, its text, the file and the heading."""


def pages() -> dict[str, Path]:
    """Returns the file of every page by its address on the site, such as `evidence/cpus.md`."""
    folders = (ROOT / "docs", *sorted(ROOT.glob("plugins/*/docs")))
    return {
        file.relative_to(folder).as_posix(): file
        for folder in folders
        for file in sorted(folder.rglob("*.md"))
    }


def core_pages() -> dict[str, Path]:
    """Returns the core's pages for users, without evidence and plugins."""
    return {
        address: file
        for address, file in pages().items()
        if file.is_relative_to(ROOT / "docs") and not address.startswith(EVIDENCE)
    }


def on_the_site(text: str, address: str, file: Path, known: Mapping[str, Path]) -> str:
    """Returns a page with links between addresses in place of links between files.

    A link to a file that is not on the site becomes plain text.
    """
    addresses = {path: name for name, path in known.items()}

    def link(found: re.Match[str]) -> str:
        image, words, target, heading = found.groups()
        goal = (file.parent / target).resolve()
        if goal in addresses:
            place = addresses[goal]
        elif goal.is_relative_to(ROOT / "docs"):
            place = goal.relative_to(ROOT / "docs").as_posix()
        elif target == posixpath.basename(target):  # a page that the site's build generates
            place = posixpath.join(posixpath.dirname(address), target)
        else:
            return words
        relative = posixpath.relpath(place, posixpath.dirname(address) or ".")
        return f"{image}[{words}]({relative}{heading or ''})"

    return LINK.sub(link, text)
