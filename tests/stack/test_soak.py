"""Real threads, real files, a store that goes wrong: thousands of seeded moves, then an audit of every book."""

from __future__ import annotations

import hashlib
import itertools
import random
import time
from typing import ClassVar

import attrs
import pytest
from faulty_backend import FINE, Fault, FaultyBackend, always, now_and_then
from patience import HANG
from sizes import LONG

import kvtier_disk.plugin
import kvtier_policies.plugin
from kvtier_core.builtin.heap import HeapConfig
from kvtier_core.config.load import load_config
from kvtier_core.config.open import open_stack
from kvtier_core.config.registry import Registry
from kvtier_core.errors import BackendError
from kvtier_core.hookspecs import hookimpl
from kvtier_core.interfaces import Backend, BackendConfig, OpenContext
from kvtier_testing.samples import PagedBuffer, make_context, make_key, make_layout, make_namespace

pytestmark = pytest.mark.long

#: Payloads of whole pages, so that no byte of a frame is mere padding.
BLOCKS = 4
LAYOUT = make_layout((1024, 3072), BLOCKS)
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
        self._buffer = PagedBuffer(LAYOUT, BLOCKS, random.Random(0))
        self._mover = HeapConfig().attach(next(iter(manager.handles.values())), self._buffer.kv_cache())
        self._page_list = [[list(range(BLOCKS))]]
        self._jobs = 0

    def fill(self, slot, seed):
        for layer, block, nbytes in self._pages():
            self._buffer.put(layer, block, page(seed, layer, block, nbytes))
        self._mover.store(self._job(), self._page_list, [slot.index])
        self._wait()

    def check(self, slot, seed):
        self._mover.load(self._job(), [slot.index], self._page_list)
        self._wait()
        for layer, block, nbytes in self._pages():
            assert self._buffer.page(layer, block) == page(seed, layer, block, nbytes), "other bytes came back"

    def close(self):
        self._mover.close()

    def _pages(self):
        return [
            (i, block, layer.page_nbytes)
            for i, layer in enumerate(LAYOUT.parts[0].shard_of(0).layers)
            for block in range(BLOCKS)
        ]

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
        self._numbers = itertools.count()

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
        slots = self.manager.reserve(path, holder := f"store {next(self._numbers)}")
        for key, slot in slots.items():
            self.engine.fill(slot, (key, self.epoch))
        if slots:
            self.storing.append(holder)

    def end_a_store(self):
        if self.storing:
            holder = self.storing.pop(self.rng.randrange(len(self.storing)))
            (self.manager.release if self.rng.random() < 0.1 else self.manager.commit)(holder)

    def load(self):
        path = [KEYS[i] for i in self.rng.choice(PATHS)]
        if self.rng.random() < 0.7:
            self.manager.on_request(path)
        found = self.manager.lookup(path, holder := f"load {next(self._numbers)}")
        if found.slots and len(self.loading) < 3:
            self.loading.append((holder, path, found.slots, self.epoch))
        else:
            self.manager.release(holder)

    def end_a_load(self):
        if self.loading:
            holder, path, slots, epoch = self.loading.pop(self.rng.randrange(len(self.loading)))
            for key, slot in zip(path, slots, strict=False):
                self.engine.check(slot, (key, epoch))
            self.loaded += len(slots)
            self.manager.release(holder)

    def step(self):
        self.note(self.manager.step())

    def wait(self):
        self.note(self.manager.drain(timeout=0.01))

    def clear(self):
        self.manager.invalidate_all(make_namespace(f"epoch {self.epoch}"))
        self.epoch += 1

    def settle(self):
        self.note(self.manager.drain(timeout=HANG))
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
            slots = self.manager.reserve([KEYS[i] for i in chunks], "audit")
            for key, slot in slots.items():
                self.engine.fill(slot, (key, self.epoch))
            if slots:
                self.manager.commit("audit")
            self.settle()
        self.crowd_out()
        keys = [KEYS[i] for i in path]
        assert self.manager.lookup(keys, "audit").pending == len(keys)
        self.settle()
        found = self.manager.lookup(keys, "audit")
        for key, slot in zip(keys, found.slots, strict=True):
            self.engine.check(slot, (key, self.epoch))
        self.manager.release("audit")

    def wake(self):
        """Store and load until no breaker rests."""
        for key in itertools.islice(self._fresh, 400):
            ((_, slot),) = self.manager.reserve([key], "audit").items()
            self.engine.fill(slot, (key, self.epoch))
            self.manager.commit("audit")
            self.settle()
            self.crowd_out()
            pending = self.manager.lookup([key], "audit").pending
            self.settle()
            self.manager.release("audit")
            if pending:
                return
            time.sleep(0.05)
        pytest.fail("a breaker never closed")

    def crowd_out(self):
        """Every chunk of the arena, if the slots are all there."""
        fresh = [make_key(1000 + i) for i in range(SLOTS + 1)]
        assert len(self.manager.reserve(fresh, "crowd")) == SLOTS, "slots that are neither free nor held by a chunk"
        self.manager.release("crowd")
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
    soak = open_soak(1, Registry.of(kvtier_disk.plugin, kvtier_policies.plugin), tier)
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
