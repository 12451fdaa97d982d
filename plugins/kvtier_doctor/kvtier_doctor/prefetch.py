"""`kvtier prefetch`: brings a prompt into the memory of running engines, ahead of its request."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvtier_core.cli.output import Output
from kvtier_doctor import engines, explain


def add_to(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "prefetch",
        help="bring a prompt into the memory of running engines, ahead of its request",
        description="Have running engines bring the chunks of a prompt from their stores into memory.",
    )
    parser.add_argument("--prompt", type=Path, metavar="FILE", required=True, help=explain.PROMPT)
    explain.add_salt_to(parser)
    engines.add_to(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, output: Output) -> int:
    """What comes into memory in each engine. Exits with PROBLEMS if only some have answered."""
    asked = {"prefetch": explain.tokens_of(options.prompt), "cache_salt": explain.salt_of(options)}
    return engines.tell(asked, options, output, _lines)


def _lines(told: Mapping[str, Any]) -> Iterator[str]:
    yield f"{told['chunks']} chunks are on their way, {told['in_memory']} were in memory"
    if told["asked"]:
        yield f"others are asked of {', '.join(told['asked'])}"
