"""Hit rate over capacity as a picture: SVG, drawn here; PNG, if `resvg-py` is installed."""

from __future__ import annotations

import math
import pathlib
import zlib
from collections.abc import Iterator, Sequence
from types import ModuleType
from xml.sax.saxutils import escape

import attrs

from kvtier_core.errors import ConfigError, Problem

_WIDTH = 1200
_LEFT, _RIGHT = 96, 984  # of the areas with the curves
_TOP, _DEEP = 128, 488  # of the first area: its upper edge, and its least height
_BELOW, _BETWEEN = 104, 168  # an area: the axis below it, and the distance to the next one
_FONT = "Inter, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"
_INK, _GREY, _GRID, _SHADE = "#111827", "#6b7280", "#e5e7eb", "#f3f4f6"
_LABEL = 21  # least distance between two labels
_LETTER = 10  # more than a letter of a label is wide
#: A policy has the same colour in each picture.
_COLOURS = {
    "gittins": "#2563eb", "lru": "#dc2626", "lru2": "#d97706", "tournament": "#7c3aed", "arc": "#059669",
    "s3fifo": "#0891b2", "fifo": "#db2777", "lfu": "#65a30d", "mru": "#9a3412",
}  # fmt: skip
_OTHER_COLOURS = (
    "#475569", "#7f1d1d", "#14532d", "#78350f", "#164e63", "#831843", "#3f6212", "#a16207", "#6b21a8", "#0f766e",
)  # fmt: skip
#: Curves collapse where half of them are within this part of the axis, next to the best. They are drawn again if that
#: makes them this many times as high.
_NEAR = 0.1
_MAGNIFIED = 8


@attrs.frozen
class Curve:
    """One policy, or the bound."""

    name: str
    rates: tuple[float, ...]  #: hit rates, one for each capacity of the picture


@attrs.frozen
class _Area:
    """The area in which the curves are drawn: over the capacities from ``first`` on, between two rates."""

    top: float
    bottom: float
    first: int
    low: float
    high: float

    def y(self, rate: float) -> float:
        return self.bottom - (rate - self.low) / (self.high - self.low) * (self.bottom - self.top)

    def grid(self) -> Iterator[float]:
        step = _step(self.high - self.low)
        return (i * step for i in range(round(self.low / step), round(self.high / step) + 1))


def _step(span: float) -> float:
    """The distance between lines of the grid: at most eight of them, if that is possible."""
    return next(step for step in (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2) if span <= 8 * step or step == 0.2)


