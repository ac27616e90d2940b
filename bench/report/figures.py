"""The report's main chart as PNG and SVG files, for a README or a paper."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...common.text import printable
from ..results import Interval, Results, Row
from .summary import UNTOUCHED, ErrorBar, Section, Series, engine_name, line_name, sections

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

COLOURS = ("#2563c9", "#c2571a", "#12825f", "#8a4fbf", "#a67c00", "#c23b6b")
MARKERS = ("o", "s", "^", "D", "v", "P")
REFERENCE = "#5b6472"
INK = "#1d2430"
FAR_APART = 6  # latencies that differ by more are drawn by factors, as on the page
ASIDE = 1.03  # how far a line of the same values is moved along the axis of k
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
        lines = _lines(chosen)
        with drawn(paths, (8, 0.75 + 3.1 * len(chosen)), rows=len(chosen)) as grid:
            for (left, right), section, series in zip(grid, chosen, lines, strict=True):
                _latency(left, section, series)
                _quality(right, section, series)
        written += paths
    return tuple(written)


def _token_figures(
    phases: Mapping[tuple[int, str], Sequence[Section]], directory: Path
) -> Iterator[Path]:
    """A figure per batch size, with a row of charts per language model; yields the files."""
    batches = sorted({batch for batch, _ in phases})
    for index, batch in enumerate(batches):
        rows = [phase_sections for (size, _), phase_sections in phases.items() if size == batch]
        name = "tokens_perplexity" if index == 0 else f"tokens_perplexity_batch{batch}"
        paths = [directory / f"{name}{kind}" for kind in (".png", ".svg")]
        columns = 1 + max(map(len, rows))
        size = (4 * columns, 0.9 + 3.1 * len(rows))
        lines = iter(_lines([section for phase_sections in rows for section in phase_sections]))
        with drawn(paths, size, rows=len(rows), columns=columns, legend=3) as grid:
            for axes, phase_sections in zip(grid, rows, strict=True):
                drawn_lines = [next(lines) for _ in phase_sections]
                for place, section, own_lines in zip(
                    axes, phase_sections, drawn_lines, strict=False
                ):
                    _tokens_per_second(place, section, own_lines)
                _quality(axes[len(phase_sections)], phase_sections[0], drawn_lines[0])
                for place in axes[len(phase_sections) + 1 :]:
                    place.set_visible(False)
        yield from paths


def _lines(chosen: Sequence[Section]) -> list[list[Series]]:
    """The lines of each section, one for an engine and precision where each k has one lowering.

    The same name looks the same in all of them; what is exported comes before PyTorch.
    """
    rows = [row for section in chosen for row in section.rows]
    precisions = {row.precision for row in rows if not row.engine.startswith("pytorch")}
    by_section: list[dict[str, list[Row]]] = []
    for section in chosen:
        lines: dict[str, list[Row]] = {}
        for row in section.rows:
            precise = len(precisions) > 1 and not row.engine.startswith("pytorch")
            name = f"{engine_name(row)}, {row.precision.upper()}" if precise else engine_name(row)
            lines.setdefault(name, []).append(row)
        apart = [name for name, line in lines.items() if len({row.k for row in line}) < len(line)]
        for row in (row for name in apart for row in lines.pop(name)):
            lines.setdefault(line_name(row), []).append(row)
        by_section.append(lines)
    names = sorted(dict.fromkeys(n for lines in by_section for n in lines), key=_is_pytorch)
    return [
        [Series(n, names.index(n), _by_k(lines[n])) for n in names if n in lines]
        for lines in by_section
    ]


def _is_pytorch(name: str) -> bool:
    return name.startswith("PyTorch")


def _by_k(rows: Sequence[Row]) -> tuple[Row, ...]:
    return tuple(sorted(rows, key=lambda row: row.k))


def _tokens_per_second(axes: Axes, section: Section, lines: Sequence[Series]) -> None:
    axes.set_title(f"{section.model}: {section.phase}, batch {section.batch}")
    axes.set_ylabel("tokens per second")
    if section.reference is not None and section.reference.tokens_per_s is not None:
        _horizontal(axes, section.reference.tokens_per_s)
    for line in lines:
        bars = {row.k: bar for row in line.rows if (bar := _rate(row)) is not None}
        _with_bars(axes, list(bars), list(bars.values()), label=line.name, **look(line.look))
    rates = [row.tokens_per_s for row in section.all_rows if row.tokens_per_s is not None]
    if max(rates, default=1.0) > FAR_APART * min(rates, default=1.0):
        by_factors(axes)
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
                columnspacing=1.2,
            )
        _show_every_character(figure)
        for path in paths:
            # Without a date in it, the same results make the same file.
            figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _show_every_character(figure: Figure) -> None:
    """Writes characters that the font lacks by their numbers, in every text of a figure."""
    from matplotlib.font_manager import FontProperties, findfont, get_font
    from matplotlib.text import Text

    glyphs = get_font(findfont(FontProperties())).get_charmap()
    for text in figure.findobj(Text):
        shown = "".join(
            c if ord(c) in glyphs or c == "\n" else c.encode("ascii", "backslashreplace").decode()
            for c in printable(text.get_text(), several=True)
        )
        text.set_text(shown)


def by_factors(axes: Axes) -> None:
    """A logarithmic axis of values, with ticks that read as numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _latency(axes: Axes, section: Section, lines: Sequence[Series]) -> None:
    axes.set_title(f"{section.model}: latency, batch {section.batch}")
    axes.set_ylabel("median latency, ms")
    reference = None if section.reference is None else section.reference.latency_ms
    if reference is not None:
        _horizontal(axes, reference.median)
        rounds = [min(ms, section.top_ms) for ms in reference.rounds]
        axes.axhspan(min(rounds), max(rounds), color=REFERENCE, alpha=0.13, linewidth=0)
    for line in lines:
        measured = [(row.k, row.latency_ms) for row in line.rows if row.latency_ms is not None]
        bars = [section.bar(latency) for _, latency in measured]
        _with_bars(axes, [k for k, _ in measured], bars, label=line.name, **look(line.look))
        # A bar that goes on outside ends in an arrow.
        mark = look(line.look) | {"marker": "^", "clip_on": False}
        for k in (k for (k, _), bar in zip(measured, bars, strict=True) if bar.cut):
            axes.plot(k, 0.985 * section.top_ms, **mark)
    medians = [row.median_ms for row in section.all_rows if row.median_ms is not None]
    if max(medians, default=1.0) > FAR_APART * min(medians, default=1.0):
        by_factors(axes)
        axes.set_ylim(0.75 * min(medians), 1.1 * section.top_ms)
    else:
        axes.set_ylim(0, section.top_ms)
    log2_axis(axes, section.ks, f"experts computed, k of {section.experts}")


