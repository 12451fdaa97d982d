"""`kvtier doctor FILE`: is this machine fit for this stack, and does each tier work?"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path

import attrs

from kvtier_core.cli.output import FINE, PROBLEMS, Output, table
from kvtier_core.config.model import ArenaTierConfig, StackConfig, StoreTierConfig
from kvtier_core.config.open import OpenedTier
from kvtier_core.errors import ConfigError, KvtierError
from kvtier_core.interfaces import AllocatorBackend, SupportsTrial
from kvtier_core.layouts import ChunkLayout, KVGroup
from kvtier_core.storekit.folder import folders, nearest
from kvtier_core.transfer.cuda.host_registration import page_tables
from kvtier_core.types import Nbytes, size
from kvtier_core.work.io_pool import run_within
from kvtier_doctor import machine, tiers
from kvtier_doctor.host_files import stack_in
from kvtier_doctor.measure import Frames, median, seconds
from kvtier_doctor.memory import available_memory
from kvtier_doctor.stores import opened

#: Frames that are written and read, and rounds of each measurement.
_FRAMES, _ROUNDS = 16, 3
#: Seconds within which peers answer; those that do not are absent.
_MEETING = 1.0
#: A tier may take this many times its timeout to be opened and tried; then it counts as not answering.
_PATIENCE = 10


def add_to(commands: argparse._SubParsersAction) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "doctor",
        help="test and measure each tier, and report what this machine lacks",
        description="Open each tier as an engine would, write and read a few frames in a namespace of its own, and "
        "remove them. A full tier makes room for them as it would for an engine's.",
    )
    parser.add_argument("file")
    parser.add_argument("--model", type=Path, help="the folder of the model, which decides the size of a frame")
    parser.add_argument(
        "--prefill", type=float, default=8000.0, help="speed of prefill, in tokens a second; default: 8000"
    )
    parser.set_defaults(run=run)


@attrs.frozen
class Diagnosis:
    """The condition of a tier; speeds in bytes per second, None where it was not measured."""

    tier: str
    trouble: str = ""  #: why it cannot be used; empty if it can
    opens: bool = True  #: a tier that does not open keeps an engine from starting
    latency: float | None = None  #: seconds until it reports whether it has a frame
    write: float | None = None
    read: float | None = None
    verify: float | None = None
    free: int | None = None  #: bytes where its folder is
    settings: tuple[str, ...] = ()  #: those whose effective value may differ from the requested one
    folders: tuple[str, ...] = ()  #: with their permissions
    advice: tuple[str, ...] = ()


def run(options: argparse.Namespace, output: Output) -> int:
    """The machine, each tier, and a verdict. Raises ConfigError if the file is wrong."""
    config = stack_in(options.file)
    if config.server:
        tiers.ask_server(config)
        output.value = {"verdict": f"the server at {config.server} answers; ask the doctor about its own file"}
        output.say(output.paint(output.value["verdict"], "good"))
        return FINE
    group = tiers.kv_of(options.model, output)
    config, layout = tiers.sized(config, group)
    facts = list(machine.facts())
    engine = _Engine(options.prefill, tiers.of_token(group))
    found = [_diagnose(config, number, layout, engine) for number in range(len(config.tiers))]
    if all(each.opens for each in found):
        found = _together(config, group, found)
    output.say(*table(("machine", ""), [(fact.name, fact.value) for fact in facts], left=2), "")
    output.say(*table(("tier", "state", "answers", "writes", "reads", "verifies", "free"), _rows(found), left=2))
    output.say(*(f"{each.tier}: {line}" for each in found for line in (*each.settings, *each.folders)), "")
    troubles = [f"{each.tier} cannot be used: {each.trouble}" for each in found if each.trouble]
    advice = [f"{fact.name}: {fact.value}; {fact.advice}" for fact in facts if fact.advice]
    advice += [f"{each.tier}: {line}" for each in found for line in each.advice]
    output.say(*(output.paint(line, "bad") for line in troubles), *(output.paint(line, "warning") for line in advice))
    verdict = _verdict(found, bool(advice))
    output.say(output.paint(verdict, "bad" if troubles else "good"))
    output.value = {
        "machine": {fact.name: fact.value for fact in facts},
        "tiers": list(map(attrs.asdict, found)),
        "advice": advice,
        "verdict": verdict,
    }
    return PROBLEMS if troubles else FINE


def _verdict(found: Sequence[Diagnosis], advice: bool) -> str:
    if closed := sum(not each.opens for each in found):
        return f"{closed} of {len(found)} tiers cannot be opened: an engine does not start with this file"
    if broken := sum(bool(each.trouble) for each in found):
        return f"{broken} of {len(found)} tiers cannot be used: an engine starts, but finds nothing there"
    return "every tier works" + ("; the advice above would make it better" if advice else "")


def _rows(found: list[Diagnosis]) -> list[list[str]]:
    """The cells of the table of tiers."""
    return [
        [
            each.tier,
            "fails" if each.trouble else "works",
            "" if each.latency is None else f"{each.latency * 1e3:.3f} ms",
            *("" if rate is None else f"{rate / 1e9:.2f} GB/s" for rate in (each.write, each.read, each.verify)),
            "" if each.free is None else size(each.free),
        ]
        for each in found
    ]


@attrs.frozen
class _Engine:
    """How fast the engine is assumed to be."""

    prefill: float  #: tokens per second
    token: Nbytes  #: KV of one

    def __str__(self) -> str:
        return f"{self.prefill:g} tokens a second (--prefill) of {self.token} each"

    @property
    def rate(self) -> float:
        """Bytes of KV that it computes per second."""
        return self.prefill * self.token


def _together(config: StackConfig, group: KVGroup, found: list[Diagnosis]) -> list[Diagnosis]:
    """Open all tiers together, as an engine does: two of them may want the same folder."""
    small = _small(config).tiers
    required = tuple(attrs.evolve(tier, required=True) if isinstance(tier, StoreTierConfig) else tier for tier in small)
    config = attrs.evolve(config, tiers=required, status="off", observers=())
    error = run_within(lambda: tiers.started(config, group).close(), _PATIENCE * 5.0)
    problems = error.error.problems if error and isinstance(error.error, ConfigError) else ()
    troubles = {problem.path: str(problem) for problem in problems}
    return [
        attrs.evolve(each, trouble=troubles[path], opens=False)
        if (path := config.path_of(number)) in troubles
        else each
        for number, each in enumerate(found)
    ]


def _diagnose(config: StackConfig, number: int, layout: ChunkLayout, engine: _Engine) -> Diagnosis:
    """Open one tier, try it and close it."""
    tier = config.tiers[number]
    limit = _PATIENCE * (tier.timeout if isinstance(tier, StoreTierConfig) else 5.0)
    outcome = run_within(lambda: _tried(_small(config), number, layout), limit)
    where = tuple(map(_described, folders(tier)))
    if outcome is None:
        return Diagnosis(tier.name, f"no answer within {limit:g} s; is everything it needs running?", folders=where)
    if isinstance(outcome.error, KvtierError):
        opens = not isinstance(outcome.error, ConfigError)
        return Diagnosis(tier.name, str(outcome.error), opens, folders=where)
    if outcome.error is not None:
        raise outcome.error
    free = [_free(folder) for folder in folders(tier)]
    found: Diagnosis = attrs.evolve(outcome.value, folders=where, free=min(free, default=None))
    if isinstance(tier, ArenaTierConfig):
        takes = f"page-locking takes about {page_tables(tier.capacity)} of the memory of each GPU of an engine"
        found = attrs.evolve(found, settings=(*found.settings, takes))
    return attrs.evolve(found, advice=tuple(_advice(tier, found, engine)))


def _tried(config: StackConfig, number: int, layout: ChunkLayout) -> Diagnosis:
    with opened(config, layout, number) as tier:
        if isinstance(tier.tier, StoreTierConfig) and tier.tier.config.of_peers:
            time.sleep(_MEETING)
        settings = _settings(tier)
        if isinstance(tier.tier, StoreTierConfig) and tier.tier.config.read_only:
            return Diagnosis(tier.tier.name, settings=settings)  # the store has no frame of this namespace
        if isinstance(tier.store, AllocatorBackend):
            return attrs.evolve(_tried_arena(tier.tier.name, tier.store), settings=settings)
        with Frames(tier, layout, _FRAMES) as frames:
            write = frames.nbytes / median(frames.write, _ROUNDS, frames.rename)[0]
            latency = median(frames.look, _ROUNDS)[0]
            read = frames.nbytes / median(frames.read, _ROUNDS)[0]
            verify = frames.nbytes / seconds(frames.verify)
            return Diagnosis(tier.tier.name, latency=latency, write=write, read=read, verify=verify, settings=settings)


def _settings(tier: OpenedTier) -> tuple[str, ...]:
    trial = tier.store.trial() if isinstance(tier.store, SupportsTrial) else {}
    return tuple(f"{name}: {fact}" for name, fact in {**tier.store.facts(), **trial}.items())


def _tried_arena(name: str, arena: AllocatorBackend) -> Diagnosis:
    """Copies to a slot and back."""
    slot = arena.view(0)
    other = memoryview(bytearray(len(slot)))

    def write() -> None:
        slot[:] = other

    def read() -> None:
        other[:] = slot

    writes, reads = (len(other) / median(work, _FRAMES)[0] for work in (write, read))
    slot.release()
    return Diagnosis(name, write=writes, read=reads)


def _advice(tier: ArenaTierConfig | StoreTierConfig, found: Diagnosis, engine: _Engine) -> list[str]:
    told = []
    if found.read and found.read < engine.rate and isinstance(tier, StoreTierConfig):
        told.append(
            f"it reads {found.read / 1e9:.2f} GB/s; an engine that computes {engine} makes "
            f"{engine.rate / 1e9:.2f} GB/s of KV, and with load: auto would seldom load from it"
        )
    if found.free is not None and tier.capacity and found.free < tier.capacity:
        told.append(f"its capacity is {tier.capacity}, but only {size(found.free)} is free, besides what it holds")
    if isinstance(tier, ArenaTierConfig) and tier.capacity > (there := available_memory()):
        told.append(f"its capacity is {tier.capacity}, but only {size(there)} of memory is available")
    return told


def _small(config: StackConfig) -> StackConfig:
    """The same stack with arenas of a few slots: an engine may be using their memory."""
    few = [
        attrs.evolve(tier, capacity=min(tier.capacity, Nbytes(64 << 20))) if isinstance(tier, ArenaTierConfig) else tier
        for tier in config.tiers
    ]
    return attrs.evolve(config, tiers=tuple(few))


def _free(folder: Path) -> int:
    status = os.statvfs(nearest(folder))
    return status.f_bavail * status.f_frsize


def _described(folder: Path) -> str:
    """A folder with its owner and permissions."""
    try:
        status = folder.stat()
    except OSError:
        return f"{folder}: not there yet; the nearest folder above it is {nearest(folder)}"
    return f"{folder}: user {status.st_uid}, permissions {status.st_mode & 0o7777:o}"
