"""JSON becomes dataclasses, and what is wrong with it is said by file, field and expectation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from moexport.common.documents import from_data, read_json
from moexport.errors import BundleError, ResultsError


@dataclass(frozen=True, slots=True)
class Part:
    size: int
    kind: Literal["small", "large"] = "small"


@dataclass(frozen=True, slots=True)
class Whole:
    name: str
    ms: float
    parts: tuple[Part, ...] = ()
    best: Part | None = None
    shape: list[int | str] = field(default_factory=list)
    notes: Mapping[str, Any] = field(default_factory=dict)


def test_a_text_becomes_a_dataclass_and_unknown_keys_are_passed_over() -> None:
    text = '{"name": "a", "ms": 1, "parts": [{"size": 2, "novelty": 0}], "shape": ["b", 3]}'
    assert read_json(Whole, text, "f") == Whole("a", 1.0, (Part(2),), shape=["b", 3])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"name": None}, "f: field name should be text, not null"),
        ({"ms": True}, "f: field ms should be a number, not true or false"),
        ({"parts": {}}, "f: field parts should be a list, not an object"),
        ({"parts": [{"size": 1}, {}]}, "f: field parts[1].size is missing"),
        ({"best": 3}, "f: field best should be an object, not a whole number"),
        ({"best": {"size": 1.5}}, "f: field best.size should be a whole number, not a number"),
        ({"best": {"size": 1, "kind": "odd"}}, "f: field best.kind is 'odd', which is unknown"),
        ({"shape": [None]}, "f: field shape[0] should be a whole number or text, not null"),
        ({"ms": 10**400}, "f: field ms: number out of range"),
    ],
)
def test_a_wrong_field_is_named_with_what_was_expected(
    changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(ResultsError) as caught:
        from_data(Whole, {"name": "a", "ms": 1.0} | changed, "f")
    assert caught.value.message == message


def test_a_path_that_leads_to_the_data_comes_first() -> None:
    with pytest.raises(ResultsError, match=r"^f: field inner\.ms is missing$"):
        from_data(Whole, {"name": "a"}, "f", at="inner")
    with pytest.raises(ResultsError, match=r"^f: field inner should be an object, not a list$"):
        from_data(Whole, [], "f", at="inner")


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "1" * 5000, '"\\ud800"', "\x00"])
def test_what_is_no_json_is_refused_with_the_reader_s_own_error(text: str) -> None:
    with pytest.raises(BundleError, match=r"^f: not valid JSON"):
        read_json(Whole, text, "f", error=BundleError)


def test_a_file_of_another_shape_is_refused() -> None:
    with pytest.raises(ResultsError, match=r"^f: the file should be an object, not a list$"):
        read_json(Whole, "[]", "f")
