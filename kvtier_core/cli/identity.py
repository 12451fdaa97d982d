"""`kvtier identity`: what decides whether two engines may share KV, in plain words."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kvtier_core.config.model import IdentityConfig
from kvtier_core.types import Namespace


def add_to(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "identity",
        help="show what decides whether two engines may share KV, as far as it can be told before one runs",
        epilog="What stands behind -- are arguments of vLLM's own, --dtype bfloat16 for instance.",
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
    """0; with --diff 1 if a fact differs; 1 for an engine that would not be served; 2 if that cannot be told."""
    if options.diff:
        return _diff(*options.diff)
    try:
        from vllm.engine.arg_utils import EngineArgs  # noqa: F401
    except ImportError as error:
        print(f"vLLM is asked for the model's configuration, and cannot be imported: {error}", file=sys.stderr)
        return 2
    facts = _facts(options.model, options.weights, options.engine)
    if isinstance(facts, str):
        print(f"an engine would not be served: {facts}", file=sys.stderr)
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


def _facts(model: str, weights: str, arguments: Sequence[str]) -> Namespace | str:
    """Of an engine with these arguments, or why it would not be served."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from kvtier_core.vllm.identity import model_weights, settings
    from kvtier_core.vllm.identity import namespace as identity

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm"))
    config = EngineArgs.from_cli_args(parser.parse_args(["--model", model, *arguments])).create_engine_config()
    try:
        found = model_weights.identify(config.model_config, config.load_config, IdentityConfig(weights))
        if isinstance(found, model_weights.Unknown):
            return found.reason
        return Namespace.of(identity.facts_before_start(config, found.fact))
    except (settings.UnidentifiedError, ValueError) as error:
        return str(error)


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
