"""Charts as inline SVG and HTML. They carry CSS classes instead of colours, so that one page serves both themes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup, escape

WIDTH, HEIGHT = 440, 270
LEFT, RIGHT, TOP, BOTTOM = 54, 424, 12, 224  # edges of the plot area
COLOURS = 8
SHAPES: tuple[Callable[[float, float], tuple[tuple[float, float], ...]], ...] = (  # corners, or none for a circle
    lambda x, y: (),
    lambda x, y: ((x - 4, y - 4), (x + 4, y - 4), (x + 4, y + 4), (x - 4, y + 4)),
    lambda x, y: ((x, y - 5.5), (x + 5, y + 4), (x - 5, y + 4)),
    lambda x, y: ((x, y - 6), (x + 6, y), (x, y + 6), (x - 6, y)),
    lambda x, y: ((x, y + 5.5), (x + 5, y - 4), (x - 5, y - 4)),
)


@dataclass(frozen=True)
class Axis:
    """An axis with its label. format: writes a tick. low, high: fixed ends, by default those of the data."""

    label: str
    format: Callable[[float], str]
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Point:
    """A point of a series. tip: text of its tooltip. low, high: ends of its confidence bar. faint: drawn hollow."""

    x: float
    y: float
    tip: str
    low: float | None = None
    high: float | None = None
    faint: bool = False


@dataclass(frozen=True)
class Series:
    """Points of one colour and shape, in the order of the line through them."""

    name: str
    points: tuple[Point, ...]
    line: bool = True


@dataclass(frozen=True)
class Bar:
    """A horizontal bar of stacked segments: (class, share of the longest bar in percent, tip)."""

    name: str
    total: str
    segments: tuple[tuple[str, float, str], ...]


@dataclass(frozen=True)
class Bars:
    """Bars on one scale. title: shown if there are several groups."""

    title: str
    bars: tuple[Bar, ...]


def tag(name: str, *children: str | Markup, **attributes: object) -> Markup:
    """Return an element. Everything but Markup is escaped.

    A final underscore of an attribute's name is dropped, others become hyphens.
    """
    pairs = ((key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items() if value is not None)
    written = Markup("").join(Markup(' {}="{}"').format(key, value) for key, value in pairs)
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), written, Markup("").join(map(escape, children)))


def plot(
    title: str, series: Sequence[Series], x: Axis, y: Axis, frontier: Sequence[tuple[float, float]] = ()
) -> Markup:
    """Draw an x-y chart. frontier: (x, y) in rising order, drawn as steps.

    Screen readers read the title only, as the numbers are in a table next to the chart.
    """
    points = [point for one in series for point in one.points]
    heights = [value for p in points for value in (p.y, p.low, p.high) if value is not None]
    across, up = _ticks(x, [p.x for p in points]), _ticks(y, heights)
    scale = _Scale((across[0], across[-1]), (up[0], up[-1]))
    children = [*_grid(scale, across, up, x, y), *_steps(scale, frontier)]
    for n, one in enumerate(series):
        children += _series(scale, one, n)
    return tag("svg", *children, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=title, class_="plot")


def swatch(n: int, *, line: bool) -> Markup:
    """Draw the sign of the n-th series for a legend."""
    drawn = [tag("line", x1=0, x2=22, y1=7, y2=7)] if line else []
    inside = tag("g", *drawn, _shape(n, 11, 7), class_=f"s{n % COLOURS}")
    return tag("svg", inside, viewBox="0 0 22 14", width=22, height=14, aria_hidden="true")


def bars(rows: Sequence[tuple[str, str, Sequence[tuple[str, float, str]]]], title: str = "") -> Bars:
    """Scale bars to the longest. rows: (name, total as text, segments of (class, amount, tip))."""
    longest = max((sum(amount for _, amount, _ in parts) for _, _, parts in rows), default=0.0) or 1.0
    drawn = (
        Bar(name, total, tuple((kind, 100 * amount / longest, tip) for kind, amount, tip in parts if amount > 0))
        for name, total, parts in rows
    )
    return Bars(title, tuple(drawn))


def stack(bar: Bar) -> Markup:
    """Draw a bar in the full width of its container."""
    drawn, at = [], 0.0
    for kind, width, tip in bar.segments:
        drawn.append(tag("rect", x=f"{at:.3f}%", width=f"{width:.3f}%", height=18, class_=kind, data_tip=tip))
        at += width
    return tag("svg", *drawn, width="100%", height=18, class_="stack", aria_hidden="true")


# Parts of a plot --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Scale:
    """Maps values to coordinates of the drawing."""

    across: tuple[float, float]
    up: tuple[float, float]

    def x(self, value: float) -> float:
        low, high = self.across
        return round(LEFT + (RIGHT - LEFT) * (value - low) / (high - low), 1)

    def y(self, value: float) -> float:
        low, high = self.up
        return round(BOTTOM - (BOTTOM - TOP) * (value - low) / (high - low), 1)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round numbers that span low to high."""
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-300):  # a range too small for ticks
        low, high = low - (abs(low) / 2 or 0.5), high + (abs(high) / 2 or 0.5)
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{n * step:.12g}") for n in range(first, last + 1)]


