"""Rewords messages for Python callers: `force=True` for `--force`, a call for a command.

Messages are written once, with options as typed in a shell. Calls with keywords (`takes`) reword
the errors that they raise.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import MoexportError
from ..console import with_pages


@dataclass(frozen=True, slots=True)
class Keyword:
    """An option in a Python call: its name and choices, and whether it is a switch or a list.

    With `pairs`, `KEY=VALUE` in a shell is a dict in Python.
    """

    name: str
    switch: bool = False
    several: bool = False
    pairs: bool = False
    choices: frozenset[str] = frozenset()


Keywords = Mapping[str, Keyword]
"""The keywords of a call, by the names of their shell options without dashes."""

OPTION = re.compile(
    r"(?<![\w-])--([a-z][a-z0-9]*(?:-[a-z0-9]+)*)(?:([ =])(\[[^\]]*\]:?|[^\s`()]+))?"
)

SHORT = re.compile(r"(?<![\w-])-([oi])(?![\w-])")

ARGUMENTS = {"o": "destination", "i": "inputs"}
"""Arguments of Python calls that are short options in a shell."""

COMMAND = re.compile(r"(`?)\bmoexport ([a-z]+|COMMAND)\b((?: [^\s`;()]+)*)(`?)")

FOR_A_SHELL = re.compile(r"(this command [^`]*`[^`]*`)")
"""A command to type in a shell, which is not reworded."""

PLAIN = re.compile(r"[a-z]+")
"""A word of a sentence, unless it is a value of an option."""

VALUES = frozenset(("n", "input", "all", "auto"))
"""Words that are values of options without listed choices."""

SET = "set"
"""The option for one setting; in Python one dict has all settings."""

CONFIG = Keyword("config", pairs=True)

OTHER_CALLS = {
    SET: CONFIG,
    "profile": Keyword("profiles", several=True),
    "compute-capability": Keyword("compute_capabilities", several=True),
    "engine-cache": Keyword("cache"),
}
"""Options of other calls whose names in Python differ from those in a shell."""

NUMBERS = frozenset(("k", "batch"))
"""Options with lists of numbers, which are separated by commas in a shell."""

SIZES = re.compile(r"(?<![\w:.=])(\d+|MIN):(\d+|OPT):(\d+|MAX)(?![\w:.])")
"""Sizes as typed in a shell; in Python they are a tuple."""

PER_LAYER = re.compile(r"\((\d+(?:,\d+){2,})\)")
"""Numbers per layer as typed in a shell; in Python they are a list."""

WITHOUT_KEYWORD = {"verbose": "the traceback", "dry-run": "moexport.plan(…)"}
"""Shell-only options and their counterparts in Python."""

END = ",.;:"


def reword(error: MoexportError, function: str, keywords: Keywords) -> None:
    """Rewords an error for the caller of a function with these keywords."""
    words = Words(function, keywords)
    error.message = words.text(error.message)
    error.args = (error.message, *error.args[1:])
    if error.hint is None:
        return
    error.hint = words.text(error.hint)


@dataclass(frozen=True, slots=True)
class Words:
    """Rewords options and commands for Python."""

    function: str
    keywords: Keywords = field(default_factory=dict)

    def text(self, text: str) -> str:
        """Returns a message with keywords for options, calls for commands, and files for pages."""
        parts = FOR_A_SHELL.split(text)
        parts[::2] = [self._reworded(part) for part in parts[::2]]
        return with_pages("".join(parts))

    def _reworded(self, text: str) -> str:
        text = OPTION.sub(self._option, COMMAND.sub(self._command, text))
        text = SIZES.sub(r"(\1, \2, \3)", text)
        text = PER_LAYER.sub(lambda match: f"([{', '.join(match[1].split(','))}])", text)
        return _joined(SHORT.sub(lambda match: ARGUMENTS[match[1]], text))

    def _keyword(self, flag: str) -> tuple[Keyword, bool]:
        """Returns the keyword of an option, and whether a switch is on."""
        positive = flag.removeprefix("no-")
        if flag == SET and CONFIG.name in self.keywords:
            return CONFIG, True
        if flag in self.keywords:
            return self.keywords[flag], True
        if positive in self.keywords:
            return self.keywords[positive], False
        if flag in OTHER_CALLS:
            return OTHER_CALLS[flag], True
        switch = flag != positive or flag == "force"  # an option of another call
        return Keyword(positive.replace("-", "_"), switch=switch), flag == positive

    def _option(self, match: re.Match[str]) -> str:
        flag, gap, word = match.groups()
        rest = f"{gap}{word}" if word else ""
        if flag in WITHOUT_KEYWORD:
            return f"{WITHOUT_KEYWORD[flag]}{rest}"
        keyword, on = self._keyword(flag)
        if keyword.switch and gap != "=":
            return f"{keyword.name}={on}{rest}"
        if not word or not _is_value(word, keyword, gap):
            return f"{keyword.name}=…{rest}"
        value = word.rstrip(END)
        return f"{_assigned(value, keyword)}{word[len(value) :]}"

    def _command(self, match: re.Match[str]) -> str:
        before, name, rest, after = match.groups()
        called = self.function if name == "COMMAND" else name
        words = rest.split()
        if words[:1] == ["--help"]:
            return " ".join([f"`help(moexport.{called})`", *words[1:]])
        package = sys.modules[__name__.partition(".")[0]]
        if called not in getattr(package, "__all__", ()):
            return match[0]
        function = getattr(package, called)
        call_words = Words(called, function.keywords() if hasattr(function, "keywords") else {})
        values, named, left = call_words._arguments(words, quoted=bool(before and after))
        if len(values) > _positional_count(function):
            values = [f"[{', '.join(values)}]"]
        call = f"{before or '`'}moexport.{called}({', '.join([*values, *named])})`"
        return " ".join([call, *left])

    def _arguments(
        self, words: list[str], *, quoted: bool
    ) -> tuple[list[str], list[str], list[str]]:
        """Splits the words after a command into arguments, options and the rest of the sentence."""
        arguments: list[str] = []
        options: list[str] = []
        left = [*words]
        while left:
            word = left[0].rstrip(END)
            if word in ("-o", "-i"):
                left.pop(0)
                continue
            if word.startswith("--"):
                keyword, on = self._keyword(word[2:])
                left.pop(0)
                if keyword.switch or not left:
                    options.append(f"{keyword.name}={on}")
                    continue
                value = left[0].rstrip(END)
                options.append(_assigned(value, keyword))
                if left.pop(0) != value:
                    break
                continue
            if PLAIN.fullmatch(word) and not quoted:
                break
            arguments.append(word.lower() if word.isupper() else json.dumps(word))
            ends = left.pop(0) != word
            if ends:
                break
        return arguments, options, left


def _positional_count(function: Callable[..., Any]) -> int:
    """Returns the number of positional arguments of a call."""
    parameters = inspect.signature(function).parameters.values()
    return sum(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters)


def _is_value(word: str, keyword: Keyword, gap: str) -> bool:
    """Whether the word after an option is its value rather than a part of the sentence."""
    bare = word.rstrip(END)
    if gap == "=" or bare in keyword.choices or bare in VALUES:
        return True
    return not PLAIN.fullmatch(bare) or (word.endswith(":") and bare != "out")


def _assigned(value: str, keyword: Keyword) -> str:
    """Returns a keyword and its value as code."""
    key, equals, setting = value.partition("=")
    if not keyword.pairs:
        return f"{keyword.name}={_literal(value, keyword)}"
    if not equals:  # not KEY=VALUE, as a user typed it in a shell
        return f"sets=[{json.dumps(value, ensure_ascii=False)}]"
    if "," in setting:
        parts = [_literal(part, keyword) for part in setting.split(",") if part]
        return f"{keyword.name}={{{json.dumps(key)}: [{', '.join(parts)}]}}"
    return f"{keyword.name}={{{json.dumps(key)}: {_literal(setting, keyword)}}}"


def _literal(value: str, keyword: Keyword) -> str:
    """Returns a value as Python source; a placeholder in capitals stays a name."""
    if keyword.several:
        return f"[{json.dumps(value, ensure_ascii=False)}]"
    if SIZES.fullmatch(value):
        return f"({', '.join(value.split(':'))})"
    if keyword.name in NUMBERS and re.fullmatch(r"(n|[\d.]+)(,(n|[\d.]+))+", value):
        parts = ('"n"' if part == "n" else part for part in value.split(","))
        return f"[{', '.join(parts)}]"
    if re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+)?|[A-Z_]+|…|None|True|False|\[.*\]", value):
        return value
    if value in ("true", "false"):
        return value.capitalize()
    return json.dumps(value, ensure_ascii=False)


REPEATED = (
    (re.compile(r"\b(\w+)=\[([^][]*)\],? \1=\["), r"\1=[\2, "),
    (re.compile(r"\b(\w+)=\{([^{}]*)\},? \1=\{"), r"\1={\2, "),
)


def _joined(text: str) -> str:
    """Joins consecutive lists or dicts of one keyword: `config={"a": 1, "b": 2}`."""
    for repeated, joined in REPEATED:
        while (longer := repeated.sub(joined, text)) != text:
            text = longer
    return text
