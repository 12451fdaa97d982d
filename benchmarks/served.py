"""What a server between engine and stack costs: a lookup embedded and over its socket, and many engines at once."""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.lookup import CHUNKS, HELD, LAYOUT, NAMESPACE
from benchmarks.measure import Case, Table, interleaved, progress, scratch
from kvtier_core.config.compose import open_stack
from kvtier_core.config.load import load_config
from kvtier_core.config.registry import Registry
from kvtier_core.interfaces import OpenContext
from kvtier_core.layouts import ChunkLayout
from kvtier_core.server.client import RemoteStack, Waits
from kvtier_core.server.protocol import Opening, arguments, encode, result
from kvtier_core.stack.interface import Stack
from kvtier_core.testing.samples import make_layout
from kvtier_core.types import KEY_NBYTES, ChunkKey

ROUNDS = 21
#: Engines at once, and the seconds for which they ask.
ENGINES, SECONDS = (1, 4, 16), 5.0
#: Chunks that the arena of the load generator holds, and those of one prompt.
MANY = 1 << 20
_SMALL = make_layout((64,), 1)  # slots of two pages: nothing is copied
KVTIER = Path(sys.executable).with_name("kvtier")


def tables(folder: Path) -> Iterator[Table]:
    """Both tables."""
    with scratch(folder) as place:
        progress(f"served: {CHUNKS} chunks, {ROUNDS} rounds")
        yield _beside_embedded(place)
        progress(f"served: {MANY} chunks, {max(ENGINES)} engines")
        yield _load(place)


def _beside_embedded(place: Path) -> Table:
    with contextlib.ExitStack() as closing:
        path = closing.enter_context(_server(place, HELD * LAYOUT.frame_nbytes))
        config = load_config({"version": 1, "tiers": _tiers(HELD * LAYOUT.frame_nbytes)}, Registry.discover())
        embedded = open_stack(config, OpenContext(NAMESPACE, LAYOUT))
        closing.callback(embedded.close)
        served = _engine(path)
        closing.callback(served.close)
        ready = _path()
        for stack in (embedded, served):
            _store(stack, ready)
        found = embedded.lookup(ready, "waiting")
        asked, answer = encode((ready, "request", None, b"", 0)), encode(found)
        cases = [
            Case("lookup, embedded", functools.partial(embedded.lookup, ready, "request"), lambda: _rest(embedded)),
            Case("lookup, through a server", functools.partial(served.lookup, ready, "request"), lambda: _rest(served)),
            Case("of that: coding", lambda: _code(ready, found, asked, answer)),
            Case("of that: a call that does nothing", lambda: served.pins_by_holder()),
        ]
        times = interleaved(cases, ROUNDS, repeats=5)
    return Table(
        title="A lookup through a server",
        says=f"On the scheduler's thread, a prompt of {CHUNKS} chunks, all READY; the server is another process. "
        f"Nothing is moved. Median of {ROUNDS} rounds, each the best of 5.",
        header=("", "µs a prompt", "µs more than embedded"),
        rows=[
            (
                name,
                f"{times.median(name) * 1e6:.0f}",
                _more(times.median(name) - times.median("lookup, embedded"), name),
            )
            for name in times.seconds
        ],
    )


def _more(seconds: float, name: str) -> str:
    return f"{seconds * 1e6:.0f} µs" if name == "lookup, through a server" else ""


def _rest(stack: Stack) -> None:
    stack.release("request")
    stack.drain(1.0)


def _code(ready: Sequence[ChunkKey], found: object, asked: bytes, answer: bytes) -> None:
    """What both processes do to say it."""
    encode((ready, "request", None, b"", 0))
    arguments("lookup", asked)
    encode(found)
    result("lookup", answer)


# -- many engines ------------------------------------------------------------------------------------------


