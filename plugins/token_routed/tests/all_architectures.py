"""Every architecture of the list, two configurations each, with a cache and without.

`make conformance` runs it: `make test` has one configuration of four.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from moexport.plugins.token_routed.tests.architectures import (
    ARCHITECTURES,
    save,
    with_cache,
    without_cache,
)
from moexport.plugins.token_routed.tests.encoder_decoders import ENCODER_DECODERS, check_parts
from moexport.plugins.token_routed.tests.encoder_decoders import save as save_both


@pytest.mark.parametrize("second", [False, True], ids=["first", "second"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_computes_the_same_without_a_cache(
    name: str, second: bool, tmp_path: Path
) -> None:
    folder = save(ARCHITECTURES[name], tmp_path / "model", second=second)
    without_cache(ARCHITECTURES[name], folder, tmp_path / "out")


@pytest.mark.parametrize("second", [False, True], ids=["first", "second"])
@pytest.mark.parametrize("name", [name for name, each in ARCHITECTURES.items() if each.cached])
def test_an_architecture_computes_the_same_step_by_step_with_its_cache(
    name: str, second: bool, tmp_path: Path
) -> None:
    folder = save(ARCHITECTURES[name], tmp_path / "model", second=second)
    with_cache(ARCHITECTURES[name], folder, tmp_path / "out")


@pytest.mark.parametrize("second", [False, True], ids=["first", "second"])
@pytest.mark.parametrize("part", ["whole", "encoder", "decoder"])
@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_a_model_with_an_encoder_and_a_decoder_computes_the_same_whole_and_in_parts(
    name: str, part: str, second: bool, tmp_path: Path
) -> None:
    case = ENCODER_DECODERS[name]
    folder = save_both(case, tmp_path / "model", second=second)
    check_parts(case, folder, tmp_path / "out", (part,))
