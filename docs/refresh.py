"""Updates the generated parts of the documents; run it from a checkout.

python docs/refresh.py registries   the tables of targets, lowerings, engines, families and folders,
                                    and the ops in evidence/lowerings.md, from exported graphs
python docs/refresh.py performance  every table and chart of perf/results, in the pages of evidence
python docs/refresh.py cpus         the results of other CPUs, in evidence/cpus.md
python docs/refresh.py compat       the versions in evidence/versions.md, from `make compat`
python docs/refresh.py demo DIR     the README's table and figure and the site's report, from
                                    `moexport demo -o DIR`
python docs/refresh.py mumoe DIR    a table of evidence/mumoe.md, from
                                    `moexport demo --family mumoe`
python docs/refresh.py schema       bench/results.schema.json, from the dataclasses
python docs/refresh.py pictures     docs/images/report*.png: the report of perf/results/demo.json in
                                    Chromium, on a desktop, a phone, dark, and printed
"""

from __future__ import annotations

import itertools
import re
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import moexport
import onnx
from moexport.bench.report.figures import figures
from moexport.bench.report.page import write_report
from moexport.bench.results import Results, read
from moexport.common.libraries import TESTED
from moexport.common.text import markdown
from moexport.docs import performance_page, results_schema, site_hooks
from moexport.docs.registries import LISTED
from moexport.docs.sources import pages
from moexport.graphs.lowerings import lowerings_of
from moexport.graphs.targets import Target
from moexport.perf import cache, calibration, granite, models, profiles, runtimes, scale, tune
from moexport.perf.experts import table as experts_table
from moexport.perf.generation import benchmark as generation
from moexport.perf.layers import mumoe
from moexport.perf.measure import kept, measured_on
from moexport.tests.bench.report.browser import browser
from PIL import Image

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "perf" / "results"
LAYER = "blocks.2.mlp/"
REPEATS = 6
"""From this number of repeats on, a chain of ops is written with a factor."""

CPU: Target = "ort-cpu"
ENGINES: Target = "tensorrt"

CASE = ROOT / "tests" / "data" / "soft_moe_vit" / "weights.pt"


def demo_table(results: Results) -> str:
    """Returns the README's table: at batch 1, PyTorch untouched, then the export for each k."""
    lines = []
    rows = [row for row in results.rows if row.batch == 1]
    experts = {row.model: row.experts for row in rows if row.is_reference}
    pruned = {row: row.experts != experts[row.model] for row in rows}
    rows.sort(
        key=lambda row: (
            -experts[row.model],
            not row.is_reference,
            pruned[row],
            row.precision,
            -row.k,
        )
    )
    for model, group in itertools.groupby(rows, key=lambda row: row.model):
        untouched = 0.0
        for row in group:
            if row.latency_ms is None or row.accuracy is None:
                continue
            if row.is_reference:
                untouched = row.latency_ms.median
            elif row.engine != "onnxruntime":
                continue
            k = f"{row.k} (`tune` pruned the rest)" if pruned[row] else str(row.k)
            share = row.accuracy.retention
            lines.append(
                (
                    str(experts[model]),
                    "PyTorch, untouched" if row.is_reference else k,
                    row.precision.upper(),
                    f"{row.accuracy.top1:.1%}",
                    "–" if share is None else f"{share:.1%}",
                    f"{row.latency_ms.median:.3f}",
                    f"{untouched / row.latency_ms.median:.1f}×",
                )
            )
    header = ("n", "k", "precision", "accuracy", "kept", "latency, ms", "vs PyTorch")
    return markdown(header, lines, words=0) + "\n"


def mumoe_demo_table(directory: Path) -> str:
    """Returns a row for each k of the muMoE demo: accuracy or perplexity, and milliseconds."""
    columns: dict[str, dict[int | None, str]] = {}
    for results in sorted(directory.glob("report-*/results.json")):
        for row in read(results).rows:
            if row.latency_ms is None:
                continue
            if row.accuracy is not None:
                quality = f"{row.accuracy.top1:.1%}"
            else:
                assert row.perplexity is not None
                quality = f"{row.perplexity.value:.2f}"
            column = columns.setdefault(row.model, {})
            key = None if row.is_reference else row.k
            column[key] = f"{quality}, {row.latency_ms.median:.3f} ms"
    models = sorted(columns, key=["digits-cp", "digits-tr", "mixer", "gpt2"].index)
    header = ("k", "CP classifier", "TR classifier", "Mixer", "GPT-2 (perplexity)")
    rows = [
        ("PyTorch, untouched" if k is None else str(k), *(columns[model][k] for model in models))
        for k in columns[models[0]]
    ]
    return markdown(header, rows, words=0) + "\n"


