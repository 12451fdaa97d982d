"""`kvtier status`: the contents of the tiers of running engines, and the seconds that they saved."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvtier_core.cli.output import FINE, PROBLEMS, Output, table
from kvtier_core.types import size
from kvtier_doctor import engines

_COLUMNS = ("tier", "holds", "of", "full", "chunks", "hit rate", "in flight", "pins", "saved", "state")
#: The columns to omit first if the terminal is too narrow for all.
_FIRST_TO_GO = ("pins", "chunks", "of", "in flight")
_OF_TENANTS = ("tenant", "requests", "tokens", "hit rate", "share")
#: Number of tenants shown: those with the most tokens.
_TENANTS = 8


def add_to(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "status",
        help="show the tiers of running engines",
        description=f"Show the tiers of running engines. Exits with {PROBLEMS} if a tier rests.",
    )
    engines.add_to(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, output: Output) -> int:
    """A table for each engine. Raises BackendError if none answers."""
    output.value = [engines.ask(path, {"status": True}) for path in engines.found(options.socket)]
    for number, snapshot in enumerate(output.value):
        output.say(*([""] if number else []), *lines(snapshot, output))
    rest = [tier for snapshot in output.value for tier in snapshot["tiers"] if state(tier) != "works"]
    return PROBLEMS if rest else FINE


def lines(
    snapshot: Mapping[str, Any], output: Output, more: Mapping[str, Sequence[str]] | None = None
) -> Iterator[str]:
    """A snapshot for people; ``more`` has further columns, by their heads, with a cell for each tier."""
    requests, age = snapshot["requests"]["running"], time.time() - snapshot["at"]
    about = f"{snapshot['model']}, {requests} request{'s' * (requests != 1)}, {age:.0f} s ago"
    yield fitting(f"pid {snapshot['pid']}: {about}, identity {snapshot['identity'][:16]}…")
    if snapshot["cold"]:
        yield output.paint(f"it started cold because {snapshot['cold']}", "warning")
    yield from of_tiers(snapshot["tiers"], output, more)
    tenants = snapshot["tenants"]
    if [each["tenant"] for each in tenants] not in ([], ["-"]):
        yield ""
        yield from table(_OF_TENANTS, [_of_tenant(each, tenants) for each in tenants[:_TENANTS]], left=1)
        if len(tenants) > _TENANTS:
            yield f"and {len(tenants) - _TENANTS} more; --json has them"


def of_tiers(
    tiers: Sequence[Mapping[str, Any]],
    output: Output,
    more: Mapping[str, Sequence[str]] | None = None,
    but: Sequence[str] = (),
) -> Iterator[str]:
    """A table of tiers, without the columns in ``but``; ``more`` as in `lines`."""
    columns: dict[str, Sequence[str]] = dict(zip(_COLUMNS, zip(*map(_cells, tiers), strict=True), strict=True))
    columns = {head: cells for head, cells in columns.items() if head not in but}
    columns |= {**(more or {}), "state": columns.pop("state")}
    for number, line in enumerate(_narrowed(columns)):
        rests = number and state(tiers[number - 1]) != "works"
        yield output.paint(line, "bad") if rests else line
    yield from (_of_writes(tier["tier"], tier["writes"]) for tier in tiers if tier["writes"])


def _of_writes(tier: str, use: Mapping[str, Any]) -> str:
    """What was written to a tier with a budget, what may be, and how long its drive lasts."""
    days = max(use["seconds"], 1) / 86400
    since = f"{days:.1f} days" if days >= 2 else f"{24 * days:.1f} hours"
    line = f"{tier}: {size(use['written'])} written in {since}, {size(max(use['left'], 0))} may be written now"
    if use["endurance"] and use["written"]:
        years = use["endurance"] * days / use["written"] / 365
        line += f"; at this rate {size(use['endurance'])} last {years:.1f} years"
    return line


def fitting(line: str) -> str:
    """The line, cut to the width of the terminal."""
    width = _width()
    return line if len(line) <= width else line[: width - 1] + "…"


def _narrowed(columns: dict[str, Sequence[str]]) -> list[str]:
    """A table of these columns, without the least important ones if the terminal is too narrow."""
    for dropped in ("", *_FIRST_TO_GO):
        columns = {head: cells for head, cells in columns.items() if head != dropped}
        lines = list(table(tuple(columns), list(zip(*columns.values(), strict=True)), left=1))
        if max(map(len, lines)) <= _width():
            break
    return lines


def _width() -> int:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize


def state(tier: Mapping[str, Any]) -> str:
    """Whether a tier is used now."""
    if tier["can_read"]:
        return "works" if tier["can_write"] else "writes rest"
    return "reads rest" if tier["can_write"] else "rests"


def _cells(tier: Mapping[str, Any]) -> list[str]:
    savings = tier["savings"]
    net = f"{round(savings['avoided'] - savings['waited'], 1) + 0.0:.1f} s"  # no -0.0
    return [
        tier["tier"],
        size(tier["nbytes"]),
        size(tier["capacity"]),
        f"{tier['nbytes'] / (tier['capacity'] or 1):.0%}",
        str(tier["chunks"]),
        f"{tier['tokens'].get('hit', 0) / tier['tokens'].get('queried', 1):.1%}",
        size(tier["inflight"]),
        str(tier["pins"]),
        "not known yet" if savings["unpriced"] else net,
        state(tier),
    ]


def _of_tenant(each: Mapping[str, Any], tenants: Sequence[Mapping[str, Any]]) -> list[str]:
    """``share`` is the tenant's share of all loaded tokens."""
    loaded = sum(tenant["loaded"] for tenant in tenants)
    return [
        each["tenant"],
        str(each["requests"]),
        str(each["tokens"]),
        f"{each['loaded'] / (each['queried'] or 1):.1%}",
        f"{each['loaded'] / (loaded or 1):.0%}",
    ]
