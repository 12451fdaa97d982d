"""`kvtier identity`: the facts that decide whether two engines may share KV."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

from kvtier_core.cli.output import FINE, PROBLEMS, Output
from kvtier_core.config.model import IdentityConfig
from kvtier_core.errors import BackendError
from kvtier_core.outside import LONGEST_PATH, printable
from kvtier_core.types import Namespace


def add_to(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "identity",
        help="show the facts that decide whether two engines may share KV, as far as known before an engine runs",
        description="Show the facts that decide whether two engines may share KV, as far as they are known before an "
        "engine runs; with --diff, those in which two saved listings differ.",
        epilog="Arguments after -- are vLLM's own, such as --dtype bfloat16.",
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
    parser.add_argument("engine", nargs="*", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, output: Output) -> int:
    """A line for each fact, or for each that differs. Raises BackendError if they cannot be found."""
    if options.diff:
        first, second = options.diff
        return _diff(first, second, output)
    with contextlib.redirect_stdout(sys.stderr):  # where vLLM's log goes
        try:
            from kvtier_vllm.identity import model_weights, namespace
        except ImportError as error:
            why = f"cannot import vLLM, which reads the model's configuration: {error}"
            raise BackendError(why) from error
        facts = namespace.of_arguments(options.model, IdentityConfig(options.weights), options.engine)
    if isinstance(facts, model_weights.Unknown):
        output.value = {"not_served": facts.reason}
        if not output.as_json:
            output.warn(f"kvtier would not serve this engine: {facts.reason}")
        return PROBLEMS
    output.value = dict(facts.facts)
    width = max(len(name) for name, _ in facts.facts)
    output.say(*(f"{name.ljust(width)}  {fact}" for name, fact in facts.facts))
    output.say(
        f"\ndigest before the start  {facts.digest.hex()}",
        "An engine adds what only it knows (attention backend, layout and bytes of its pages, device, block and chunk",
        "size) and logs both digests at start. Requests add tokens, cache_salt, LoRA adapter and images.",
    )
    return FINE


def _diff(first: Path, second: Path, output: Output) -> int:
    try:
        one, other = (Namespace.from_json(file.read_text("utf-8")) for file in (first, second))
    except (OSError, ValueError) as error:
        raise BackendError(f"cannot compare: {error}; pass two files made with --json") from error
    differences = [tuple(printable(each, LONGEST_PATH) for each in found) for found in one.differences(other)]
    output.value = [{"fact": name, "first": here, "second": there} for name, here, there in differences]
    for name, here, there in differences:
        if here and there:
            output.say(f"{name}\n  {first}: {here}\n  {second}: {there}")
    for file, alone in (
        (first, [name for name, _, there in differences if not there]),
        (second, [name for name, here, _ in differences if not here]),
    ):
        if alone:
            output.say(f"only in {file}: {', '.join(alone)}")
    if not differences:
        output.say("every fact is the same: these engines share KV")
    return PROBLEMS if differences else FINE
