"""`kvtier plugins`: lists what is installed, and what of it cannot be used."""

from __future__ import annotations

import argparse

from kvtier_core.config.registry import Registry


def add_to(commands: argparse._SubParsersAction) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("plugins", help="list what is installed, and what is broken and why")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if anything is broken or clashes")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print a line for each offer, then what is wrong; returns the exit status."""
    registry = Registry.discover()
    rows = [("kind", "name", "plugin", "version")]
    for offer in registry.offers():
        aliases = f" ({', '.join(offer.aliases)})" if offer.aliases else ""
        rows.append((offer.role, offer.name + aliases, offer.plugin, offer.version))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    complaints = [f"broken: {broken}" for broken in registry.broken]
    complaints += [f"clash: {clash}" for clash in registry.clashes()]
    for complaint in complaints:
        print(complaint)
    return 1 if options.strict and complaints else 0
