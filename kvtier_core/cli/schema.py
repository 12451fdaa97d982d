"""`kvtier schema`: a JSON Schema of the configuration file, with all plugins that are installed here, for editors."""

from __future__ import annotations

import argparse
import json

from kvtier_core.cli.output import FINE, Output
from kvtier_core.config.registry import Registry
from kvtier_core.config.schema import schema_of


def add_to(commands: argparse._SubParsersAction) -> None:
    commands.add_parser(
        "schema",
        help="print a JSON Schema of the configuration file, for editors",
        description="Print a JSON Schema of the configuration file, with all plugins that are installed. An editor "
        "that reads '# yaml-language-server: $schema=kvtier.schema.json' completes and checks the file with it.",
    ).set_defaults(run=run)


def run(options: argparse.Namespace, output: Output) -> int:
    """The schema, with --json or without."""
    output.value = schema_of(Registry.discover())
    output.say(json.dumps(output.value, indent=1))
    return FINE
