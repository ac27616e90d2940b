"""A search that takes a minute: few experts of a small network, all of them kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import moexport
from moexport.plugins.demo.digits import Training, load_digits, save, train
from moexport.plugins.tune.tune import Tuned


def small_search(folder: Path, **options: Any) -> Tuned:
    """Returns the result of a search for 90%; bundle `out` and `report` are in the folder."""
    digits = load_digits(test_share=0.5)
    training = Training(8, hidden=16, normalise=True, scale=16.0, epochs=6, batch=64)
    save(train(training, digits.train), folder / "digits.pt")
    return moexport.tune(
        moexport.load(folder / "digits.pt"),
        digits.test,
        folder / "out",
        keep="90%",
        all_experts=True,
        threads=1,
        report=folder / "report",
        **options,
    )