def layer_ops(bundle: moexport.Bundle, lowering: str) -> list[str]:
    """Returns the ops of one layer in a bundle's graph with that lowering, in order."""
    file = bundle.path / bundle.graph(lowering).file
    graph = onnx.load(file, load_external_data=False).graph
    return [node.op_type for node in graph.node if node.output[0].startswith(LAYER)]


def listed_ops() -> dict[str, str]:
    """Returns the text of each listing: `route`, with which all begin, and what follows it."""
    model = moexport.load(CASE, config={"num_heads": 4, "rest": "default"})
    records = lowerings_of("soft-moe").values()
    on_cpu = [record.name for record in records if CPU in record.targets]
    ops: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        # Lowerings that are only for engines have the ops of a graph for TensorRT.
        for target, names in (
            (CPU, on_cpu),
            (ENGINES, [record.name for record in records if record.name not in on_cpu]),
        ):
            bundle = moexport.export(
                model,
                Path(folder) / target,
                k=2,
                target=target,
                lowering=",".join(names),
                verify=False,
                engine=False if target == ENGINES else None,
            )
            ops |= {name: layer_ops(bundle, name) for name in names}
    columns = zip(*(ops[name] for name in on_cpu), strict=False)
    route = [column[0] for column in itertools.takewhile(lambda c: len(set(c)) == 1, columns)]
    return {"route": shown(route)} | {name: shown(ops[name][len(route) :]) for name in ops}


def shown(ops: Sequence[str]) -> str:
    """Returns ops as lines of text, with `8×(Gemm Gelu Gemm)` for eight such chains in a row."""
    parts = []
    place = 0
    while place < len(ops):
        length, times = max(((n, _repeats(ops, place, n)) for n in (1, 2, 3)), key=_saved)
        chain = " ".join(ops[place : place + length])
        if times >= REPEATS:
            parts.append(f"{times}×({chain})")
            place += length * times
        else:
            parts.append(ops[place])
            place += 1
    # A non-breaking space keeps each chain on one line while wrapping.
    text = " ".join(part.replace(" ", "\xa0") for part in parts)
    return "\n".join(textwrap.wrap(text, 80)).replace("\xa0", " ") + "\n"


def _repeats(ops: Sequence[str], place: int, length: int) -> int:
    chain, times = ops[place : place + length], 1
    while ops[place + times * length : place + (times + 1) * length] == chain:
        times += 1
    return times


def _saved(candidate: tuple[int, int]) -> int:
    length, times = candidate
    return length * (times - 1)


def refresh_demo(directory: Path) -> None:
    """Puts a demo's table and figure into the README, and saves its results for the site."""
    report = directory / "report"
    results = read(report / "results.json")
    replace_marked(ROOT / "README.md", "demo-table", demo_table(results))
    first = replace(results, rows=tuple(results.of_model(results.models[0].name)))
    with tempfile.TemporaryDirectory() as folder:
        drawn, *_ = figures(first, Path(folder))
        shutil.copy(drawn, ROOT / "docs" / "images" / "demo.png")
    shutil.copy(report / "results.json", site_hooks.DEMO)


def refresh_mumoe(directory: Path) -> None:
    """Puts a muMoE demo's table into the page of evidence on muMoE."""
    replace_marked(pages()["evidence/mumoe.md"], "mumoe-table", mumoe_demo_table(directory))


def refresh_registries() -> None:
    """Puts the tables of the registries and the ops of current graphs into the pages."""
    for page, tables in LISTED.items():
        for name, table in tables.items():
            replace_marked(ROOT / page, name, table())
    replace_marked(pages()["evidence/lowerings.md"], "ops", ops_of_lowerings())


def ops_of_lowerings() -> str:
    """Returns the ops of every lowering of a Soft MoE layer, a section for each."""
    return "\n".join(f"## {name}\n\n```text\n{ops}```\n" for name, ops in listed_ops().items())


