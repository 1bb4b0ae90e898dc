"""Small pieces of SVG: scales, ticks, frames. Colours come from the report's style sheet by class name."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 460, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 14, 14, 44


@dataclass(frozen=True)
class Scale:
    """Maps [low, high] to pixels [start, end], linearly or by logarithm."""

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
        """About six round values, or the powers of ten of a logarithmic scale."""
        if self.log:
            powers = range(math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1)
            return [10.0**power for power in powers]
        return linear_ticks(self.low, self.high)


def linear_ticks(low: float, high: float, wanted: int = 6) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten inside [low, high]."""
    raw = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def padded(values: Iterable[float], share: float = 0.06) -> tuple[float, float]:
    """Range of the values with a margin on both sides; never empty."""
    known = list(values)
    low, high = min(known), max(known)
    margin = (high - low) * share or abs(low) * 0.01 or 1.0
    return low - margin, high + margin


def x_scale(low: float, high: float, log: bool = False) -> Scale:
    """Across a figure."""
    return Scale(low, high, _LEFT, WIDTH - _RIGHT, log)


def y_scale(low: float, high: float) -> Scale:
    """Up a figure."""
    return Scale(low, high, HEIGHT - _BOTTOM, _TOP)


def num(value: float) -> str:
    """A coordinate: one decimal at most, always the same for the same input."""
    return f"{value:.1f}".removesuffix(".0")


def tick_label(value: float) -> str:
    """Short text of a tick: 0.25, 1e-4, 12k."""
    if value == 0:
        return "0"
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    if abs(value) < 0.001:
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:.4g}"


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """A straight line of a class."""
    return f'<line class="{kind}" x1="{num(x1)}" y1="{num(y1)}" x2="{num(x2)}" y2="{num(y2)}"/>'


def rect(x: float, y: float, width: float, height: float, kind: str, title: str = "") -> str:
    """A rectangle of a class; `title` shows on hover."""
    box = f'class="{kind}" x="{num(x)}" y="{num(y)}" width="{num(max(width, 0))}" height="{num(max(height, 0))}"'
    return f"<rect {box}><title>{escape(title)}</title></rect>" if title else f"<rect {box}/>"


def circle(x: float, y: float, radius: float, kind: str) -> str:
    """A dot of a class."""
    return f'<circle class="{kind}" cx="{num(x)}" cy="{num(y)}" r="{num(radius)}"/>'


def text(x: float, y: float, words: str, kind: str = "tick", anchor: str = "middle") -> str:
    """Words at a place."""
    return f'<text class="{kind}" x="{num(x)}" y="{num(y)}" text-anchor="{anchor}">{escape(words)}</text>'


def path(points: Sequence[tuple[float, float]], kind: str) -> str:
    """An open line through the points."""
    moves = " ".join(f"{'L' if index else 'M'}{num(x)} {num(y)}" for index, (x, y) in enumerate(points))
    return f'<path class="{kind}" d="{moves}"/>'


def frame(x: Scale, y: Scale, x_label: str, y_label: str, tick: Callable[[float], str] = tick_label) -> list[str]:
    """Grid, ticks and axis labels; `tick` writes the labels across."""
    parts = []
    for value in y.ticks:
        parts += [line(x.start, y(value), x.end, y(value), "grid")]
        parts += [text(x.start - 7, y(value) + 3.5, tick_label(value), anchor="end")]
    for value in x.ticks:
        parts += [line(x(value), y.start, x(value), y.start + 4, "axis")]
        parts += [text(x(value), y.start + 16, tick(value))]
    middle = (y.start + y.end) / 2
    parts += [line(x.start, y.start, x.end, y.start, "axis")]
    parts += [text((x.start + x.end) / 2, HEIGHT - 8, x_label, "label")]
    turned = f'<g transform="translate(13 {num(middle)}) rotate(-90)">{text(0, 0, y_label, "label")}</g>'
    return [*parts, turned]


def figure(parts: Iterable[str], description: str, width: int = WIDTH, height: int = HEIGHT) -> str:
    """The <svg> around the parts, with a description for those who cannot see it."""
    head = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(description, quote=True)}">'
    return head + "".join(parts) + "</svg>"
