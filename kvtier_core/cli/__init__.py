"""The command `kvtier`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from kvtier_core.cli import check, conform, fsck, identity, new, plan, plugins, simulate


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, or those of the process; returns the exit status."""
    parser = argparse.ArgumentParser(prog="kvtier", description="Tiers for the KV cache of inference engines.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (check, conform, fsck, identity, new, plan, plugins, simulate):
        command.add_to(commands)
    options = parser.parse_args(arguments)
    return options.run(options)
