"""The longest turn of a server's thread, whatever the server holds and whoever hangs."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import attrs

import kvtier_cpu.plugin
from benchmarks.measure import Table, sized
from kvtier_core.config.load import load_config
from kvtier_core.config.registry import Registry
from kvtier_core.hookspecs import hookimpl
from kvtier_core.interfaces import Backend, BackendConfig, OpenContext
from kvtier_core.stack.outcomes import ANY, Terms
from kvtier_core.types import KEY_NBYTES, ChunkKey, Namespace, Nbytes
from kvtier_remote.protocol import MOST_RESERVED, Opening
from kvtier_serve.operators.console import Console, Named
from kvtier_serve.operators.forms import Scope
from kvtier_serve.server import Server
from kvtier_serve.sessions import Session
from kvtier_serve.tenants import UNBOUNDED, Quota
from kvtier_testing.samples import make_layout

#: Chunks in the memory, namespaces, and the chunks of a prompt.
CHUNKS, NAMESPACES, PROMPT = sized((30_000, 300, 128), (1_000, 20, 128))
LAYOUT = make_layout((64,), 1)
_HANGS = threading.Event()  # is never set


class Hanging(Backend):
    """A store whose answers never come."""

    shared = True

    def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        _HANGS.wait()
        return [False] * len(keys)

    def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> Sequence[int]:
        return [0] * len(keys)

    def write(self, keys: Sequence[ChunkKey], frames: Sequence[memoryview]) -> None:
        return None

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        return None

    def close(self) -> None:
        return None


@attrs.frozen
class HangingConfig(BackendConfig):
    """Opens it."""

    type = "hanging"
    shared = True

    def open(self, ctx: OpenContext) -> Backend:
        return Hanging()


@hookimpl
def kvtier_backends() -> list[type[BackendConfig]]:
    return [HangingConfig]


def table(place: Path) -> Table:
    """The longest turn of several kinds."""
    full = _Full(place)
    gc.disable()
    try:
        rows = [(name, f"{longest * 1e3:.2f}", turns) for name, longest, turns in full.measured()]
    finally:
        gc.enable()
        full.server.close(0.0)
    return Table(
        title="The longest turn of a server",
        says="Processor time of the thread that answers all engines, with that of a call before it. Python's "
        "garbage collector is off: now and then it stops all threads, here for 70 ms. The server holds "
        f"{CHUNKS} chunks in {NAMESPACES} namespaces, each above a store that never answers. An engine "
        "waits 2 ms for a lookup.",
        header=("", "longest turn, ms", "turns"),
        rows=rows,
    )


class _Full:
    def __init__(self, place: Path):
        capacity = str(Nbytes(CHUNKS * LAYOUT.frame_nbytes))
        tiers = [{"type": "cpu", "capacity": capacity, "huge_pages": "off"}, {"type": "hanging", "threads": 1}]
        plugins = Registry.of(kvtier_cpu.plugin, SimpleNamespace(kvtier_backends=kvtier_backends))
        config = load_config({"version": 1, "tiers": tiers}, plugins)
        self.server = Server(config, place / "turns.sock", Quota(soft=CHUNKS * LAYOUT.frame_nbytes))
        self.engine, *_ = [self._session(number) for number in range(NAMESPACES)]
        self.keys: list[ChunkKey] = []
        for begin in range(0, CHUNKS, MOST_RESERVED):
            self._store(b"flood" if begin < CHUNKS // 2 else f"tenant {begin}".encode())
        self._turns()

    def _session(self, number: int) -> Session:
        opening = Opening(f"model {number}", "engine", Namespace.of({"model": f"model {number}"}), LAYOUT)
        got: list = []
        self.server.spaces.open(opening, got.append)
        while not got:
            self.server.turn(0.1)
        session = self.server.sessions[number] = Session(number, opening, got[0].value)
        return session

    def _store(self, salt: bytes, chunks: int = MOST_RESERVED) -> None:
        keys = [ChunkKey(os.urandom(KEY_NBYTES)) for _ in range(chunks)]
        if self.engine.reserve(keys, "store", salt, (), ""):  # a policy may want none of them
            self.engine.commit("store", None, ())
        self.keys += keys
        self.server.turn(0)

    def _turns(self, call: Callable[[], object] = lambda: None, times: int = 1) -> tuple[float, int]:
        """The longest turn while a call is made so often, and afterwards until nothing is left to do."""
        longest, turns = 0.0, 0
        for number in range(times + 10_000):
            begun = time.thread_time()
            if number < times:
                call()
            busy = self.server.turn(0.02)
            longest, turns = max(longest, time.thread_time() - begun), turns + 1
            if number >= times and not busy:
                break
        return longest, turns

    def measured(self) -> Iterator[tuple[str, float, int]]:
        console = Console(self.server)
        flood = self.keys[: CHUNKS // 2]

        def lookup() -> None:
            self.engine.lookup(self.keys[-PROMPT:], "request", ANY)
            self.engine.release("request")

        yield "idle", *self._turns(times=100)
        yield f"lookup and release of {PROMPT}", *self._turns(lookup, 100)
        yield f"reserve and commit of {PROMPT}, in a full memory", *self._turns(lambda: self._store(b"x"), 50)
        for begin in range(0, len(flood), 512):
            self.engine.lookup(flood[begin : begin + 512], f"pin {begin}", Terms(salt=b"flood"))
            self._turns()
        tenants = self.server.spaces.tenants
        tenants.set_quotas(UNBOUNDED, {tenants.name(b"flood"): Quota(hard=LAYOUT.frame_nbytes)})
        yield "lookup and release, beside a tenant over its hard quota with pinned chunks", *self._turns(lookup, 100)
        for begin in range(0, len(flood), 512):
            self.engine.release(f"pin {begin}")
        yield "its chunks are evicted when they are released", *self._turns()
        salts = (f"tenant {begin}".encode() for begin in range(CHUNKS // 2, CHUNKS, MOST_RESERVED))
        tenants.set_quotas(UNBOUNDED, {tenants.name(salt): Quota(soft=0) for salt in salts})
        for _ in range(CHUNKS // 2 // MOST_RESERVED):
            self._store(b"x")
        yield "reserve and commit, beside tenants over their soft quotas", *self._turns(lambda: self._store(b"y"), 50)
        named = Named(self.engine.space, self.keys, b"")
        yield "`POST /explain` of all chunks", *self._turns(lambda: self.server.ask(lambda: console.explain(named)))
        yield "`GET /status`", *self._turns(lambda: self.server.ask(console.status))
        yield "`POST /clear`", *self._turns(lambda: self.server.ask(lambda: console.clear(Scope())))
