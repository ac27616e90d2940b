"""The report's main chart as PNG and SVG files, for a README or a paper."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..results import Interval, Results, Row
from .summary import UNTOUCHED, ErrorBar, Section, limit_lines, sections

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#2563c9", "#c2571a", "#12825f", "#8a4fbf", "#a67c00", "#c23b6b")
MARKERS = ("o", "s", "^", "D", "v", "P")
REFERENCE = "#5b6472"
INK = "#1d2430"
FAR_APART = 6  # latencies that differ by more are drawn by factors, as on the page
STYLE = Path(__file__).parent / "assets" / "figures.mplstyle"


def figures(results: Results, directory: Path) -> tuple[Path, ...]:
    """Writes latency beside accuracy or perplexity over k, PNG and SVG per batch; returns them.

    The smallest batch size is `latency_accuracy`, others `latency_accuracy_batch{b}`; each holds a
    row of two charts per model. Of language models `tokens_perplexity` holds tokens per second in
    each phase and perplexity.
    """
    by_batch: dict[int, list[Section]] = {}
    phases: dict[tuple[int, str], list[Section]] = {}
    for section in sections(results):
        if section.series and section.phase is None:
            by_batch.setdefault(section.batch, []).append(section)
        elif section.series:
            phases.setdefault((section.batch, section.model), []).append(section)
    written = [*_token_figures(phases, directory)]
    for index, (batch, chosen) in enumerate(sorted(by_batch.items())):
        name = "latency_accuracy" if index == 0 else f"latency_accuracy_batch{batch}"
        paths = [directory / f"{name}{kind}" for kind in (".png", ".svg")]
        with drawn(paths, (8, 0.75 + 3.1 * len(chosen)), rows=len(chosen), legend=3) as grid:
            for (left, right), section in zip(grid, chosen, strict=True):
                _latency(left, section)
                _quality(right, section)
        written += paths
    return tuple(written)


def _token_figures(
    phases: Mapping[tuple[int, str], Sequence[Section]], directory: Path
) -> Iterator[Path]:
    """A figure per batch size, with a row of charts per language model; yields the files."""
    batches = sorted({batch for batch, _ in phases})
    for index, batch in enumerate(batches):
        rows = [found for (each, _), found in phases.items() if each == batch]
        name = "tokens_perplexity" if index == 0 else f"tokens_perplexity_batch{batch}"
        paths = [directory / f"{name}{kind}" for kind in (".png", ".svg")]
        columns = 1 + max(map(len, rows))
        size = (4 * columns, 0.9 + 3.1 * len(rows))
        with drawn(paths, size, rows=len(rows), columns=columns, legend=3) as grid:
            for axes, found in zip(grid, rows, strict=True):
                for place, section in zip(axes, found, strict=False):
                    _tokens_per_second(place, section)
                _quality(axes[len(found)], found[0])
                for place in axes[len(found) + 1 :]:
                    place.set_visible(False)
        yield from paths


def _tokens_per_second(axes: Axes, section: Section) -> None:
    axes.set_title(f"{section.model}: {section.phase}, batch {section.batch}")
    axes.set_ylabel("tokens per second")
    if section.reference is not None and section.reference.tokens_per_s is not None:
        _horizontal(axes, section.reference.tokens_per_s)
    for line in section.series:
        bars = {row.k: bar for row in line.rows if (bar := _rate(row)) is not None}
        _with_bars(axes, list(bars), list(bars.values()), label=line.name, **_look(line.look))
    rates = [row.tokens_per_s for row in section.all_rows if row.tokens_per_s is not None]
    if max(rates, default=1.0) > FAR_APART * min(rates, default=1.0):
        _by_factors(axes)
    else:
        axes.set_ylim(bottom=0)
    log2_axis(axes, section.ks, f"experts for a token, k of {section.experts}")


def _rate(row: Row) -> ErrorBar | None:
    """Tokens per second, with those of the slowest and the fastest round."""
    if row.tokens_per_s is None or row.latency_ms is None:
        return None
    rounds = [row.tokens_per_s * row.latency_ms.median / ms for ms in row.latency_ms.rounds]
    return ErrorBar.around(row.tokens_per_s, Interval(min(rounds), max(rounds)))


@contextmanager
def drawn(
    paths: Sequence[Path],
    size: tuple[float, float],
    *,
    rows: int = 1,
    columns: int = 2,
    legend: int = 4,
    **subplots: Any,
) -> Iterator[Any]:
    """Yields a grid of axes in the report's style; the files are written when the context ends.

    `size` is in inches. Below stands one legend of what the axes name, `legend` names in a row.
    """
    from matplotlib import style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with style.context(STYLE):
        figure = Figure(figsize=size, dpi=200, layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(rows, columns, squeeze=False, **subplots)
        yield grid
        handles: dict[str, Any] = {}
        for axes in grid.flat:
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                handles.setdefault(label, handle)
        if handles:
            figure.legend(
                list(handles.values()),
                list(handles),
                loc="outside lower center",
                ncols=min(legend, len(handles)),
            )
        for path in paths:
            # Without a date in it, the same results make the same file.
            figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _by_factors(axes: Axes) -> None:
    """A logarithmic axis of values, with ticks that read as numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _latency(axes: Axes, section: Section) -> None:
    axes.set_title(f"{section.model}: latency, batch {section.batch}")
    axes.set_ylabel("median latency, ms")
    reference = None if section.reference is None else section.reference.latency_ms
    if reference is not None:
        _horizontal(axes, reference.median)
        rounds = [min(each, section.top_ms) for each in reference.rounds]
        axes.axhspan(min(rounds), max(rounds), color=REFERENCE, alpha=0.13, linewidth=0)
    for line in section.series:
        measured = [(row.k, row.latency_ms) for row in line.rows if row.latency_ms is not None]
        bars = [section.bar(latency) for _, latency in measured]
        _with_bars(axes, [k for k, _ in measured], bars, label=line.name, **_look(line.look))
        # A bar that goes on outside ends in an arrow.
        look = _look(line.look) | {"marker": "^", "clip_on": False}
        for k in (k for (k, _), bar in zip(measured, bars, strict=True) if bar.cut):
            axes.plot(k, 0.985 * section.top_ms, **look)
    for name, points in limit_lines(section).items():
        ks, least = zip(*points, strict=True)
        axes.plot(ks, least, color=REFERENCE, linestyle=":", linewidth=1.2, label=name)
    medians = [row.median_ms for row in section.all_rows if row.median_ms is not None]
    if max(medians, default=1.0) > FAR_APART * min(medians, default=1.0):
        _by_factors(axes)
        axes.set_ylim(0.75 * min(medians), 1.1 * section.top_ms)
    else:
        axes.set_ylim(0, section.top_ms)
    log2_axis(axes, section.ks, f"experts kept, k of {section.experts}")