def _ticks(axis: Axis, values: Sequence[float]) -> list[float]:
    low = min(values) if axis.low is None else axis.low
    high = max(values) if axis.high is None else axis.high
    return ticks(low, high)


def _grid(scale: _Scale, across: Sequence[float], up: Sequence[float], x: Axis, y: Axis) -> list[Markup]:
    drawn = []
    for value in up:
        at = scale.y(value)
        drawn.append(tag("line", x1=LEFT, x2=RIGHT, y1=at, y2=at, class_="grid"))
        drawn.append(tag("text", y.format(value), x=LEFT - 7, y=at, class_="tick y"))
    for value in across:
        at = scale.x(value)
        drawn.append(tag("line", x1=at, x2=at, y1=BOTTOM, y2=BOTTOM + 4, class_="axis"))
        drawn.append(tag("text", x.format(value), x=at, y=BOTTOM + 20, class_="tick x"))
    drawn.append(tag("line", x1=LEFT, x2=RIGHT, y1=BOTTOM, y2=BOTTOM, class_="axis"))
    drawn.append(tag("text", x.label, x=(LEFT + RIGHT) / 2, y=HEIGHT - 4, class_="label"))
    return drawn


def _steps(scale: _Scale, frontier: Sequence[tuple[float, float]]) -> list[Markup]:
    """Draw a frontier as steps. Between two settings, the lower quality is attainable."""
    if len(frontier) < 2:
        return []
    corners = [(scale.x(frontier[0][0]), scale.y(frontier[0][1]))]
    for (_, before), (x, y) in pairwise(frontier):
        corners += [(scale.x(x), scale.y(before)), (scale.x(x), scale.y(y))]
    return [tag("polyline", points=_corners(corners), class_="frontier")]


def _series(scale: _Scale, series: Series, n: int) -> list[Markup]:
    drawn = []
    if series.line and len(series.points) > 1:
        drawn.append(tag("polyline", points=_corners([(scale.x(p.x), scale.y(p.y)) for p in series.points])))
    drawn += [_point(scale, point, n) for point in series.points]
    return [tag("g", *drawn, class_=f"s{n % COLOURS}")]


def _point(scale: _Scale, point: Point, n: int) -> Markup:
    x, y = scale.x(point.x), scale.y(point.y)
    parts = []
    if point.low is not None and point.high is not None:
        parts.append(tag("line", x1=x, x2=x, y1=scale.y(point.low), y2=scale.y(point.high), class_="whisker"))
    parts += [_shape(n, x, y), tag("circle", cx=x, cy=y, r=11, class_="reach")]
    return tag("g", *parts, class_="point faint" if point.faint else "point", data_tip=point.tip)


def _shape(n: int, x: float, y: float) -> Markup:
    corners = SHAPES[n % len(SHAPES)](x, y)
    if not corners:
        return tag("circle", cx=x, cy=y, r=4.5, class_="mark")
    return tag("polygon", points=_corners(corners), class_="mark")


def _corners(corners: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
