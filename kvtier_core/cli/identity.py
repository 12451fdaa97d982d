"""`kvtier identity`: what decides whether two engines may share KV, in plain words."""

from __future__ import annotations

import argparse
import sys

from kvtier_core.types import Namespace


def add_to(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "identity",
        help="show what decides whether two engines may share KV, as far as it can be told before one runs",
        epilog="What stands behind -- are arguments of vLLM's own, --dtype bfloat16 for instance.",
    )
    parser.add_argument("--model", required=True, help="a folder, or the name of a model in the hub's cache")
    parser.add_argument("engine", nargs="*", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    try:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError as error:
        print(f"vLLM is asked for the model's configuration, and cannot be imported: {error}", file=sys.stderr)
        return 2
    from kvtier_core.vllm import identity

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm"))
    engine = EngineArgs.from_cli_args(parser.parse_args(["--model", options.model, *options.engine]))
    model = engine.create_model_config()
    weights = identity.weights_of(model, engine.create_load_config())
    if not weights:
        print(f"the weights of {options.model} are not on this disk; an engine would not be served", file=sys.stderr)
        return 1
    facts = Namespace.of(identity.model_facts(model, weights))
    width = max(len(name) for name, _ in facts.facts)
    for name, fact in facts.facts:
        print(f"{name.ljust(width)}  {fact}")
    print(f"\ndigest of the model  {facts.digest.hex()}")
    print("An engine adds what only it knows (attention backend, layout and bytes of its pages, ranks, kv dtype, block")
    print("and chunk size) and logs both digests at start. Requests add tokens, cache_salt, LoRA adapter and images.")
    return 0
