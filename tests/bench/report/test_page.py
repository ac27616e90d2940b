"""The report and figures: what they say, and that the page needs no network."""

from __future__ import annotations

import base64
import gzip
import json
import re
import shlex
import warnings
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import markdown
import matplotlib.image
import pytest
from moexport.bench.report import page as page_module
from moexport.bench.report.charts import ChartPanel, ink_of, over_k, side_by_side, write_pictures
from moexport.bench.report.figures import figures
from moexport.bench.report.page import export_command, html, recipe_command, write_report
from moexport.bench.report.sections import contents
from moexport.bench.report.summary import caveat, claim, headline, sections, summary, times
from moexport.bench.report.text import absent_lines, reproduce, rows_table, to_csv, to_markdown
from moexport.bench.results import (
    Absent,
    Accuracy,
    ClassChange,
    Interval,
    ModelInfo,
    Perplexity,
    Results,
    Row,
    read,
    to_json,
    write,
)
from moexport.common.latency import summarise
from moexport.errors import ResultsError

RowMaker = Callable[..., Row]


class Page(HTMLParser):
    """The parts of a page: what it would fetch, scripts, and the text outside of them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self.words: list[str] = []
        self._inside = ""
        self.feed(text)
        self.text = re.sub(r"\s+", " ", " ".join(self.words))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag
        self.fetched += [str(v) for name, v in attrs if name in {"src", "href", "srcset", "data"}]

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        places = {"script": self.scripts, "style": self.styles}
        places.get(self._inside, self.words).append(data)


BESIDE_BOTH = "2.0 times the speed of all experts in ONNX Runtime, 3.1 times that of PyTorch"


def kept(share: float, low: float) -> Accuracy:
    """What is kept of 900 right answers in 1,000 inputs, and the lower end of its interval."""
    return Accuracy(0.9 * share, share, 1000, retention_interval=Interval(low, 2 * share - low))


def test_the_summary_is_about_the_fastest_row_that_is_shown_to_keep_99_percent(
    results: Results, row: RowMaker
) -> None:
    shown = row(4, 1.0, None, accuracy=kept(0.996, 0.991))
    faster = row(2, 0.5, None, accuracy=kept(0.993, 0.985))
    (section,) = sections(replace(results, rows=(*results.rows[:2], shown, faster)))
    assert headline(section) is shown
    # The gain of fewer experts comes before that of the runtime.
    assert summary(section) == (
        f"Deploy k = 4 of 16 in FP32: {BESIDE_BOTH}; keeps 99.6% of the accuracy (at least 99.1%)."
    )
    assert caveat(section) == (
        "Faster: k = 2 of 16 in FP32: 4.0 times the speed of all experts in ONNX Runtime, 6.2 "
        "times that of PyTorch; keeps 99.3% of the accuracy (at least 98.5%). Not proven: about "
        "6,200 more inputs needed."
    )


def test_what_is_not_shown_is_said_to_be_not_proven_and_what_would_show_it(
    results: Results, row: RowMaker
) -> None:
    rows = (results.rows[0], row(4, 1.0, None, accuracy=kept(0.995, 0.985)))
    (section,) = sections(replace(results, rows=rows))
    assert summary(section) == (
        "k = 4 of 16 in FP32: 3.1 times the speed of PyTorch; keeps 99.5% of the accuracy (at "
        "least 98.5%). Not proven: about 3,000 more inputs needed."
    )
    on_the_bar = (results.rows[0], row(4, 1.0, None, accuracy=kept(0.99, 0.98)))
    (section,) = sections(replace(results, rows=on_the_bar))
    assert summary(section).endswith("Not proven: more inputs needed.")


def test_all_experts_in_fp32_are_the_trained_model_which_parity_shows(
    results: Results, row: RowMaker
) -> None:
    alone = row(16, 2.0, None, accuracy=kept(1.0, 0.98))
    (section,) = sections(replace(results, rows=(results.rows[0], alone)))
    assert summary(section) == (
        "Deploy k = 16 of 16 (all experts) in FP32: 1.6 times the speed of PyTorch; keeps 100% of "
        "the accuracy."
    )
    (section,) = sections(
        replace(results, rows=(results.rows[0], replace(alone, precision="int8")))
    )
    assert "Not proven" in summary(section)


def test_the_summary_says_what_is_kept_when_nothing_keeps_99_percent(
    results: Results, row: RowMaker
) -> None:
    rows = (results.rows[0], row(8, 2.0, 0.95), row(4, 1.0, 0.9))
    (section,) = sections(replace(results, rows=rows))
    assert summary(section) == (
        "No row keeps 99%. Closest: k = 8 of 16 in FP32: 1.6 times the speed of PyTorch; "
        "keeps 95% of the accuracy (at least 94.9%)."
    )


def test_where_only_all_experts_keep_99_percent_the_next_k_is_told(
    results: Results, row: RowMaker
) -> None:
    rows = (results.rows[0], row(16, 2.0, 1.0), row(8, 1.0, 0.95), row(4, 0.5, 0.7))
    (section,) = sections(replace(results, rows=rows))
    assert summary(section).startswith(
        "Deploy k = 16 of 16 (all experts) in FP32: 1.6 times the speed of PyTorch; keeps 100%"
    )
    assert caveat(section) == (
        f"No smaller k keeps 99%. The next: k = 8 of 16 in FP32: {BESIDE_BOTH}; keeps 95% of the "
        "accuracy (at least 94.9%)."
    )


def test_a_difference_below_the_spread_is_not_sold_as_one(results: Results, row: RowMaker) -> None:
    (section,) = sections(replace(results, rows=(results.rows[0], row(4, 3.08, 1.0))))
    assert "the speed of PyTorch, within the spread; keeps" in summary(section)
    alike = (results.rows[0], row(16, 1.0, 1.0), row(4, 0.995, 1.01))
    (section,) = sections(replace(results, rows=alike))
    told = "the speed of all experts in ONNX Runtime, within the spread, 3.1 times that of PyTorch"
    assert told in claim(section, alike[2])


DISTURBED = summarise([[1.0], [1.0], [1.0], [1.0], [1.75]])


def test_where_rounds_disagree_there_is_no_verdict_and_no_speed(
    results: Results, row: RowMaker
) -> None:
    verdict = "No verdict: times disagree by 75%. Close other programs, or run again."
    untouched, whole, fewer = results.rows[:3]
    disturbed = replace(fewer, latency_ms=DISTURBED, accuracy=kept(0.996, 0.991))
    slow = summarise([[3.1], [3.1], [3.1], [3.1], [3.1 * 1.75]])
    for rows in (
        (untouched, whole, disturbed),
        (replace(untouched, latency_ms=slow), whole, fewer),
        # A faster one may be among those that would do.
        (untouched, row(4, 1.2, None, accuracy=kept(0.999, 0.995)), disturbed),
    ):
        changed = replace(results, rows=rows)
        (section,) = sections(changed)
        assert summary(section) == verdict
        page = Page(html(changed))
        assert verdict in page.text
        assert "Deploy" not in page.text
        assert verdict in to_markdown(changed)
    (section,) = sections(replace(results, rows=(untouched, whole, disturbed)))
    assert section.speedup(disturbed) is None
    assert "times disagree by 75%" in claim(section, disturbed)
    assert "times the speed" not in claim(section, disturbed)
    assert caveat(section) == (
        "By accuracy alone, k = 4 of 16 is enough: keeps 99.6% of the accuracy (at least 99.1%)."
    )


def test_without_times_a_smaller_k_that_is_not_proven_is_named_with_the_inputs_that_it_needs(
    results: Results,
) -> None:
    untouched, whole, fewer = results.rows[:3]
    whole = replace(whole, latency_ms=DISTURBED)
    for quality, told in (
        (
            kept(0.996, 0.981),
            "k = 4 of 16 keeps 99.6% of the accuracy (at least 98.1%). Not proven",
        ),
        (kept(0.9, 0.88), "no smaller k keeps 99%."),
    ):
        small = replace(fewer, latency_ms=DISTURBED, accuracy=quality)
        (section,) = sections(replace(results, rows=(untouched, whole, small)))
        assert caveat(section).startswith(f"By accuracy alone, {told}")
    (section,) = sections(replace(results, rows=(untouched, whole)))
    assert caveat(section) == ""


def test_a_time_below_the_limit_is_said_to_show_that_the_limit_does_not_hold(
    results: Results, row: RowMaker
) -> None:
    why = "limit does not apply: the 2.0 MB of weights and tokens stay in a cache between calls"
    beaten = row(4, 1.0, 1.0, limit_ms=1.2, no_limit=why)
    changed = replace(results, rows=(*results.rows[:2], beaten, row(2, 0.5, 0.8, limit_ms=0.2)))
    lines = to_markdown(changed).splitlines()
    rows = [[cell.strip() for cell in line.split("|")] for line in lines if "grouped" in line]
    assert {cells[2]: cells[5] for cells in rows if len(cells) == 11} == {
        "16/16": "",
        "4/16": "limit does not apply",
        "2/16": "2.5",
    }
    data = json.loads(Page(html(changed)).scripts[0])
    assert data["rows"][2]["limit_told"] == why


def test_without_labels_the_fastest_row_is_told(results: Results, row: RowMaker) -> None:
    rows = (replace(results.rows[0], accuracy=None), row(4, 1.0, None), row(2, 0.5, None))
    changed = replace(results, rows=rows)
    assert summary(sections(changed)[0]) == (
        "Accuracy is not known: the inputs had no labels. Fastest: k = 2 of 16 in FP32: 6.2 times "
        "the speed of PyTorch."
    )


def test_where_the_untouched_model_is_right_for_nothing_that_is_the_reason(
    results: Results, row: RowMaker
) -> None:
    wrong = Accuracy(0.0, None, 10)
    rows = (replace(results.rows[0], accuracy=wrong), replace(row(4, 1.0, 1.0), accuracy=wrong))
    assert summary(sections(replace(results, rows=rows))[0]).startswith(
        "The kept accuracy is not known: the untouched model gets none of the inputs right. Fast"
    )


@pytest.mark.parametrize(
    ("ratio", "text"), [(21.2, "21×"), (3.14, "3.1×"), (1.0, "1.0×"), (0.853, "0.85×")]
)
def test_speedups_read_well(ratio: float, text: str) -> None:
    assert times(ratio) == text


def test_the_page_fetches_nothing(results: Results) -> None:
    page = Page(html(results))
    assert page.fetched == []
    assert not any("@import" in style or "url(" in style for style in page.styles)
    packed = gzip.decompress(base64.b64decode(page.scripts[1])).decode()
    assert ".vega={}" in packed and ".vegaLite={}" in packed
    assert "Vega and Vega-Lite: BSD licence" in html(results)
    assert len(html(results).encode()) < 1_600_000


def test_the_page_tells_every_row_the_machine_and_the_command(results: Results) -> None:
    page = Page(html(results))
    assert summary(sections(results)[0]) in page.text
    data = json.loads(page.scripts[0])
    assert data["results"] == json.loads(to_json(results))
    names = [row["name"] for row in data["rows"]]
    assert names == ["PyTorch, untouched", *["ONNX Runtime, grouped"] * 4]
    assert "RuntimeError: <no such op>" in [row["error"] for row in data["results"]["rows"]]
    assert ["torch", "2.13"] in data["environment"]
    told = " ".join((*data["method"], data["again"], page.text))
    for fact in ("soft-moe-mnist, 318,000 parameters", "2030-01-02 03:04:05 UTC"):
        assert fact in told
    assert results.command in data["again"]
    assert "5 interleaved rounds" in told
    assert data["csv"] == to_csv(results)


def test_the_page_holds_what_is_said_of_every_row(results: Results) -> None:
    data = json.loads(Page(html(results)).scripts[0])
    untouched, _, row = data["rows"][:3]
    assert row["speed"] == pytest.approx(3.1)
    assert row["base"] == 0
    assert row["told"]
    assert row["claim"] == (
        f"k = 4 of 16 in FP32: {BESIDE_BOTH}; keeps 99.2% of the accuracy (at least 99.1%)"
    )
    assert untouched["command"] is None


def test_a_row_comes_with_the_command_that_exports_it(results: Results, row: RowMaker) -> None:
    def told(command: str, one: Row, source: str = "digits.pt") -> str | None:
        models = (replace(results.models[0], source=source),)
        return export_command(replace(results, command=command, models=models), one)

    words = ("export", "--k", "4", "--target", "ort-cpu", "--lowering", "grouped")
    floats = row(4, 1.0, 1.0, deploy=words)
    integers = row(4, 1.0, 1.0, precision="int8", batch=64, deploy=(*words, "--calibration", "t"))
    asked = "moexport bench digits.pt --set num_heads=4 --family=soft-moe-vit --data test.npz -o r"
    assert told(asked, floats) == (
        "moexport export digits.pt -o digits-k4-fp32 --k 4 --target ort-cpu --lowering grouped "
        "--data test.npz --family soft-moe-vit --set num_heads=4"
    )
    again = "moexport export digits.pt --recipe r.yaml -o again --data test.npz"
    assert recipe_command("digits.pt", "r.yaml", "again", shlex.split(asked)).startswith(again)
    assert told(asked, integers) == (
        "moexport export digits.pt -o digits-k4-int8 --k 4 --target ort-cpu --lowering grouped "
        "--calibration t --batch 1:64:64 --data test.npz --family soft-moe-vit --set num_heads=4"
    )
    own = "moexport bench own:net --weights w.pt --adapter=own:adapt --data x.npz -o r"
    by_code = str(told(own, floats, "own:net"))
    assert by_code.endswith(" --data x.npz --weights w.pt --adapter own:adapt")
    fixed = row(4, 1.0, 1.0, batch=8, deploy=(*words, "--batch", "8"))
    assert str(told(asked, fixed)).count("--batch") == 1
    for other in (results.rows[0], row(4, 1.0, 1.0, deploy=()), replace(floats, error="failed")):
        assert told(asked, other) is None
    assert told("python -m benchmarks", floats) is None


def test_a_row_of_a_bundle_comes_with_the_command_that_runs_it(
    results: Results, row: RowMaker
) -> None:
    one = row(4, 1.0, 1.0, bundle="out", deploy=("run", "my/out", "--k", "4", "--threads", "2"))
    typed = replace(results, command="moexport bench my/out -o r")
    command = "moexport run my/out --k 4 --threads 2 -i {} -o OUTPUTS.npz"
    assert export_command(typed, one) == command.format("INPUTS.npz")
    data = {"data": {"source": "test.npz", "sha256": ""}}
    named = replace(typed, protocol=typed.protocol | data)
    assert export_command(named, one) == command.format("test.npz")


def test_text_from_a_results_file_cannot_become_markup(results: Results) -> None:
    evil = "</script><img src=x onerror=alert(1)>%%DATA%%"
    rows = tuple(replace(r, model=evil) for r in results.rows)
    page = Page(html(replace(results, models=(ModelInfo(evil),), rows=rows, command=evil)))
    assert page.fetched == []
    assert json.loads(page.scripts[0])["again"].endswith(evil)


def test_several_models_and_batches_become_panels_in_order(results: Results, row: RowMaker) -> None:
    rows = [
        replace(r, model=model, batch=batch)
        for model in ("one", "two")
        for batch in (64, 1)
        for r in results.rows
    ]
    found = sections(replace(results, rows=tuple(rows)))
    assert [(p.model, p.batch) for p in found] == [("one", 1), ("one", 64), ("two", 1), ("two", 64)]


def test_a_results_file_without_rows_still_makes_a_page(results: Results, tmp_path: Path) -> None:
    empty = replace(results, rows=())
    assert "No rows were measured." in html(empty)
    assert figures(empty, tmp_path) == ()


@pytest.mark.parametrize("phase", ["", "prefill, decode"])
def test_a_phase_that_is_none_is_refused(phase: str, results: Results, tmp_path: Path) -> None:
    write(results, tmp_path / "results.json")
    content = json.loads((tmp_path / "results.json").read_text())
    content["rows"][1]["phase"] = phase
    (tmp_path / "results.json").write_text(json.dumps(content))
    with pytest.raises(ResultsError, match=r"results\.json.*phase"):
        read(tmp_path / "results.json")


def written(svg: Path) -> list[str]:
    """The texts of a picture."""
    return [unescape(text) for text in re.findall(r"<text[^>]*>([^<]+)<", svg.read_text())]


def test_a_token_models_figure_shows_its_perplexity(
    results: Results, row: RowMaker, tmp_path: Path
) -> None:
    def judged(k: int, value: float) -> Row:
        found = Perplexity(value, 6.3 / value, 8192, Interval(value - 0.2, value + 0.2))
        return row(k, 1.0, None, perplexity=found)

    rows = (replace(judged(16, 6.3), engine="pytorch-eager"), judged(16, 6.3), judged(1, 12.8))
    _, drawn = figures(replace(results, rows=rows), tmp_path)
    words = written(drawn)
    said = summary(sections(replace(results, rows=rows))[0])
    assert said == (
        "Deploy k = 16 of 16 (all experts) in FP32: the speed of PyTorch, within the spread; "
        "perplexity 6.3 (PyTorch: 6.3)."
    )
    assert "perplexity, lower is better" in words
    assert "digits: perplexity" in words
    assert "12" in words  # on the axis
    assert not any("no labels" in each for each in words)


def test_a_bar_that_goes_on_outside_of_the_chart_is_cut_and_says_so(
    results: Results, row: RowMaker, tmp_path: Path
) -> None:
    def arrows(*rows: Row) -> tuple[int, float]:
        """How many bars end in an arrow, and the last number of the axis of latencies."""
        _, svg = figures(replace(results, rows=rows), tmp_path)
        marks = re.findall(
            r'class="mark-symbol role-mark chart0_cut_marks"[^>]*>(.*?)</g>', svg.read_text()
        )
        numbers = [float(each) for each in written(svg) if re.fullmatch(r"[\d.]+", each)]
        return sum(each.count("<path") for each in marks), max(numbers)

    disturbed = summarise([[1.0], [1.0], [1.0], [1.0], [90.0]])
    reference = replace(results.rows[0], latency_ms=disturbed)
    cut = row(1, 1.0, 1.0, latency_ms=disturbed)
    found, top = arrows(reference, *results.rows[1:], cut)
    assert found == 1
    assert top < 90  # one disturbed round does not flatten the chart
    assert arrows(*results.rows)[0] == 0


def test_latencies_that_are_far_apart_are_drawn_by_factors(
    results: Results, row: RowMaker, tmp_path: Path
) -> None:
    rows = (results.rows[0], row(16, 0.3, 1.0), row(4, 0.06, 1.0))
    _, drawn = figures(replace(results, rows=rows), tmp_path)
    words = written(drawn)
    assert {"0.1", "0.2", "0.5", "1", "2"} <= set(words)
    assert not any("10^" in each for each in words)


def test_several_models_share_one_pair_of_axes(
    results: Results, row: RowMaker, tmp_path: Path
) -> None:
    other = [replace(each, model="other", experts=8) for each in results.rows if each.k <= 8]
    untouched = replace(results.rows[0], model="other", experts=8, k=8)
    both = replace(results, rows=(*results.rows, untouched, *other))
    for folder in ("one", "both"):
        (tmp_path / folder).mkdir()
    _, one = figures(results, tmp_path / "one")
    assert len(re.findall(r"chart\d_points_marks", one.read_text())) == 2
    _, svg = figures(both, tmp_path / "both")
    text = svg.read_text()
    assert len(re.findall(r"chart\d_points_marks", text)) == 2
    words = written(svg)
    assert [each for each in words if "batch 1" in each] == ["latency, batch 1"]
    assert "experts computed, k" in words
    # The legend has each model and each engine once: dashes tell models apart.
    for name in ("digits", "other", "ONNX Runtime", "PyTorch, untouched"):
        assert words.count(name) == 1, name


@pytest.mark.parametrize("names", [1, 3, 9])
def test_a_legend_stays_within_its_picture(names: int, tmp_path: Path) -> None:
    listed = [f"a-model-of-mine-{index}: ONNX Runtime, INT8" for index in range(names)]
    legend = dict.fromkeys(listed, (ink_of("fp32"), "M-1,-1H1V1H-1Z"))
    panels: list[ChartPanel] = [
        ("one", over_k("ms", "ms", "zero"), []),
        ("two", over_k("ms", "ms", "zero"), []),
    ]
    write_pictures(side_by_side(panels, legend), [tmp_path / "picture.svg"])
    text = (tmp_path / "picture.svg").read_text()
    width = float(re.findall(r'<svg[^>]* width="(\d+)"', text)[0])
    assert [each for each in written(tmp_path / "picture.svg") if each in listed] == listed
    assert width < 1000


def test_views_are_files_that_can_be_made_again(results: Results, tmp_path: Path) -> None:
    write_report(results, tmp_path / "report.html")
    first = (tmp_path / "report.html").read_bytes()
    write_report(results, tmp_path / "report.html")
    assert (tmp_path / "report.html").read_bytes() == first
    path, drawn = figures(results, tmp_path)
    assert (path.name, drawn.name) == ("latency_accuracy.png", "latency_accuracy.svg")
    first = drawn.read_bytes()
    figures(results, tmp_path)
    assert drawn.read_bytes() == first
    height, width, _ = matplotlib.image.imread(path).shape
    assert 1400 < width < 1800
    assert 400 < height < 1600
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "latency_accuracy.png",
        "latency_accuracy.svg",
        "report.html",
    ]


def test_reproduce_tells_versions_hashes_and_data(results: Results) -> None:
    packages = {"moexport": "0.9", "torch": "2.13", "onnxruntime": "1.23"}
    model = replace(results.models[0], sha256="ab12")
    full = replace(
        results,
        models=(model,),
        environment=results.environment | {"packages": packages},
        protocol=results.protocol | {"data": {"source": "test.npz", "sha256": "cd34"}},
    )
    assert reproduce(full).splitlines() == [
        "# moexport 0.9",
        "pip install torch==2.13 onnxruntime==1.23",
        "# model digits, digits.pt: sha256 ab12",
        "# data test.npz: sha256 cd34",
        "moexport bench digits.pt --k 4,2",
    ]
    assert "cd34" in to_markdown(full)
    random = full.protocol | {"data": {"source": None, "sha256": "cd34"}, "labelled": False}
    assert "# data random inputs: sha256 cd34" in reproduce(replace(full, protocol=random))
    earlier = full.protocol | {"calibration": "train.npz"}
    assert "# INT8 ranges from train.npz" in reproduce(replace(full, protocol=earlier))


NAME = (
    "net\n```\n<img src=http://x>\n# forged\n```sh\nmoexport run evil ![](http://x) [a](http://x)|b"
)


def test_names_are_escaped_in_markdown(results: Results, row: RowMaker) -> None:
    rows = [replace(each, model=NAME, error=each.error and NAME) for each in results.rows]
    hostile = replace(
        results,
        rows=tuple(rows),
        models=(ModelInfo(NAME, NAME, NAME, 1, sha256=NAME),),
        environment={"packages": {"moexport": NAME, "torch": "2.13; rm -r ~"}},
        protocol=results.protocol | {"data": {"source": NAME, "sha256": NAME}},
        command="moexport bench net.pt ```\n```",
    )
    page = Page(markdown.markdown(to_markdown(hostile), extensions=["fenced_code", "tables"]))
    assert page.fetched == []
    headings = [line for line in to_markdown(hostile).splitlines() if line.startswith("#")]
    assert not [line for line in headings if line.startswith("# forged")]
    (code,) = re.findall(r"(`{3,})sh\n(.*)\n\1", to_markdown(hostile), re.DOTALL)
    typed = [line for line in code[1].splitlines() if not line.startswith("# ")]
    assert typed[0] == "pip install 'torch==2.13; rm -r ~'"
    assert len(typed) == 2
    assert typed[1].startswith("moexport bench net.pt")


@pytest.mark.parametrize("name", ["net$a_b_c$", "$\\frac{", "日本語", "a\x1b[2Jb"])
def test_a_name_is_only_a_name_in_a_figure(
    name: str, results: Results, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = tuple(replace(each, model=name) for each in results.rows)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, svg = figures(replace(results, rows=rows), tmp_path)
    assert svg.stat().st_size > 1000
    assert capfd.readouterr() == ("", "")


def test_classes_that_lose_at_a_smaller_k_are_told(results: Results, row: RowMaker) -> None:
    lost = (ClassChange(8, 36, 34, 30), ClassChange(3, 31, 30, 29))
    rows = (*results.rows, row(4, 1.0, 0.99, losing=lost), row(4, 1.0, 0.99, batch=8, losing=lost))
    changed = replace(results, rows=rows)
    found = {section.name: content for section, content in contents(changed, None)}
    (table,) = found["losing"].tables
    ((name, lines),) = table.groups.items()
    assert name == "digits, k = 4 of 16, FP32"
    assert lines[0] == ("8", "36", "94.4%", "83.3%", ("-4", "bad"))
    assert "losing" not in {section.name for section, _ in contents(results, None)}


def test_k_and_batch_have_a_heat_map_of_speed(results: Results, row: RowMaker) -> None:
    assert "heat" not in {section.name for section, _ in contents(results, None)}
    more = [row(k, ms, 1.0, batch=8, throughput=8e3 / ms) for k, ms in ((16, 8.0), (4, 2.0))]
    changed = replace(results, rows=(*results.rows, *more))
    found = {section.name: content for section, content in contents(changed, None)}
    (table,) = found["heat"].tables
    assert table.heads == ("k", "batch 1", "batch 8")
    floats = [
        ("16/16", ("500", "heat-0"), ("1,000", "heat-3")),
        ("4/16", ("1,000", "heat-3"), ("4,000", "heat-9")),
        ("2/16", ("2,000", "heat-6"), ("–", "quiet")),
    ]
    assert table.groups == {"digits, FP32": floats}
    # A faster row in another precision has a table of its own.
    also = (*changed.rows[1:3], *more)
    integers = [replace(each, precision="int8", throughput=9e6) for each in also]
    mixed = replace(changed, rows=(*changed.rows, *integers))
    shown = {section.name: content for section, content in contents(mixed, None)}
    floating, integer = shown["heat"].tables
    assert floating.groups == {"digits, FP32": floats}
    assert [*integer.groups] == ["digits, INT8"]


def test_where_nothing_is_proven_the_answer_needs_the_fewest_more_inputs(
    results: Results, row: RowMaker
) -> None:
    def judged(kept: float, low: float) -> Accuracy:
        interval = Interval(low, 1.0)
        return Accuracy(0.9 * kept, kept, 360, retention_interval=interval)

    fast = row(2, 0.5, 1.0, accuracy=judged(0.992, 0.975))
    near = row(4, 1.0, 1.0, accuracy=judged(1.0, 0.989))
    one = replace(results, rows=(results.rows[0], fast, near))
    (section,) = sections(one)
    assert headline(section) is near
    # 360 · ((1 − 0.989) / (1 − 0.99))² = 436 inputs, which are 76 more.
    assert summary(section).endswith("Not proven: about 76 more inputs needed.")
    assert "at least" in rows_table(one)
    proven = row(8, 2.0, 1.0, accuracy=judged(0.999, 0.991))
    (section,) = sections(replace(one, rows=(*one.rows, proven)))
    assert headline(section) is proven


PRECISIONS = ("fp32", "fp16", "int8", "bf16", "int4", "fp8")


def test_a_precision_has_one_colour_on_the_page_and_in_pictures(
    results: Results, row: RowMaker, tmp_path: Path
) -> None:
    for precision in PRECISIONS:
        drawn = [replace(row(k, k, 1.0), precision=precision) for k in (4, 8)]
        one = replace(results, rows=(results.rows[0], *drawn))
        data = json.loads(Page(html(one)).scripts[0])
        assert data["rows"][1]["ink"] == f"var(--{precision})"
        _, svg = figures(one, tmp_path)
        colours = {colour for name, colour in variables("light").items() if name in PRECISIONS}
        used = {colour for colour in colours if colour in svg.read_text()}
        assert used == {variables("light")[precision]}


PARTS = ("router", "dispatch", "experts", "combine", "host", "runtime")


def variables(scheme: str) -> dict[str, str]:
    """The colours of the page in a scheme, by their names."""
    style = Path(page_module.__file__).with_name("assets").joinpath("report.css")
    light, _, rest = style.read_text(encoding="utf-8").partition("@media (prefers-color-scheme")
    found = re.findall(r"--([\w-]+): (#[0-9a-f]{6});", light)
    dark = re.findall(r"--([\w-]+): (#[0-9a-f]{6});", rest) if scheme == "dark" else []
    return dict([*found, *dark])


def contrast(one: str, other: str) -> float:
    """The ratio of WCAG 2.2 for two colours, 1 to 21."""

    def luminance(colour: str) -> float:
        shares = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shares]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_that_of_the_standard() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_and_marks_of_the_page_stand_out(scheme: str) -> None:
    colours = variables(scheme)
    for text in ("ink", "soft", "bad", "good", "accent"):
        for ground in ("card", "page", "zebra"):
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    for mark in (*PRECISIONS, *PARTS, "reference"):
        assert contrast(colours[mark], colours["card"]) >= 3, mark


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_is_no_precision_has_the_colour_of_none(scheme: str) -> None:
    colours = variables(scheme)
    taken = {colours[name] for name in PRECISIONS}
    assert not taken & {colours[name] for name in (*PARTS, "bad", "reference")}


def test_engines_that_are_absent_for_one_reason_stand_in_one_line(results: Results) -> None:
    names = ("pytorch-eager-cuda", "tensorrt")
    absent = [Absent(name, "there is no GPU") for name in names]
    absent += [Absent(n, f"not requested: --engine {n}") for n in ("openvino", "pytorch-compile")]
    lines = [
        "pytorch-eager-cuda, tensorrt: there is no GPU",
        "openvino, pytorch-compile: not requested",
    ]
    changed = replace(results, absent=tuple(absent))
    assert absent_lines(changed) == lines
    assert json.loads(Page(html(changed)).scripts[0])["absent"] == lines
    assert f"- not measured: {lines[0]}" in to_markdown(changed)


def tuned(results: Results, row: RowMaker, metric: str) -> Results:
    """The results of a search for 97%: 8 of 16 experts, at twice the speed of all."""
    point: dict[str, object] = {
        "ms": 1.0,
        "predicted_ms": None,
        "bytes": 10,
        "kept": 0.99,
        "layers": [],
    }
    point |= {"searched": {"low": 0.98, "high": 1.0}, "text": "8 of 16 experts kept, fp32"}
    point |= {"front": True, "chosen": True, "confirmed_kept": 0.985}
    point |= {"confirmed": {"low": 0.9712, "high": 0.99}, "predicted_ms": 1.0}
    search: dict[str, object] = {
        "model": "digits",
        "metric": metric,
        "batch": 1,
        "searching": 180,
        "confirming": 180,
    }
    search |= {"seconds": 9.0, "keep": 0.97, "max_latency_ms": None, "max_bytes": None}
    search |= {"recipe": "tuned/recipe.yaml", "points": [point]}
    kept = None if metric == "agreement" else 0.985
    chosen = row(8, 1.0, kept, point="8 of 16 experts kept, fp32", routing=None)
    rows = (*results.rows[:2], chosen)
    return replace(results, rows=rows, analyses={"tuning": search})


@pytest.mark.parametrize("metric", ["accuracy", "agreement"])
def test_the_page_of_a_search_speaks_of_its_threshold_and_its_model_in_english(
    results: Results, row: RowMaker, metric: str
) -> None:
    found = tuned(results, row, metric)
    page = Page(html(found))
    data = json.loads(page.scripts[0])
    assert data["keep"] == 0.97
    (section,) = sections(found)
    assert summary(section) == (
        f"Deploy the model with 8 of 16 experts kept in FP32: {BESIDE_BOTH}; keeps 98.5% of the "
        f"{metric} (at least 97.1%)."
    )
    assert data["search"]["answer"] == summary(section)
    assert caveat(section) == (
        f"The requirement was to keep 97% of the {metric}; the result is confirmed on 180 inputs "
        "that the search did not use."
    )
