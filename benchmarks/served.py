"""What a server between engine and stack costs: lookups, stores, loads, hits of a real engine, many engines at once."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import multiprocessing
import os
import random
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import attrs

from benchmarks import ttft, turns
from benchmarks.bare import must
from benchmarks.copies import LAYERS, MEMCPY, Shape, address, end, paged, warm
from benchmarks.engines import BLOCK, Recipe, kvtier, none
from benchmarks.lookup import CHUNKS, HELD, LAYOUT, NAMESPACE
from benchmarks.measure import Case, Spread, Table, Times, interleaved, progress, scratch, sized
from benchmarks.models import RANDOM, TRAINED
from benchmarks.stores import Served, cpu_seconds, kvtier_server, memory
from kvtier_core.config.load import load_config
from kvtier_core.config.open import open_stack
from kvtier_core.config.registry import Registry
from kvtier_core.interfaces import Mover, OpenContext
from kvtier_core.layouts import ChunkLayout
from kvtier_core.stack.interface import Stack
from kvtier_core.stack.outcomes import ANY, Lookup
from kvtier_core.types import KEY_NBYTES, ChunkKey, Nbytes, Slot
from kvtier_cpu.config import CpuConfig
from kvtier_remote.client import RemoteStack, Waits
from kvtier_remote.memory import served_tier
from kvtier_remote.protocol import Opening, ServedLookup, arguments, encode, result
from kvtier_testing.samples import make_layout

ROUNDS = sized(21, 1)
#: Engines at once, and the seconds for which they ask.
ENGINES, SECONDS = sized(((1, 2, 4, 16), 5.0), ((1, 2), 0.2))
#: Chunks that the arena of the load generator holds, and those of one prompt.
MANY = sized(1 << 20, 1 << 12)
#: Of the chunks that are copied: those of a model with 8 billion parameters, and of one block.
SHAPE = Shape(64 << 10, 1)
SMALL = make_layout((64,), 1)  # slots of two pages: nothing is copied
EMBEDDED, SERVED = "embedded", "through a server"
CALLS = ("lookup, all READY", "lookup, all absent", "reserve and commit")
ENGINE_NBYTES = 1 << 30
#: Model, prompts, tokens of each, and prompts that are not counted.
ASKED = sized(((RANDOM, 24, ttft.TOKENS, 3), (TRAINED, 6, 1500, 1)), ((RANDOM, 1, 300, 0), (TRAINED, 1, 300, 0)))


def tables(folder: Path) -> Iterator[Table]:
    """All tables."""
    with scratch(folder) as place:
        progress(f"served: {CHUNKS} chunks, {ROUNDS} rounds")
        yield _beside_embedded(place)
        progress(f"served: {Nbytes(CHUNKS * SHAPE.layout.payload_nbytes)} moved, {ROUNDS} rounds")
        yield _moves(place)
        yield from _engines(place)
        progress(f"served: {MANY} chunks, {max(ENGINES)} engines")
        yield _load(place)
        progress("served: turns")
        yield turns.table(place)


# -- the scheduler's thread --------------------------------------------------------------------------------


def _beside_embedded(place: Path) -> Table:
    with contextlib.ExitStack() as closing:
        stacks = both(closing, place, LAYOUT, HELD)
        ready, absent = path(), path()
        cases = []
        for name, stack in stacks.items():
            store(stack, ready)
            found = stack.lookup(ready, "waiting")
            cases += [case(f"{call}, {name}", stack, ready, absent) for call in CALLS]
        question: tuple = ready, "request", ANY
        asked, answer = encode(question), encode(ServedLookup.of(found))
        echo = closing.enter_context(_echo(len(asked), len(answer)))
        cases += [
            Case("of a lookup: coding", lambda: _code(question, found, asked, answer)),
            Case("of a lookup: an echo of its bytes by a process that sleeps", echo, echo),
            Case("a call that does nothing", stack.pins_by_holder),
        ]
        times = interleaved(cases, ROUNDS, repeats=5)
    return Table(
        title="A lookup through a server",
        says=f"On the scheduler's thread, a prompt of {CHUNKS} chunks; the server is another process. Nothing is "
        f"moved. A full arena of {HELD} chunks: each reserve evicts as many as it takes. A commit is sent, and nothing "
        f"waits for its answer. Median, and median (min to max), of {ROUNDS} rounds, each the best of 5. The aim is "
        "100 µs more than embedded.",
        header=("", "embedded µs", "through a server µs", "µs more"),
        rows=[
            *(_call(times, call) for call in CALLS),
            *((each.name, "", _us(times, each.name), "") for each in cases[-3:]),
        ],
    )


def case(name: str, stack: Stack, ready: Sequence[ChunkKey], absent: Sequence[ChunkKey]) -> Case:
    fresh: list[list[ChunkKey]] = []

    def rest() -> None:
        stack.release("request")
        stack.drain(1.0)
        fresh[:] = [path()]

    def reserve() -> None:
        must(len(stack.reserve(fresh[0], "request")) == CHUNKS)
        stack.commit("request")

    if name.startswith("reserve"):
        return Case(name, reserve, rest)
    asked = absent if "absent" in name else ready
    return Case(name, lambda: stack.lookup(asked, "request"), rest)


def _us(times: Times, name: str) -> str:
    return f"{times.median(name) * 1e6:.0f}"


def _call(times: Times, call: str) -> tuple[str, ...]:
    mine, its = f"{call}, {SERVED}", f"{call}, {EMBEDDED}"
    return call, _us(times, its), _us(times, mine), _range(_more(times, mine, its))


def _more(times: Times, name: str, than: str) -> Spread:
    """Microseconds, round by round."""
    pairs = zip(times.seconds[name], times.seconds[than], strict=True)
    return Spread(tuple((mine - its) * 1e6 for mine, its in pairs))


def _range(spread: Spread) -> str:
    return f"{spread.median:.0f} ({min(spread.values):.0f} to {max(spread.values):.0f})"


def _code(question: object, found: Lookup, asked: bytes, answer: bytes) -> None:
    """What both processes do to say it."""
    encode(question)
    arguments("lookup", asked)
    encode(ServedLookup.of(found))
    _ = result("lookup", answer).found


@contextlib.contextmanager
def _echo(asked: int, answered: int) -> Iterator[Callable[[], None]]:
    """A call asks another process over a bare socket, and polls for the answer as an engine does."""
    ours, theirs = socket.socketpair()
    process = multiprocessing.get_context("fork").Process(target=_echoes, args=(ours, theirs, asked, answered))
    process.start()
    theirs.close()
    ours.setblocking(False)

    def call() -> None:
        ours.sendall(bytes(asked))
        left = answered
        while left:
            try:
                left -= len(ours.recv(left))
            except BlockingIOError:
                os.sched_yield()

    yield call
    ours.close()
    process.join()


def _echoes(ours: socket.socket, theirs: socket.socket, asked: int, answered: int) -> None:
    ours.close()
    while theirs.recv(asked, socket.MSG_WAITALL):
        theirs.sendall(bytes(answered))


# -- bytes -------------------------------------------------------------------------------------------------


def _moves(place: Path) -> Table:
    """A store and a load by both sides of an engine, without the engine."""
    nbytes = CHUNKS * SHAPE.layout.payload_nbytes
    with contextlib.ExitStack() as closing:
        pages, plain = warm(nbytes), warm(nbytes)
        cases = [Case(MEMCPY, lambda: ctypes.memmove(address(plain), address(pages), nbytes))]
        for name, stack in both(closing, place, SHAPE.layout, 3 * CHUNKS).items():
            (handle,) = stack.handles.values()
            config = served_tier(handle).config if name == SERVED else CpuConfig()
            mover = config.attach(handle, paged(pages, SHAPE, CHUNKS))
            closing.callback(mover.close)
            moves = _Moves(stack, mover)
            for _ in range(6):  # so that every slot was used
                moves.rest()
                moves.store()
            cases += [
                Case(f"store, {name}", moves.store, moves.rest),
                Case(f"load, {name}", moves.load, moves.rest),
            ]
        times = interleaved(cases, ROUNDS, repeats=3)
    return Table(
        title="Stores and loads through a server",
        says=f"A prompt of {CHUNKS} chunks of {Nbytes(SHAPE.layout.payload_nbytes)}, each {LAYERS} pages of "
        f"{Nbytes(SHAPE.page_nbytes)}: {Nbytes(nbytes)} are copied. A store is `reserve`, the mover's copy with its "
        "checksums, and `commit`; a load is `lookup`, the copy, and `release`. The scheduler's side and the worker's "
        "are one process, the server is another. The ratios are of times in the same round, to one memcpy of as many "
        f"bytes and to the same embedded: median (min to max) of {ROUNDS} rounds, each the best of 3. The aim is 1.05.",
        header=("", "ms", "times memcpy", "times embedded"),
        rows=[(name, *_move(times, name)) for name in times.seconds],
    )


def _move(times: Times, name: str) -> tuple[object, ...]:
    cells = f"{times.median(name) * 1e3:.1f}", "1" if name == MEMCPY else times.ratio(name, MEMCPY)
    return *cells, times.ratio(name, name.replace(SERVED, EMBEDDED)) if name.endswith(SERVED) else ""


class _Moves:
    """What both sides of an engine do with its pages, one prompt at a time."""

    def __init__(self, stack: Stack, mover: Mover):
        self._stack, self._mover = stack, mover
        self._jobs = itertools.count()
        self._pages = [[[chunk]] for chunk in range(CHUNKS)]
        self._fresh = self._kept = path()
        self.store()
        must(len(stack.lookup(self._kept, "waiting").slots) == CHUNKS)  # which keeps it

    def rest(self) -> None:
        """What was asked before has ended; the next store is of another prompt."""
        self._stack.drain(1.0)
        self._fresh = path()

    def store(self) -> None:
        slots = self._stack.reserve(self._fresh, "store")
        must(len(slots) == CHUNKS)
        job = next(self._jobs)
        self._mover.store(job, self._pages, [slot.index for slot in slots.values()])
        checksums = end(self._mover, job)
        self._stack.commit("store", {key: [each] for key, each in zip(slots, checksums, strict=True)})

    def load(self) -> None:
        slots = self._stack.lookup(self._kept, "request").slots
        must(len(slots) == CHUNKS)
        job = next(self._jobs)
        self._mover.load(job, [slot.index for slot in slots if isinstance(slot, Slot)], self._pages)
        end(self._mover, job)
        self._stack.release("request")


# -- real engines ------------------------------------------------------------------------------------------


def _engines(place: Path) -> Iterator[Table]:
    for model, prompts, tokens, warming in ASKED:
        with scratch(place) as own, kvtier_server(own, ENGINE_NBYTES) as server:

            def recipes(place: Path, shared: ttft.Tiers, server: Served = server) -> list[Recipe]:
                own = memory(ENGINE_NBYTES)
                return [
                    kvtier("kvtier, cpu", BLOCK, *own),
                    kvtier("kvtier, cpu, once more", BLOCK, *own),
                    kvtier("kvtier, cpu, through a server", BLOCK, server=server.path),
                    none(),
                ]

            title = "Time to first token through a server" + (", trained model" if model is TRAINED else "")
            yield ttft.measure(ttft.Workload(title, model, prompts, warming, recipes, tokens), own)


# -- many engines ------------------------------------------------------------------------------------------


def _load(place: Path) -> Table:
    rows: list[tuple[str, ...]] = []
    with kvtier_server(place, MANY * SMALL.frame_nbytes) as server:
        filled = [path() for _ in range(MANY // CHUNKS)]
        fill(server, filled)

        def path_of(number: int) -> Sequence[ChunkKey]:
            return filled[number % len(filled)]

        for engines in ENGINES:
            asked = ask_together(server, path_of, engines)
            rows.append(_asked(f"{engines}", asked))
        prompts = len(asked.times) / asked.seconds
        asked = ask_together(server, path_of, engines, 2 * engines / prompts)
        rows.append(_asked(f"{engines}, half as fast", asked))
    return Table(
        title="Engines that ask one server at once",
        says=f"Each engine is a process that looks up prompts of {CHUNKS} chunks one after the other, of {MANY} chunks "
        f"that the server holds, and releases each, for {SECONDS:g} s. An engine that serves waits for no answer "
        f"longer than {Waits().lookup * 1e3:g} ms; `later` is the share of those that took more. All processes share "
        f"{os.cpu_count()} cores, so that many engines wait for a core as much as for the server.",
        header=("engines", "chunks a second", "chunks a second of the server's CPU", "median µs", "p99 µs", "later"),
        rows=rows,
    )


@attrs.frozen
class Asked:
    """What became of the lookups of some engines."""

    times: Sequence[float]  #: seconds of each, in order of length
    seconds: float  #: for which they asked
    cpu: float  #: seconds of the server's CPU

    def at(self, share: float) -> float:
        return self.times[int(len(self.times) * share)]


def _asked(name: str, asked: Asked) -> tuple[str, ...]:
    chunks, late = len(asked.times) * CHUNKS, sum(each > Waits().lookup for each in asked.times)
    return (
        name,
        f"{chunks / asked.seconds:,.0f}",
        f"{chunks / asked.cpu:,.0f}",
        f"{asked.at(0.5) * 1e6:.0f}",
        f"{asked.at(0.99) * 1e6:.0f}",
        f"{late / len(asked.times):.1%}",
    )


#: Makes the keys of a prompt, by its number. What that takes counts.
PathOf = Callable[[int], Sequence[ChunkKey]]


def ask_together(server: Served, path_of: PathOf, engines: int, pause: float = 0.0, seconds: float = SECONDS) -> Asked:
    """``pause`` are the seconds from one prompt to the next, on average; 0: one after the other."""
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for number in range(engines):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=_asks, args=(server, path_of, number, pause, seconds, theirs)))
        processes[-1].start()
        pipes.append(ours)
    for pipe in pipes:
        pipe.recv()
    begun, cpu = time.perf_counter(), cpu_seconds(server.process)
    for pipe in pipes:
        pipe.send("go")
    told = [pipe.recv() for pipe in pipes]
    took, cpu = time.perf_counter() - begun, cpu_seconds(server.process) - cpu
    for process in processes:
        process.join()
    return Asked(sorted(each for asked in told for each in asked), took, cpu)


def _asks(server: Served, path_of: PathOf, number: int, pause: float, seconds: float, pipe: Connection) -> None:
    drawn = random.Random(number)
    stack = engine(server, SMALL)
    pipe.send("ready")
    pipe.recv()
    times: list[float] = []
    ends = time.perf_counter() + seconds
    while (begin := time.perf_counter() + (drawn.expovariate(1 / pause) if pause else 0.0)) < ends:
        time.sleep(max(0.0, begin - time.perf_counter()))
        begin = time.perf_counter()
        found = stack.lookup(path_of(len(times) * 7919 + number * 104729), f"request {len(times)}")
        times.append(time.perf_counter() - begin)
        if len(found.slots) != CHUNKS:
            raise RuntimeError("a prompt that the server holds was not found")
        stack.release(f"request {len(times) - 1}")
        stack.step()
    stack.close()
    pipe.send(times)


# -- stacks ------------------------------------------------------------------------------------------------


def both(closing: contextlib.ExitStack, place: Path, layout: ChunkLayout, held: int) -> dict[str, Stack]:
    """A stack of one's own and that of a server, each with memory for so many chunks."""
    server = closing.enter_context(kvtier_server(place, held * layout.frame_nbytes))
    config = load_config({"version": 1, "tiers": memory(held * layout.frame_nbytes)}, Registry.discover())
    stacks: dict[str, Stack] = {
        EMBEDDED: open_stack(config, OpenContext(NAMESPACE, layout)),
        SERVED: engine(server, layout),
    }
    for stack in stacks.values():
        closing.callback(stack.close)
    return stacks


def engine(server: Served, layout: ChunkLayout) -> RemoteStack:
    """One that waits for every answer, however long it takes."""
    return RemoteStack(server.path, Opening("benchmark", "engine", NAMESPACE, layout), Waits(60.0, 60.0))


def fill(server: Served, prompts: Sequence[Sequence[ChunkKey]]) -> None:
    """Store them all; nothing is copied."""
    stack = engine(server, SMALL)
    for keys in prompts:
        store(stack, keys)
    stack.close()


def store(stack: Stack, keys: Sequence[ChunkKey]) -> None:
    must(len(stack.reserve(keys, "store")) == len(keys))
    stack.commit("store")
    stack.drain(1.0)


def path() -> list[ChunkKey]:
    return [ChunkKey(os.urandom(KEY_NBYTES)) for _ in range(CHUNKS)]
