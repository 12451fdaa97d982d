"""The command `kvtier`.

Each of its commands is a module: `add_to` adds it to the parser, `run` carries it out and returns the exit code. Other
packages add commands through entry points of the group `kvtier.commands`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import entry_points
from typing import Any

from kvtier_core.cli.output import FINE, PROBLEMS, USAGE, Output
from kvtier_core.config.versions import own_version
from kvtier_core.errors import BackendError, ConfigError
from kvtier_core.work.io_pool import run

_COMMANDS = "completion plugins"
_GROUP = "kvtier.commands"
#: The extras that install packages with commands, and these commands.
_COMMANDS_OF = {
    "blend": "blend-quality",
    "bundle": "export import",
    "doctor": "bench check clear doctor explain fsck pins prefetch schema status top",
    "fleet": "fleet",
    "serve": "serve",
    "simulate": "plan simulate",
    "testing": "conform new",
    "vllm": "identity quality",
}
_EXTRAS = {command: extra for extra, commands in _COMMANDS_OF.items() for command in commands.split()}


class _Command(argparse.ArgumentParser):
    """The parser of one command, which may be `missing`."""

    missing = ""  #: the reason

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As in the base class."""
        if self.missing:
            self.exit(USAGE, f"{self.missing}\n")
        return super().parse_known_args(args, namespace)


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    modules = {command: f"{__name__}.{command}" for command in _COMMANDS.split()}
    modules |= {entry.name: entry.value for entry in entry_points(group=_GROUP) if entry.name not in modules}
    whole = argparse.ArgumentParser(
        prog="kvtier",
        description="Tiers for the KV cache of inference engines.",
        epilog=f"Exit codes: {FINE} success, {PROBLEMS} problems found, {USAGE} the command cannot run.",
    )
    whole.add_argument("--version", action="version", version=f"kvtier {own_version()}")
    commands = whole.add_subparsers(required=True, metavar="COMMAND", parser_class=_Command)
    for command in sorted({*modules, *_EXTRAS}):
        if command not in modules:
            _add_missing(commands, command, f"not installed; pip install 'kvtier[{_EXTRAS[command]}]'")
        elif module := (imported := run(functools.partial(importlib.import_module, modules[command]))).value:
            module.add_to(commands)
        else:
            _add_missing(commands, command, f"{modules[command]} cannot be imported: {imported.error}")
    for each in commands.choices.values():
        each.add_argument("--json", action="store_true", help="print one JSON value, for programs")
    return whole


def _add_missing(commands: argparse._SubParsersAction, command: str, why: str) -> None:
    commands.add_parser(command, help=why.replace("%", "%%")).missing = f"kvtier {command}: {why}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, or those of the process; returns the exit status."""
    options = parser().parse_args(arguments)
    output = Output(options.json)
    # What a plugin prints during its import is not part of the value.
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
        status: int = options.run(options, output)
    except (ConfigError, BackendError) as error:
        output.fail(error)
        status = USAGE
    output.finish()
    return status
