"""Time that a prompt costs on the scheduler's thread: keys, and the bookkeeping of the stack."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import random
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from benchmarks.measure import Case, Spread, Table, interleaved, progress, scratch, sized
from kvtier_core.builtin.chained import ChainedConfig
from kvtier_core.config.load import load_config
from kvtier_core.config.model import StackConfig
from kvtier_core.config.open import Runtime, open_stack
from kvtier_core.config.registry import Registry
from kvtier_core.engine.request_view import RequestView
from kvtier_core.engine.scheduler.side import SchedulerSide
from kvtier_core.engine.step import ScheduledRequest, Step
from kvtier_core.interfaces import OpenContext
from kvtier_core.stack.manager import StorageManager
from kvtier_core.types import KEY_NBYTES, ChunkKey, Namespace
from kvtier_core.work.io_pool import Then, Work
from kvtier_simulate.dry_run import InstantPool
from kvtier_testing.samples import make_layout

ROUNDS = sized(21, 1)
CHUNK_TOKENS = 256
CHUNKS = 128
NAMESPACE = Namespace.of({"benchmark": "lookup"})
LAYOUT = make_layout((60 << 10,), 1)  # small: bytes are not the matter here
HELD = 1024  # chunks that the arena holds when it is full
LONG, BLOCK = sized(8192, 256), 16
WAITING, AWAITED = sized((1000, 400), (20, 20))  # requests that wait, and chunks of each
HASH = "one blake2b over the packed tokens"


def tables(folder: Path) -> Iterator[Table]:
    progress(f"lookup: {CHUNKS} chunks, {ROUNDS} rounds")
    yield _keys()
    with scratch(folder) as place:
        yield _bookkeeping(place)
    yield _long_prompt()
    progress(f"lookup: {WAITING} waiting requests of {AWAITED} chunks")
    with scratch(folder) as place:
        yield _waiting(place)


def _keys() -> Table:
    database = ChainedConfig().open(NAMESPACE, CHUNK_TOKENS)
    tokens = random.Random(0).choices(range(128_000), k=CHUNKS * CHUNK_TOKENS)
    packed = struct.pack(f"<{len(tokens)}I", *tokens)
    known = database.keys(tokens[:-CHUNK_TOKENS])
    cases = [
        Case(HASH, lambda: hashlib.blake2b(packed, digest_size=32).digest()),
        Case("keys of a prompt", lambda: database.keys(tokens)),
        Case("keys of a prompt that grew by a chunk", lambda: database.keys(tokens, known=known)),
    ]
    times = interleaved(cases, ROUNDS, repeats=3)
    return Table(
        title="Keys",
        says=f"{len(tokens)} token ids in a list, {CHUNKS} chunks of {CHUNK_TOKENS}. The ratio is time to that of one "
        f"hash over the same bytes, already packed: median (min to max) of {ROUNDS} rounds, each the best of 3.",
        header=("", "µs", "times the hash"),
        rows=[
            (name, f"{times.median(name) * 1e6:.0f}", "1" if name == HASH else times.ratio(name, HASH))
            for name in times.seconds
        ],
    )


def _bookkeeping(place: Path) -> Table:
    with contextlib.ExitStack() as stack:
        cases = [*_looking(_open(stack, place / "looking")), *_storing(_open(stack), _open(stack, place / "storing"))]
        times = interleaved(cases, ROUNDS, repeats=3)
    return Table(
        title="Bookkeeping",
        says=f"On the scheduler's thread, for a prompt of {CHUNKS} chunks. A full arena of {HELD} chunks, below it a "
        "disk tier unless it says otherwise. Each store evicts as many chunks, and threads seal and write meanwhile. "
        f"Median, and median (min to max), of {ROUNDS} rounds, each the best of 3.",
        header=("", "µs a prompt", "µs a chunk"),
        rows=[
            (name, f"{times.median(name) * 1e6:.0f}", Spread(tuple(each / CHUNKS * 1e6 for each in seconds)))
            for name, seconds in times.seconds.items()
        ],
    )


def _long_prompt() -> Table:
    """As `auto` cuts it for a model whose blocks are large."""
    tokens = random.Random(0).choices(range(128_000), k=LONG * BLOCK)
    database = ChainedConfig().open(NAMESPACE, BLOCK)
    path, never = database.keys(tokens), database.keys(tokens[1:] + tokens[:1])
    with contextlib.ExitStack() as stack:
        manager = _open(stack, held=LONG)
        _must(len(manager.reserve(path, "store")) == LONG)
        manager.commit("store")
        _must(len(manager.lookup(path, "waiting").slots) == LONG)
        cases = [
            Case("keys", lambda: database.keys(tokens)),
            Case("lookup and release, all READY", lambda: _look(manager, path)),
            Case("lookup, all absent", lambda: _look(manager, never)),
            Case("keys, lookup and release", lambda: _look(manager, database.keys(tokens))),
            Case("lookup again, all READY", lambda: manager.lookup(path, "waiting")),
            Case("on_request, once a request", lambda: manager.on_request(path)),
        ]
        times = interleaved(cases, ROUNDS, repeats=3)
    return Table(
        title="A long prompt in short chunks",
        says=f"{LONG * BLOCK} tokens, {LONG} chunks of {BLOCK}. Median of {ROUNDS} rounds, each the best of 3.",
        header=("", "ms a prompt", "µs a chunk"),
        rows=[
            (name, f"{times.median(name) * 1e3:.2f}", f"{times.median(name) / LONG * 1e6:.2f}")
            for name in times.seconds
        ],
    )


def _waiting(place: Path) -> Table:
    """vLLM's scheduler asks about each request that waits in every step."""
    with contextlib.ExitStack() as stack:
        own = [_request(number) for number in range(WAITING)]
        same = [attrs.evolve(_request(0), request_id=str(number)) for number in range(WAITING)]
        cases = []
        for name, views, shared in (
            ("prompts of their own, which the store was asked for", own, True),
            ("one prompt, which is being read", same, False),
        ):
            side = _serving(stack, place / name.split()[0], same[0], shared)
            for view in views:
                side.arrived(view)
            _must(side.match(views[0], 0) is None)
            cases.append(Case(name, functools.partial(_step, side, views)))
        times = interleaved(cases, ROUNDS)
    return Table(
        title="Requests that wait",
        says=f"On the scheduler's thread: a step in which nothing arrives, with {WAITING} requests of {AWAITED} chunks "
        f"that wait for a disk, each of them asked about, beside one that computes. Median of {ROUNDS} rounds.",
        header=("", "ms a step", "µs a request"),
        rows=[
            (name, f"{times.median(name) * 1e3:.2f}", f"{times.median(name) / WAITING * 1e6:.2f}")
            for name in times.seconds
        ],
    )


