"""Draws the charts and computes the figures of docs/performance.md that no benchmark tabulates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from moexport.bench.results import Results, read
from moexport.common.text import markdown
from moexport.examples.studies import mnist
from moexport.graphs.targets import Precision
from moexport.perf import models
from moexport.perf.layers import auto
from moexport.perf.layers.soft_moe import LOOP, SHAPES, STACKED
from moexport.perf.layers.tables import Cell, cells
from moexport.perf.measure import ms, times
from moexport.plugins.studies.findings import studies_in
from moexport.plugins.studies.report import figures, retention_rows

STYLE = Path(__file__).with_name("figures.mplstyle")

Groups = Mapping[str, Sequence[float]]
"""Values of each series by its name, one for each position on the axis."""

BATCHES = (1, 100)
"""The batch sizes of a layer that the page shows."""

PRECISIONS: tuple[Precision, ...] = ("fp32", "int8")


def layer_by_k(results: Results) -> str:
    """Returns a layer's times for k from n to n/8 in FP32 and INT8, with PyTorch's."""
    integers = {(cell.layer, cell.batch, cell.k): cell for cell in cells(results, precision="int8")}
    rows = []
    for cell in cells(results):
        one = integers.get((cell.layer, cell.batch, cell.k))
        if one is None or cell.batch not in BATCHES:
            continue
        rows.append(
            (
                *(cell.layer.name, str(cell.batch), str(cell.k)),
                *(ms(cell.median(STACKED)), ms(cell.median(LOOP))),
                *(ms(cell.auto_ms), ms(cell.limit), cell.speedup(STACKED)),
                *(ms(one.auto_ms), ms(one.limit), times(cell.auto_ms, one.auto_ms)),
            )
        )
    header = (
        *("layer", "batch", "k", "PyTorch, stacked", "PyTorch, loop"),
        *("FP32", "limit", "vs stacked", "INT8", "limit", "vs FP32"),
    )
    return markdown(header, rows)


def choices(file: Path) -> str:
    """Returns how far `auto` is from the best lowering, for layers that it was not fitted to."""
    rows = []
    for precision in PRECISIONS:
        held_out = [c for c in auto.read_cells(file, auto.HELD_OUT) if c.precision == precision]
        for batch, choice in auto.CHOICES.items():
            ratios = [cell.ratio(choice(cell)) for cell in held_out]
            typical = (np.median(ratios), np.quantile(ratios, 0.95), max(ratios))
            rows.append(
                (precision.upper(), batch, str(len(ratios)), *(f"{ratio:.2f}" for ratio in typical))
            )
    return markdown(("precision", "`--batch`", "cases", "median", "95%", "worst"), rows, words=2)


def retention(results: Results) -> str:
    """Returns the accuracy that k experts keep in the paper's networks; the paper's in brackets."""
    header, rows = retention_rows(studies_in(results.analyses), mnist.PRINTED)
    return markdown(header, rows, words=1)


def draw(results: Path, folder: Path) -> None:
    """Writes the page's charts from the folder of saved results."""
    layers = read(results / "layers-cpu.json")
    _by_k(
        folder / "performance-layer.png",
        {
            precision.upper(): [
                cell for cell in cells(layers, precision=precision) if cell.batch == 1
            ]
            for precision in PRECISIONS
        },
    )
    rows = [row for row in read(results / "models-cpu.json").rows if row.batch == 1]
    named = {(row.model, row.lowering, row.k): row.median_ms or 0.0 for row in rows}
    places = [(row.model, row.k, row.experts) for row in rows if row.lowering == models.AUTO]
    _bars(
        folder / "performance-models.png",
        [f"n = {n}\nk = {k}" for _, k, n in places],
        {
            "PyTorch eager": [named[model, models.EAGER, n] for model, _, n in places],
            "exported, FP32": [named[model, models.AUTO, k] for model, k, _ in places],
            "exported, INT8": [named[model, models.INT8, k] for model, k, _ in places],
        },
        "ms, batch 1",
    )
    studies = studies_in(read(results / "paper-mnist.json").analyses)
    for chart in figures(studies, folder, mnist.PRINTED):
        if "retention" in chart.name:
            chart.replace(folder / "performance-retention.png")
        else:
            chart.unlink()


def _by_k(path: Path, series: Mapping[str, Sequence[Cell]]) -> None:
    """Draws times over k with PyTorch's and the limit, one panel per layer."""
    import matplotlib.pyplot as plt
    from matplotlib import ticker

    with plt.style.context(STYLE):
        figure, panels = plt.subplots(1, len(SHAPES), figsize=(8, 3.2), layout="constrained")
        for panel, layer in zip(panels, SHAPES, strict=True):
            shown = {name: [c for c in line if c.layer == layer] for name, line in series.items()}
            for name, line in shown.items():
                panel.plot([c.k for c in line], [c.auto_ms for c in line], marker="o", label=name)
            first = next(iter(shown.values()))
            dense = first[0].median(STACKED)
            panel.axhline(dense, color="0.4", linestyle="--", label="PyTorch, stacked")
            ks, limits = [c.k for c in first], [c.limit for c in first]
            panel.plot(ks, limits, color="0.4", linestyle=":", label="limit, FP32")
            panel.set_xscale("log", base=2)
            panel.set_xticks(ks, map(str, ks))
            panel.set_yscale("log")
            panel.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            panel.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
            panel.yaxis.set_minor_formatter(ticker.NullFormatter())
            panel.set(title=layer.name, xlabel="experts kept, k", ylabel="ms, batch 1 (log)")
        panels[0].legend()
        figure.savefig(path)
        plt.close(figure)


def _bars(path: Path, places: Sequence[str], series: Groups, unit: str) -> None:
    """Draws a group of bars for each position."""
    import matplotlib.pyplot as plt

    wide = 0.8 / len(series)
    with plt.style.context(STYLE):
        figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
        for index, (name, values) in enumerate(series.items()):
            shifted = [
                place + (index - (len(series) - 1) / 2) * wide for place in range(len(places))
            ]
            axes.bar(shifted, values, wide, label=name)
        axes.set_xticks(range(len(places)), places)
        axes.set_ylabel(unit)
        figure.legend(loc="outside upper center", ncols=len(series))
        figure.savefig(path)
        plt.close(figure)
