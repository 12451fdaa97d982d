"""Hit rate over capacity as a picture: SVG, drawn here; PNG, if `resvg-py` is installed."""

from __future__ import annotations

import itertools
import math
import pathlib
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

import attrs

from kvtier_core.errors import ConfigError, Problem

_WIDTH, _HEIGHT = 1200, 720
_LEFT, _RIGHT, _TOP, _BOTTOM = 96, 984, 128, 616  # of the area with the curves
_FONT = "Inter, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"
_INK, _GREY, _GRID, _SHADE = "#111827", "#6b7280", "#e5e7eb", "#f3f4f6"
_COLOURS = (
    "#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#db2777", "#65a30d", "#9a3412", "#475569",
)  # fmt: skip
_LABEL = 21  # least distance between two labels


@attrs.frozen
class Curve:
    """One policy, or the bound."""

    name: str
    rates: tuple[float, ...]  #: hit rates, one for each capacity of the picture


@attrs.frozen
class Picture:
    """Curves over capacity, below the bound."""

    title: str
    subtitle: str
    capacities: tuple[float, ...]  #: ascending
    ticks: tuple[tuple[str, str], ...]  #: for each capacity two labels, one below the other
    curves: tuple[Curve, ...]
    bound: Curve

    def save(self, path: pathlib.Path) -> None:
        """Write the picture, as a PNG if the name ends so. Raises ConfigError."""
        drawn = self.svg()
        try:
            path.write_bytes(_png(drawn) if path.suffix == ".png" else drawn.encode())
        except OSError as error:
            raise _wrong(path, f"cannot be written: {error.strerror}") from error

    def svg(self) -> str:
        """The picture as the text of an SVG file."""
        parts = [*self._frame(), *self._shade(), *self._lines(), *self._labels()]
        size = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}"'
        body = "\n".join(parts)
        return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{_FONT}" font-size="16">\n{body}\n</svg>\n'

    def _x(self, i: int) -> float:
        """A logarithmic scale."""
        first, last = math.log(self.capacities[0]), math.log(self.capacities[-1])
        return _LEFT + 28 + (math.log(self.capacities[i]) - first) / (last - first) * (_RIGHT - _LEFT - 28)

    def _y(self, rate: float) -> float:
        return _BOTTOM - rate / self._top * (_BOTTOM - _TOP)

    @property
    def _top(self) -> float:
        """The highest line of the grid, just above the bound."""
        return math.ceil(max(*self.bound.rates, 0.01) / self._grid * 1.02) * self._grid

    @property
    def _grid(self) -> float:
        return next(step for step in (0.02, 0.05, 0.1, 0.2) if max(self.bound.rates) <= 8 * step or step == 0.2)

    def _points(self, curve: Curve) -> list[tuple[float, float]]:
        return [(self._x(i), self._y(rate)) for i, rate in enumerate(curve.rates)]

    def _frame(self) -> Iterator[str]:
        yield f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>'
        yield _text(_LEFT - 44, 54, self.title, size=28, weight=700)
        yield _text(_LEFT - 44, 84, self.subtitle, colour=_GREY)
        for i in range(round(self._top / self._grid) + 1):
            y = self._y(i * self._grid)
            yield f'<path d="M{_LEFT} {y:.1f}H{_RIGHT}" stroke="{_GRID}"/>'
            yield _text(_LEFT - 12, y + 5, f"{i * self._grid:.0%}", colour=_GREY, anchor="end")
        for i, (label, below) in enumerate(self.ticks):
            yield f'<path d="M{self._x(i):.1f} {_BOTTOM}v7" stroke="{_GREY}"/>'
            yield _text(self._x(i), _BOTTOM + 28, label, anchor="middle")
            yield _text(self._x(i), _BOTTOM + 50, below, colour=_GREY, anchor="middle", size=14)
        middle = (_LEFT + _RIGHT) / 2
        yield _text(middle, _HEIGHT - 24, "capacity, of all distinct chunks", colour=_GREY, anchor="middle", size=14)

    def _shade(self) -> Iterator[str]:
        """Below the bound, where the policies are."""
        points = self._points(self.bound)
        yield f'<path d="{_path(points)}V{_BOTTOM}H{points[0][0]:.1f}Z" fill="{_SHADE}"/>'
        yield f'<path d="{_path(points)}" fill="none" stroke="{_INK}" stroke-width="2" stroke-dasharray="7 5"/>'

    def _lines(self) -> Iterator[str]:
        for curve, colour in self._coloured():
            points = self._points(curve)
            look = f'stroke="{colour}" stroke-width="{3.5 if curve is self._best else 2}"'
            yield f'<path d="{_path(points)}" fill="none" {look} stroke-linejoin="round" stroke-linecap="round"/>'
            for x, y in points:
                radius = 5 if curve is self._best else 3.5
                yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}" stroke="#ffffff"/>'

    def _labels(self) -> Iterator[str]:
        """Each curve's name at its right end, moved so that no two overlap."""
        ends = [(self._y(self.bound.rates[-1]), self.bound, _INK)]
        ends += [(self._y(curve.rates[-1]), curve, colour) for curve, colour in self._coloured()]
        ends.sort(key=lambda end: (end[0], -sum(end[1].rates)))
        for (y, curve, colour), at in zip(ends, _spread([y for y, _, _ in ends]), strict=True):
            strong = curve in (self._best, self.bound)
            yield f'<path d="M{_RIGHT + 7} {y:.1f}L{_RIGHT + 22} {at:.1f}" stroke="{colour}" opacity="0.5"/>'
            words = f"{curve.name}  {curve.rates[-1]:.1%}"
            yield _text(_RIGHT + 28, at + 5, words, colour=colour, weight=700 if strong else 400)

    def _coloured(self) -> list[tuple[Curve, str]]:
        """The curves and their colours, the best one last, so that it is drawn on top."""
        pairs = list(zip(self.curves, itertools.cycle(_COLOURS)))
        return sorted(pairs, key=lambda pair: pair[0] is self._best)

    @property
    def _best(self) -> Curve | None:
        return max(self.curves, key=lambda curve: sum(curve.rates), default=None)


def _spread(ys: Sequence[float]) -> list[float]:
    """The same heights, from the top down, moved so far apart that labels do not overlap."""
    placed: list[float] = []
    for y in ys:
        placed.append(max(y, placed[-1] + _LABEL) if placed else y)
    for i in reversed(range(len(placed))):
        lowest = _BOTTOM if i == len(placed) - 1 else placed[i + 1] - _LABEL
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
        raise _wrong(path, f"there is no folder {path.parent}")


def _png(drawn: str) -> bytes:
    return bytes(_resvg(pathlib.Path("plot.png")).svg_to_bytes(svg_string=drawn, zoom=2))


def _resvg(path: pathlib.Path):
    try:
        import resvg_py
    except ImportError:
        raise _wrong(path, "resvg-py is not installed", "pip install 'kvtier[plot]', or write an .svg") from None
    return resvg_py


def _wrong(path: pathlib.Path, why: str, hint: str = "") -> ConfigError:
    return ConfigError([Problem("--plot", str(path), why, hint)])
