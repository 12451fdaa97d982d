"""`kvtier explain`: why requests of a running engine hit or missed, or where the chunks of a prompt are now."""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtier_core.cli.output import FINE, PROBLEMS, Output, table
from kvtier_core.errors import BackendError
from kvtier_core.telemetry.status_page import sources
from kvtier_core.types import EnvSecret
from kvtier_doctor import engines

#: Number of hit lines shown if no request is named.
_LAST = 10
#: What the file of an option ``--prompt`` has, for its help.
PROMPT = "the prompt with these token ids: a list in JSON, or what vLLM's /tokenize answers"


def add_to(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "explain",
        help="say why requests of a running engine hit or missed",
        description="Say why one request, or each of the last ten, hit or missed, or where the chunks of a prompt are. "
        "A prompt is treated as one without adapter and images.",
    )
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument(
        "request", nargs="?", metavar="REQUEST_ID", help="the id of a request, as the client or the log shows it"
    )
    asked.add_argument("--prompt", type=Path, metavar="FILE", help=PROMPT)
    add_salt_to(parser, "the cache_salt of the prompt")
    engines.add_to(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, output: Output) -> int:
    """The reason, or a line for each run of chunks. Raises BackendError if no engine answers."""
    question: dict[str, Any] = {"request": options.request} if options.request else {"requests": _LAST}
    if options.cache_salt and not options.prompt:
        raise BackendError("specify the prompt of that salt: --prompt FILE")
    if options.prompt:
        question = {"prompt": tokens_of(options.prompt), "cache_salt": salt_of(options)}
    paths = engines.found(options.socket)
    answers = {str(path): engines.ask(path, question) for path in paths}
    for each in paths if options.prompt else ():
        answers[str(each)]["cold"] = engines.ask(each, {"status": True})["cold"]
    output.value = answers
    if not options.request:
        for path, answer in answers.items():
            lines = of_prompt(answer) if options.prompt else _of_requests(answer["found"])
            output.say(*([path] if len(answers) > 1 else []), *lines)
        return FINE
    told = [line for answer in answers.values() for line in _of_requests(answer["found"])]
    output.say(*told)
    if not told:
        remembered = max(answer["remembered"] for answer in answers.values())
        output.warn(
            f"{options.request}: no engine knows this request: it was bypassed at the start, or is not among the last "
            f"{remembered}; the log has a line for every request"
        )
    return FINE if told else PROBLEMS


def add_salt_to(parser: Any, what: str = "the cache_salt of the tenant") -> Any:
    """Add ``--cache-salt``; returns the parser."""
    named = f"{what}: the environment variable that has it"
    parser.add_argument("--cache-salt", type=EnvSecret.parse, metavar="env:NAME", help=named)
    return parser


def salt_of(options: argparse.Namespace) -> str:
    """The cache_salt that is named; empty if none is. Raises BackendError."""
    return options.cache_salt.value if options.cache_salt else ""


def tokens_of(file: Path) -> list[int]:
    """The prompt in a file: a list of token ids, or an answer of vLLM's ``/tokenize``. Raises BackendError."""
    try:
        tokens = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise BackendError(f"cannot read {file}: {error}; write the token ids as a JSON list") from error
    if isinstance(tokens, dict):
        tokens = tokens.get("tokens")
    if not (isinstance(tokens, list) and all(type(token) is int for token in tokens)):
        raise BackendError(f"{file}: not a list of token ids; write [1, 2, 3]")
    return tokens


def _of_requests(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for told in found:
        ago = f"{time.time() - told['at']:.0f} s ago"
        yield f"{told['request']}, {ago}: {told['tokens']} tokens: {sources(told)}"


def of_prompt(answer: Mapping[str, Any]) -> Iterator[str]:
    """The places of a prompt's chunks, for people."""
    chunks, size = answer["chunks"], answer["chunk_tokens"]
    held = len(list(itertools.takewhile(lambda chunk: chunk["tiers"], chunks)))
    yield f"{answer['tokens']} tokens are {len(chunks)} chunks of {size}; the first {held} of them can be loaded"
    if held < len(chunks):
        yield f"from token {held * size} on: {chunks[held]['miss_reason']}"
    if answer["cold"] and not held:
        yield f"this engine started cold because {answer['cold']}"
    rows, first = [], 0
    for (where, reason), run in itertools.groupby(chunks, lambda each: (tuple(each["tiers"]), each["miss_reason"])):
        last = first + len(list(run))
        rows.append([f"{first * size} to {last * size - 1}", ", ".join(where) or "-", reason])
        first = last
    yield from table(("tokens", "can be loaded from", "why not"), rows, left=3) if rows else ()
