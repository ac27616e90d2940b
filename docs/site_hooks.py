"""Hooks of mkdocs that generate parts of the site's pages."""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

MARK = "<!-- generated -->"

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "perf" / "results" / "demo.json"
"""The results of `moexport demo` that the README's table shows."""

REPORT = "demo-report.html"


def on_files(files: Any, *, config: Any) -> Any:
    """Returns the site's files with plugins' pages, and the report of the demo."""
    from mkdocs.structure.files import File
    from moexport.bench.report.page import html
    from moexport.bench.results import read
    from moexport.docs.sources import pages

    for address, file in pages().items():
        if files.get_file_from_path(address) is None:
            files.append(File.generated(config, address, abs_src_path=str(file)))
    files.append(File.generated(config, REPORT, content=html(read(DEMO))))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:
    """Returns a page with its generated part, and with links to other pages of the site."""
    from moexport.docs.sources import on_the_site, pages

    address, known = page.file.src_uri, pages()
    made = GENERATED.get(address)
    if made is not None:
        markdown = markdown.replace(MARK, "\n".join(made()))
    return on_the_site(markdown, address, known[address], known)


def report() -> Iterator[str]:
    """Yields a link to a report on the site."""
    yield f"**[Open the demo's report]({REPORT})** and move the threshold."


def commands() -> Iterator[str]:
    """Yields the help of every command, as in a terminal of 100 columns."""
    import typer
    from moexport.cli import app

    group: Any = typer.main.get_command(app)
    for name in group.list_commands(typer.Context(group)):
        yield f"## {name}\n\n```text\n{_help(name)}\n```\n"


def _help(command: str) -> str:
    from moexport.cli import app

    printed = io.StringIO()
    wide = {"COLUMNS": "100", "TERMINAL_WIDTH": "100", "NO_COLOR": "1"}
    with (
        mock.patch.dict(os.environ, wide),
        contextlib.redirect_stdout(printed),
        contextlib.suppress(SystemExit),
    ):
        app([command, "--help-all"], prog_name="moexport")
    return printed.getvalue().strip()


def calls() -> Iterator[str]:
    """Yields the signature and docstring of every name in `moexport`, functions first."""
    import moexport

    for name in sorted(moexport.__all__, key=lambda name: (name[0].isupper(), name)):
        found = getattr(moexport, name)
        if inspect.isclass(found) and issubclass(found, moexport.MoexportError):
            continue  # they are on errors.md
        yield f"## {name}\n\n{_signature(name, found)}\n\n{inspect.getdoc(found)}\n"
        if inspect.isclass(found):
            for member, value in vars(found).items():
                function = getattr(value, "fget", None) or getattr(value, "__func__", value)
                if member[0] != "_" and inspect.isfunction(function):
                    shown = member if isinstance(value, property) else _signature(member, function)
                    heading = f"### {name}.{member}\n\n"
                    yield (
                        heading
                        + (f"{shown}\n\n" if shown != member else "")
                        + (f"{inspect.getdoc(function) or ''}\n")
                    )


def _signature(name: str, found: Callable[..., object]) -> str:
    """Formats a call with its parameters, one per line if there are several."""
    given = inspect.signature(found)
    parameters = [str(each) for each in given.parameters.values() if each.name != "self"]
    kinds = [each.kind for each in given.parameters.values() if each.name != "self"]
    if inspect.Parameter.KEYWORD_ONLY in kinds:
        parameters.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    joined = ", ".join(parameters)
    if len(joined) > 80:
        joined = "\n    " + ",\n    ".join(parameters) + ",\n"
    returns = given.return_annotation
    arrow = "" if returns in (inspect.Signature.empty, None, "None") else f" -> {returns}"
    return f"```python\n{name}({joined}){arrow}\n```"


def errors() -> Iterator[str]:
    """Yields a table of the kinds of errors from their classes."""
    from moexport import errors as module

    yield "| error | what it means | what to do, unless the error says more | exit code |"
    yield "|---|---|---|---|"
    for name, kind in vars(module).items():
        if (
            inspect.isclass(kind)
            and issubclass(kind, module.MoexportError)
            and kind is not module.MoexportError
        ):
            meaning = (inspect.getdoc(kind) or "").partition("\n\n")[0].replace("\n", " ")
            advice = kind.HINT or "follow its hint"
            yield f"| `moexport.{name}` | {meaning} | {advice} | {kind.EXIT_CODE} |"


FOLDERS = ("plugins", "commands", "bench", "exporter", "calibration", "data", "graphs", "common")
"""The top-level folders of the package, in the order of imports."""


def folders() -> Iterator[str]:
    """Yields every folder of the package with the first sentence of its docstring."""
    yield "| folder | contents |"
    yield "|---|---|"
    for room in FOLDERS:
        for module in sorted((ROOT / room).rglob("__init__.py")):
            text = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or ""
            summary = " ".join(text.partition("\n\n")[0].split())
            yield f"| `{module.parent.relative_to(ROOT).as_posix()}/` | {summary} |"


GENERATED: dict[str, Callable[[], Iterator[str]]] = {
    "reference-cli.md": commands,
    "reference-python.md": calls,
    "errors.md": errors,
    "architecture.md": folders,
    "bench.md": report,
    "index.md": report,
}
