"""Charts as small inline SVG and HTML: no colours of their own, only classes, so that one page serves both themes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup, escape

WIDTH, HEIGHT = 440, 270
LEFT, RIGHT, TOP, BOTTOM = 54, 424, 12, 224  # of the plot's area
COLOURS = 8
SHAPES: tuple[Callable[[float, float], tuple[tuple[float, float], ...]], ...] = (  # corners; none: a circle
    lambda x, y: (),
    lambda x, y: ((x - 4, y - 4), (x + 4, y - 4), (x + 4, y + 4), (x - 4, y + 4)),
    lambda x, y: ((x, y - 5.5), (x + 5, y + 4), (x - 5, y + 4)),
    lambda x, y: ((x, y - 6), (x + 6, y), (x, y + 6), (x - 6, y)),
    lambda x, y: ((x, y + 5.5), (x + 5, y - 4), (x - 5, y - 4)),
)


@dataclass(frozen=True)
class Axis:
    """label stands beside it. format writes a tick. low, high: ends, where they are not to follow the data."""

    label: str
    format: Callable[[float], str]
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Point:
    """tip: what is shown on it. low, high: the ends of its confidence bar. faint: drawn hollow."""

    x: float
    y: float
    tip: str
    low: float | None = None
    high: float | None = None
    faint: bool = False


@dataclass(frozen=True)
class Series:
    """Points of one colour and shape, in the order in which a line joins them."""

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
    """Bars on one scale, under a title of their own where there are several such groups."""

    title: str
    bars: tuple[Bar, ...]


def tag(name: str, *children: str | Markup, **attributes: object) -> Markup:
    """An element; a final underscore of an attribute's name goes, others become hyphens. All but Markup is escaped."""
    pairs = ((key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items() if value is not None)
    written = Markup("").join(Markup(' {}="{}"').format(key, value) for key, value in pairs)
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), written, Markup("").join(map(escape, children)))


def plot(
    title: str, series: Sequence[Series], x: Axis, y: Axis, frontier: Sequence[tuple[float, float]] = ()
) -> Markup:
    """An x-y chart. frontier: (x, y) in rising order, drawn as steps.

    A chart reads as one picture with the title as its name; what it says in numbers stands in a table beside it.
    """
    points = [point for one in series for point in one.points]
    heights = [value for p in points for value in (p.y, p.low, p.high) if value is not None]
    across, up = _ticks(x, [p.x for p in points]), _ticks(y, heights)
    place = _Place((across[0], across[-1]), (up[0], up[-1]))
    children = [*_grid(place, across, up, x, y), *_steps(place, frontier)]
    for n, one in enumerate(series):
        children += _series(place, one, n)
    return tag("svg", *children, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=title, class_="plot")


def swatch(n: int, *, line: bool) -> Markup:
    """The sign of the n-th series, for a legend."""
    drawn = [tag("line", x1=0, x2=22, y1=7, y2=7)] if line else []
    inside = tag("g", *drawn, _shape(n, 11, 7), class_=f"s{n % COLOURS}")
    return tag("svg", inside, viewBox="0 0 22 14", width=22, height=14, aria_hidden="true")


def bars(rows: Sequence[tuple[str, str, Sequence[tuple[str, float, str]]]], title: str = "") -> Bars:
    """Bars on one scale. rows: (name, total as text, segments of (class, amount, tip))."""
    longest = max((sum(amount for _, amount, _ in parts) for _, _, parts in rows), default=0.0) or 1.0
    drawn = (
        Bar(name, total, tuple((kind, 100 * amount / longest, tip) for kind, amount, tip in parts if amount > 0))
        for name, total, parts in rows
    )
    return Bars(title, tuple(drawn))


def stack(bar: Bar) -> Markup:
    """The drawing of a bar: as wide as it is given room."""
    drawn, at = [], 0.0
    for kind, width, tip in bar.segments:
        drawn.append(tag("rect", x=f"{at:.3f}%", width=f"{width:.3f}%", height=18, class_=kind, data_tip=tip))
        at += width
    return tag("svg", *drawn, width="100%", height=18, class_="stack", aria_hidden="true")


# Parts of a plot --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """From values to places on the canvas."""

    across: tuple[float, float]
    up: tuple[float, float]

    def x(self, value: float) -> float:
        low, high = self.across
        return round(LEFT + (RIGHT - LEFT) * (value - low) / (high - low), 1)

    def y(self, value: float) -> float:
        low, high = self.up
        return round(BOTTOM - (BOTTOM - TOP) * (value - low) / (high - low), 1)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers that span low to high."""
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-300):  # nothing that ticks could tell apart
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


def _grid(place: _Place, across: Sequence[float], up: Sequence[float], x: Axis, y: Axis) -> list[Markup]:
    drawn = []
    for value in up:
        at = place.y(value)
        drawn.append(tag("line", x1=LEFT, x2=RIGHT, y1=at, y2=at, class_="grid"))
        drawn.append(tag("text", y.format(value), x=LEFT - 7, y=at, class_="tick y"))
    for value in across:
        at = place.x(value)
        drawn.append(tag("line", x1=at, x2=at, y1=BOTTOM, y2=BOTTOM + 4, class_="axis"))
        drawn.append(tag("text", x.format(value), x=at, y=BOTTOM + 20, class_="tick x"))
    drawn.append(tag("line", x1=LEFT, x2=RIGHT, y1=BOTTOM, y2=BOTTOM, class_="axis"))
    drawn.append(tag("text", x.label, x=(LEFT + RIGHT) / 2, y=HEIGHT - 4, class_="label"))
    return drawn


def _steps(place: _Place, frontier: Sequence[tuple[float, float]]) -> list[Markup]:
    """Between two settings of a frontier, the lower quality is what can be had."""
    if len(frontier) < 2:
        return []
    corners = [(place.x(frontier[0][0]), place.y(frontier[0][1]))]
    for (_, before), (x, y) in pairwise(frontier):
        corners += [(place.x(x), place.y(before)), (place.x(x), place.y(y))]
    return [tag("polyline", points=_corners(corners), class_="frontier")]


def _series(place: _Place, series: Series, n: int) -> list[Markup]:
    drawn = []
    if series.line and len(series.points) > 1:
        drawn.append(tag("polyline", points=_corners([(place.x(p.x), place.y(p.y)) for p in series.points])))
    drawn += [_point(place, point, n) for point in series.points]
    return [tag("g", *drawn, class_=f"s{n % COLOURS}")]


def _point(place: _Place, point: Point, n: int) -> Markup:
    x, y = place.x(point.x), place.y(point.y)
    parts = []
    if point.low is not None and point.high is not None:
        parts.append(tag("line", x1=x, x2=x, y1=place.y(point.low), y2=place.y(point.high), class_="whisker"))
    parts += [_shape(n, x, y), tag("circle", cx=x, cy=y, r=11, class_="reach")]
    return tag("g", *parts, class_="point faint" if point.faint else "point", data_tip=point.tip)


def _shape(n: int, x: float, y: float) -> Markup:
    corners = SHAPES[n % len(SHAPES)](x, y)
    if not corners:
        return tag("circle", cx=x, cy=y, r=4.5, class_="mark")
    return tag("polygon", points=_corners(corners), class_="mark")


def _corners(corners: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