@attrs.frozen
class Picture:
    """Curves over capacity, below the bound; where they collapse, again and larger."""

    title: str
    subtitle: str
    axis: str  #: the meaning of the capacities
    capacities: tuple[float, ...]  #: ascending
    ticks: tuple[tuple[str, str], ...]  #: for each capacity two labels, one below the other
    curves: tuple[Curve, ...]
    bound: Curve

    def save(self, path: pathlib.Path) -> None:
        """Write the picture, as a PNG if its name says so. Raises ConfigError."""
        drawn = self.svg()
        try:
            path.write_bytes(_png(drawn) if path.suffix == ".png" else drawn.encode())
        except OSError as error:
            raise _wrong(path, f"cannot be written: {error.strerror}") from error

    def svg(self) -> str:
        """The picture as the text of an SVG file."""
        areas = list(self._areas())
        height = areas[-1].bottom + _BELOW
        parts = [
            f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
            _text(_LEFT - 44, 54, self.title, size=28, weight=700),
            _text(_LEFT - 44, 84, self.subtitle, colour=_GREY),
        ]
        for area in areas:
            inside = f'clip-path="url(#area{area.first})"'
            parts += [
                f'<clipPath id="area{area.first}"><rect x="{_LEFT}" y="{area.top - 6}" '
                f'width="{_RIGHT - _LEFT + 6}" height="{area.bottom - area.top + 12}"/></clipPath>',
                *self._frame(area),
                f"<g {inside}>",
                *self._shade(area),
                *self._lines(area),
                "</g>",
                *self._labels(area),
            ]
        size = f'viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
        body = "\n".join(parts)
        return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{_FONT}" font-size="16">\n{body}\n</svg>\n'

    def _areas(self) -> Iterator[_Area]:
        height = max(_DEEP, (len(self.curves) + 1) * _LABEL)
        most = max(*self.bound.rates, 0.01)
        step = _step(most)
        top = math.ceil(most / step * 1.02) * step
        yield _Area(_TOP, _TOP + height, 0, 0.0, top)
        for first in range(len(self.capacities) - 1):
            if all(len(self._near(i, top)) >= max(3, len(self.curves) / 2) for i in range(first, len(self.capacities))):
                rates = [rate for i in range(first, len(self.capacities)) for rate in self._near(i, top)]
                step = _step(max(self.bound.rates[first:]) - min(rates))
                low = math.floor(min(rates) / step) * step
                high = math.ceil(max(self.bound.rates[first:]) / step) * step
                if high - low <= top / _MAGNIFIED:
                    yield _Area(_TOP + height + _BETWEEN, _TOP + 2 * height + _BETWEEN, first, low, high)
                    return

    def _near(self, i: int, top: float) -> list[float]:
        """The rates that are next to the best at a capacity."""
        rates = [curve.rates[i] for curve in self.curves]
        return [rate for rate in rates if rate >= max(rates) - _NEAR * top]

    def _x(self, area: _Area, i: int) -> float:
        """A logarithmic scale."""
        first, last = math.log(self.capacities[area.first]), math.log(self.capacities[-1])
        return _LEFT + 28 + (math.log(self.capacities[i]) - first) / (last - first) * (_RIGHT - _LEFT - 28)

    def _points(self, area: _Area, curve: Curve) -> list[tuple[float, float]]:
        return [(self._x(area, i), area.y(curve.rates[i])) for i in range(area.first, len(self.capacities))]

    def _frame(self, area: _Area) -> Iterator[str]:
        digits = 0 if _step(area.high - area.low) >= 0.01 else 1
        if area.first:
            yield _text(_LEFT - 44, area.top - 20, "the same, where curves lie close", colour=_GREY)
        for rate in area.grid():
            yield f'<path d="M{_LEFT} {area.y(rate):.1f}H{_RIGHT}" stroke="{_GRID}"/>'
            yield _text(_LEFT - 12, area.y(rate) + 5, f"{rate:.{digits}%}", colour=_GREY, anchor="end")
        end = -math.inf  # of the last label
        for i in range(area.first, len(self.capacities)):
            x, half = self._x(area, i), max(map(len, self.ticks[i])) * _LETTER / 2
            yield f'<path d="M{x:.1f} {area.bottom}v7" stroke="{_GREY}"/>'
            if x - half > end:
                yield _text(x, area.bottom + 28, self.ticks[i][0], anchor="middle")
                yield _text(x, area.bottom + 50, self.ticks[i][1], colour=_GREY, anchor="middle", size=14)
                end = x + half
        middle = (_LEFT + _RIGHT) / 2
        yield _text(middle, area.bottom + 80, self.axis, colour=_GREY, anchor="middle", size=14)

    def _shade(self, area: _Area) -> Iterator[str]:
        """The area below the bound, where the policies are."""
        points = self._points(area, self.bound)
        yield f'<path d="{_path(points)}V{area.bottom}H{points[0][0]:.1f}Z" fill="{_SHADE}"/>'
        yield f'<path d="{_path(points)}" fill="none" stroke="{_INK}" stroke-width="2" stroke-dasharray="7 5"/>'

    def _lines(self, area: _Area) -> Iterator[str]:
        for curve, colour in self._coloured():
            points = self._points(area, curve)
            look = f'stroke="{colour}" stroke-width="{3.5 if curve is self._best else 2}"'
            yield f'<path d="{_path(points)}" fill="none" {look} stroke-linejoin="round" stroke-linecap="round"/>'
            for x, y in points:
                radius = 5 if curve is self._best else 3.5
                yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}" stroke="#ffffff"/>'

    def _labels(self, area: _Area) -> Iterator[str]:
        """Each curve's name at its right end, moved so that no two overlap."""
        ends = [(area.y(curve.rates[-1]), curve, colour) for curve, colour in [(self.bound, _INK), *self._coloured()]]
        ends = [end for end in ends if end[0] <= area.bottom]
        ends.sort(key=lambda end: (end[0], -sum(end[1].rates)))
        for (y, curve, colour), at in zip(ends, _spread([y for y, _, _ in ends], area.bottom), strict=True):
            strong = curve in (self._best, self.bound)
            yield f'<path d="M{_RIGHT + 7} {y:.1f}L{_RIGHT + 22} {at:.1f}" stroke="{colour}" opacity="0.5"/>'
            words = f"{curve.name}  {curve.rates[-1]:.1%}"
            yield _text(_RIGHT + 28, at + 5, words, colour=colour, weight=700 if strong else 400)

    def _coloured(self) -> list[tuple[Curve, str]]:
        """The curves and their colours, the best one last, so that it is drawn on top."""
        free = list(_OTHER_COLOURS)
        pairs = []
        for curve in self.curves:
            if curve.name in _COLOURS:
                colour = _COLOURS[curve.name]
            else:
                free = free or list(_OTHER_COLOURS)
                colour = free.pop(zlib.crc32(curve.name.encode()) % len(free))
            pairs.append((curve, colour))
        return sorted(pairs, key=lambda pair: pair[0] is self._best)

    @property
    def _best(self) -> Curve | None:
        return max(self.curves, key=lambda curve: sum(curve.rates), default=None)


def _spread(ys: Sequence[float], bottom: float) -> list[float]:
    """The same heights, from the top down, moved so far apart that labels do not overlap."""
    placed: list[float] = []
    for y in ys:
        placed.append(max(y, placed[-1] + _LABEL) if placed else y)
    for i in reversed(range(len(placed))):
        lowest = bottom if i == len(placed) - 1 else placed[i + 1] - _LABEL
        placed[i] = min(placed[i], lowest)
    return placed


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _text(
    x: float, y: float, words: str, *, colour: str = _INK, size: int = 16, weight: int = 400, anchor: str = "start"
) -> str:
    look = f'fill="{colour}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {look} xml:space="preserve">{escape(words)}</text>'


def check_name(path: pathlib.Path) -> None:
    """Raise ConfigError if no picture can be written under this name. Called before long work."""
    if path.suffix not in (".svg", ".png"):
        raise _wrong(path, "a picture must be .svg or .png")
    if path.suffix == ".png":
        _resvg(path)
    if not path.parent.is_dir():
        raise _wrong(path, f"folder {path.parent} does not exist")


def _png(drawn: str) -> bytes:
    return bytes(_resvg(pathlib.Path("plot.png")).svg_to_bytes(svg_string=drawn, zoom=2))


def _resvg(path: pathlib.Path) -> ModuleType:
    try:
        import resvg_py
    except ImportError:
        raise _wrong(path, "resvg-py is not installed", "pip install 'kvtier[plot]', or write an .svg") from None
    return resvg_py


def _wrong(path: pathlib.Path, why: str, hint: str = "") -> ConfigError:
    return ConfigError([Problem("--plot", str(path), why, hint)])
