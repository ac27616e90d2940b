"""Fixtures from the tests of `bench`."""

from __future__ import annotations

from moexport.tests.bench.conftest import deterministic, digits, model, results, row, trained

__all__ = ["deterministic", "digits", "model", "results", "row", "trained"]
