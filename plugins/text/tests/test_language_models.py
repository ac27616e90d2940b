"""`bench` measures language models with routed experts: speed by phase, perplexity, routing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import pytest
import torch
from moexport.bench.measure.roofline import work_of
from moexport.bench.metrics import RoutingOverlap
from moexport.bench.plan import Phase
from moexport.bench.report.page import export_command, payload
from moexport.bench.request import BenchRequest
from moexport.bench.results import Results, Row, read
from moexport.bench.runners.candidates import from_bundle
from moexport.bench.runners.pytorch import untouched
from moexport.errors import FeedError, UsageError
from moexport.exporter.model import Model
from moexport.plugins.demo.experts import trained_tokenizer
from moexport.plugins.text.language import (
    TEXT_BYTES,
    phase_inputs,
    prompt_of,
    python_topics,
    targets_of,
    token_windows,
)
from moexport.plugins.token_routed.tests.architectures import ARCHITECTURES, save, transformers
from moexport.tests.command import run

pytestmark = pytest.mark.slow

MIXTRAL = ARCHITECTURES["mixtral"]
PROMPT = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mixtral with random weights, two of eight experts for a token, and a tokenizer."""
    place = tmp_path_factory.mktemp("mixtral") / "model"
    save(MIXTRAL, place, vocab_size=300, num_hidden_layers=1)
    trained_tokenizer(python_topics()[0], 300).save_pretrained(str(place))
    return place


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return moexport.load(folder)


