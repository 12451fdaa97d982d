"""`kvtier check FILE`: the effective settings of a file, or everything that is wrong with it."""

from __future__ import annotations

import argparse
import contextlib
import enum
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from kvtier_core.builtin.heap import HeapConfig
from kvtier_core.cli.output import FINE, PROBLEMS, USAGE, Output, table
from kvtier_core.config.model import ArenaTierConfig, StackConfig, StoreTierConfig
from kvtier_core.config.quality import check_quality
from kvtier_core.config.server_client import server_client
from kvtier_core.config.suitable import unset_secrets, unsuitable
from kvtier_core.config.yaml_nodes import ProblemCollector
from kvtier_core.errors import ConfigError, Problem
from kvtier_core.interfaces import Medium
from kvtier_core.layouts import KVGroup
from kvtier_core.stack.manager import StorageManager
from kvtier_core.storekit.folder import folders, nearest
from kvtier_core.types import EnvSecret, Nbytes, size
from kvtier_doctor import memory, tiers
from kvtier_doctor.host_files import stack_in

#: The ends of the paths of settings that no file has: of the arena that a tier brings itself.
_DERIVED = (".staging.type", ".staging.capacity")
#: In place of those of a server.
_ANY_TIERS = (ArenaTierConfig("heap", HeapConfig(), Nbytes(16 << 20)),)


def add_to(commands: argparse._SubParsersAction) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "check",
        help="show the settings of a configuration file, or all its problems",
        description="Read a configuration file and show what it says, or everything that is wrong with it; also what "
        "is wrong with this machine for it, as far as nothing needs to be opened for that. No file changes.",
    )
    parser.add_argument("file")
    parser.add_argument("--all", action="store_true", help="show the defaults, too")
    parser.add_argument("--elsewhere", action="store_true", help="the file is for another machine; ignore this one")
    parser.add_argument(
        "--open",
        action="store_true",
        help="open and close what an engine opens when it starts, and report each setting",
    )
    parser.add_argument(
        "--model", type=Path, help="the folder of a model, to report how much fits and whether there is room"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, output: Output) -> int:
    """A line for each setting that was written or derived, or every problem."""
    try:
        config = stack_in(options.file)
    except ConfigError as error:
        output.fail(error)
        return USAGE if isinstance(error.__cause__, OSError) else PROBLEMS
    try:
        if config.server:
            server_client()
        quality = _must_suit(config, options, output)
        rows = [(path, _shown(value), config.origin(path)) for path, value in _settings(config)]
        output.value = {"settings": [dict(zip(("path", "value", "origin"), row, strict=True)) for row in rows]}
        shown = [row for row in rows if options.all or row[2] != "default" or row[0].endswith(_DERIVED)]
        widths = [max(len(row[column]) for row in shown) for column in (0, 1)]
        for path, value, origin in shown:
            output.say(f"{path.ljust(widths[0])}  {value.ljust(widths[1])}  {origin}")
        if quality:
            output.value["quality"] = quality
            output.say(*quality)
        for line in programs_not_found(config):
            output.warn(line)
        lacking = []
        if options.model or options.open:
            group = tiers.kv_of(options.model, output)
        if options.model:
            lacking = _say_sizes(tiers.sized(config, group)[0], tiers.of_token(group), output)
        if options.open:
            _open(config, group, quality, output)
    except ConfigError as error:
        output.fail(error)
        return PROBLEMS
    if lacking:
        return PROBLEMS
    more = {"--all also shows defaults": options.all, "--open also opens its tiers": options.open}
    output.warn("; ".join([f"{options.file}: no problems", *(told for told, done in more.items() if not done)]))
    return FINE


def _must_suit(config: StackConfig, options: argparse.Namespace, output: Output) -> list[str]:
    """How far answers may differ with its codecs.

    Raises ConfigError with what keeps an engine from starting here, as far as it shows without opening anything.
    """
    collector, quality = ProblemCollector(), []
    if options.open:
        with collector:
            config.check_engine(tiers.BLOCK_TOKENS)
    for number in range(len(config.tiers)):
        with collector:
            quality.append(check_quality(config, number))
    for problem, required in _of_machine(config) if not options.elsewhere else ():
        if required:
            collector.problems.append(problem)
        elif not options.open:  # or its start says so
            output.warn(f"{problem}; an engine starts without it")
    collector.raise_if_any()
    return list(filter(None, quality))


def _of_machine(config: StackConfig) -> Iterator[tuple[Problem, bool]]:
    """Each problem, and whether an engine does not start with it."""
    needed, there = sum(tier.capacity for tier in config.arenas), memory.whole_memory()
    if needed > there:
        why = f"memory tiers need {size(needed)}, but this machine has {size(there)}"
        yield config.problem(config.path_of(0), why, "lower the capacity"), True
    for number, tier in enumerate(config.tiers):
        required = isinstance(tier, ArenaTierConfig) or tier.required
        yield from ((problem, required) for problem in unsuitable(config, number))
    for name in ("observers", "requests"):
        yield from ((problem, True) for problem in unset_secrets(config, getattr(config, name), f"$.{name}"))


def programs_not_found(config: StackConfig) -> Iterator[str]:
    """A line for each program whose executable cannot be found here."""
    for program in config.programs:
        if shutil.which(program.command[0]) is None:
            yield f"program {program.name}: {program.command[0]!r} is not found; its server starts without it"


