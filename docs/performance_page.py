"""What docs/performance.md shows: for each question one table and one chart, from kept results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moexport.bench.report.figures import STYLE
from moexport.bench.results import ONNXRUNTIME, PYTORCH_EAGER, Results, read
from moexport.common.text import markdown
from moexport.perf import models
from moexport.perf.layers import auto, mumoe
from moexport.perf.layers.soft_moe import LOOP, SHAPES, STACKED
from moexport.perf.layers.tables import Cell, cells
from moexport.perf.measure import kept, measured_on, ms, times

Groups = Mapping[str, Sequence[float]]
"""Values by the name of their series, one for each place on the axis."""

BATCHES = (1, 100)
"""The batch sizes of a layer that the page shows; docs/history.md has all of them."""


def layer_by_k(results: Results) -> str:
    """Returns a layer's time for every k beside PyTorch's, as Markdown."""
    rows = [
        (
            *(cell.layer.name, str(cell.batch), str(cell.k)),
            *(ms(cell.median(STACKED)), ms(cell.median(LOOP)), ms(cell.auto_ms), ms(cell.limit)),
            *(cell.speedup(STACKED), cell.speedup(LOOP)),
        )
        for cell in cells(results)
        if cell.batch in BATCHES
    ]
    header = (
        *("layer", "batch", "k", "PyTorch, stacked", "PyTorch, loop", "exported", "limit"),
        *("vs stacked", "vs loop"),
    )
    return markdown(header, rows)


def layer_in_int8(results: Results) -> str:
    """Returns a layer's time in INT8 beside FP32's, for every k, as Markdown."""
    floats = {(cell.layer, cell.batch, cell.k): cell for cell in cells(results)}
    rows = []
    for cell in cells(results, precision="int8"):
        single = floats.get((cell.layer, cell.batch, cell.k))
        if cell.batch in BATCHES and single is not None:
            rows.append(
                (
                    *(cell.layer.name, str(cell.batch), str(cell.k)),
                    *(ms(single.auto_ms), ms(cell.auto_ms), ms(cell.limit)),
                    *(times(single.auto_ms, cell.auto_ms), cell.speedup(STACKED)),
                )
            )
    header = ("layer", "batch", "k", "FP32", "INT8", "limit", "vs FP32", "vs PyTorch, stacked")
    return markdown(header, rows)


def routed_layer(body: Any) -> str:
    """Returns a token-routed layer's time beside PyTorch's, for each number of tokens."""
    columns = {
        "PyTorch, eager": "PyTorch eager",
        "PyTorch, `grouped_mm`": "PyTorch grouped_mm",
        "FP32, `grouped`": "grouped fp32",
        "INT8, `grouped`": "grouped int8",
        "INT8, `fused`": "fused int8",
        "INT4, `fused`": "fused int4",
        "reading the FP32 weights in use": "bytes",
    }
    rows = [
        (tokens, *(f"{found[name]:.3g}" for name in columns.values()))
        for tokens, found in body["times"].items()
    ]
    return f"Measured on {measured_on(body)}.\n\n{markdown(('tokens', *columns), rows)}"


def draw(results: Path, folder: Path) -> None:
    """Writes the page's charts, `performance-*.png`, from the folder of kept results."""
    layers = read(results / "layers-cpu.json")
    floats = [cell for cell in cells(layers) if cell.batch == 1]
    integers = [cell for cell in cells(layers, precision="int8") if cell.batch == 1]
    _by_k(folder / "performance-layer.png", floats, {"exported": floats}, "PyTorch, stacked")
    both = {"FP32": floats, "INT8": integers}
    _by_k(folder / "performance-int8.png", floats, both, None)

    found = [row for row in read(results / "models-cpu.json").rows if row.batch == 1]
    named = {(row.model, row.lowering, row.k): row.median_ms or 0.0 for row in found}
    places = [(row.model, row.k, row.experts) for row in found if row.lowering == models.AUTO]
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
    of_mumoe = read(results / "mumoe-cpu.json")
    rows = [
        {(row.engine, row.precision): row.median_ms or 0.0 for row in of_mumoe.of_model(layer.name)}
        for layer in mumoe.LAYERS
    ]
    _bars(
        folder / "performance-mumoe.png",
        [layer.name.partition(" (")[0] for layer in mumoe.LAYERS],
        {
            name: [row[PYTORCH_EAGER, "fp32"] / row[ONNXRUNTIME, kind] for row in rows]
            for name, kind in (("exported, FP32", "fp32"), ("exported, INT8", "int8"))
        },
        "times the speed of PyTorch",
    )
    exports: list[dict[str, Any]] = kept(results / "scale-cpu.json")["exports"]
    _bars(
        folder / "performance-scale.png",
        [f"n = {each['experts']}, h = {each['hidden']}\n{each['stored']}" for each in exports],
        {
            "weights": [each["weights_bytes"] / 1e9 for each in exports],
            "peak memory of the export": [each["peak_bytes"] / 1e9 for each in exports],
        },
        "GB",
    )
    answers: list[dict[str, Any]] = kept(results / "startup-cpu.json")["answers"]
    quick = [sorted(each["seconds"]) for each in answers]
    _bars(
        folder / "performance-startup.png",
        ["--help", *(f"inspect {each['command'].split()[2]}" for each in answers[1:])],
        {
            "median": [each[len(each) // 2] for each in quick],
            "slowest": [each[-1] for each in quick],
        },
        "s",
    )
    every = auto.read_cells(results / "auto-cpu.json")
    ratios = sorted(cell.ratio(auto.chosen(cell)) for cell in every)
    _shares(folder / "performance-auto.png", ratios)


def _by_k(
    path: Path, floats: Sequence[Cell], series: Mapping[str, Sequence[Cell]], untouched: str | None
) -> None:
    """Draws times over k, a panel for each layer, with the least time that the machine needs."""
    import matplotlib.pyplot as plt
    from matplotlib import ticker

    with plt.style.context(STYLE):
        figure, panels = plt.subplots(1, len(SHAPES), figsize=(8, 3.2), layout="constrained")
        for panel, layer in zip(panels, SHAPES, strict=True):
            for name, found in series.items():
                mine = [cell for cell in found if cell.layer == layer]
                panel.plot([c.k for c in mine], [c.auto_ms for c in mine], marker="o", label=name)
            mine = [cell for cell in floats if cell.layer == layer]
            if untouched is not None:
                dense = mine[0].median(STACKED)
                panel.axhline(dense, color="0.4", linestyle="--", label=untouched)
                limits = [cell.limit for cell in mine]
                panel.plot([c.k for c in mine], limits, color="0.4", linestyle=":", label="limit")
            panel.set_xscale("log", base=2)
            panel.set_xticks([c.k for c in mine], [str(c.k) for c in mine])
            panel.set_yscale("log")
            panel.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            panel.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
            panel.yaxis.set_minor_formatter(ticker.NullFormatter())
            panel.set(title=layer.name, xlabel="experts kept, k", ylabel="ms, batch 1 (log)")
        panels[0].legend()
        figure.savefig(path)
        plt.close(figure)


def _bars(path: Path, places: Sequence[str], series: Groups, unit: str) -> None:
    """Draws a group of bars for each place."""
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


def _shares(path: Path, ratios: Sequence[float]) -> None:
    """Draws for how many of the layers the choice is within so much of the fastest."""
    import matplotlib.pyplot as plt

    with plt.style.context(STYLE):
        figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
        axes.plot(ratios, [100 * (place + 1) / len(ratios) for place in range(len(ratios))])
        axes.set(xlabel="time of the choice over that of the fastest", ylabel="% of the cells")
        axes.set_xlim(0.98, 3)
        figure.savefig(path)
        plt.close(figure)