def _quality(axes: Axes, section: Section) -> None:
    """What is kept of the accuracy, or the perplexity, beside the untouched model's."""
    from matplotlib.ticker import PercentFormatter

    by_perplexity, reference = section.quality == "perplexity", section.reference
    if by_perplexity:
        axes.set_title(f"{section.model}: perplexity")
        axes.set_ylabel("perplexity, less is better")
        if reference is not None and reference.perplexity is not None:
            _horizontal(axes, reference.perplexity.value)
    else:
        axes.set_title(f"{section.model}: accuracy kept")
        axes.set_ylabel("accuracy kept, of PyTorch's")
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
        _horizontal(axes, 1.0)
    for index, line in enumerate(section.series):
        bars: dict[int, ErrorBar] = {}
        for row in line.rows:
            if by_perplexity and row.perplexity is not None:
                bars[row.k] = ErrorBar.around(row.perplexity.value, row.perplexity.interval)
            elif not by_perplexity and row.kept is not None:
                bars[row.k] = ErrorBar.around(row.kept, row.kept_interval)
        # Engines with one k mostly agree: earlier marks are larger, so that all can be seen.
        look = _look(line.look) | {"markersize": max(3.5, 9 - 2 * index)}
        _with_bars(axes, list(bars), list(bars.values()), **look)
    if section.quality is None:
        axes.text(
            0.5, 0.5, "not measured: no labels", transform=axes.transAxes, ha="center", color=INK
        )
    if not by_perplexity:
        axes.set_ylim(bottom=0, top=max(1.05, axes.get_ylim()[1]))
    log2_axis(axes, section.ks, f"experts kept, k of {section.experts}")


def _with_bars(axes: Axes, ks: Sequence[int], bars: Sequence[ErrorBar], **look: Any) -> None:
    error = [[bar.below for bar in bars], [bar.above for bar in bars]]
    values = [bar.value for bar in bars]
    axes.errorbar(ks, values, yerr=error, capsize=2.5, elinewidth=1, **look)


def _horizontal(axes: Axes, value: float) -> None:
    axes.axhline(value, color=REFERENCE, linestyle="--", linewidth=1.4, label=UNTOUCHED)


def _look(index: int) -> dict[str, Any]:
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
        "markersize": 5,
        "linewidth": 1.8,
    }


def log2_axis(axes: Axes, ticks: Sequence[int], label: str) -> None:
    """A logarithmic axis with a tick for each value: k is halved from point to point."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(list(ticks)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel(label)
