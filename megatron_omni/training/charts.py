"""Charts of the report: inline SVG in the page's CSS colours, so that it follows light and dark."""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megatron_omni.training.run_log import Series

# Stand-ins that matplotlib draws with, and the CSS variables that take their place.
INK, GRID = "#010101", "#010102"
COLOURS = ("#010111", "#010112", "#010113", "#010114", "#010115")
_VARIABLES = {INK: "--muted", GRID: "--grid"} | {c: f"--series-{n}" for n, c in enumerate(COLOURS, 1)}
_STYLE = {
    "svg.fonttype": "none",
    "font.size": 8,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GRID,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.formatter.limits": (-3, 4),
    "axes.formatter.useoffset": False,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
}
_MARGINS = (0.54, 0.1, 0.22, 0.17)
"""Left, right, bottom and top in inches, with room for the numbers. Measuring those takes half the time."""
_MOST_POINTS = 300


@dataclass(frozen=True)
class Line:
    """One curve. Colours are numbered from 0, as in the legend."""

    series: Series
    colour: int = 0
    errors: Sequence[float] | None = None
    """Standard errors, drawn as bars."""
    markers: bool = False
    dashed: bool = False
    faint: bool = False


def line_chart(
    name: str,
    lines: list[Line],
    *,
    size: tuple[float, float],
    from_zero: bool = False,
    limit: float | None = None,
) -> str:
    """SVG of curves over iterations.

    `name` is for screen readers, `size` in inches, `from_zero` includes 0 in the vertical axis, and `limit`
    is drawn as a dashed level.
    """
    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": f"{name}{size}"}):
        figure, axes = _axes(size)
        for line in lines:
            series = line.series if line.errors else thin(line.series)
            style = {"color": COLOURS[line.colour], "linestyle": (0, (4, 2)) if line.dashed else "-"}
            if line.faint:
                style |= {"alpha": 0.35, "linewidth": 0.9}
            if line.markers or len(series) == 1:
                style |= {"marker": "o", "markersize": 3.5}
            axes.errorbar(series.iterations, series.values, line.errors, elinewidth=1, **style)
        values = [value for line in lines for value in line.series.values]
        if from_zero or min(values) == max(values):
            axes.set_ylim(*_range_with_zero(values))
        if limit is not None:
            axes.axhline(limit, color=INK, linewidth=0.8, linestyle=(0, (2, 3)))
        return _svg(figure, name)


def stacked_chart(name: str, layers: list[Series], *, size: tuple[float, float]) -> str:
    """SVG of series on the same iterations, stacked from the first upwards."""
    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": f"{name}{size}"}):
        figure, axes = _axes(size)
        thinned = [thin(layer) for layer in layers]
        axes.stackplot(
            thinned[0].iterations,
            [layer.values for layer in thinned],
            colors=COLOURS,
            step="mid" if len(thinned[0]) > 1 else None,
            linewidth=0,
        )
        axes.set_ylim(bottom=0)
        return _svg(figure, name)


def thin(series: Series) -> Series:
    """At most a few hundred points: means of neighbours."""
    stride = -(-len(series) // _MOST_POINTS)
    if stride <= 1:
        return series
    cuts = range(0, len(series), stride)
    blocks = [series.values[start : start + stride] for start in cuts]
    return Series([series.iterations[start] for start in cuts], [sum(block) / len(block) for block in blocks])


def smooth(series: Series) -> Series:
    """Centred running mean over about a tenth of the run."""
    half = max(1, len(series) // 20)
    windows = [series.values[max(0, at - half) : at + half + 1] for at in range(len(series))]
    return Series(series.iterations, [sum(window) / len(window) for window in windows])


def _axes(size: tuple[float, float]) -> tuple[Figure, Axes]:
    width, height = size
    left, right, bottom, top = _MARGINS
    figure = Figure(figsize=size)
    axes = figure.add_axes(
        (left / width, bottom / height, 1 - (left + right) / width, 1 - (bottom + top) / height)
    )
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.ticklabel_format(axis="x", style="plain")
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.margins(x=0.02)
    return figure, axes


def _range_with_zero(values: list[float]) -> tuple[float, float]:
    low, high = min(0.0, *values), max(0.0, *values)
    margin = 0.06 * (high - low) or 1.0
    return low - margin if low < 0 else 0.0, high + margin


def _svg(figure: Figure, name: str) -> str:
    """The figure as an SVG element that can stand in a page: scaled by it, in its font and colours."""
    buffer = io.StringIO()
    no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=True, metadata=no_metadata)
    svg = buffer.getvalue()
    _, _, width, height = re.search(r'viewBox="([^"]*)"', svg)[1].split()
    body = svg[svg.index("</style>") : svg.rindex("</svg>")].removeprefix("</style>").strip()
    body = body.removeprefix("</defs>")
    used = set(re.findall(r"#([\w.-]+)", body))
    body = re.sub(r' id="([\w.-]+)"', lambda match: match[0] if match[1] in used else "", body)
    body = re.sub(r"font-family: [^;]*; ", "", body)
    body = re.sub(r"\d+\.\d{3,}", lambda match: f"{float(match[0]):.2f}", body)
    body = re.sub(r"\s*\n\s*", " ", body)
    for stand_in, variable in _VARIABLES.items():
        body = body.replace(stand_in, f"var({variable})")
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{name}">{body}</svg>'
