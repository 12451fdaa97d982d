"""`kvtier plugins`: lists the installed plugins, and those that cannot be used."""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

from kvtier_core.cli.output import FINE, PROBLEMS, Output, table
from kvtier_core.config.registry import Broken, Registry
from kvtier_core.hookspecs import GROUP

#: Entry points of another major version are in another group, which is not searched.
_API = GROUP.rpartition(".")[2]
_COLUMNS = ("kind", "name", "plugin", "version", "api", "state")
_USABLE, _LACKING, _SHADOWED, _BROKEN = "usable", "lacking", "shadowed", "broken"
_MEANINGS = {_USABLE: "good", _LACKING: "warning", _SHADOWED: "warning", _BROKEN: "bad"}


def add_to(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "plugins",
        help="list the installed plugins, and say which are broken and why",
        description="List the installed plugins. A name that is shadowed is offered by several plugins, and must be "
        "written in full; one that is lacking needs a library that is not installed.",
    )
    parser.add_argument("--strict", action="store_true", help=f"exit with {PROBLEMS} if anything is broken or shadowed")
    parser.add_argument("--traceback", action="store_true", help="show where broken plugins failed")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, output: Output) -> int:
    """A line for each offer, then the problems."""
    registry = Registry.discover()
    rows = [*_offers(registry), *map(_of_broken, registry.broken)]
    complaints = [f"broken: {broken}" for broken in registry.broken]
    complaints += [f"clash: {clash}" for clash in registry.clashes()]
    lacking = [
        f"lacking: {row['kind']} {row['name']} needs {', '.join(row['needs'])}; pip install {' '.join(row['needs'])}"
        for row in rows
        if row.get("needs")
    ]
    output.value = {"plugins": rows, "clashes": registry.clashes()}
    for number, line in enumerate(table(_COLUMNS, list(map(_cells, rows)), left=len(_COLUMNS))):
        text, _, state = line.rpartition(" ")
        output.say(line if not number else f"{text} {output.paint(state, _MEANINGS[state])}")
    output.say(*lacking, *complaints)
    if options.traceback:
        for broken in registry.broken:
            output.say("", f"{broken.plugin}:", *_traceback(broken))
    return PROBLEMS if options.strict and complaints else FINE


def _cells(row: Mapping[str, Any]) -> list[str]:
    """The row for people, with the aliases after the name."""
    aliases = f" ({', '.join(row['aliases'])})" if row.get("aliases") else ""
    return [row[column] + (aliases if column == "name" else "") for column in _COLUMNS]


def _offers(registry: Registry) -> Iterator[Mapping[str, Any]]:
    for offer in registry.offers():
        needs = registry.lacking(offer)
        is_one = registry.choose(offer.kind, offer.name) is offer.config
        state = _SHADOWED if not is_one else _LACKING if needs else _USABLE
        yield {
            "kind": offer.role,
            "name": offer.name,
            "aliases": list(offer.aliases),
            "plugin": offer.plugin,
            "version": offer.version,
            "api": _API,
            "state": state,
            "needs": needs,
            "choose": offer.full_name if state == _SHADOWED else offer.name,
        }


def _of_broken(broken: Broken) -> Mapping[str, str]:
    return {
        "kind": "-",
        "name": "-",
        "plugin": broken.plugin,
        "version": broken.version,
        "api": _API,
        "state": _BROKEN,
        "why": broken.why,
        "traceback": "\n".join(_traceback(broken)),
    }


def _traceback(broken: Broken) -> list[str]:
    """How the plugin failed, in Python's words."""
    return "".join(traceback.format_exception(broken.error)).splitlines() if broken.error else []
