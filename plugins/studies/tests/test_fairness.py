"""Fairness follows its definition, and a reported rewriting equals the edited model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import pytest
import torch
from moexport.bench.data import LabelledData
from moexport.bench.results import read
from moexport.errors import FeedError, UsageError
from moexport.exporter.bundle.bundle import Bundle
from moexport.plugins.studies.fairness import best_strength, compared_in, fairness
from moexport.tests.bench.heads import CLASS, RARE, trained_head, unfair_head
from moexport.tests.command import Outcome, run
from moexport.tests.commands.test_errors import assert_refused
from moexport.tests.recorded import DATA, ENTMAX, VIT_SETS

CONFIG = {"act": "entmax15"}


@pytest.fixture(scope="module")
def unfair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    return unfair_head(tmp_path_factory.mktemp("unfair"))


@pytest.fixture(scope="module")
def rewritten(unfair: tuple[Path, Path, Path]) -> Path:
    """The output of `specialise` for the mirrored sevens."""
    head, choose, _ = unfair
    outcome = run(
        *("specialise", head, *ENTMAX, "--data", choose, "-o", head.parent / "found"),
        *("--group-by", "style", "--rewrite-class", str(CLASS), "--rewrite-group", RARE),
    )
    assert outcome.code == 0, outcome.err
    assert "rewritten        mirrored 7" in outcome.out
    assert "blind threshold  mirrored 7" in outcome.out
    assert "because the subgroup or its complement has no input of the class" in outcome.out
    return head.parent / "found"


def arrays(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    with np.load(path) as held:
        return held["input"], held["label"], held["style"]


def scores_of(checkpoint: Path, x: np.ndarray) -> np.ndarray:
    module = moexport.load(checkpoint, config=CONFIG).module
    with torch.no_grad():
        y: torch.Tensor = module(torch.from_numpy(x[:, None]))
    return y[:, 0].numpy()


def test_every_figure_is_counted_as_it_is_defined() -> None:
    labels = np.array([0, 0, 0, 1, 1, 1, 1, 0])
    said = np.array([0, 1, 0, 1, 1, 0, 1, 0])
    groups = np.array(["a", "a", "b", "b", "b", "c", "c", "c"])
    found = fairness(said, labels, groups, 2)
    assert found.accuracy.value == 6 / 8
    one = found.classes[1]  # correct: a 1 of 2, b 3 of 3, c 2 of 3
    assert [each.accuracy.value for each in one.subgroups] == [1 / 2, 1, 2 / 3]
    assert [each.positives for each in one.subgroups] == [0, 2, 2]
    rates = [each.true_positive_rate for each in one.subgroups]
    assert rates[0] is None
    assert [rate.value for rate in rates[1:] if rate is not None] == [1, 1 / 2]
    assert (one.target, one.target_accuracy.value, one.max_min.value) == ("a", 1 / 2, 1 / 2)
    assert one.std_bias.value == pytest.approx(np.std([1 / 2, 1, 2 / 3]))
    assert one.equality_of_opportunity is None
    assert one.undefined == "subgroup a has no input of class 1"
    of_c = fairness(said, labels, groups, 2, targets=["c", "c"]).classes[1]
    assert of_c.equality_of_opportunity is not None
    assert of_c.equality_of_opportunity.value == abs(1 / 2 - 2 / 2)  # c against a and b together
    for each in (one.std_bias, one.max_min, one.accuracy, of_c.equality_of_opportunity):
        assert 0 <= each.low <= each.value <= each.high <= 1
        assert each.low < each.high


def test_intervals_narrow_with_more_inputs() -> None:
    labels, said = np.array([0, 0, 1, 1]), np.array([0, 1, 1, 1])
    groups = np.array([True, True, False, False])
    widths = []
    for times in (5, 500):
        repeated = [np.tile(a, times) for a in (said, labels, groups)]
        each = fairness(repeated[0], repeated[1], repeated[2], 2).classes[0]
        assert each.equality_of_opportunity is None and each.undefined is not None
        widths.append(each.std_bias.high - each.std_bias.low)
    assert widths[1] < widths[0] / 5


def test_the_strength_that_is_found_is_the_best_of_a_fine_grid() -> None:
    random = np.random.default_rng(0)
    scores = random.standard_normal((300, 4)).astype(np.float32)
    alike = np.where(random.random(300) < 0.2, 0.0, random.random(300))
    labels, groups = random.integers(0, 4, 300), random.integers(0, 3, 300)
    for sign in (1, -1):
        for budget in (0.0, 0.02, 0.5):

            def judged(strength: float) -> tuple[float, float]:
                y = scores.astype(np.float64)
                y[:, 2] += strength * alike
                said = y.argmax(axis=1)
                right = (said == 2) == (labels == 2)
                return min(float(right[groups == g].mean()) for g in range(3)), float(
                    (said == labels).mean()
                )

            whole = judged(0.0)[1]
            grid = [judged(sign * strength) for strength in np.linspace(0, 20, 4001)]
            best = max(low for low, accuracy in grid if accuracy >= whole - budget)
            if best == judged(0.0)[0]:
                assert best_strength(scores, alike, labels, groups, 2, sign, budget) is None
                continue
            found = best_strength(scores, alike, labels, groups, 2, sign, budget)
            assert found is not None
            low, accuracy = judged(found.value)
            assert low >= best and accuracy >= whole - budget
            assert np.sign(found.value) == sign


def test_a_rewriting_helps_inputs_that_did_not_choose_it(
    unfair: tuple[Path, Path, Path], rewritten: Path, tmp_path: Path
) -> None:
    head, _, held = unfair
    outcome = run(
        *("export", head, *ENTMAX, "-o", tmp_path / "fair"),
        *("--rewrite", rewritten / "rewrite.json"),
    )
    assert outcome.code == 0, outcome.err
    x, labels, style = arrays(held)
    before = scores_of(head, x).argmax(axis=1)
    after = Bundle.open(tmp_path / "fair").session()(x[:, None])[:, 0].argmax(axis=1)
    rare = style == RARE
    assert (after[rare] == CLASS).mean() > (before[rare] == CLASS).mean() + 0.15
    assert (after == labels).mean() > (before == labels).mean() - 0.02


def test_what_is_written_says_what_the_edited_model_does(
    unfair: tuple[Path, Path, Path], rewritten: Path
) -> None:
    head, choose, _ = unfair
    x, labels, style = arrays(choose)
    found = json.loads((rewritten / "specialise.json").read_text())
    (entry,) = json.loads((rewritten / "rewrite.json").read_text())
    rewriting = found["rewriting"]
    assert entry == {
        "layer": "layer",
        "output": CLASS,
        "coefficients": rewriting["coefficients"],
        "lambda": rewriting["strength"],
    }
    assert rewriting["strength"] > 0 and rewriting["tried"] > 50
    said = scores_of(head, x).argmax(axis=1)
    for key, predicted in (("before", said), ("after", None)):
        record = rewriting[key]
        assert record["target"] == RARE
        if predicted is not None:
            right = (predicted == CLASS) == (labels == CLASS)
            assert record["target_accuracy"]["value"] == right[style == RARE].mean()
            assert record["accuracy"]["value"] == right.mean()
    assert rewriting["after"]["max_min"]["value"] > rewriting["before"]["max_min"]["value"] + 0.1
    lost = rewriting["accuracy_before"]["value"] - rewriting["accuracy_after"]["value"]
    assert lost <= rewriting["budget"]
    assert len(found["classes"]) == 10
    assert found["classes"][0]["equality_of_opportunity"] is None  # no zero is a mirrored seven


def test_a_strength_gets_the_sign_of_the_right_answer(unfair: tuple[Path, Path, Path]) -> None:
    head, choose, _ = unfair
    model = moexport.load(head, config=CONFIG)
    for given in (5.0, -5.0):
        found = moexport.specialise(
            model, choose, group_by="style", rewrite_class=CLASS, rewrite_group=RARE, strength=given
        )
        assert found.rewriting is not None
        assert (found.rewriting.strength, found.rewriting.tried) == (5.0, 1)
    wrong = moexport.specialise(  # some ones are missed, and too many others are taken for a one
        model, choose, group_by="style", rewrite_class=1, rewrite_group=RARE, strength=5
    )
    assert wrong.rewriting is not None and wrong.rewriting.strength == -5.0


@pytest.mark.slow
def test_a_benchmark_shows_the_edited_model_beside_the_untouched(
    unfair: tuple[Path, Path, Path], rewritten: Path, tmp_path: Path
) -> None:
    head, _, held = unfair
    rank = ("--set", "input_rank=2")
    rewrite = ("--rewrite", rewritten / "rewrite.json")
    outcome = run("export", head, *ENTMAX, *rank, "-o", tmp_path / "fair", *rewrite)
    assert outcome.code == 0, outcome.err
    outcome = run(
        *("bench", head, tmp_path / "fair", *ENTMAX, *rank, "--data", held, "--no-memory"),
        *("--engine", "onnxruntime", "--group-by", "style", "-o", tmp_path / "report"),
    )
    assert outcome.code == 0, outcome.err
    (found,) = compared_in(read(tmp_path / "report" / "results.json").analyses)
    assert (found.rewritten, found.group_by) == ((CLASS,), "style")
    x, labels, style = arrays(held)
    said = scores_of(head, x).argmax(axis=1)
    assert found.untouched.accuracy == fairness(said, labels, style, 10).accuracy
    after = Bundle.open(tmp_path / "fair").session()(x)[:, 0].argmax(axis=1)
    assert found.edited is not None
    targets = [each.target for each in found.untouched.classes]
    assert found.edited == fairness(after, labels, style, 10, targets=targets)
    assert "edited      mirrored 7" in outcome.out
    assert "Subgroups" in (tmp_path / "report" / "report.html").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "names an array of a file, but the data are not a file"),
        (("--data", "held.npz", "--group-by", "colour"), "no array 'colour'"),
        (("--data", "plain.npz"), "needs labels"),
    ],
)
def test_subgroups_that_a_benchmark_cannot_compare(
    options: tuple[str, ...], message: str, unfair: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    head, _, held = unfair
    x, _, style = arrays(held)
    np.savez(tmp_path / "plain.npz", input=x, style=style)
    (tmp_path / "held.npz").symlink_to(held)
    given = [tmp_path / each if each.endswith(".npz") else each for each in options]
    outcome = run(
        *("bench", head, *ENTMAX, "--set", "input_rank=2", "-o", tmp_path / "report"),
        *("--engine", "onnxruntime", "--k", "n", "--group-by", "style", *given),
    )
    assert outcome.code in (1, 2) and outcome.hint
    assert message in outcome.error


def asked(folder: Path, *options: str, data: dict[str, Any] | None = None) -> Outcome:
    """`specialise` on `choose.npz` with some of its arrays replaced."""
    with np.load(folder / "choose.npz") as held:
        np.savez(folder / "given.npz", **{**held, **(data or {})})
    return run(
        *("specialise", folder / "unfair.pt", *ENTMAX, "--data", folder / "given.npz"), *options
    )


GROUPS = ("--group-by", "style")
SEVENS = (*GROUPS, "--rewrite-class", "7", "--rewrite-group", RARE)


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        (SEVENS[2:], "subgroups are needed", "--group-by"),
        ((*GROUPS, "--rewrite-class", "7"), "--rewrite-class: a rewrite needs", "leave"),
        ((*GROUPS, "--strength", "3"), "--strength: a rewrite needs --rewrite-class", "leave"),
        ((*SEVENS[:-1], "sideways"), "--rewrite-group sideways: there is no such", "usual"),
        ((*GROUPS, "--rewrite-class", "10", *SEVENS[4:]), "has 10 classes", "0 to 9"),
        ((*GROUPS, "--rewrite-class", "0", *SEVENS[4:]), "no wrong answer", "specialise"),
        ((*SEVENS, "--strength", "nan"), "--strength nan: a finite number other", "sign"),
        ((*SEVENS, "--strength", "0"), "--strength 0.0: a finite number other", "sign"),
        ((*SEVENS, "--budget", "1.5"), "--budget 1.5: a share of at least 0", "0.01"),
        (
            (*SEVENS, "--budget", "0.1", "--strength", "3"),
            "--budget is for the search",
            "one of them",
        ),
    ],
)
def test_a_rewriting_that_cannot_be_meant(
    options: tuple[str, ...], message: str, hint: str, unfair: tuple[Path, Path, Path]
) -> None:
    outcome = asked(unfair[0].parent, *options)
    assert_refused(outcome, message, hint)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"style": np.full(397, "usual")}, "has only the subgroup usual"),
        ({"label": np.full(397, 12)}, "labels outside 0..9"),
        ({"label": np.full(397, 0.5)}, "'label'"),
    ],
)
def test_data_that_compare_nothing(
    data: dict[str, Any], message: str, unfair: tuple[Path, Path, Path]
) -> None:
    outcome = asked(unfair[0].parent, *GROUPS, data=data)
    assert outcome.code == 1
    assert message in outcome.error and outcome.hint


def test_only_the_layer_that_gives_the_scores_can_be_rewritten_by_class(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "x.npz",
        input=np.random.default_rng(0).standard_normal((6, 3, 32, 32)).astype(np.float32),
        label=[0, 1, 2, 0, 1, 2],
        half=[0, 0, 0, 1, 1, 1],
    )
    outcome = run(
        *("specialise", DATA / "soft_moe_vit" / "weights.pt", *VIT_SETS),
        *("--data", tmp_path / "x.npz", "--group-by", "half"),
        *("--rewrite-class", "1", "--rewrite-group", "0"),
    )
    assert_refused(outcome, "is a soft-moe layer", "only muMoE layers")


def test_python_names_what_is_missing(tmp_path: Path) -> None:
    checkpoint, data = trained_head(tmp_path)
    model = moexport.load(checkpoint, config=CONFIG)
    with pytest.raises(UsageError, match="needs rewrite_class=… and rewrite_group=…"):
        moexport.specialise(model, data, group_by="odd", rewrite_class=3)
    with np.load(data) as held:
        given = LabelledData(held["input"], held["label"])
    with pytest.raises(FeedError, match="only the subgroup"):
        moexport.specialise(model, given, group_by=[True] * len(given))