def refresh_schema() -> None:
    """Writes the JSON Schema of results files."""
    results_schema.FILE.write_text(results_schema.text(), encoding="utf-8")


def refresh_pictures() -> None:
    """Takes the pictures of the top of the report."""
    html = Path(tempfile.mkdtemp()) / "report.html"
    write_report(read(RESULTS / "demo.json"), html)
    with browser(html.parent) as window:
        for name, width, height, scheme in (
            ("report", 1400, 1150, "light"),
            ("report-phone", 390, 1350, "light"),
            ("report-dark", 1400, 1150, "dark"),
            ("report-print", 703, 1032, "dark"),  # paper is light
        ):
            window.colour_scheme(scheme)
            window.resize(width, 900)
            window.open(html)
            window.wait("return document.documentElement.dataset.drawnMs")
            if name == "report-print":
                window.paper(True)
                window.run("dispatchEvent(new Event('beforeprint'))")
            picture = ROOT / "docs" / "images" / f"{name}.png"
            window.screenshot(picture)
            with Image.open(picture) as whole:
                top = whole.crop((0, 0, whole.width, height)).convert(
                    "P", palette=Image.Palette.ADAPTIVE
                )
            top.save(picture, optimize=True)


def refresh_tables(page: str) -> None:
    """Puts the tables of saved results into a page."""
    for name, content in MEASURED[page]().items():
        replace_marked(pages()[page], name, content)


def refresh_performance() -> None:
    """Puts the measurements into the pages, and draws the charts of docs/performance.md."""
    for page in MEASURED:
        refresh_tables(page)
    performance_page.draw(RESULTS, ROOT / "docs" / "images")


def performance_tables() -> dict[str, str]:
    """Returns the tables of evidence/performance.md, by their markers."""
    results, scales = read(RESULTS / "layers-cpu.json"), kept(RESULTS / "scale-cpu.json")
    where = textwrap.fill(f"Measured on {measured_on(scales)}.", 100)
    return {
        "machine": measured_by(results),
        "layer-by-k": performance_page.layer_by_k(results) + "\n",
        "models": models.table(read(RESULTS / "models-cpu.json"), 1) + "\n",
        "runtimes": runtimes_tables(),
        "profiles": _wrapped(profiles.table(kept(RESULTS / "profiles-cpu.json"))),
        "mumoe": mumoe.table(read(RESULTS / "mumoe-cpu.json")) + "\n",
        "scale": f"{where}\n\n{scale.table(scales)}\n",
        "auto": performance_page.choices(RESULTS / "auto-cpu.json") + "\n",
        "mnist": performance_page.retention(read(RESULTS / "paper-mnist.json")) + "\n",
    }


def runtimes_tables() -> str:
    """Returns the machine and the times of the two runtimes."""
    results = read(RESULTS / "runtimes-cpu.json")
    return f"{measured_by(results)}\n{runtimes.table(results)}\n"


def token_routed_tables() -> dict[str, str]:
    """Returns the tables of evidence/token-routed.md, by their markers."""
    return {
        "experts": _wrapped(experts_table(kept(RESULTS / "experts-cpu.json"))),
        "granite": _wrapped(granite.table(kept(RESULTS / "granite-cpu.json"))),
        "generation": _wrapped(generation.table(kept(RESULTS / "generation-cpu.json"))),
    }


def calibration_tables() -> dict[str, str]:
    """Returns the tables of evidence/calibration.md, by their markers."""
    body = kept(RESULTS / "calibration-cpu.json")
    facts = body["environment"]
    machine = f"{facts['cpu']['model']}, ONNX Runtime {onnxruntime_of(facts['packages'])}"
    return {
        "machine": f"Measured on {machine} (CPU), one thread.\n",
        "methods": calibration.methods_table(body) + "\n",
    }


def mumoe_tables() -> dict[str, str]:
    """Returns the tables of evidence/mumoe.md, by their markers."""
    return {"cache": cache.table(kept(RESULTS / "cache-cpu.json")) + "\n"}


def tune_tables() -> dict[str, str]:
    """Returns the tables of tune.md, by their markers."""
    return {"tune": tune.bundles_table(kept(RESULTS / "tune-cpu.json")) + "\n"}