def _request(number: int) -> RequestView:
    tokens = random.Random(number).choices(range(128_000), k=AWAITED * LAYOUT.tokens + 1)
    return RequestView(str(number), tokens, len(tokens))


class _Silent(InstantPool):
    """A pool of a store that answers nothing."""

    def submit_load(self, work: Work, then: Then) -> None:
        pass


def _serving(stack: contextlib.ExitStack, place: Path, known: RequestView, shared: bool) -> SchedulerSide:
    """An engine's scheduler side whose disk has a prompt, and answers nothing any more."""
    kind = {"shared": True} if shared else {"capacity": "1GiB"}
    disk = {"type": "disk", "path": str(place), "min_free": "0B", **kind}
    tiers = [{"type": "cpu", "capacity": f"{2 * AWAITED * LAYOUT.frame_nbytes >> 10}KiB"}, disk]
    values = {"version": 1, "chunk_tokens": LAYOUT.tokens, "load_wait": "60min", "status": "off", "tiers": tiers}
    config = load_config(values, Registry.discover())
    with contextlib.closing(_scheduler_side(config, Runtime())) as before:
        _must(len(before.manager.reserve(before.track(known).path, "store")) == AWAITED)
        before.manager.commit("store")
        before.drain(10.0)
    return stack.enter_context(contextlib.closing(_scheduler_side(config, Runtime(lambda *_: _Silent()))))


