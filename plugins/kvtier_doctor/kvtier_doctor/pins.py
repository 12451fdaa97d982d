"""`kvtier pins`: the prompts that running engines keep in memory."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtier_core.cli.output import Output, table
from kvtier_core.errors import BackendError
from kvtier_core.types import Seconds
from kvtier_doctor import engines, explain


def add_to(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "pins",
        help="show the prompts that running engines keep in memory, or change one",
        description="Show the prompts that running engines keep in memory, or have each engine keep one, or stop it.",
    )
    add_changes_to(parser)
    parser.add_argument("--prompt", type=Path, metavar="FILE", help=explain.PROMPT)
    explain.add_salt_to(parser)
    engines.add_to(parser)
    parser.set_defaults(run=run)


def add_changes_to(parser: argparse.ArgumentParser) -> None:
    """Add ``--add NAME``, with ``--for TIME``, and ``--delete NAME``."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--add", metavar="NAME", help="keep the prompt in memory, under this name")
    which.add_argument("--delete", metavar="NAME", help="stop keeping it")
    parser.add_argument("--for", dest="lasting", type=Seconds.parse, metavar="TIME", help="default: a day")


def run(options: argparse.Namespace, output: Output) -> int:
    """What each engine has done, or keeps. Exits with PROBLEMS if only some have answered."""
    if options.add:
        if not options.prompt:
            raise BackendError("specify what to keep: --prompt FILE")
        prompt = {"prompt": explain.tokens_of(options.prompt), "cache_salt": explain.salt_of(options)}
        asked = {"pin": options.add, **prompt, **lasting(options)}
        return engines.tell(asked, options, output, lambda told: [kept(options.add, told)])
    if options.delete:
        return engines.tell({"unpin": options.delete}, options, output, lambda told: [deleted(options.delete, told)])
    return engines.tell({"pins": True}, options, output, lambda told: listed(told["pins"]))


def lasting(options: argparse.Namespace) -> dict[str, Any]:
    """How long to keep a prompt, as engines and servers take it."""
    return {"seconds": options.lasting} if options.lasting else {}


def kept(name: str, told: Mapping[str, Any]) -> str:
    """What a pin keeps, for people."""
    left_out = f", {told['left_out']} have no room" if told["left_out"] else ""
    return f"{name}: {told['chunks']} chunks are kept, {told['pending']} may follow{left_out}"


def deleted(name: str, told: Mapping[str, Any]) -> str:
    """What a deleted pin kept, for people."""
    return f"{name}: {told['chunks']} slots are kept no longer"


def listed(pins: Sequence[Mapping[str, Any]], *more: str) -> Iterator[str]:
    """A table of pins, with columns for these further fields."""
    rows = [
        [
            each["name"],
            *(each[field] for field in more),
            str(each["chunks"]),
            f"{each['slots']}{' …' * each['pending']}",
            f"{each['seconds'] / 3600:.1f} h",
        ]
        for each in pins
    ]
    return table(("pin", *more, "chunks", "slots", "expires in"), rows, left=1 + len(more))
