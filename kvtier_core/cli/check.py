"""`kvtier check FILE`: the effective settings of a file, or everything that is wrong with it."""

from __future__ import annotations

import argparse
import contextlib
import enum
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from kvtier_core.cli import machine, tiers
from kvtier_core.cli.host_files import stack_in
from kvtier_core.cli.output import FINE, PROBLEMS, USAGE, Output, table
from kvtier_core.config.model import ArenaTierConfig, StackConfig, StoreTierConfig
from kvtier_core.config.open import open_token_database
from kvtier_core.config.quality import check_quality
from kvtier_core.config.server_client import server_client
from kvtier_core.config.yaml_nodes import ProblemCollector
from kvtier_core.engine.start.startup import open_beside
from kvtier_core.errors import ConfigError, Problem
from kvtier_core.interfaces import Medium
from kvtier_core.layouts import ChunkLayout
from kvtier_core.storekit.folder import folders, nearest
from kvtier_core.storekit.user_folders import runtime_folders
from kvtier_core.telemetry.observer_feed import Observers
from kvtier_core.telemetry.status_page import socket_path
from kvtier_core.telemetry.status_server import Server
from kvtier_core.types import EnvSecret, Nbytes, size

#: The ends of the paths of settings that no file has: of the arena that a tier brings itself.
_DERIVED = (".staging.type", ".staging.capacity")


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
        if not options.elsewhere:
            _must_suit(config, output)
        rows = [(path, _shown(value), config.origin(path)) for path, value in _settings(config)]
        output.value = {"settings": [dict(zip(("path", "value", "origin"), row, strict=True)) for row in rows]}
        shown = [row for row in rows if options.all or row[2] != "default" or row[0].endswith(_DERIVED)]
        widths = [max(len(row[column]) for row in shown) for column in (0, 1)]
        for path, value, origin in shown:
            output.say(f"{path.ljust(widths[0])}  {value.ljust(widths[1])}  {origin}")
        quality = [told for number in range(len(config.tiers)) if (told := check_quality(config, number))]
        if quality:
            output.value["quality"] = quality
            output.say(*quality)
        for line in programs_not_found(config):
            output.warn(line)
        lacking = []
        if options.model or options.open:
            token = tiers.kv_of_token(options.model, output)
            config, layout = tiers.sized(config, token)
        if options.model:
            lacking = _say_sizes(config, token, output)
        if options.open:
            _open(config, layout, output)
    except ConfigError as error:
        output.fail(error)
        return PROBLEMS
    if lacking:
        return PROBLEMS
    more = {"--all also shows defaults": options.all, "--open also opens its tiers": options.open}
    output.warn("; ".join([f"{options.file}: no problems", *(told for told, done in more.items() if not done)]))
    return FINE


def _must_suit(config: StackConfig, output: Output) -> None:
    """Raise ConfigError with what keeps an engine from starting here, as far as it shows without opening anything."""
    stores = ((number, tier) for number, tier in enumerate(config.tiers) if isinstance(tier, StoreTierConfig))
    optional = tuple(config.path_of(number) for number, tier in stores if not tier.required)
    collector = ProblemCollector()
    for problem in (*_of_memory(config), *_of_folders(config), *_of_secrets(config)):
        if problem.path.startswith(optional):
            output.warn(f"{problem}; an engine starts without it")
        else:
            collector.problems.append(problem)
    collector.raise_if_any()


def _of_memory(config: StackConfig) -> Iterator[Problem]:
    needed, there = sum(tier.capacity for tier in config.arenas), machine.whole_memory()
    if needed > there:
        why = f"memory tiers need {size(needed)}, but this machine has {size(there)}"
        yield config.problem(config.path_of(0), why, "lower the capacity")


def _of_folders(config: StackConfig) -> Iterator[Problem]:
    used: dict[str, str] = {}
    for number, tier in enumerate(config.tiers):
        path = config.path_of(number)
        for folder in folders(tier) if tier.config.medium is Medium.DISK else ():
            if not (there := nearest(folder)).is_dir():
                yield config.problem(path, f"{there} is not a folder", "name one")
            if (other := used.setdefault(os.path.realpath(folder), path)) != path:
                yield config.problem(path, f"{folder} is also the folder of {other}", "give each its own path")


def _of_secrets(config: StackConfig) -> Iterator[Problem]:
    for path, value in _settings(config):
        if isinstance(value, EnvSecret) and not os.environ.get(value.variable):
            yield config.problem(path, f"the environment variable {value.variable} is not set", "set it for the engine")


def programs_not_found(config: StackConfig) -> Iterator[str]:
    """A line for each program whose executable cannot be found here."""
    for program in config.programs:
        if shutil.which(program.command[0]) is None:
            yield f"program {program.name}: {program.command[0]!r} is not found; its server starts without it"


def _open(config: StackConfig, layout: ChunkLayout, output: Output) -> None:
    """Open what an engine opens when it starts, report the result, and leave no trace. Raises ConfigError."""
    ctx = attrs.evolve(tiers.context(layout), checking=True)
    without: list[Problem] = []
    made = [folder for each in (*config.observers, config.record) for folder in folders(each)]
    with tiers.no_new_folders([*made, *runtime_folders()]), contextlib.ExitStack() as closing:
        open_token_database(config, ctx.namespace)
        opened = closing.enter_context(tiers.opened(config, layout, range(len(config.tiers)), without, checking=True))
        recorder, observers = open_beside(config, ctx)
        if recorder:
            closing.callback(recorder.path.unlink)
            closing.callback(recorder.close)
        closing.callback(Observers(observers).close)
        _say_facts({each.tier.name: dict(each.store.facts()) for each in opened}, output)
        output.say(*(f"{name}: opened" for name, _ in observers))
        if without:
            output.value["without"] = list(map(str, without))
            for problem in without:
                output.warn(f"{problem}; an engine starts without it")
        for what, why in _goes_without(config):
            output.warn(f"{what}: {why}; an engine starts anyway")


def _goes_without(config: StackConfig) -> Iterator[tuple[str, str]]:
    """Each thing that an engine lacks when it starts, and the reason."""
    if config.server:
        try:
            tiers.ask_server(config)
        except ConfigError as error:
            yield "server", f"{error.problems[0].why}, so everything is computed until it is there"
    if config.status != "off":
        try:
            Server(socket_path(config.status), lambda asked: None).close()
        except OSError as error:
            yield "status", f"cannot open a socket: {error}"


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
    chunk = f"of a chunk of {config.chunk_tokens}: {size(token * int(config.chunk_tokens))}"
    output.say("", f"KV of a token: at most {token}; {chunk}")
    output.say(*table(("tier", "capacity", "tokens"), held, left=1))
    output.say(*(f"{what}: {size(needed)} needed, {size(has)} there" for what, needed, has in needs))
    output.say(*(output.paint(each, "bad") for each in lacking))
    return lacking


def _needs(config: StackConfig) -> Iterator[tuple[str, Nbytes, Nbytes]]:
    """The needs of the tiers on this machine, memory and space in each folder; and the amounts that are available."""
    arenas = Nbytes(sum(tier.capacity for tier in config.arenas))
    yield "memory", arenas, Nbytes(machine.available_memory())
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
