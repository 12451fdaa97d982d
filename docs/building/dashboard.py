"""Draws the panels of examples/grafana.json, with what a Prometheus server answers to their queries.

python docs/building/dashboard.py http://localhost:9090 MINUTES > docs/drawings/dashboard.svg

The last MINUTES are drawn. Panels for which there is no data are left out.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

DASHBOARD = Path(__file__).parents[2] / "examples/grafana.json"
COLUMNS, WIDTH, HEIGHT = 2, 430, 210  # of a panel, with its margins
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 30, 44  # margins
POINTS = 120
COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#4b5563")
#: How a unit of Grafana's is written.
UNITS = {"percentunit": "%", "Bps": "B/s", "bytes": "B", "s": "s", "short": "", "bool_on_off": ""}


class Series(NamedTuple):
    """One line of a panel."""

    name: str
    points: Sequence[tuple[float, float]]  #: seconds since 1970, and values


class Panel(NamedTuple):
    """A panel with data."""

    title: str
    unit: str
    series: Sequence[Series]


def panels(server: str, end: float, seconds: float) -> Iterator[Panel]:
    """The panels, in the dashboard's order."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        series = [line for target in panel["targets"] for line in _ask(server, target, end, seconds)]
        if series:
            yield Panel(panel["title"], panel["fieldConfig"]["defaults"]["unit"], series)


def _ask(server: str, target: Mapping[str, Any], end: float, seconds: float) -> Iterator[Series]:
    step = seconds / POINTS
    query = target["expr"].replace("$__rate_interval", f"{max(15, round(4 * step))}s")
    parameters = {"query": query, "start": end - seconds, "end": end, "step": step}
    with urllib.request.urlopen(f"{server}/api/v1/query_range?{urllib.parse.urlencode(parameters)}") as answer:
        found = json.load(answer)["data"]["result"]
    for line in found:
        name = target["legendFormat"]
        for label, value in line["metric"].items():
            name = name.replace(f"{{{{{label}}}}}", value)
        points = [(float(at), float(value)) for at, value in line["values"] if value != "NaN"]
        if points:
            yield Series(name, points)


def drawn(all_panels: Sequence[Panel], end: float, seconds: float) -> Iterator[str]:
    """The lines of an SVG picture."""
    width, height = COLUMNS * WIDTH, -(-len(all_panels) // COLUMNS) * HEIGHT
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11" fill="#111827">'
    )
    yield f'<title>The dashboard of kvtier</title><rect width="{width}" height="{height}" fill="#ffffff"/>'
    for number, panel in enumerate(all_panels):
        yield f'<g transform="translate({number % COLUMNS * WIDTH} {number // COLUMNS * HEIGHT})">'
        yield from _panel(panel, end, seconds)
        yield "</g>"
    yield "</svg>"


def _panel(panel: Panel, end: float, seconds: float) -> Iterator[str]:
    values = [value for line in panel.series for _, value in line.points]
    low, high = min(0.0, *values), max(0.0, *values)
    high = high if high > low else low + 1
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    unit = UNITS.get(panel.unit, panel.unit.removeprefix("suffix: "))
    title = f'<tspan font-weight="bold">{escape(panel.title)}</tspan>  {unit}'
    yield f'<text x="{LEFT}" y="18" font-size="13" xml:space="preserve">{title}</text>'
    for share in (0.0, 0.5, 1.0):
        y = bottom - share * (bottom - TOP)
        yield f'<path d="M{LEFT} {y:.1f}H{right}" stroke="#e5e7eb"/>'
        value = _written((low + share * (high - low)) * (100 if panel.unit == "percentunit" else 1))
        yield f'<text x="{LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{value}</text>'
    x = float(LEFT)
    for line, colour in zip(panel.series, COLOURS * len(panel.series), strict=False):
        at = (
            f"{LEFT + (when - end + seconds) / seconds * (right - LEFT):.1f} "
            f"{bottom - (value - low) / (high - low) * (bottom - TOP):.1f}"
            for when, value in line.points
        )
        yield f'<path d="M{"L".join(at)}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        if x < right - 6 * len(line.name):
            yield f'<text x="{x:.0f}" y="{HEIGHT - 18}" fill="{colour}">{escape(line.name)}</text>'
        x += 6 * len(line.name) + 14


def _written(value: float) -> str:
    """A number with three digits."""
    for prefix, size in (("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1), ("m", 1e-3), ("µ", 1e-6)):
        if abs(value) >= size:
            return f"{value / size:.3g}{prefix}"
    return "0"


def main() -> None:
    server, minutes = sys.argv[1], float(sys.argv[2])
    end, seconds = time.time(), 60 * minutes
    sys.stdout.write("\n".join(drawn(list(panels(server, end, seconds)), end, seconds)) + "\n")


if __name__ == "__main__":
    main()