def compat_tables() -> dict[str, str]:
    """Returns the table of evidence/versions.md: the versions that `make compat` tested."""
    packages = tuple(TESTED)
    header = ("versions", "Python", *packages, "tests", "date")
    rows = []
    for row in kept(RESULTS / "compat.json"):
        said = row["why"] or f"{row['passed']} passed" + (
            f", {len(row['failed'])} failed" if row["failed"] else ""
        )
        found = [row["versions"].get(name, "–").partition("+")[0] for name in packages]
        rows.append((row["row"], row["python"], *found, said, row["date"]))
    return {"compat": markdown(header, rows, words=2) + "\n"}


def cpus_tables() -> dict[str, str]:
    """Returns the table of evidence/cpus.md: what `python -m moexport.tests.hard.cpus` found."""
    rows = kept(RESULTS / "cpus.json")["rows"]
    cpus = list(rows[0]["cpus"])
    lines = [
        (row["precision"], row["bundles"], f"{row['error']:.1e}", *_by_cpu(row, cpus))
        for row in rows
    ]
    named = ("qemu's `max`" if cpu == "max" else cpu for cpu in cpus)
    return {"cpus": markdown(("precision", "bundles", "error on x86", *named), lines) + "\n"}


def _by_cpu(row: Mapping[str, Any], cpus: Sequence[str]) -> Iterator[str]:
    """Yields the errors of each CPU relative to those of x86, and its differences from x86."""
    for cpu in cpus:
        found = row["cpus"][cpu]
        yield f"{found['times']:.2f} times, {found['from_here']:.1e} from x86"


MEASURED: Mapping[str, Callable[[], dict[str, str]]] = {
    "evidence/performance.md": performance_tables,
    "evidence/token-routed.md": token_routed_tables,
    "evidence/calibration.md": calibration_tables,
    "evidence/mumoe.md": mumoe_tables,
    "tune.md": tune_tables,
    "evidence/versions.md": compat_tables,
    "evidence/cpus.md": cpus_tables,
}
"""The tables of each page with saved results, by the page's address and its markers."""


def _wrapped(content: str) -> str:
    """Wraps the paragraphs around a benchmark's tables to the lines of a page."""
    parts = (
        part if part.startswith("|") else textwrap.fill(part, 100, break_on_hyphens=False)
        for part in content.split("\n\n")
    )
    return "\n\n".join(parts) + "\n"


def onnxruntime_of(packages: Mapping[str, str]) -> str:
    """Returns ONNX Runtime's version; one of its two packages was installed."""
    return packages.get("onnxruntime") or packages["onnxruntime-gpu"]


def measured_by(results: Results) -> str:
    """Returns when and on which machine layers were measured, and the machine's median rates."""
    facts, rates = results.environment, results.protocol
    packages = facts["packages"]
    others = {"bf16_gflop_s": "BF16 {:.0f} GFLOP/s", "int8_gop_s": "INT8 {:.0f} GOP/s"}
    beside = ", ".join(said.format(rates[name]) for name, said in others.items() if name in rates)
    machine = (
        f"Measured on {results.created[:10]}: {facts['cpu']['model']}, {facts['threads']} threads, "
        f"streaming {rates['stream_gb_s']:.0f} GB/s, matmul {rates['matmul_gflop_s']:.0f} GFLOP/s"
        f"{beside and f' ({beside})'}; "
        f"ONNX Runtime {onnxruntime_of(packages)} (CPU), torch {packages['torch']}"
    )
    if any(row.engine == "openvino" for row in results.rows):
        machine += f", OpenVINO {packages['openvino']}"
    return textwrap.fill(f"{machine}.", 100) + "\n"


def replace_marked(page: Path, name: str, content: str) -> None:
    """Puts content between a page's `<!-- name -->` and `<!-- /name -->`."""
    text = page.read_text(encoding="utf-8")
    marked = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    page.write_text(marked.sub(lambda m: m[1] + content + m[2], text), encoding="utf-8")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["demo", directory]:
            refresh_demo(Path(directory))
        case ["mumoe", directory]:
            refresh_mumoe(Path(directory))
        case ["registries"]:
            refresh_registries()
        case ["schema"]:
            refresh_schema()
        case ["pictures"]:
            refresh_pictures()
        case ["compat"]:
            refresh_tables("evidence/versions.md")
        case ["cpus"]:
            refresh_tables("evidence/cpus.md")
        case ["performance"]:
            refresh_performance()
        case _:
            sys.exit(__doc__)
