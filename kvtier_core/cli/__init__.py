"""The command `kvtier`.

Each of its commands is a module of that name: `add_to` adds it to the parser, `run` carries it out and returns the exit
code.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Sequence

from kvtier_core.cli.output import FINE, PROBLEMS, USAGE, Output
from kvtier_core.errors import BackendError, ConfigError

_COMMANDS = (
    "bench check clear completion conform doctor explain fsck identity new plan plugins quality schema serve simulate "
    "status top"
)


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    whole = argparse.ArgumentParser(
        prog="kvtier",
        description="Tiers for the KV cache of inference engines.",
        epilog=f"Exit codes: {FINE} all is well, {PROBLEMS} problems were found, {USAGE} it cannot be done as asked.",
    )
    commands = whole.add_subparsers(required=True, metavar="COMMAND")
    for command in _COMMANDS.split():
        importlib.import_module(f"{__name__}.{command}").add_to(commands)
    for each in commands.choices.values():
        each.add_argument("--json", action="store_true", help="print one JSON value, for programs")
    return whole


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, or those of the process; returns the exit status."""
    options = parser().parse_args(arguments)
    output = Output(options.json)
    # Output of a plugin while it is imported is not part of the value.
    apart = contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext()
    try:
        with apart:
            status = _run(options, output)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, `head` for instance, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PROBLEMS
    return status


def _run(options: argparse.Namespace, output: Output) -> int:
    try:
        status = options.run(options, output)
    except (ConfigError, BackendError) as error:
        output.fail(error)
        status = USAGE
    output.finish()
    return status
