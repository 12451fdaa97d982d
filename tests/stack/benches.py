"""A tier, and a stack, over stores in memory, whose calls return when the test says so."""

from __future__ import annotations

from machine import LAYOUT, NAMESPACE, Shelf, Slots, payload
from manual_pool import ManualPool
from patience import HANG

from kvtier_core.encoding.codec import FrameCodec
from kvtier_core.frames.format import seal
from kvtier_core.policies.lru import Lru, LruConfig
from kvtier_core.stack.arena import Arena
from kvtier_core.stack.index.cache_index import CacheIndex
from kvtier_core.stack.index.write_budget import WriteBudget
from kvtier_core.stack.manager import StorageManager
from kvtier_core.stack.store_tier.tier import FrameWrite, StoreTier
from kvtier_core.types import FRAME_ALIGNMENT

#: What `StackBench.look` says of a chunk.
MISS, READY, PENDING = "miss", "ready", "pending"
FRAME = LAYOUT.frame_nbytes


def sealed(key):
    view = memoryview(bytearray(FRAME))
    view[FRAME_ALIGNMENT : FRAME_ALIGNMENT + LAYOUT.payload_nbytes] = payload(key, 0)
    seal(view, NAMESPACE, key, LAYOUT.payload_nbytes)
    return view


class TierBench:
    """A tier, a pool that waits for the test, and the keys of frames that came back, good or bad."""

    def __init__(
        self, *, frames=4, inflight=100, shelf=None, policy=None, pool=None, codec=None, layout=LAYOUT, burst=0
    ):
        """With ``burst``, a number of frames, one frame a second may be written."""
        self.now = 0.0
        per_day, burst = 86400 * layout.frame_nbytes, burst * layout.frame_nbytes
        self.budget = WriteBudget(per_day, burst, None, lambda: self.now) if burst else None
        self.layout = layout
        self.pool = pool or ManualPool()
        self.shelf = shelf or Shelf()
        self.released, self.good, self.bad = [], [], []
        self.tier = StoreTier(
            "disk",
            self.shelf,
            pool=self.pool,
            index=CacheIndex(policy or LruConfig().open(), budget=self.budget),
            codec=codec or FrameCodec(NAMESPACE, layout),
            capacity=frames * layout.frame_nbytes,
            inflight=inflight * layout.frame_nbytes,
            clock=lambda: self.now,
        )

    def write(self, *keys):
        """Begin to write the frames of one path."""
        parents = (None, *keys)
        offers = [FrameWrite(key, parent, sealed(key)) for parent, key in zip(parents, keys, strict=False)]
        self.tier.write(offers, self.released.extend)

    def read(self, *keys):
        """Begin to read; the slots by key."""
        slots = {key: memoryview(bytearray(self.layout.frame_nbytes)) for key in keys}
        begun = self.tier.read(list(slots.items()), self._arrived)
        return {key: slots[key] for key in begun}

    def _arrived(self, good, bad):
        self.good += good
        self.bad += bad

    def turn(self, which=0):
        """One piece of work, and what follows from it."""
        self.pool.run(which)
        self.step()

    def step(self):
        """As the stack has it in each of its steps."""
        self.pool.step()
        self.tier.poll()

    def settle(self):
        while self.pool.jobs:
            self.pool.wait(HANG)
            self.step()

    def has(self, *keys):
        return [self.tier.has(key) for key in keys]

    def events(self):
        """Since the last time: kind and keys of each."""
        events = [(event.kind.value, list(event.keys)) for event in self.tier.events]
        self.tier.events.clear()
        return events

    def whys(self):
        """Since the last time: what was said of each event."""
        whys = [event.why for event in self.tier.events]
        self.tier.events.clear()
        return whys


class Memory(Slots):
    closed = 0

    def close(self):
        self.closed += 1


