"""Options are declared by their types, which packages of somebody else write in their own way."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moexport.common.option import declared, kind_of, option


@dataclass(frozen=True, kw_only=True)
class Written:
    """Types as a package of somebody else's may write them: this file's are no texts."""

    place: Path | None = option(None, "", unset="none")
    mood: Literal["calm", "wild"] | None = option(None, "", unset="none")
    tone: Literal["low", "high"] = option("low", "")
    size: "int | None" = option(None, "", unset="none")
    pitch: 'Literal["a", "b"]' = option("a", "")
    names: Sequence[str] = option((), "")
    either: int | str | None = option(None, "", unset="none")


def test_the_type_of_an_option_is_what_is_written_however_it_is_written() -> None:
    kinds = {name: kind_of(Written, name) for name in declared(Written)}
    assert kinds == {
        "place": Path,
        "mood": Literal["calm", "wild"],
        "tone": Literal["low", "high"],
        "size": int,
        "pitch": Literal["a", "b"],
        "names": list[str],
        "either": str,
    }
