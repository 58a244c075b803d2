"""Charts as SVG text: grouped bars, and lines. No dependency, light background, readable in a page.

A figure is a grid of panels. Every panel has a title, a named vertical axis from zero, round tick
values and a legend; colours are told apart by colour-blind readers too (Okabe and Ito's set).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import batched

__all__ = ["BarPanel", "LinePanel", "distribution_points", "draw_figure"]

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
WIDTH, HEIGHT = 480, 320  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 58, 52  # of its plot, from its edges
PLOT_WIDTH, PLOT_HEIGHT = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
HEADING = 40  # height of the figure's own title
NOTE_HEIGHT = 20
MAX_POINTS = 400  # of a line; more cannot be seen
FONT = "font-family='system-ui, sans-serif'"


@dataclass(frozen=True, kw_only=True, slots=True)
class BarPanel:
    """Grouped bars.

    Attributes:
        groups: names along the horizontal axis; a comma starts another line.
        series: for each name in the legend, one value for each group; None leaves a gap.
    """

    title: str
    y_label: str
    groups: Sequence[str]
    series: Mapping[str, Sequence[float | None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class LinePanel:
    """Lines through points.

    Attributes:
        series: for each name in the legend, points (x, y) with rising x.
        log_x: a logarithmic horizontal axis; points at or below zero are left out.
    """

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Sequence[tuple[float, float]]]
    log_x: bool = False


def distribution_points(values: Sequence[float]) -> list[tuple[float, float]]:
    """The share of values, in percent, that is no larger than each: a line for LinePanel."""
    ordered = sorted(values)
    return [(value, 100 * (rank + 1) / len(ordered)) for rank, value in enumerate(ordered)]


def draw_figure(
    title: str,
    panels: Sequence[BarPanel | LinePanel],
    columns: int = 2,
    notes: Sequence[str] = (),
) -> str:
    """A whole SVG document.

    Args:
        title: above all panels.
        panels: row by row.
        columns: panels side by side.
        notes: lines below all panels, such as what short names stand for.
    """
    columns = max(1, min(columns, len(panels)))
    num_rows = max(1, math.ceil(len(panels) / columns))
    panels_end = HEADING + num_rows * HEIGHT
    width, height = columns * WIDTH, panels_end + NOTE_HEIGHT * len(notes)
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' "
        f"width='{width}' height='{height}' role='img' {FONT} font-size='12' fill='#222'>",
        f"<title>{escape(title)}</title>",
        f"<rect width='{width}' height='{height}' fill='#ffffff'/>",
        text_at(width / 2, 26, title, anchor="middle", size=16, weight="bold"),
    ]
    for row, in_row in enumerate(batched(panels, columns)):
        for column, panel in enumerate(in_row):
            parts.append(f"<g transform='translate({column * WIDTH} {HEADING + row * HEIGHT})'>")
            parts += draw_bars(panel) if isinstance(panel, BarPanel) else draw_lines(panel)
            parts.append("</g>")
    for number, note in enumerate(notes):
        parts.append(text_at(LEFT, panels_end + NOTE_HEIGHT * number + 12, note))
    return "\n".join([*parts, "</svg>", ""])


def draw_bars(panel: BarPanel) -> Iterator[str]:
    """The parts of a panel with bars."""
    values = [value for series in panel.series.values() for value in series if value is not None]
    ticks = round_ticks(max(values, default=1.0))
    yield from draw_frame(panel.title, panel.y_label, list(panel.series), ticks)
    group_width = PLOT_WIDTH / max(1, len(panel.groups))
    bar_width = 0.8 * group_width / max(1, len(panel.series))
    for group, name in enumerate(panel.groups):
        middle = LEFT + (group + 0.5) * group_width
        for row, part in enumerate(name.split(", ")):
            yield text_at(middle, HEIGHT - BOTTOM + 18 + 14 * row, part, anchor="middle")
        for number, (label, series) in enumerate(panel.series.items()):
            value = series[group]
            if value is None:
                continue
            x = middle - 0.4 * group_width + number * bar_width
            height = PLOT_HEIGHT * value / ticks[-1]
            y = HEIGHT - BOTTOM - height
            yield (
                f"<rect x='{x:.1f}' y='{y:.1f}' width='{bar_width - 1:.1f}' height='{height:.1f}' "
                f"fill='{colour(number)}'><title>{escape(f'{name}, {label}: {value:.4g}')}</title>"
                "</rect>"
            )
            centre = x + bar_width / 2
            yield text_at(centre, y - 3, short_number(value), anchor="middle", size=9)


def draw_lines(panel: LinePanel) -> Iterator[str]:
    """The parts of a panel with lines."""
    shown = {
        name: thin([(x, y) for x, y in points if x > 0 or not panel.log_x])
        for name, points in panel.series.items()
    }
    xs = [x for points in shown.values() for x, _ in points] or [1.0]
    y_ticks = round_ticks(max((y for points in shown.values() for _, y in points), default=1.0))
    x_ticks = decade_ticks(min(xs), max(xs)) if panel.log_x else round_ticks(max(xs))
    yield from draw_frame(panel.title, panel.y_label, list(panel.series), y_ticks)

    def place_x(x: float) -> float:
        low, high = x_ticks[0], x_ticks[-1]
        share = math.log(x / low) / math.log(high / low) if panel.log_x else x / high
        return LEFT + PLOT_WIDTH * share

    for tick in x_ticks:
        x = place_x(tick)
        yield line(x, TOP, x, HEIGHT - BOTTOM, "#eeeeee")
        yield text_at(x, HEIGHT - BOTTOM + 16, f"{tick:g}", anchor="middle")
    yield text_at(LEFT + PLOT_WIDTH / 2, HEIGHT - 14, panel.x_label, anchor="middle")
    for number, points in enumerate(shown.values()):
        path = " ".join(
            f"{place_x(x):.1f},{HEIGHT - BOTTOM - PLOT_HEIGHT * y / y_ticks[-1]:.1f}"
            for x, y in points
        )
        yield f"<polyline points='{path}' fill='none' stroke='{colour(number)}' stroke-width='2'/>"


def draw_frame(
    title: str, y_label: str, legend: Sequence[str], y_ticks: Sequence[float]
) -> Iterator[str]:
    """Title, legend, vertical axis and its grid."""
    yield text_at(LEFT, 18, title, size=13, weight="bold")
    x = float(LEFT)
    for number, name in enumerate(legend):
        yield f"<rect x='{x:.1f}' y='29' width='10' height='10' fill='{colour(number)}'/>"
        yield text_at(x + 14, 38, name, size=11)
        x += 26 + 6.5 * len(name)
    for tick in y_ticks:
        y = HEIGHT - BOTTOM - PLOT_HEIGHT * tick / y_ticks[-1]
        yield line(LEFT, y, WIDTH - RIGHT, y, "#dddddd")
        yield text_at(LEFT - 6, y + 4, f"{tick:g}", anchor="end")
    yield line(LEFT, HEIGHT - BOTTOM, WIDTH - RIGHT, HEIGHT - BOTTOM, "#222222")
    middle = TOP + PLOT_HEIGHT / 2
    yield (
        f"<text x='14' y='{middle:.1f}' text-anchor='middle' "
        f"transform='rotate(-90 14 {middle:.1f})'>{escape(y_label)}</text>"
    )


def round_ticks(highest: float) -> list[float]:
    """From zero to at least `highest`, in four to eight steps of 1, 2 or 5 times a power of ten."""
    if highest <= 0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(highest / 4))
    step = next(factor * power for factor in (1, 2, 5, 10) if highest / (factor * power) <= 8)
    count = math.ceil(highest / step - 1e-9)
    return [round(number * step, 12) for number in range(count + 1)]


def decade_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten, from the last at or below `low` to the first from `high`."""
    exponents = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    steps = [factor * 10.0**exponent for exponent in exponents for factor in (1, 2, 5)]
    first = max(index for index, step in enumerate(steps) if step <= low * (1 + 1e-9))
    last = min(index for index, step in enumerate(steps) if step >= high * (1 - 1e-9))
    return steps[first : max(last, first + 1) + 1]


def thin(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """At most MAX_POINTS of the points, the last among them."""
    stride = math.ceil(len(points) / MAX_POINTS)
    return points if stride <= 1 else [*points[:-1:stride], points[-1]]


def short_number(value: float) -> str:
    """Three digits, or all digits of a whole number."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def colour(number: int) -> str:
    """The colour of a series."""
    return COLOURS[number % len(COLOURS)]


def line(x1: float, y1: float, x2: float, y2: float, stroke: str) -> str:
    """A thin straight line."""
    return f"<line x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}' stroke='{stroke}'/>"


def text_at(
    x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, weight: str = "normal"
) -> str:
    """A piece of text."""
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' font-size='{size}' "
        f"font-weight='{weight}'>{escape(text)}</text>"
    )
