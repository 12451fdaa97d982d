"""Real threads, real files, a store that goes wrong: thousands of seeded moves, then an audit of every book."""

from __future__ import annotations

import hashlib
import itertools
import random
import time
from typing import ClassVar

import attrs
import pytest
from sizes import LONG

import kvtier_disk.plugin
from kvtier_core.builtin.heap import HeapConfig
from kvtier_core.config.model import load_config, open_stack
from kvtier_core.config.registry import Registry
from kvtier_core.errors import BackendError
from kvtier_core.hookspecs import hookimpl
from kvtier_core.interfaces import Backend, BackendConfig, OpenContext
from kvtier_core.testing import Fault, FaultyBackend, always, now_and_then
from kvtier_core.testing.faults import FINE
from kvtier_core.testing.samples import PagedBuffer, make_context, make_key, make_namespace
from kvtier_core.types import ChunkLayout, Presence

pytestmark = pytest.mark.long

#: Payloads of whole pages, so that no byte of a frame is mere padding.
LAYOUT = ChunkLayout((1024, 3072), blocks=4)
FRAME = LAYOUT.frame_nbytes
SLOTS = 12
TIER_FRAMES = 30

#: Chunk i hangs on chunk i // 3: 60 chunks in three trees.
PARENTS = {i: i // 3 if i >= 9 else i - 3 for i in range(3, 60)}


def path_to(i):
    path = [i]
    while path[0] in PARENTS:
        path.insert(0, PARENTS[path[0]])
    return path


PATHS = [path_to(i) for i in range(60)]
KEYS = [make_key(i) for i in range(60)]


class Engine:
    """Moves pages of its own buffer to slots and back, as a worker does."""

    def __init__(self, manager):
        self._buffer = PagedBuffer(LAYOUT, LAYOUT.blocks, random.Random(0))
        self._mover = HeapConfig().attach(manager.handles[0], self._buffer.table())
        self._rows = [list(range(LAYOUT.blocks))]
        self._jobs = 0

    def fill(self, slot, seed):
        for layer, block, nbytes in self._pages():
            self._buffer.put(layer, block, page(seed, layer, block, nbytes))
        self._mover.store(self._job(), self._rows, [slot.index])
        self._wait()

    def check(self, slot, seed):
        self._mover.load(self._job(), [slot.index], self._rows)
        self._wait()
        for layer, block, nbytes in self._pages():
            assert self._buffer.page(layer, block) == page(seed, layer, block, nbytes), "other bytes came back"

    def close(self):
        self._mover.close()

    def _pages(self):
        return [(i, block, nbytes) for i, nbytes in enumerate(LAYOUT.page_nbytes) for block in range(LAYOUT.blocks)]

    def _job(self):
        self._jobs += 1
        return self._jobs

    def _wait(self):
        self._mover.wait([self._jobs])
        assert [ended.ok for ended in self._mover.finished()] == [True]


def page(seed, layer, block, nbytes):
    return hashlib.shake_128(repr((seed, layer, block)).encode()).digest(nbytes)


class Soak:
    """Requests that store and load, several at a time, in an order that the seed decides."""

    def __init__(self, manager, seed):
        self.manager = manager
        self.engine = Engine(manager)
        self.rng = random.Random(seed)
        self.epoch = 0  # how often all was cleared: what is found must be younger
        self.storing = []
        self.loading = []
        self.loaded = 0
        self.seen = set()
        self._fresh = map(make_key, itertools.count(3000))

    def run(self, moves):
        named = {
            self.store: 5,
            self.load: 8,
            self.end_a_store: 5,
            self.end_a_load: 8,
            self.step: 10,
            self.wait: 1,
            self.clear: 0.05,
        }
        for move in self.rng.choices(list(named), list(named.values()), k=moves):
            move()
        while self.storing:
            self.end_a_store()
        while self.loading:
            self.end_a_load()
        self.settle()

    def store(self):
        path = [KEYS[i] for i in self.rng.choice(PATHS)]
        slots = self.manager.reserve(path)
        for key, slot in slots.items():
            self.engine.fill(slot, (key, self.epoch))
        if slots:
            self.storing.append(list(slots))

    def end_a_store(self):
        if self.storing:
            keys = self.storing.pop(self.rng.randrange(len(self.storing)))
            (self.manager.abort if self.rng.random() < 0.1 else self.manager.commit)(keys)

    def load(self):
        path = [KEYS[i] for i in self.rng.choice(PATHS)]
        if self.rng.random() < 0.7:
            self.manager.on_request(path)
        found = self.manager.lookup(path)
        ready = [key for key, presence in zip(path, found, strict=True) if presence is Presence.READY]
        ready = ready[: found.index(Presence.PENDING)] if Presence.PENDING in found else ready
        if ready and len(self.loading) < 3:
            self.loading.append((ready, self.manager.pin(ready, "test"), self.epoch))

    def end_a_load(self):
        if self.loading:
            keys, slots, epoch = self.loading.pop(self.rng.randrange(len(self.loading)))
            for key, slot in zip(keys, slots, strict=True):
                self.engine.check(slot, (key, epoch))
            self.loaded += len(keys)
            self.manager.unpin(slots, "test")

    def step(self):
        self.note(self.manager.step())

    def wait(self):
        self.note(self.manager.drain(timeout=0.01))

    def clear(self):
        self.manager.invalidate_all(make_namespace(f"epoch {self.epoch}"))
        self.epoch += 1

    def settle(self):
        self.note(self.manager.drain(timeout=30.0))
        assert self.manager.jobs == 0

    def note(self, events):
        self.seen.update(event.kind.value for event in events)

    def close(self):
        self.engine.close()
        self.manager.close()

    # -- the audit -------------------------------------------------------------------------------------

    def books_balance(self):
        arena, tier = self.manager.usage()
        assert (arena.pins, tier.inflight) == (0, 0)
        assert arena.nbytes == arena.chunks * FRAME
        assert tier.nbytes <= tier.capacity == TIER_FRAMES * FRAME
        self.crowd_out()

    def what_is_stored_is_found(self):
        """Liveness: and after it was crowded out of the arena, it comes from below."""
        self.clear()
        self.settle()
        path = max(PATHS, key=len)
        for chunks in (path, *PATHS[:8]):
            slots = self.manager.reserve([KEYS[i] for i in chunks])
            for key, slot in slots.items():
                self.engine.fill(slot, (key, self.epoch))
            self.manager.commit(list(slots))
            self.settle()
        self.crowd_out()
        keys = [KEYS[i] for i in path]
        assert self.manager.lookup(keys) == [Presence.PENDING] * len(keys)
        self.settle()
        assert self.manager.lookup(keys) == [Presence.READY] * len(keys)
        slots = self.manager.pin(keys, "test")
        for key, slot in zip(keys, slots, strict=True):
            self.engine.check(slot, (key, self.epoch))
        self.manager.unpin(slots, "test")

    def wake(self):
        """Store and load until no breaker rests."""
        for key in itertools.islice(self._fresh, 400):
            ((_, slot),) = self.manager.reserve([key]).items()
            self.engine.fill(slot, (key, self.epoch))
            self.manager.commit([key])
            self.settle()
            self.crowd_out()
            if self.manager.lookup([key]) == [Presence.PENDING]:
                self.settle()
                return
            time.sleep(0.05)
        pytest.fail("a breaker never closed")

    def crowd_out(self):
        """Every chunk of the arena, if the slots are all there."""
        self.step()
        self.step()  # what was looked up is spared for two steps
        fresh = [make_key(1000 + i) for i in range(SLOTS + 1)]
        assert len(self.manager.reserve(fresh)) == SLOTS, "slots that are neither free nor held by a chunk"
        self.manager.abort(fresh[:SLOTS])
        assert self.manager.usage()[0].chunks == 0


def open_soak(seed, registry, tier):
    tiers = [
        {"type": "heap", "capacity": f"{SLOTS * FRAME}B"},
        {"capacity": f"{TIER_FRAMES * FRAME}B", "inflight": f"{6 * FRAME}B", **tier},
    ]
    config = load_config({"version": 1, "tiers": tiers}, registry)
    return Soak(open_stack(config, make_context(layout=LAYOUT)), seed)


@pytest.mark.parametrize("eviction", ["lru", "mru"])
def test_a_soak_over_files(tmp_path, eviction):
    tier = {"type": "disk", "path": str(tmp_path), "min_free": "0B", "eviction": eviction}
    soak = open_soak(1, Registry.of(kvtier_disk.plugin), tier)
    soak.run(10000 * LONG)
    assert soak.seen >= {"stored", "promoted", "written", "evicted"}
    assert not soak.seen & {"io_error", "missing", "corrupt", "breaker_open"}
    assert soak.loaded > 200
    soak.books_balance()
    files = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.suffix == ".kv")
    assert files == soak.manager.usage()[1].nbytes > 0
    soak.what_is_stored_is_found()
    soak.close()


