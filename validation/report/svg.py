"""SVG elements, scales and axes for the figures. Colors come from report.css.jinja by class."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 420, 264
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 26, 46
_MOST_POWERS = 8


@dataclass(frozen=True)
class Scale:
    """Maps [low, high] to pixels [start, end], linearly or logarithmically."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __post_init__(self) -> None:
        assert self.high > self.low, (self.low, self.high)

    def __call__(self, value: float) -> float:
        low, high, at = (math.log10(x) if self.log else x for x in (self.low, self.high, value))
        return self.start + (at - low) / (high - low) * (self.end - self.start)

    @property
    def ticks(self) -> list[float]:
        """About six round values, or up to nine powers of ten of a logarithmic scale."""
        if not self.log:
            return linear_ticks(self.low, self.high)
        first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        return [10.0**power for power in range(first, last + 1, 1 + (last - first) // (_MOST_POWERS + 1))]


def linear_ticks(low: float, high: float, count: int = 6) -> list[float]:
    """About `count` multiples of 1, 2 or 5 times a power of ten within [low, high]."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def padded(values: Iterable[float], share: float = 0.06) -> tuple[float, float]:
    """Range of the values with a margin on both sides; never empty."""
    given = list(values)
    low, high = min(given), max(given)
    margin = (high - low) * share or abs(low) * 0.01 or 1.0
    return low - margin, high + margin


def x_scale(low: float, high: float, log: bool = False) -> Scale:
    """The horizontal scale of a figure."""
    return Scale(low, high, LEFT, WIDTH - RIGHT, log)


def y_scale(low: float, high: float) -> Scale:
    """The vertical scale of a figure."""
    return Scale(low, high, HEIGHT - BOTTOM, TOP)


def num(value: float) -> str:
    """Format a coordinate with at most one decimal."""
    return f"{value:.1f}".removesuffix(".0")


def tick_label(value: float) -> str:
    """Short label of a tick: 0.25, 1e-4, 12k."""
    if value == 0:
        return "0"
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    if abs(value) < 0.001:
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:.4g}"


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """A straight line with the class `kind`."""
    return f'<line class="{kind}" x1="{num(x1)}" y1="{num(y1)}" x2="{num(x2)}" y2="{num(y2)}"/>'


def rect(x: float, y: float, width: float, height: float, kind: str, title: str = "") -> str:
    """A rectangle with the class `kind`; `title` is shown on hover."""
    box = f'class="{kind}" x="{num(x)}" y="{num(y)}" width="{num(max(width, 0))}" height="{num(max(height, 0))}"'
    return f"<rect {box}><title>{escape(title)}</title></rect>" if title else f"<rect {box}/>"


def circle(x: float, y: float, radius: float, kind: str, title: str = "") -> str:
    """A dot with the class `kind`; `title` is shown on hover."""
    dot = f'class="{kind}" cx="{num(x)}" cy="{num(y)}" r="{num(radius)}"'
    return f"<circle {dot}><title>{escape(title)}</title></circle>" if title else f"<circle {dot}/>"


def text(x: float, y: float, words: str, kind: str = "tick", anchor: str = "middle") -> str:
    """Text at a position."""
    return f'<text class="{kind}" x="{num(x)}" y="{num(y)}" text-anchor="{anchor}">{escape(words)}</text>'


def path(points: Sequence[tuple[float, float]], kind: str) -> str:
    """An open polyline through the points."""
    moves = " ".join(f"{'L' if index else 'M'}{num(x)} {num(y)}" for index, (x, y) in enumerate(points))
    return f'<path class="{kind}" d="{moves}"/>'


def axes(x: Scale, y: Scale, x_label: str, y_label: str, tick: Callable[[float], str] = tick_label) -> list[str]:
    """Grid, ticks and axis labels; `tick` formats the horizontal labels."""
    parts = y_axis(x, y, y_label)
    for value in x.ticks:
        parts += [line(x(value), y.start, x(value), y.start + 4, "axis")]
        parts += [text(x(value), y.start + 17, tick(value))]
    return [*parts, *x_axis(x, y, x_label)]


def y_axis(x: Scale, y: Scale, label: str) -> list[str]:
    """Horizontal grid lines with their values, and the label at the left."""
    parts = []
    for value in y.ticks:
        parts += [line(x.start, y(value), x.end, y(value), "grid")]
        parts += [text(x.start - 6, y(value) + 4, tick_label(value), anchor="end")]
    middle = (y.start + y.end) / 2
    return [*parts, f'<g transform="translate(13 {num(middle)}) rotate(-90)">{text(0, 0, label, "label")}</g>']


def x_axis(x: Scale, y: Scale, label: str) -> list[str]:
    """The line at the bottom, and the label below it."""
    return [
        line(x.start, y.start, x.end, y.start, "axis"),
        text((x.start + x.end) / 2, y.start + BOTTOM - 8, label, "label"),
    ]


def legend(entries: Sequence[tuple[str, str]], y: float = 13) -> list[str]:
    """Lines with their names in a row at the top: (class, name)."""
    parts = []
    for index, (kind, name) in enumerate(entries):
        left = LEFT + 120 * index
        parts += [line(left, y - 4, left + 26, y - 4, kind), text(left + 32, y, name, "label", "start")]
    return parts


def figure(parts: Iterable[str], description: str, width: int = WIDTH, height: int = HEIGHT) -> str:
    """The <svg> element; its <title> says in words what the figure shows."""
    head = f'<svg viewBox="0 0 {width} {height}" role="img"><title>{escape(description)}</title>'
    return head + "".join(parts) + "</svg>"