def _open(config: StackConfig, group: KVGroup, known: Sequence[str], output: Output) -> None:
    """Do what an engine does when it starts, report the result, and leave no trace. Raises ConfigError.

    ``known`` are warnings of the start that need no repetition.
    """
    lines: list[str] = []
    if config.server:
        try:
            tiers.ask_server(config)
        except ConfigError as error:
            lines.append(f"no server: {error.problems[0].why}, so everything is computed until it is there")
        config = attrs.evolve(config, server=None, tiers=_ANY_TIERS)  # its sessions are for engines
    with contextlib.closing(tiers.started(config, group, lines.append)) as side:
        stack = side.manager
        assert isinstance(stack, StorageManager), "opened here"
        opened = {arena.name: arena.memory.facts() for arena in stack.arenas}
        opened |= {tier.name: tier.backend.facts() for tier in stack.tiers}
        if config.tiers is not _ANY_TIERS:
            _say_facts({tier.name: dict(opened[tier.name]) for tier in config.tiers if tier.name in opened}, output)
        output.say(*(f"observer {each.type} ($.observers[{i}]): opened" for i, each in enumerate(config.observers)))
    if without := [line for line in lines if line not in known]:
        output.value["without"] = without
        for line in without:
            output.warn(f"{line}; an engine starts anyway")


def _say_facts(facts: dict[str, dict[str, str]], output: Output) -> None:
    """Report the effective settings of each opened tier."""
    output.value["opened"] = facts
    for name, of_tier in facts.items():
        output.say(f"{name}: {', '.join(f'{setting}: {fact}' for setting, fact in of_tier.items()) or 'opened'}")


def _say_sizes(config: StackConfig, token: Nbytes, output: Output) -> list[str]:
    """Show the room in each tier and on this machine; returns what the machine lacks."""
    held = [(tier.name, str(tier.capacity), f"{tier.capacity // token:,}") for tier in config.tiers if tier.capacity]
    needs = list(_needs(config))
    lacking = [
        f"{what} needs {size(needed)}, but {size(has)} is available" for what, needed, has in needs if needed > has
    ]
    output.value |= {
        "token_nbytes": int(token),
        "chunk_tokens": config.chunk_tokens,
        "tokens": {tier.name: tier.capacity // token for tier in config.tiers if tier.capacity},
        "needs": [{"what": what, "needed": int(needed), "there": int(has)} for what, needed, has in needs],
        "lacking": lacking,
    }
    blocks = f"of a chunk of {config.chunk_tokens}, in blocks of {tiers.BLOCK_TOKENS}"
    chunk = f"{blocks}: {size(token * int(config.chunk_tokens))}"
    output.say("", f"KV of a token: at most {token}; {chunk}")
    output.say(*table(("tier", "capacity", "tokens"), held, left=1))
    output.say(*(f"{what}: {size(needed)} needed, {size(has)} there" for what, needed, has in needs))
    output.say(*(output.paint(each, "bad") for each in lacking))
    return lacking


def _needs(config: StackConfig) -> Iterator[tuple[str, Nbytes, Nbytes]]:
    """The needs of the tiers on this machine, memory and space in each folder; and the amounts that are available."""
    arenas = Nbytes(sum(tier.capacity for tier in config.arenas))
    yield "memory", arenas, Nbytes(memory.available_memory())
    for tier in config.tiers:
        if tier.config.medium is Medium.DISK and tier.capacity:
            for folder in folders(tier):
                status = os.statvfs(nearest(folder))
                yield f"{tier.name} in {folder}", tier.capacity, Nbytes(status.f_bavail * status.f_frsize)


def _settings(config: StackConfig) -> Iterator[tuple[str, Any]]:
    for i, tier in enumerate(config.tiers):
        yield from _of_tier(tier, config.path_of(i))
    yield from _of_fields(config, "$", but=("tiers", "observers", "programs", "_places", "_plugins"))
    for i, observer in enumerate(config.observers):
        yield f"$.observers[{i}].type", observer.type
        yield from _of_fields(observer, f"$.observers[{i}]")
    for i, program in enumerate(config.programs):
        yield from _of_fields(program, f"$.programs[{i}]")


def _of_tier(tier: ArenaTierConfig | StoreTierConfig, path: str) -> Iterator[tuple[str, Any]]:
    yield f"{path}.type", tier.config.type
    yield from _of_fields(tier.config, path)
    shared = isinstance(tier, StoreTierConfig) and tier.config.shared
    evicts = ("eviction",) if shared else ()  # one engine's policy does not decide what leaves a shared store
    its = attrs.fields_dict(type(tier.config))
    yield from _of_fields(tier, path, but=("name", "config", "source", *evicts, *its))


def _of_fields(config: Any, path: str, but: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for field in attrs.fields(type(config)):
        if field.init and field.name not in but:
            value = getattr(config, field.name)
            at = f"{path}.{field.alias}"
            if attrs.has(type(value)) and not isinstance(value, EnvSecret):
                if hasattr(value, "type"):  # a plugin that was chosen by its name
                    yield at, value.type
                yield from _of_fields(value, at)
            else:
                yield at, value if field.repr else "(hidden)"


def _shown(value: Any) -> str:
    if isinstance(value, bool | None):
        return {True: "true", False: "false", None: "~"}[value]
    if isinstance(value, enum.Enum):
        return str(value.value)
    if isinstance(value, tuple):
        return f"[{', '.join(map(_shown, value))}]"
    text = str(value)
    return text if text and text.isprintable() else repr(text)