@pytest.fixture(scope="module")
def found(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    out = tmp_path_factory.mktemp("report")
    results = moexport.bench(
        folder,
        k=["n", 1],
        precision="fp32,int8",
        target="ort-cpu",
        batch=(1, 2),
        tokens=PROMPT,
        round_s=0.0,
        threads=1,
        memory=False,
        parts=False,
        out=out,
        command=f"moexport bench {folder} -o {out}",
    )
    assert read(out / "results.json") == results
    names = {path.name for path in out.iterdir()}
    assert {"tokens_perplexity.png", "tokens_perplexity_batch2.png", "report.html"} <= names
    assert not any(name.startswith("latency_accuracy") for name in names)
    return results


def rows(found: Results, **wanted: object) -> list[Row]:
    return [r for r in found.rows if all(getattr(r, n) == v for n, v in wanted.items())]


def test_each_engine_has_a_row_for_each_k_phase_and_batch_it_can_run(found: Results) -> None:
    assert not [row.error for row in found.rows if row.error]
    cells = {(row.phase, row.batch) for row in found.rows}
    assert cells == {(phase, batch) for phase in ("decode", "prefill") for batch in (1, 2)}
    for phase, batch in cells:
        here = rows(found, phase=phase, batch=batch)
        by_k = {(row.engine, row.precision, row.k) for row in here}
        assert by_k == {
            ("pytorch-eager", "fp32", 2),  # untouched: grouped_mm is the library's own choice
            ("pytorch-grouped-mm", "fp32", 1),
            *(("pytorch-experts-eager", "fp32", k) for k in (2, 1)),
            *(
                (engine, precision, k)
                for engine in ("onnxruntime", "openvino")
                for precision in ("fp32", "int8")
                for k in (2, 1)
            ),
            ("transformers-onnx", "fp32", 2),
        }
        assert [row.k for row in here if row.is_reference] == [2]
        for row in here:
            assert (row.tokens, row.past) == ((1, PROMPT) if phase == "decode" else (PROMPT, 0))
            assert row.latency_ms is not None and row.tokens is not None
            rate = 1e3 * batch * row.tokens / row.latency_ms.median
            assert row.tokens_per_s == pytest.approx(rate)
            assert row.no_limit is None and row.limit_ms is not None


def test_the_work_of_a_prompt_is_counted_in_its_backbone_and_its_chosen_experts(
    model: Model,
) -> None:
    m, past = 5, 3
    cache = np.zeros((2, 2, past, 8), np.float32)
    names = ("past_key_values.0.key", "past_key_values.0.value")
    work = work_of(model, {"input_ids": np.zeros((2, m), np.int64), **dict.fromkeys(names, cache)})
    attention, router, head = 2 * 32 * 32 + 2 * 32 * 16, 32 * 8, 32 * 300
    scores = 2 * 4 * 8 * m * (m + past)
    assert work.backbone_macs == m * (attention + router + head) + scores
    (name,) = model.layers
    assert work.tokens == {name: m}
    (_, one), (_, both) = (work.parts({name: k}, batch=1) for k in (1, 2))
    expert = 3 * 32 * 24
    assert both.macs == 2 * one.macs == 2 * m * (expert + 32)
    active = round(8 * (1 - (1 - 2 / 8) ** m))
    assert both.bytes == 4 * (active * expert + 2 * m * 32)


def test_perplexity_is_that_of_the_library_with_the_same_k(folder: Path, found: Results) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("\n\n".join(python_topics()), verbose=False)["input_ids"]
    windows = torch.tensor(ids[: 32 * (PROMPT + 1)]).reshape(-1, PROMPT + 1)
    for k in (2, 1):
        network = transformers.MixtralForCausalLM.from_pretrained(folder, num_experts_per_tok=k)
        with torch.no_grad():
            loss = network(input_ids=windows, labels=windows).loss
        for row in rows(found, k=k, precision="fp32"):
            assert row.perplexity is not None
            assert row.perplexity.value == pytest.approx(math.exp(float(loss)), rel=1e-4)
            assert row.perplexity.tokens == 32 * PROMPT


def test_graphs_choose_pytorchs_experts_for_each_token(found: Results) -> None:
    exported = [row for row in found.rows if row.engine in ("onnxruntime", "openvino")]
    for row in exported:
        assert row.routing is not None and row.routing.choices is not None
        assert row.routing.choices == 1.0 if row.precision == "fp32" else row.routing.choices > 0.9
        assert row.routing.ties is not None and row.routing.ties < 0.01
        assert row.parity is not None and row.parity.cosine > 0.99
    assert {row.routing for row in found.rows if row not in exported} == {None}


def test_the_report_shows_every_row_and_the_command_that_exports_it(found: Results) -> None:
    told = payload(found)
    assert [each["full_k"] for each in told["rows"]] == [2] * len(found.rows)
    trained, fewer = rows(found, engine="onnxruntime", precision="int8", phase="decode", batch=1)
    assert "--k n" in str(export_command(found, trained))
    command = str(export_command(found, fewer))
    assert "--k 1" in command
    assert "--data" not in command  # each row's scale is found while the graph runs
    assert "(as trained)" in told["rows"][found.rows.index(trained)]["claim"]


def test_a_token_after_its_prompt_has_the_logits_of_the_whole_text(model: Model) -> None:
    """This holds in the library's own forms and in a graph, and if the same call is repeated."""
    windows = np.random.default_rng(0).integers(0, 300, (2, PROMPT + 1))
    base = untouched(model)
    whole = base.infer(windows)[:, -1:]
    given = phase_inputs(Phase("decode", 1, PROMPT), windows, base)
    assert given["past_key_values.0.key"].shape[2] == PROMPT
    k = dict.fromkeys(model.layers, 2)
    calls: list[Any] = [base.bound(given)]
    for form in ("eager", "grouped_mm"):
        module = model.host.in_form(model, k, form)
        calls.append(type(base)(module, model.inputs, model.host).bound(given))
    for call in calls:
        for _ in range(2):
            np.testing.assert_allclose(call().numpy(), whole, rtol=1e-4, atol=1e-5)


def test_a_bundle_alone_is_measured_at_its_k(folder: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "ids.npz", input_ids=np.arange(26).reshape(2, 13))
    bundle = moexport.export(
        moexport.load(folder), tmp_path / "out", k=1, data=tmp_path / "ids.npz"
    )
    assert all(check.passed for check in bundle.verify())  # of prompts, whose cache is empty
    candidate = from_bundle(bundle, BenchRequest(engine="onnxruntime", threads=1))
    (job,) = candidate.jobs_by_k.values()
    assert set(job.k.values()) == {1}
    windows = np.random.default_rng(1).integers(0, 300, (2, PROMPT + 1))
    base = untouched(candidate.model)
    given = phase_inputs(Phase("decode", 1, PROMPT), windows, base)
    wanted = type(base)(job.model.module, job.model.inputs).infer(given)
    with candidate.graphs[0].loader() as runner:
        returned: Any = runner.bound(given)()
        np.testing.assert_allclose(returned[0], wanted, rtol=1e-4, atol=1e-5)
        assert len(returned) == 3  # the logits, and the keys and values of a layer


def test_text_and_ids_become_windows(model: Model, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("def f(x):\n    return x\n" * 40, encoding="utf-8")
    from_text = token_windows(tmp_path / "text.txt", model, PROMPT)
    assert from_text.inputs.shape[1] == PROMPT + 1
    np.save(tmp_path / "ids.npy", from_text.inputs.ravel())
    from_ids = token_windows(tmp_path / "ids.npy", model, PROMPT)
    assert np.array_equal(from_ids.inputs, from_text.inputs)
    ids = np.arange(10).reshape(2, 5)
    mask = np.array([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    np.savez(tmp_path / "ids.npz", input_ids=ids, attention_mask=mask)
    archived = token_windows(tmp_path / "ids.npz", model, PROMPT)
    assert np.array_equal(archived.labels, targets_of(ids, mask))  # type: ignore[arg-type]
    assert targets_of(ids, mask).tolist() == [[1, 2, 3, 4, -1], [-1, -1, 8, 9, -1]]
    assert np.array_equal(archived.others["attention_mask"], mask)


def test_without_a_tokenizer_ids_are_random_and_tell_no_perplexity(tmp_path: Path) -> None:
    place = save(MIXTRAL, tmp_path / "model")
    bare = moexport.load(place, values=False)
    data = token_windows(None, bare, PROMPT)
    assert data.labels is not None and (data.labels == -1).all()
    (tmp_path / "text.txt").write_text("words", encoding="utf-8")
    with pytest.raises(FeedError, match=r"is text, but .* has no tokenizer"):
        token_windows(tmp_path / "text.txt", bare, PROMPT)


def test_invalid_data_for_a_language_model_is_refused(model: Model, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("def", encoding="utf-8")
    with pytest.raises(FeedError, match=r"short.txt: \d tokens, but a prompt and the token after"):
        token_windows(tmp_path / "short.txt", model, PROMPT)
    (tmp_path / "no.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(FeedError, match="is not UTF-8 text"):
        token_windows(tmp_path / "no.txt", model, PROMPT)
    (tmp_path / "no.npy").write_bytes(b"no array")
    with pytest.raises(FeedError, match="not a readable"):
        token_windows(tmp_path / "no.npy", model, PROMPT)
    deep = b"-" * 7000 + b"1\n"
    head = b"\x93NUMPY\x01\x00" + len(deep).to_bytes(2, "little")
    (tmp_path / "deep.npy").write_bytes(head + deep)
    with pytest.raises(FeedError, match="its header is nested too deeply"):
        token_windows(tmp_path / "deep.npy", model, PROMPT)
    for number, array in enumerate((np.array(3), np.array("text"), np.array([None]))):
        np.save(tmp_path / f"{number}.npy", array)
        with pytest.raises(FeedError):
            token_windows(tmp_path / f"{number}.npy", model, PROMPT)
    with (tmp_path / "long.txt").open("wb") as file:
        file.truncate(TEXT_BYTES + 1)
    with pytest.raises(FeedError, match=r"long\.txt has more than 67108864 bytes"):
        token_windows(tmp_path / "long.txt", model, PROMPT)
    with pytest.raises(FeedError, match="no such file"):
        token_windows(tmp_path / "none.txt", model, PROMPT)
    with pytest.raises(FeedError, match="only 0 to 299"):
        token_windows(np.full(100, 300), model, PROMPT)
    assert prompt_of(model, None) == 63
    with pytest.raises(UsageError, match="--tokens 64: the model has only 64 positions"):
        prompt_of(model, 64)


def test_ties_are_no_choices() -> None:
    """Of four tokens in a layer, one clearly selected others, and one had equal scores."""
    reference = {"a": np.array([[0, 1], [0, 1], [0, 1], [2, 3]])}
    chosen = {"a": np.array([[0, 1], [0, 2], [0, 2], [2, 3]])}
    margins = {"a": np.array([0.5, 0.5, 1e-7, 0.5])}
    overlap = RoutingOverlap.of(chosen, reference, margins, 1e-5)
    found = (overlap + RoutingOverlap()).agreement()
    assert (found.choices, found.ties, found.exact) == (2 / 3, 0.25, 0.75)
    assert found.jaccard == pytest.approx((1 + 1 / 3 + 1) / 3)


def test_a_classifier_of_tokens_is_measured_on_several_inputs(tmp_path: Path) -> None:
    """Its accuracy counts tokens with a label; every engine gets the mask."""
    architecture = ARCHITECTURES["openai_privacy_filter"]
    place = save(architecture, tmp_path / "model", num_hidden_layers=1)
    model = moexport.load(place)
    random = np.random.default_rng(0)
    ids = random.integers(0, 61, (6, 9))
    mask = np.ones_like(ids)
    mask[1::2, 5:] = 0
    y = untouched(model).infer({"input_ids": ids, "attention_mask": mask})
    label = np.where(mask == 1, y.argmax(axis=-1), -1)
    label[0, 0] = (label[0, 0] + 1) % y.shape[-1]
    np.savez(tmp_path / "x.npz", input_ids=ids, attention_mask=mask, label=label)
    done = run(
        *("bench", place, "-o", tmp_path / "out", "--data", tmp_path / "x.npz", "--k", "n"),
        *("--engine", "onnxruntime", "--threads", "1", "--no-memory"),
    )
    assert done.code == 0, done.err
    found = read(tmp_path / "out" / "results.json")
    assert [row.engine for row in found.rows] == ["pytorch-eager", "onnxruntime"]
    for row in found.rows:
        assert row.accuracy is not None and row.phase is None
        assert row.accuracy.n == int(mask.sum())
        assert row.accuracy.top1 == pytest.approx(1 - 1 / mask.sum())
    assert found.rows[1].routing is not None and found.rows[1].routing.choices == 1.0
    refused = run("bench", place, "-o", tmp_path / "no", "--tokens", "4")
    assert refused.code == 2 and "is not a transformers language model" in refused.err
