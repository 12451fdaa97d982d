"""A lookup through `kvtier serve` beside one through LMCache's multi-process server, each asked as its own engines do.

LMCache lies in an environment of its own, if at all: its public client and its server are called as they are.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import served
from benchmarks.bare import must
from benchmarks.lookup import CHUNK_TOKENS, CHUNKS, NAMESPACE
from benchmarks.measure import Table, Times, progress, scratch, sized, turned
from benchmarks.served import SMALL, Asked, PathOf, ask_together
from benchmarks.stores import Served, cpu_seconds, kvtier_server
from kvtier_core.builtin.chained import ChainedConfig
from kvtier_core.types import ChunkKey

ROUNDS, REPEATS = sized((15, 5), (1, 1))
PROMPTS = sized(64, 2)  # that both servers hold
#: Clients at once, the seconds for which they ask, and how often.
CLIENTS, SECONDS, TURNS = sized(((1, 2, 4), 3.0, 3), ((1, 2), 0.2, 1))
PYTHON = Path(__file__).parents[1] / "build/lmcache-venv/bin/python"
TITLE = "A lookup, beside LMCache's server"
MAKING = (
    "python3 -m venv build/lmcache-venv && build/lmcache-venv/bin/pip install --no-deps -r requirements/lmcache.lock"
)
MINE, THEIRS = "kvtier serve", "LMCache's server"
_ENVIRONMENT = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING"}


def tables(folder: Path) -> Iterator[Table]:
    """Both tables, or one that says how LMCache is installed."""
    if not PYTHON.exists():
        yield Table(TITLE, f"Not measured: LMCache is not there. `{MAKING}` installs it.", ("", "", ""), [])
        return
    progress(f"lmcache: {PROMPTS} prompts of {CHUNKS} chunks, {ROUNDS} rounds")
    prompts = [random.Random(number).choices(range(128_000), k=CHUNKS * CHUNK_TOKENS) for number in range(PROMPTS)]
    database = ChainedConfig().open(NAMESPACE, CHUNK_TOKENS)

    def path_of(number: int) -> Sequence[ChunkKey]:
        return database.keys(prompts[number % PROMPTS])

    with contextlib.ExitStack() as closing:
        place = closing.enter_context(scratch(folder))
        theirs = closing.enter_context(_server())
        clients = [closing.enter_context(_client(theirs, fill=number == 0)) for number in range(max(CLIENTS))]
        mine = closing.enter_context(kvtier_server(place, 2 * PROMPTS * CHUNKS * SMALL.frame_nbytes))
        served.fill(mine, [path_of(number) for number in range(PROMPTS)])
        yield _alone(mine, path_of, clients[0])
        rows: list[tuple[object, ...]] = []
        for number in CLIENTS:
            progress(f"lmcache: {number} of each server's clients")
            asked: dict[str, list[Asked]] = {MINE: [], THEIRS: []}
            for _ in range(TURNS):
                asked[MINE].append(ask_together(mine, path_of, number, seconds=SECONDS))
                asked[THEIRS].append(_ask_together(theirs, clients[:number]))
            rows += [(f"{number}, {name}", *_asked(turns)) for name, turns in asked.items()]
    yield Table(
        title="Engines that look up at once, beside LMCache's server",
        says="The same servers and prompts. Each client is a process that asks without a pause, those of one server "
        f"for {SECONDS:g} s, then those of the other, {TURNS} times: median (min to max) of these, and of all lookups. "
        "LMCache's clients do not wait for the answers to what ends a request, as its connector does not, so that the "
        "next lookup waits behind these. LMCache's server makes the keys, kvtier's clients make theirs. Both servers "
        f"have their default threads; {os.cpu_count()} cores for all.",
        header=("clients", "prompts a second", "prompts a second of the server's CPU", "median ms", "p99 ms"),
        rows=rows,
    )


def _alone(mine: Served, path_of: PathOf, theirs: _Client) -> Table:
    with contextlib.closing(served.engine(mine, SMALL)) as stack:
        numbers = itertools.count()

        def lookup() -> float:
            begin = time.perf_counter()
            found = stack.lookup(path_of(next(numbers)), "request")
            seconds = time.perf_counter() - begin
            must(len(found.slots) == CHUNKS)
            stack.release("request")
            stack.drain(1.0)
            return seconds

        asking: dict[str, Callable[[], float]] = {MINE: lookup, THEIRS: lambda: theirs(0.0)[0]}
        seconds: dict[str, list[float]] = {name: [] for name in asking}
        for number in range(ROUNDS):
            for name in turned(list(asking), number):
                seconds[name].append(min(asking[name]() for _ in range(REPEATS)))
    times = Times(seconds)
    installed = next(PYTHON.parents[1].glob("lib/*/site-packages/lmcache-*.dist-info"))
    version = installed.stem.removeprefix("lmcache-")
    return Table(
        TITLE,
        f"From the tokens of a prompt, {CHUNKS} chunks of {CHUNK_TOKENS}, until the scheduler knows that all are held, "
        f"and has them pinned; {PROMPTS} such prompts are held, and nothing is copied. kvtier makes the keys in the "
        f"engine, and asks once. LMCache {version} (multi-process server, engine-driven, ZMQ on the loopback, without "
        "observability) gets the tokens with `LOOKUP`, and makes them there; then its client asks with "
        "`QUERY_PREFETCH_STATUS` until it is answered. The engine's connector does so from one step to the next; here "
        "it waits for each answer. What releases a prompt, `FREE_LOOKUP_LOCKS` and `END_SESSION`, has ended before the "
        f"next, and is not counted. Each asks in turn. Median of {ROUNDS} rounds, each the best of {REPEATS}; ratio "
        "round by round: median (min to max).",
        ("", "µs a prompt", "times kvtier serve"),
        [
            (name, f"{times.median(name) * 1e6:.0f}", "1" if name == MINE else times.ratio(name, MINE))
            for name in times.seconds
        ],
    )


def _asked(turns: Sequence[Asked]) -> tuple[object, ...]:
    every = Asked(sorted(each for asked in turns for each in asked.times), 0.0, 0.0)
    rate = _range([len(asked.times) / asked.seconds for asked in turns])
    of_cpu = _range([len(asked.times) / asked.cpu for asked in turns])
    return rate, of_cpu, f"{every.at(0.5) * 1e3:.2f}", f"{every.at(0.99) * 1e3:.2f}"


def _range(values: Sequence[float]) -> str:
    return f"{statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"


# -- LMCache -----------------------------------------------------------------------------------------------


def _ask_together(server: _Server, clients: Sequence[_Client]) -> Asked:
    begun, cpu = time.perf_counter(), cpu_seconds(server.process)
    for client in clients:
        client.send(SECONDS)
    times = sorted(each for client in clients for each in client.receive())
    return Asked(times, time.perf_counter() - begun, cpu_seconds(server.process) - cpu)


class _Server(NamedTuple):
    url: str
    process: subprocess.Popen


@contextlib.contextmanager
def _server() -> Iterator[_Server]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    memory = f"kvtier{os.getpid()}"
    words = ["--supported-transfer-mode", "engine_driven", "--l1-size-gb", "1", "--eviction-policy", "LRU"]
    place = ["--host", "127.0.0.1", "--port", str(port), "--shm-name", memory, "--disable-observability"]
    with _started("-m", "lmcache.v1.multiprocess.server", *words, *place, stdout=sys.stderr) as process:
        try:
            yield _Server(f"tcp://127.0.0.1:{port}", process)
        finally:
            process.kill()  # what it would keep is removed below
            process.wait()
            for left in Path("/dev/shm").glob(f"*{memory}"):
                left.unlink()


class _Client:
    """A process that asks their server."""

    def __init__(self, process: subprocess.Popen):
        self._process = process

    def __call__(self, seconds: float) -> list[float]:
        """Ask for so long, 0: once. Returns the seconds of each lookup."""
        self.send(seconds)
        return self.receive()

    def send(self, seconds: float) -> None:
        print(seconds, file=self._process.stdin, flush=True)

    def receive(self) -> list[float]:
        return json.loads(self._process.stdout.readline())  # type: ignore[union-attr]


@contextlib.contextmanager
def _client(server: _Server, fill: bool) -> Iterator[_Client]:
    words = [server.url, str(PROMPTS), str(CHUNKS), str(CHUNK_TOKENS), *(["fill"] if fill else [])]
    with _started(str(Path(__file__).with_name("lmcache_client.py")), *words, stdin=-1, stdout=-1) as process:
        client = _Client(process)
        client.receive()  # it is ready
        yield client


def _started(*words: str, **pipes: Any) -> subprocess.Popen:
    return subprocess.Popen([PYTHON, *words], env={**os.environ, **_ENVIRONMENT}, text=True, **pipes)
