"""The papers' experiments: their numbers, their scale, and small runs of each."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from math import comb
from pathlib import Path

import numpy as np
import pytest
import torch
from moexport.bench.results import read
from moexport.common.console import Silent
from moexport.common.timing import MIN_ROUNDS
from moexport.docs.sources import ROOT
from moexport.errors import UsageError
from moexport.examples.studies.l2norm import QUICK, TASK, NormLayer, NormTask, run_l2norm
from moexport.examples.studies.latency import (
    TABLE_3,
    fitting,
    latency_rows,
    parameters,
    passes_for,
    run_latency,
    run_whole,
)
from moexport.examples.studies.mnist import NORMALISED, SUITE, Suite, kept, run_mnist
from moexport.examples.studies.mnist_files import read_mnist
from moexport.examples.studies.multilinear import TABLE_8, work
from moexport.examples.studies.program import main
from moexport.exporter.checkpoints.load import load
from moexport.plugins.demo.digits import Training, train
from moexport.plugins.studies.findings import studies_in

pytestmark = pytest.mark.slow


def test_the_paper_s_shape_has_2_27_billion_parameters_and_is_halved_until_it_fits() -> None:
    assert parameters(TABLE_3) == 2_264_924_160
    assert fitting(TABLE_3, 1 << 50) == TABLE_3
    small = fitting(TABLE_3, 24 << 30)
    assert (small.layers, small.experts, small.dim, small.tokens) == (6, 8, 768, 197)
    assert 64 * 4 * parameters(small) <= 24 << 30 < 2 * 64 * 4 * parameters(small)


def test_the_paper_s_size_is_kept_where_two_copies_of_the_weights_fit() -> None:
    whole = 4 * parameters(TABLE_3)
    assert fitting(TABLE_3, 24 << 30, 2.2) == TABLE_3
    assert fitting(TABLE_3, 2 * whole, 2.2).hidden == TABLE_3.hidden // 2


def test_passes_are_the_paper_s_where_they_are_affordable() -> None:
    fast = passes_for(TABLE_3, 1e-3, 8)
    assert (fast.warmup, fast.timed, MIN_ROUNDS * fast.inputs) == (100, 100, 100)
    slow = passes_for(TABLE_3, 10.0, 8)
    assert (slow.warmup, slow.timed) == (1, 5)


@pytest.mark.parametrize("form", ["CP", "TR"])
def test_table_8_is_counted_from_the_shapes(form: str) -> None:
    found, (naive, factorised) = work(form), TABLE_8[form]
    assert found.naive == pytest.approx(naive, rel=5e-4)
    assert found.factorised == pytest.approx(factorised, rel=0.035)  # printed with two digits


def test_a_small_suite_is_trained_exported_and_analysed(tmp_path: Path) -> None:
    _, text = run_mnist(Suite((4,), epochs=2, seeds=2), tmp_path, Silent(), command="bench")
    results = read(tmp_path / "results.json")
    (study,) = studies_in(results.analyses)
    assert (study.model, study.experts, study.samples) == ("digits, n = 4", 4, 360)
    assert {row.k for row in results.rows} == {4, *kept(4)} == {4, 2, 1}
    assert [row.error for row in results.rows] == [None] * len(results.rows)
    untouched = next(row for row in results.rows if row.is_reference)
    assert untouched.accuracy is not None and untouched.accuracy.top1 == study.top1
    for row in results.rows:  # the exported graphs keep what the analysis says
        assert row.accuracy is not None
        assert row.accuracy.retention == pytest.approx(study.kept(row.k), abs=0.01)
    assert "Accuracy kept by Algorithm 1" in text
    assert (tmp_path / "experts_retention.png").stat().st_size > 10_000
    assert (tmp_path / "digits-n4-2-epochs.pt").is_file()


def test_every_n_of_the_paper_is_trained_and_the_digits_are_named(tmp_path: Path) -> None:
    assert SUITE.experts == SUITE.on_mnist.experts == (2, 4, 8, 16, 32, 64, 128, 256, 512)
    suite = replace(SUITE, experts=(2, 512), epochs=1, seeds=2, samples=32)
    _, text = run_mnist(suite, tmp_path, Silent(), command="bench")
    first, *_ = text.splitlines()
    assert first.startswith("Trained on 32 images and tested on 32, from scikit-learn's")
    assert "--data: your MNIST" in first
    results = read(tmp_path / "results.json")
    assert [row.error for row in results.rows] == [None] * len(results.rows)
    assert {(row.experts, row.k) for row in results.rows} == {
        *((2, k) for k in (2, 1)),
        *((512, k) for k in (512, 256, 128, 64)),
    }
    small, large = studies_in(results.analyses)
    assert (small.experts, large.experts) == (2, 512)
    assert large.subsets[0].subsets == comb(512, 256)


def test_a_user_s_mnist_is_trained_on_as_the_paper_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    random = np.random.default_rng(0)
    arrays = {
        "x_train": random.integers(0, 256, (600, 28, 28), np.uint8),
        "y_train": random.integers(0, 10, 600, np.uint8),
        "x_test": random.integers(0, 256, (40, 28, 28), np.uint8),
        "y_test": random.integers(0, 10, 40, np.uint8),
    }
    np.savez(tmp_path / "mnist.npz", **arrays)  # type: ignore[arg-type]
    assert SUITE.on_mnist.epochs == NORMALISED.on_mnist.epochs == 15
    typed = ("mnist", "-o", "out", "--data", "mnist.npz", "--quick")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["studies", *typed])
    assert main() == 0
    out = capsys.readouterr().out
    assert "Trained on 512 images and tested on 40, from mnist.npz" in out
    assert "MNIST, n = 4" in out and "digits" not in out
    mean, std = 0.1307, 0.3081
    shown = (arrays["x_train"][:512, None].astype(np.float64) / 255 - mean) / std
    data = read_mnist(tmp_path / "mnist.npz").train.head(512)
    assert np.abs(data.inputs - shown).max() < 1e-5
    names = {path.name for path in (tmp_path / "out").glob("*.pt")}
    assert names == {f"mnist-{data.fingerprint[:8]}-n{n}-2-epochs.pt" for n in (4, 16)}
    model = load(next((tmp_path / "out").glob("*n16*.pt")))
    trained = train(Training(16, epochs=2), data).published_state_dict()
    assert torch.equal(model.layers["layer"].get_parameter("phi")[..., 0], trained["phi"])


@pytest.mark.parametrize("typed", [("l2norm", "--data", "x"), ("latency", "--quick")])
def test_an_option_that_a_study_does_not_have_is_refused(
    typed: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["studies", *typed, "-o", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match=f"{typed[1]}: the study {typed[0]} has no such option"):
        main()
    assert not (tmp_path / "out").exists()


def test_a_clone_has_its_studies_beside_an_installed_package(tmp_path: Path) -> None:
    installed = tmp_path / "site" / "moexport"
    installed.mkdir(parents=True)
    for part in (*ROOT.glob("*.py"), *ROOT.glob("[a-z]*")):
        if part.name not in ("examples", "tests") and not (installed / part.name).exists():
            (installed / part.name).symlink_to(part)
    libraries = Path(np.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-S", ROOT / "examples" / "studies", "latency", "--quick", "-o", "out"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (installed.parent, libraries)))},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr.startswith("--quick: the study latency has no such option"), done.stderr


def test_the_norm_is_learned_with_the_settings_of_appendix_b() -> None:
    assert TASK.experts == QUICK.experts == (1, 2, 5, 10)
    assert TASK.shapes == QUICK.shapes == ((5, 2), (2, 5))
    units = {dim: [TASK.hidden(n, dim) for n in TASK.experts] for _, dim in TASK.shapes}
    assert units == {2: [20, 10, 4, 2], 5: [50, 25, 10, 5]}  # 10 d / n
    with pytest.raises(UsageError, match="3 experts: 10·2 units cannot be divided equally"):
        NormTask(experts=(3,))


@pytest.mark.parametrize(("n", "m", "d"), [(1, 5, 2), (5, 5, 2), (10, 2, 5)])
def test_the_layer_of_the_norm_is_eq_1_with_a_sum(n: int, m: int, d: int) -> None:
    hidden = TASK.hidden(n, d)
    layer = NormLayer(n, d, hidden, torch.Generator().manual_seed(0))
    phi, w1, b1, w2, b2 = (p.detach().double().numpy() for p in layer.parameters())
    x = np.random.default_rng(0).standard_normal((20, m, d)).astype(np.float32)
    logits = np.exp(np.einsum("bmd,dn->bmn", x.astype(np.float64), phi))
    dispatch = logits / logits.sum(axis=1, keepdims=True)
    combine = logits / logits.sum(axis=2, keepdims=True)
    slots = np.einsum("bmn,bmd->bnd", dispatch, x)
    units = np.maximum(np.einsum("bnd,ndh->bnh", slots, w1) + b1[:, 0], 0)
    outputs = np.einsum("bnh,nhd->bnd", units, w2) + b2[:, 0]
    wanted = np.einsum("bmn,bnd->b", combine, outputs)
    found = layer(torch.from_numpy(x)).detach().numpy()
    assert np.abs(found - wanted).max() < 1e-5 * np.abs(wanted).max()
    assert w1.size + w2.size == 2 * 10 * d * d  # whatever n is


def test_one_expert_sees_an_average_alone() -> None:
    layer = NormLayer(1, 2, 20, torch.Generator().manual_seed(0))
    across = (layer.phi.detach().flatten().flip(0) * torch.tensor([-1.0, 1.0]))[None]  # logits: 0
    far = torch.cat((across, -across, 7 * across, -7 * across, 0 * across))[None]
    assert torch.allclose(layer(far), layer(0 * far), atol=1e-5)
    several = NormLayer(5, 2, 4, torch.Generator().manual_seed(0))
    assert not torch.allclose(several(far), several(0 * far), atol=1e-2)


def test_several_small_experts_learn_a_norm_that_one_large_one_does_not(tmp_path: Path) -> None:
    task = NormTask(experts=(1, 5), shapes=((5, 2),), steps=300, seeds=1, points=4)
    results, text = run_l2norm(tmp_path, Silent(), task=task)
    one, several = results.analyses["l2norm"]["losses"]
    assert one["steps"] == several["steps"] == (0, 75, 150, 225, 300)
    assert len(one["test"]) == len(one["train"]) == 5
    assert one["test"][-1] > 0.5 and one["train"][-1] > 0.5
    assert several["test"][-1] < 0.6 * one["test"][-1]
    assert several["test"][-1] < several["test"][0]
    kept_file = read(tmp_path / "results.json").analyses["l2norm"]
    assert kept_file["losses"][1]["test"] == list(several["test"])
    assert (tmp_path / "l2norm.png").stat().st_size > 10_000
    assert re.search(rf"5 × 2 +5 +4 +120 +{several['train'][-1]:.3f}", text)


def test_a_small_stack_is_timed_for_every_k(tmp_path: Path) -> None:
    shape = replace(TABLE_3, layers=2, dim=32, hidden=16, tokens=12, warmup=2, timed=5)
    results, text = run_latency(tmp_path, Silent(), shape=shape, batches=(1,), threads=1)
    assert [row.error for row in results.rows] == [None] * len(results.rows)
    assert {row.k for row in results.rows} == {8, 6, 4, 2}
    assert [row[:2] for row in latency_rows(results)] == [("1", str(k)) for k in (8, 6, 4, 2)]
    assert "2 layers, n=8, d=32, h=16" in text


def test_a_stack_is_timed_with_one_engine_open_at_a_time(tmp_path: Path) -> None:
    shape = replace(TABLE_3, layers=2, dim=32, hidden=64, tokens=12, warmup=2, timed=5)
    room = int(2.5 * 4 * parameters(shape))
    results, text = run_whole(
        tmp_path, Silent(), shape=shape, batches=(1, 2), threads=1, memory=room
    )
    assert "2 copies of the weights fit; one engine at a time" in text
    assert results.analyses["latency"]["shape"]["hidden"] == 64
    assert len(results.rows) == 2 * (1 + 3 + 4)
    table = list(latency_rows(results))
    assert [row[:2] for row in table] == [(b, str(k)) for b in "12" for k in (8, 6, 4, 2)]
    assert all("–" not in row[2:5] for row in table)
    assert read(tmp_path / "results.json").rows == results.rows