def _quality(axes: Axes, section: Section, lines: Sequence[Series]) -> None:
    """What is kept of the accuracy, or the perplexity, beside the untouched model's."""
    by_perplexity, reference = section.quality == "perplexity", section.reference
    if by_perplexity:
        axes.set_title(f"{section.model}: perplexity")
        axes.set_ylabel("perplexity, less is better")
        if reference is not None and reference.perplexity is not None:
            _horizontal(axes, reference.perplexity.value)
    else:
        axes.set_title(f"{section.model}: accuracy kept")
        axes.set_ylabel("accuracy kept, of PyTorch's")
        _horizontal(axes, 1.0)
    ends = [1.0]
    for index, line in enumerate(_different(lines)):
        bars: dict[int, ErrorBar] = {}
        for row in line.rows:
            if by_perplexity and row.perplexity is not None:
                bars[row.k] = ErrorBar.around(row.perplexity.value, row.perplexity.interval)
            elif not by_perplexity and row.kept is not None:
                bars[row.k] = ErrorBar.around(row.kept, row.kept_interval)
        ends += [bar.value - bar.below for bar in bars.values()]
        ends += [bar.value + bar.above for bar in bars.values()]
        # Precisions mostly agree: beside one another all can be seen.
        ks = [k * ASIDE**index for k in bars]
        _with_bars(axes, ks, list(bars.values()), **look(line.look))
    if section.quality is None:
        axes.text(
            0.5, 0.5, "not measured: no labels", transform=axes.transAxes, ha="center", color=INK
        )
    if not by_perplexity:
        span = max(ends) - min(ends)
        room = 0.08 * max(0.02, span)
        axes.set_ylim(min(ends) - room, max(ends) + room)
        in_percent(axes.yaxis, decimals=0 if span > 0.05 else 1)
    log2_axis(axes, section.ks, f"experts computed, k of {section.experts}")


def _different(lines: Sequence[Series]) -> list[Series]:
    """The lines without those whose points another of the same precision has."""

    def points(line: Series) -> set[tuple[Any, ...]]:
        return {(row.precision, row.k, row.kept, row.perplexity) for row in line.rows}

    kept: list[Series] = []
    for line in sorted(lines, key=lambda line: -len(line.rows)):
        if not any(points(line) <= points(other) for other in kept):
            kept.append(line)
    return kept


def _with_bars(axes: Axes, ks: Sequence[float], bars: Sequence[ErrorBar], **drawing: Any) -> None:
    error = [[bar.below for bar in bars], [bar.above for bar in bars]]
    values = [bar.value for bar in bars]
    axes.errorbar(ks, values, yerr=error, capsize=2.5, elinewidth=1, **drawing)


def _horizontal(axes: Axes, value: float) -> None:
    axes.axhline(value, color=REFERENCE, linestyle="--", linewidth=1.4, label=UNTOUCHED)


def look(index: int) -> dict[str, Any]:
    """Returns how the line of this number is drawn in every chart."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
        "markersize": 5,
        "linewidth": 1.8,
    }


def in_percent(axis: Axis, decimals: int = 0) -> None:
    """Shares along an axis, as percentages."""
    from matplotlib.ticker import PercentFormatter

    axis.set_major_formatter(PercentFormatter(xmax=1, decimals=decimals))


def log2_axis(
    axes: Axes, ticks: Sequence[float], label: str, text: Callable[[float], str] = "{:g}".format
) -> None:
    """A logarithmic axis with a tick for each value: k is halved from point to point."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(list(ticks)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
    axes.set_xlabel(label)
