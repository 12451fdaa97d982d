"""`kvtier identity`: the facts that decide whether two engines may share KV."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvtier_core.config.model import IdentityConfig
from kvtier_core.types import Namespace


def add_to(commands: argparse._SubParsersAction) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "identity",
        help="show what decides whether two engines may share KV, as far as it can be told before one runs",
        epilog="Arguments after -- are vLLM's own, --dtype bfloat16 for instance.",
    )
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--model", help="a folder, or the name of a model in the hub's cache")
    asked.add_argument(
        "--diff",
        nargs=2,
        type=Path,
        metavar=("A", "B"),
        help="name the facts that differ between two files made with --json, or kept by a tier beside its frames",
    )
    parser.add_argument("--weights", default="full", help="how the weights are identified: full, sampled or name:…")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the facts to this file, too, for --diff")
    parser.add_argument("engine", nargs="*", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Returns 0; 1 if --diff finds a difference or the engine would not be served; 2 if the facts cannot be found."""
    if options.diff:
        return _diff(*options.diff)
    try:
        from kvtier_core.vllm.identity import before_start
    except ImportError as error:
        print(f"vLLM is asked for the model's configuration, and cannot be imported: {error}", file=sys.stderr)
        return 2
    facts = before_start.of_arguments(options.model, IdentityConfig(options.weights), options.engine)
    if isinstance(facts, before_start.Unknown):
        print(f"an engine would not be served: {facts.reason}", file=sys.stderr)
        return 1
    if options.json:
        options.json.write_text(facts.to_json())
    width = max(len(name) for name, _ in facts.facts)
    for name, fact in facts.facts:
        print(f"{name.ljust(width)}  {fact}")
    print(f"\ndigest before the start  {facts.digest.hex()}")
    print(
        "An engine adds what only it knows (attention backend, layout and bytes of its pages, device, block and chunk"
    )
    print("size) and logs both digests at start. Requests add tokens, cache_salt, LoRA adapter and images.")
    return 0


def _diff(first: Path, second: Path) -> int:
    try:
        one, other = (Namespace.from_json(file.read_text()) for file in (first, second))
    except (OSError, ValueError) as error:
        print(f"cannot be compared: {error}", file=sys.stderr)
        return 2
    differences = one.differences(other)
    for name, here, there in differences:
        if here and there:
            print(f"{name}\n  {first}: {here}\n  {second}: {there}")
    for file, alone in (
        (first, [name for name, _, there in differences if not there]),
        (second, [name for name, here, _ in differences if not here]),
    ):
        if alone:
            print(f"only in {file}: {', '.join(alone)}")
    if not differences:
        print("every fact is the same: these engines share KV")
    return 1 if differences else 0
