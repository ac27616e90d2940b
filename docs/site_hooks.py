"""What mkdocs does to pages on their way to the site: parts of them are generated."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

MARK = "<!-- generated -->"
OUTSIDE = re.compile(r"\[([^\]]*)\]\(\.\./[^)]*\)")
"""A link to a file of the sources that is no page."""


DEMO = Path(__file__).parents[1] / "perf" / "results" / "demo.json"
"""The results of a `moexport demo`, those of the README's table."""

REPORT = "demo-report.html"


def on_files(files: Any, *, config: Any) -> Any:
    """Returns the site's files with the report of the demo, as `moexport report` writes it."""
    from mkdocs.structure.files import File
    from moexport.bench.report.page import html
    from moexport.bench.results import read

    files.append(File.generated(config, REPORT, content=html(read(DEMO))))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:
    """Returns a page with its generated part, and with the text alone of links to sources."""
    made = GENERATED.get(page.file.src_uri)
    if made is not None:
        markdown = markdown.replace(MARK, "\n".join(made()))
    return OUTSIDE.sub(r"\1", markdown)


def report() -> Iterator[str]:
    """Yields where the site has a report to try."""
    yield f"**[Open the demo's report]({REPORT})** and move the threshold: it is the page itself."


def commands() -> Iterator[str]:
    """Yields the help of every command, as a terminal of 100 columns shows it."""
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
    """Yields signature and docstring of all that `import moexport` gives; functions first."""
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
    """A call with its parameters, each on a line of its own where there are several."""
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
    """Yields a table of the kinds of errors, from their classes."""
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


GENERATED: dict[str, Callable[[], Iterator[str]]] = {
    "reference-cli.md": commands,
    "reference-python.md": calls,
    "errors.md": errors,
    "bench.md": report,
    "index.md": report,
}