def _load(place: Path) -> Table:
    rows: list[tuple[str, ...]] = []
    with _server(place, MANY * _SMALL.frame_nbytes) as path:
        filled = [_path() for _ in range(MANY // CHUNKS)]
        engine = _engine(path, _SMALL, Waits(60.0, 60.0))
        for keys in filled:
            _store(engine, keys)
        engine.close()
        for engines in ENGINES:
            rows.append(_ask_together(path, filled, engines, 0.0, f"{engines}"))
        prompts = float(rows[-1][1].replace(",", "")) / CHUNKS
        rows.append(_ask_together(path, filled, engines, 2 * engines / prompts, f"{engines}, half as fast"))
    return Table(
        title="Engines that ask one server at once",
        says=f"Each engine is a process that looks up prompts of {CHUNKS} chunks one after the other, of {MANY} chunks "
        f"that the server holds, and releases each, for {SECONDS:g} s. An engine that serves waits for no answer "
        f"longer than {Waits().lookup * 1e3:g} ms; `later` is the share of those that took more. All processes share "
        f"{os.cpu_count()} cores, so that many engines wait for a core as much as for the server.",
        header=("engines", "chunks a second", "chunks a second of the server's CPU", "median µs", "p99 µs", "later"),
        rows=rows,
    )


def _ask_together(
    path: Path, filled: Sequence[Sequence[ChunkKey]], engines: int, pause: float, name: str
) -> tuple[str, ...]:
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for number in range(engines):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=_asks, args=(path, filled, number, pause, theirs)))
        processes[-1].start()
        pipes.append(ours)
    for pipe in pipes:
        pipe.recv()
    begun, cpu = time.perf_counter(), _cpu_seconds()
    for pipe in pipes:
        pipe.send("go")
    told = [pipe.recv() for pipe in pipes]
    seconds, cpu = time.perf_counter() - begun, _cpu_seconds() - cpu
    for process in processes:
        process.join()
    times = sorted(each for asked in told for each in asked)
    chunks = len(times) * CHUNKS
    late = sum(each > Waits().lookup for each in times)
    return (
        name,
        f"{chunks / seconds:,.0f}",
        f"{chunks / cpu:,.0f}",
        f"{times[len(times) // 2] * 1e6:.0f}",
        f"{times[len(times) * 99 // 100] * 1e6:.0f}",
        f"{late / len(times):.1%}",
    )


def _asks(path: Path, filled: Sequence[Sequence[ChunkKey]], number: int, pause: float, pipe: Connection) -> None:
    """``pause`` are the seconds from one prompt to the next, on average; 0: one after the other."""
    drawn = random.Random(number)
    stack = _engine(path, _SMALL, Waits(60.0, 60.0))  # it waits for every answer
    pipe.send("ready")
    pipe.recv()
    times: list[float] = []
    ends = time.perf_counter() + SECONDS
    while (begin := time.perf_counter() + (drawn.expovariate(1 / pause) if pause else 0.0)) < ends:
        time.sleep(max(0.0, begin - time.perf_counter()))
        begin = time.perf_counter()
        found = stack.lookup(filled[(len(times) * 7919 + number * 104729) % len(filled)], f"request {len(times)}")
        times.append(time.perf_counter() - begin)
        if len(found.slots) != CHUNKS:
            raise RuntimeError("a prompt that the server holds was not found")
        stack.release(f"request {len(times) - 1}")
        stack.step()
    stack.close()
    pipe.send(times)


_servers: list[int] = []


def _cpu_seconds() -> float:
    """Of the server that runs."""
    fields = Path(f"/proc/{_servers[-1]}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def _server(place: Path, nbytes: int) -> Iterator[Path]:
    file, path = place / "kvtier.yaml", place / "s"
    file.write_text(json.dumps({"version": 1, "tiers": _tiers(nbytes)}))
    command: list[str | Path] = [KVTIER, "serve", "--config", file, "--socket", path]
    with subprocess.Popen(command, stdout=-1, stderr=-3, text=True) as server:
        _servers.append(server.pid)
        try:
            if not any(line.startswith("engines write") for line in server.stdout or ()):
                raise RuntimeError("the server has not started")
            yield path
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)


def _tiers(nbytes: int) -> list[dict[str, str]]:
    return [{"type": "cpu", "capacity": f"{nbytes >> 10}KiB", "huge_pages": "off"}]


def _engine(path: Path, layout: ChunkLayout = LAYOUT, waits: Waits | None = None) -> RemoteStack:
    return RemoteStack(path, Opening("benchmark", "engine", NAMESPACE, layout), waits)


def _store(stack: Stack, keys: Sequence[ChunkKey]) -> None:
    if len(stack.reserve(keys, "store")) != len(keys):
        raise RuntimeError("there is no room for what is to be looked up")
    stack.commit("store")
    stack.drain(1.0)


def _path() -> list[ChunkKey]:
    return [ChunkKey(os.urandom(KEY_NBYTES)) for _ in range(CHUNKS)]
