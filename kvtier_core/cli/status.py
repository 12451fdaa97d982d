"""`kvtier status`: what the tiers of running engines hold, and what they brought."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from typing import Any

from kvtier_core.cli import engines, studies
from kvtier_core.cli.output import FINE, PROBLEMS, Output, table

_COLUMNS = ("tier", "holds", "of", "full", "chunks", "hits", "in flight", "pins", "saved", "state")


def add_to(commands: argparse._SubParsersAction) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "status",
        help="show what the tiers of running engines hold",
        description=f"Show what the tiers of running engines hold. Exits with {PROBLEMS} if a tier rests.",
    )
    engines.add_to(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, output: Output) -> int:
    """A table for each engine. Raises BackendError if there is none that answers."""
    output.value = [engines.ask(path, {"status": True}) for path in engines.found(options.socket)]
    for number, snapshot in enumerate(output.value):
        output.say(*([""] if number else []), *lines(snapshot, output))
    rest = [tier for snapshot in output.value for tier in snapshot["tiers"] if state(tier) != "works"]
    return PROBLEMS if rest else FINE


def lines(snapshot: Mapping[str, Any], output: Output, more: Mapping[str, str] | None = None) -> Iterator[str]:
    """A snapshot for people; ``more`` has a further column, by the name of the tier."""
    running = snapshot["requests"]["running"]
    age = time.time() - snapshot["at"]
    yield (
        f"pid {snapshot['pid']}: {snapshot['model']}, {running} requests, identity {snapshot['identity'][:16]}…, "
        f"{age:.0f} s ago"
    )
    if snapshot["cold"]:
        yield output.paint(f"it started cold because {snapshot['cold']}", "warning")
    columns = (*_COLUMNS[:-1], *(["in GB/s"] if more is not None else []), _COLUMNS[-1])
    rows = [_cells(tier, snapshot, more) for tier in snapshot["tiers"]]
    for number, line in enumerate(table(columns, rows, left=1)):
        rests = number and state(snapshot["tiers"][number - 1]) != "works"
        yield output.paint(line, "bad") if rests else line


def state(tier: Mapping[str, Any]) -> str:
    """Whether a tier is used now."""
    if tier["can_read"] and tier["can_write"]:
        return "works"
    return {(False, False): "rests", (False, True): "reads rest", (True, False): "writes rest"}[
        tier["can_read"], tier["can_write"]
    ]


def _cells(tier: Mapping[str, Any], snapshot: Mapping[str, Any], more: Mapping[str, str] | None) -> list[str]:
    saved = tier["savings"]["avoided"] - tier["savings"]["waited"]
    return [
        tier["tier"],
        studies.size(tier["nbytes"]),
        studies.size(tier["capacity"]),
        f"{tier['nbytes'] / (tier['capacity'] or 1):.0%}",
        str(tier["chunks"]),
        f"{tier['savings']['loaded'] / (snapshot['requests']['tokens'] or 1):.1%}",
        studies.size(tier["inflight"]),
        str(tier["pins"]),
        f"{saved:.1f} s",
        *([] if more is None else [more.get(tier["tier"], "")]),
        state(tier),
    ]