class StackBench:
    """A stack, its parts, and an engine that stores and loads as it should."""

    def __init__(self, *, arenas=(4,), tiers=(12,), inflight=100, shelf=Shelf, pool=ManualPool, below=Lru):
        self.now = 0.0
        self.memories = [Memory(slots) for slots in arenas]
        self.shelves = [shelf() for _ in tiers]
        names = [f"cpu{i or ''}" for i in range(len(arenas))], [f"disk{i or ''}" for i in range(len(tiers))]
        self.arenas = [
            Arena(name, i, memory, CacheIndex(Lru()))
            for i, (name, memory) in enumerate(zip(names[0], self.memories, strict=True))
        ]
        self.tiers = [
            StoreTier(
                name,
                shelf,
                pool=pool(),
                index=CacheIndex(below()),
                codec=FrameCodec(NAMESPACE, LAYOUT),
                capacity=frames * LAYOUT.frame_nbytes,
                inflight=inflight * LAYOUT.frame_nbytes,
                clock=lambda: self.now,
            )
            for name, shelf, frames in zip(names[1], self.shelves, tiers, strict=True)
        ]
        self.sealer = pool()
        self.manager = StorageManager(
            [*self.arenas, *self.tiers],
            namespace=NAMESPACE,
            layout=LAYOUT,
            pool=self.sealer,
            clock=lambda: self.now,
        )

    def fill(self, path, holder="store"):
        """Reserve and fill slots; the keys that got one."""
        slots = self.manager.reserve(path, holder)
        for key, slot in slots.items():
            self._payload(slot)[:] = payload(key, 0)
        return list(slots)

    def store(self, path):
        """Until it is everywhere."""
        if self.fill(path):
            self.manager.commit("store")
        return self.settle()

    def settle(self):
        events = self.manager.drain(HANG)
        assert not self.manager.jobs
        return events

    def look(self, path, keep=""):
        """What an engine would be told of each chunk. With ``keep`` that holder keeps it pinned from then on."""
        found = self.manager.lookup(path, keep or "a look")
        if not keep:
            self.manager.release("a look")
        ready, pending = len(found.slots), found.pending
        return [READY] * ready + [PENDING] * pending + [MISS] * (len(path) - ready - pending)

    def why(self, path):
        """Why the first chunk that is not there is not."""
        reason = self.manager.lookup(path, "a look").miss_reason
        self.manager.release("a look")
        return reason

    def bring_up(self, path):
        """The events meanwhile, and the tiers that the chunks are said to be from."""
        assert self.manager.lookup(path, "waiting").pending
        events = self.settle()
        found = self.manager.lookup(path, "waiting")
        assert len(found.slots) == len(path) and not found.pending
        self.manager.release("waiting")
        return events, list(found.sources)

    def load(self, path):
        """The arenas from which the bytes came, which were the right ones, and the tiers they are said to be from."""
        found = self.manager.lookup(path, "load")
        assert [bytes(self._payload(slot)) for slot in found.slots] == [payload(key, 0) for key in path]
        self.manager.release("load")
        return [slot.arena for slot in found.slots], list(found.sources)

    def work(self, pieces):
        """So many pieces of work, each followed by a step; returns whether there were so many."""
        for _ in range(pieces):
            busy = [pool for pool in [self.sealer, *(tier.pool for tier in self.tiers)] if pool.queue]
            if not busy:
                return False
            busy[0].run()
            self.manager.step()
        return True

    def at_rest(self):
        """Nothing is pinned, in flight, or held by nobody."""
        usage = self.manager.usage()
        assert not any(level.pins or level.inflight for level in usage)
        for arena in self.arenas:
            assert arena.free + len(arena.index) == arena.memory.slots
        for tier, shelf in zip(self.tiers, self.shelves, strict=True):
            assert tier.usage().nbytes == sum(map(len, shelf.frames.values()))

    def _payload(self, slot):
        return self.memories[slot.arena].view(slot.index)[FRAME_ALIGNMENT : FRAME_ALIGNMENT + LAYOUT.payload_nbytes]