def _scheduler_side(config: StackConfig, runtime: Runtime) -> SchedulerSide:
    manager = open_stack(config, OpenContext(NAMESPACE, LAYOUT), runtime)
    return SchedulerSide(config, manager, NAMESPACE, LAYOUT)


def _step(side: SchedulerSide, views: Sequence[RequestView]) -> None:
    for view in views:
        _must(side.still_waits(view.request_id, view.tokens, 0) or side.match(view, 0) is None)
    side.plan(Step([ScheduledRequest("another", 100, 1)], (), lambda _: ()))
    side.step_ended()


def _looking(manager: StorageManager) -> list[Case]:
    """`step` is never called again, so what is READY stays so, and what is below stays there."""
    below, ready, never = _path(), _path(), _path()
    half = [*ready[: CHUNKS // 2], *never[CHUNKS // 2 :]]
    for path in (below, *(_path() for _ in range(HELD // CHUNKS)), ready):
        _store(manager, path)
        manager.drain(10.0)
    for path, expected in ((below, (0, CHUNKS)), (never, (0, 0)), (ready, (CHUNKS, 0))):
        found = manager.lookup(path, "waiting")
        _must((len(found.slots), found.pending) == expected)
    return [
        Case("lookup and release, all READY", lambda: _look(manager, ready)),
        Case("lookup and release, half READY, half absent", lambda: _look(manager, half)),
        Case("lookup, all absent", lambda: _look(manager, never)),
        Case("lookup, all in the tier below", lambda: _look(manager, below)),
        Case("lookup again, all READY", lambda: manager.lookup(ready, "waiting")),
        Case("on_request, once a request", lambda: manager.on_request(ready)),
    ]


def _storing(alone: StorageManager, both: StorageManager) -> list[Case]:
    fresh = []

    def ready(manager: StorageManager) -> None:
        manager.drain(10.0)
        fresh.append(_path())

    for manager in (alone, both):
        for _ in range(HELD // CHUNKS):
            _store(manager, _path())
            manager.drain(10.0)
    return [
        Case("reserve and commit, no tier below", lambda: _store(alone, fresh.pop()), before=lambda: ready(alone)),
        Case("reserve and commit", lambda: _store(both, fresh.pop()), before=lambda: ready(both)),
        Case("step, nothing to do", both.step, before=lambda: both.drain(10.0)),
    ]


def _store(manager: StorageManager, path: Sequence[ChunkKey]) -> None:
    _must(len(manager.reserve(path, "store")) == CHUNKS)
    manager.commit("store")


def _look(manager: StorageManager, path: Sequence[ChunkKey]) -> None:
    manager.lookup(path, "request")
    manager.release("request")


def _path() -> list[ChunkKey]:
    return [ChunkKey(os.urandom(KEY_NBYTES)) for _ in range(CHUNKS)]


def _open(stack: contextlib.ExitStack, disk: Path | None = None, held: int = HELD) -> StorageManager:
    capacity = f"{held * LAYOUT.frame_nbytes >> 10}KiB"
    tiers = [{"type": "cpu", "capacity": capacity}]
    if disk:
        tiers.append({"type": "disk", "path": str(disk), "capacity": "4GiB", "min_free": "0B"})
    config = load_config({"version": 1, "tiers": tiers}, Registry.discover())
    manager = open_stack(config, OpenContext(NAMESPACE, LAYOUT))
    stack.callback(manager.close)
    return manager


def _must(right: bool) -> None:
    if not right:
        raise RuntimeError("the stack is not in the state that is to be measured")