class Dict(Backend):
    """A store that several threads can use."""

    def __init__(self):
        self.frames = {}

    def contains(self, keys):
        return [key in self.frames for key in keys]

    def read(self, keys, into):
        held = [self.frames.get(key, b"") for key in keys]
        for view, found in zip(into, held, strict=True):
            view[: len(found)] = found
        return [len(found) for found in held]

    def write(self, keys, frames):
        for key, view in zip(keys, frames, strict=True):
            self.frames[key] = bytes(view)

    def delete(self, keys):
        for key in keys:
            self.frames.pop(key, None)


class Faulty:
    """A plugin with a store in a dict, which goes wrong now and then until it is told to stop."""

    def __init__(self):
        self.store = Dict()
        self.backend = FaultyBackend(self.store, now_and_then(3, 0.1, *FAULTS))

    @hookimpl
    def kvtier_backends(self):
        plugin = self

        @attrs.frozen
        class FaultyConfig(BackendConfig):
            type: ClassVar[str] = "faulty"

            def open(self, ctx: OpenContext):
                return plugin.backend

        return [FaultyConfig]


#: No `drop`: who says that he deleted and did not, and says that he wrote and did not, serves what was cleared.
FAULTS = [
    Fault(error=BackendError("planned")),
    Fault(error=ZeroDivisionError("planned")),
    Fault(damage=True),
    Fault(surplus=1),
    Fault(delay=0.002),
]


def test_a_soak_over_a_store_that_goes_wrong():
    plugin = Faulty()
    soak = open_soak(2, Registry.of(plugin), {"type": "faulty"})
    for _ in range(5 * LONG):
        soak.run(5000)
        soak.wake()
    assert soak.seen >= {"stored", "promoted", "written", "evicted", "io_error", "corrupt"}
    assert soak.loaded > 200
    plugin.backend.plan = always(FINE)
    soak.books_balance()
    assert sum(map(len, plugin.store.frames.values())) == soak.manager.usage()[1].nbytes
    soak.wake()
    soak.what_is_stored_is_found()
    soak.close()
