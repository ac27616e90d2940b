"""`bench --analysis` from the command line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from moexport.bench.results import read
from moexport.plugins.demo.digits import Digits, SoftMoEMnist, save
from moexport.plugins.studies.findings import studies_in
from moexport.tests.command import run


@pytest.mark.slow
def test_analyses_go_into_results_tables_and_figures(
    digits: Digits, trained: SoftMoEMnist, tmp_path: Path
) -> None:
    save(trained, tmp_path / "digits.pt")
    assert digits.test.labels is not None
    np.savez(tmp_path / "x.npz", input=digits.test.inputs, label=digits.test.labels)
    outcome = run(
        *("bench", tmp_path / "digits.pt", "-o", tmp_path / "out", "--data", tmp_path / "x.npz"),
        *("--k", "n,0.5", "--engine", "onnxruntime", "--no-memory", "--analysis", "random,subsets"),
    )
    assert outcome.code == 0, outcome.err
    assert "Algorithm 1 and random experts" in outcome.out
    (study,) = studies_in(read(tmp_path / "out" / "results.json").analyses)
    assert [(each.k, each.subsets) for each in study.subsets] == [(2, 6)]
    assert len(study.random[0].accuracies) == 10
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert '"title":"All sets of k experts"' in page.replace('": "', '":"')
    figures = sorted(path.name for path in (tmp_path / "out").glob("experts_*.png"))
    assert figures == ["experts_random.png", "experts_subsets.png"]


def test_a_benchmark_of_no_model_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    none = run("bench", "-o", out)
    assert (none.code, none.error) == (2, "bench: no model to measure")
    assert not out.exists()
