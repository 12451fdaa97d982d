"""A hypothesis state machine over StorageManager: chosen interleavings, failing stores, no threads.

The bytes of a chunk follow from its key and from the number of `invalidate_all` calls before it was stored, so
a chunk that is served to the wrong reader, from the wrong epoch, or half filled, is detected at once.
Subclass `StackMachine` to try a policy, a serializer or another shape of stack.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from manual_pool import ManualPool
from patience import HANG
from tables import differences, tables
from wrong_calls import WRONG, Known

from kvtier_core.builtin.heap import Heap
from kvtier_core.builtin.raw import RawConfig
from kvtier_core.encoding.codec import FrameCodec
from kvtier_core.errors import BackendError, ContractError
from kvtier_core.frames.checksum import crc32
from kvtier_core.frames.format import seal, verify
from kvtier_core.frames.identity import RAW, CodecIdentity, identity_of
from kvtier_core.interfaces import Backend, EvictionConfig, OpenContext, SerializerConfig, SupportsDirectReads
from kvtier_core.policies.lru import LruConfig
from kvtier_core.stack.arena import Arena
from kvtier_core.stack.index.cache_index import CacheIndex
from kvtier_core.stack.interface import Stack
from kvtier_core.stack.manager import StorageManager
from kvtier_core.stack.outcomes import Lookup
from kvtier_core.stack.store_tier.tier import StoreTier
from kvtier_core.transfer.own_shard import OwnShard
from kvtier_core.types import FRAME_HEADER_NBYTES, ChunkKey, FrameRead, Namespace, ReadStatus, Slot, StoredFrame
from kvtier_testing.samples import make_context, make_layout

LAYOUT = make_layout((24,), blocks=2, ranks=2)
_SHARDS = OwnShard.of(LAYOUT, rank=0)  # both: the second does not begin where it could be read alone
NAMESPACE = Namespace.of({"model": "machine"})
OTHER_CODEC = CodecIdentity("machine", bytes(range(32)), lossless=True)

#: A small forest: three prompts' paths that share prefixes, and one that shares nothing.
PATHS = {
    name: [ChunkKey(hashlib.blake2b(name[: i + 1].encode(), digest_size=32).digest()) for i in range(len(name))]
    for name in ("abcdef", "abcxyz", "abqr", "mnop")
}


#: Holder, chunks, where they are, epoch.
_Lease = tuple[str, list[ChunkKey], Sequence[Slot | StoredFrame], int]

#: Chooses an item, modulo the number of items: small numbers make short failure reports.
_WHICH = st.integers(0, 7)


class Slots(Heap):
    """An arena's memory for so many chunks."""

    def __init__(self, slots: int):
        super().__init__(make_context(layout=LAYOUT, capacity=slots * LAYOUT.frame_nbytes))


class Shelf(Backend):
    """A store in a dict that fails on demand, and checks what the interface promises to a backend."""

    def __init__(self) -> None:
        self.frames: dict[ChunkKey, bytes] = {}
        self.most = 0  # bytes ever held at once
        self.fails = False

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        self._gate()
        return [key in self.frames for key in keys]

    def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[int]:
        self._gate()
        counts = []
        for key, view in zip(keys, into, strict=True):
            found = self.frames.get(key, b"")
            view[: len(found)] = found
            counts.append(len(found))
        return counts

    def write(self, keys: Sequence[ChunkKey], frames: Sequence[memoryview]) -> None:
        self._gate()
        self.frames.update((key, bytes(view)) for key, view in zip(keys, frames, strict=True))
        self.most = max(self.most, sum(map(len, self.frames.values())))

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        self._gate()
        for key in keys:
            self.frames.pop(key, None)

    def _gate(self) -> None:
        if self.fails:
            raise BackendError("told to fail")


class SharedShelf(Shelf):
    """The same as a shared store."""

    shared = True


def payload(key: ChunkKey, epoch: int) -> bytes:
    """The bytes of a chunk that is stored in this epoch."""
    return hashlib.shake_128(key + bytes([epoch])).digest(LAYOUT.payload_nbytes)


def open_codec(config: SerializerConfig, ctx: OpenContext) -> FrameCodec:
    """The codec of a tier with this serializer, as the stack opens it."""
    serializer = config.open(ctx)
    return FrameCodec(ctx.namespace, ctx.layout, serializer, None if serializer is None else identity_of(config))


class StackMachine(RuleBasedStateMachine):
    """Stores, loads, evicts, fails and recovers in an order that hypothesis chooses."""

    policy: ClassVar[EvictionConfig] = LruConfig()
    serializer: ClassVar[SerializerConfig] = RawConfig()
    arenas: ClassVar[Sequence[int]] = (5,)  #: slots of each
    tiers: ClassVar[Sequence[int]] = (8,)  #: capacity of each, in frames
    shelf: ClassVar[type[Shelf]] = Shelf

    @initialize()
    def open(self) -> None:
        """Open a stack of `arenas` and `tiers`."""
        self.now = 0.0
        self.epoch = 0
        self.namespace = NAMESPACE
        self.epochs = [NAMESPACE]  # the namespace of each
        self.holders = 0
        self.storing: list[str] = []  # holders of reservations
        self.reserved: dict[str, list[ChunkKey]] = {}  # by holder
        self.testing = ""  # the last holder of the slots of a self-test
        self.loading: list[_Lease] = []
        self.codec = open_codec(self.serializer, OpenContext(NAMESPACE, LAYOUT))
        self.sealer = ManualPool()
        self.memories = [Slots(slots) for slots in self.arenas]
        self.arena_levels = [
            Arena(f"arena{i}", i, memory, CacheIndex(self.policy.open())) for i, memory in enumerate(self.memories)
        ]
        self.arena_levels[0].sealed = self.shown = {}
        self.tier_levels = [self._tier(i, frames) for i, frames in enumerate(self.tiers)]
        self.manager = self.as_engine_has(
            StorageManager(
                [*self.arena_levels, *self.tier_levels],
                namespace=NAMESPACE,
                layout=LAYOUT,
                pool=self.sealer,
                clock=lambda: self.now,
            )
        )
        self.pools = [self.sealer, *(tier.pool for tier in self.tier_levels)]

    def as_engine_has(self, manager: StorageManager) -> Stack:
        """The stack as an engine has it."""
        return manager

    def _tier(self, number: int, frames: int) -> StoreTier:
        shelf = self.shelf()
        return StoreTier(
            f"tier{number}",
            shelf,
            pool=ManualPool(),
            index=CacheIndex(self.policy.open()),
            codec=self.codec,
            capacity=frames * self.codec.max_frame_nbytes,
            inflight=4 * LAYOUT.frame_nbytes,
            not_direct="" if isinstance(shelf, SupportsDirectReads) else "a shelf is not read directly",
            clock=lambda: self.now,
        )

    # -- what an engine does -------------------------------------------------------------------------

    def new_holder(self) -> str:
        """A name that no holder had before."""
        self.holders += 1
        return f"holder {self.holders}"

    @rule(name=st.sampled_from(sorted(PATHS)), length=st.integers(1, 6))
    def store(self, name: str, length: int) -> None:
        """Reserve slots for the beginning of a prompt, and fill them."""
        slots = self.manager.reserve(PATHS[name][:length], holder := self.new_holder())
        for key, slot in slots.items():
            view = self.memories[slot.arena].view(slot.index)
            view[FRAME_HEADER_NBYTES : FRAME_HEADER_NBYTES + LAYOUT.payload_nbytes] = payload(key, self.epoch)
        if slots:
            self.storing.append(holder)
            self.reserved[holder] = list(slots)

    @rule(name=st.sampled_from(sorted(PATHS)))
    def serve(self, name: str) -> None:
        """Serve a whole request at once, so that random choices soon fill the tiers."""
        self.manager.on_request(PATHS[name])
        self.store(name, len(name))
        while self.storing:
            self.finish_store(0, ok=True)
        self.manager.drain(timeout=HANG)

    @precondition(lambda self: self.storing)
    @rule(which=_WHICH, ok=st.booleans())
    def finish_store(self, which: int, ok: bool) -> None:
        """Commit a reservation, or release it."""
        holder = self.storing.pop(which % len(self.storing))
        if ok:
            self.manager.commit(holder)
        self.manager.release(holder)

    @precondition(lambda self: self.storing)
    @rule(which=_WHICH)
    def test_itself(self, which: int) -> None:
        """The holder of a reservation takes the slots of a self-test as well, if no other holder has them."""
        holder = self.storing[which % len(self.storing)]
        if self.testing == holder or self.testing not in self.storing:
            slots = self.manager.reserve_self_test_slots(holder, LAYOUT.self_test_slots)
            assert len(slots) in (0, len(self.arenas))
            self.testing = holder

    @rule(name=st.sampled_from(sorted(PATHS)), known=st.booleans())
    def load(self, name: str, known: bool) -> None:
        """Look up a prompt; the policies learn of it unless it is ``known``."""
        path = PATHS[name]
        if not known:
            self.manager.on_request(path)
        found = self.lookup(path, holder := self.new_holder())
        assert len(found.slots) == len(found.sources) and len(found.slots) + found.pending <= len(path)
        assert bool(found.miss_reason) == (len(found.slots) + found.pending < len(path))
        self.loading.append((holder, path[: len(found.slots)], found.slots, self.epoch))

    def lookup(self, path: Sequence[ChunkKey], holder: str) -> Lookup:
        """Look up a prompt."""
        return self.manager.lookup(path, holder)

    @precondition(lambda self: self.loading)
    @rule(which=_WHICH)
    def finish_load(self, which: int) -> None:
        """Check the bytes of what a lookup found, and release it."""
        holder, keys, slots, epoch = self.loading.pop(which % len(self.loading))
        self.manager.load_begins([slot for slot in slots if isinstance(slot, StoredFrame)], holder)
        unread = {}
        for key, slot in zip(keys, slots, strict=True):
            view = self._read_directly(slot, unread) if isinstance(slot, StoredFrame) else self._view(slot)
            if key not in unread:
                held = bytes(view[FRAME_HEADER_NBYTES : FRAME_HEADER_NBYTES + LAYOUT.payload_nbytes])
                assert held == payload(key, epoch), "what is held for a request is not its chunk"
        self.manager.load_ended(holder, unread, ok=not unread)
        self.manager.release(holder)

    def _view(self, slot: Slot) -> memoryview:
        return self.memories[slot.arena].view(slot.index)

    def _read_directly(self, frame: StoredFrame, unread: dict[ChunkKey, FrameRead]) -> memoryview:
        """The frame as a worker reads it."""
        (tier,) = [tier for tier in self.tier_levels if tier.name == frame.tier]
        view = memoryview(tier.backend.bytes_at(frame.location, frame.key))
        checksum = crc32(view[FRAME_HEADER_NBYTES : FRAME_HEADER_NBYTES + LAYOUT.payload_nbytes])
        read = _SHARDS.examine(frame, view[:FRAME_HEADER_NBYTES], len(view) - FRAME_HEADER_NBYTES, checksum)
        if read.status is not ReadStatus.VERIFIED:
            unread[frame.key] = read
        return view

    @precondition(lambda self: self.loading)
    @rule(which=_WHICH)
    def look_again(self, which: int) -> None:
        """Look up again for a holder: it keeps its slots, and chunks promoted meanwhile are added."""
        holder, keys, slots, epoch = self.loading[which % len(self.loading)]
        if epoch == self.epoch and keys:
            path = next(path for path in PATHS.values() if path[: len(keys)] == keys)
            found = self.lookup(path, holder)
            assert list(found.slots[: len(slots)]) == list(slots), "a slot was taken from its holder"
            self.loading[which % len(self.loading)] = holder, path[: len(found.slots)], found.slots, epoch

    @rule(name=st.sampled_from(sorted(PATHS)))
    def come_back(self, name: str) -> None:
        """Serve a whole request that waits for promotions."""
        before = len(self.loading)
        self.load(name, known=True)
        self.manager.drain(timeout=HANG)
        self.manager.release(self.loading.pop(before)[0])
        self.load(name, known=True)
        self.finish_load(before)

    @rule()
    def invalidate_all(self) -> None:
        """Begin an epoch."""
        self._new_epoch()

    def _new_epoch(self) -> None:
        self.epoch += 1
        self.namespace = Namespace.of({"model": "machine", "epoch": self.epoch})
        self.epochs.append(self.namespace)
        self.manager.invalidate_all(self.namespace)

    @rule(name=st.sampled_from(sorted(WRONG)), path=st.sampled_from(sorted(PATHS)), which=st.integers(0, 1000))
    def call_wrongly(self, name: str, path: str, which: int) -> None:
        """A call that names what its holder does not have is refused, and changes no table."""
        reserved = {holder: keys for holder, keys in self.reserved.items() if holder in self.storing and keys}
        frames = {
            holder: held
            for holder, _, places, _ in self.loading
            if (held := [place for place in places if isinstance(place, StoredFrame)])
        }
        wrong = WRONG[name](Known(LAYOUT, PATHS[path], reserved, frames))
        arguments = wrong[which % len(wrong)]
        for callee in self.callees():
            before = tables(*self.remembering())
            with pytest.raises(ContractError):
                self.call(callee, name, arguments)
            after = tables(*self.remembering())
            assert before == after, f"a refused {name}({arguments}): {list(differences(before, after))}"

    def callees(self) -> Sequence[Any]:
        """Those who answer wrong calls."""
        return [self.manager]

    def call(self, callee: Any, name: str, arguments: Mapping[str, Any]) -> None:
        """Make a call."""
        getattr(callee, name)(**arguments)

    def remembering(self) -> Sequence[Any]:
        """All that a refused call must leave as it is."""
        return [self.manager]

    # -- what time and stores do -----------------------------------------------------------------------

    @rule()
    def drain(self) -> None:
        """Let everything in flight end."""
        self.manager.drain(timeout=HANG)

    @rule()
    def step(self) -> None:
        """One step of the stack."""
        self.manager.step()

    @precondition(lambda self: any(pool.queue for pool in self.pools))
    @rule(pool=_WHICH, which=_WHICH)
    def run(self, pool: int, which: int) -> None:
        """Do one piece of the work that waits in a pool."""
        pools = [pool for pool in self.pools if pool.queue]
        pools[pool % len(pools)].run(which % len(pools[pool % len(pools)].queue))

    @rule(seconds=st.sampled_from([0.1, 2.0, 100.0]))
    def pass_time(self, seconds: float) -> None:
        """Advance the clock."""
        self.now += seconds

    @precondition(lambda self: self.tier_levels)
    @rule(tier=_WHICH)
    def toggle_failure(self, tier: int) -> None:
        """Make a store fail from now on, or work again."""
        shelf = self.tier_levels[tier % len(self.tier_levels)].backend
        shelf.fails = not shelf.fails

    @precondition(lambda self: any(tier.backend.frames for tier in self.tier_levels))
    @rule(tier=_WHICH, which=_WHICH, how=st.sampled_from(["drop", "swap", "cut", "flip", "codec"]), at=_WHICH)
    def spoil(self, tier: int, which: int, how: str, at: int) -> None:
        """Damage every other frame of a store."""
        shelves = [tier.backend.frames for tier in self.tier_levels if tier.backend.frames]
        frames = shelves[tier % len(shelves)]
        end = FRAME_HEADER_NBYTES + LAYOUT.payload_nbytes
        for key in sorted(frames)[which % 2 :: 2]:
            spoiled = bytearray(frames[key][:end])
            if how == "drop":
                del frames[key]
            elif how == "swap":
                frames[key] = frames[max(frames)]
            elif how == "codec":
                self._write_with_another_codec(frames, key)
            elif how == "cut":
                frames[key] = bytes(spoiled[: (1, 50, FRAME_HEADER_NBYTES, end - 1)[at % 4]])
            elif spoiled:
                spoiled[(0, 20, 60, FRAME_HEADER_NBYTES, end - 1)[at % 5] % len(spoiled)] ^= 1
                frames[key] = bytes(spoiled)

    def _write_with_another_codec(self, frames: dict[ChunkKey, bytes], key: ChunkKey) -> None:
        """As an engine with other options of the serializer does, whose frames decode to other bytes here."""
        other = bytearray(frames[key])
        if len(other) > FRAME_HEADER_NBYTES:
            other[FRAME_HEADER_NBYTES:] = bytes(len(other) - FRAME_HEADER_NBYTES)
            seal(memoryview(other), self.namespace, key, len(other) - FRAME_HEADER_NBYTES, codec=OTHER_CODEC)
            frames[key] = bytes(other)

    # -- what must always hold -------------------------------------------------------------------------

    @invariant()
    def books_balance(self) -> None:
        """Every slot and every byte is accounted for, within the capacity."""
        for arena in self.arena_levels:
            taken = arena.free + arena.reserved + len(arena.index)
            assert taken == arena.memory.slots, f"{arena.name}: {taken} slots of {arena.memory.slots} accounted for"
            assert arena.pins >= sum(
                slot.arena == arena.number
                for _, _, slots, _ in self.loading
                for slot in slots
                if isinstance(slot, Slot)
            )
        for tier in self.tier_levels:
            assert tier.index.resident.used == sum(map(tier.index.resident.nbytes, tier.index.resident))
            if not tier.backend.shared:
                held = sum(map(len, tier.backend.frames.values()))
                assert tier.backend.most <= tier.capacity, f"{tier.name} was beyond its capacity"
                assert held <= tier.index.resident.used + sum(tier.incompatible.values()), (
                    f"{tier.name} holds bytes that are not accounted for"
                )

    @invariant()
    def what_is_shown_is_whole(self) -> None:
        """A frame that the hottest arena shows is sealed, and that of a chunk which is READY there."""
        hot = self.arena_levels[0]
        nbytes = LAYOUT.payload_nbytes
        for key, frame in self.shown.items():
            assert hot.exact([key]) == [key], "a frame is shown that is not found"
            errors = [verify(frame, each, key, codec=RAW, payload_nbytes=nbytes) for each in self.epochs]
            assert None in errors, "what is shown is not its chunk"
            assert frame[FRAME_HEADER_NBYTES:][:nbytes] == payload(key, errors.index(None))

    def teardown(self) -> None:
        """Mend every store and let everything end: then nothing is pinned, and what is stored is found."""
        if not hasattr(self, "manager"):
            return
        self._come_to_rest()
        for tier in self.tier_levels:
            tier.backend.fails = False
        self.now += 1000.0  # longer than any breaker stays open
        self._come_to_rest()
        self._what_is_stored_is_found()

    def _come_to_rest(self) -> None:
        while self.storing:
            self.finish_store(0, ok=True)
        while self.loading:
            self.finish_load(0)
        self.manager.drain(timeout=HANG)
        self.books_balance()
        assert self.manager.pins_by_holder().keys() <= {"requester"}, "pinned at rest"
        assert not any(usage.inflight for usage in self.manager.usage()), "in flight at rest"
        assert all(usage.nbytes <= usage.capacity for usage in self.manager.usage()), "beyond capacity at rest"
        assert not any(arena.reserved for arena in self.arena_levels), "reserved at rest"

    def _what_is_stored_is_found(self) -> None:
        """Liveness: a cache that never hits is never wrong, and useless."""
        self._new_epoch()
        self.manager.drain(timeout=HANG)
        path = PATHS["abcdef"][:3]
        self.store("abcdef", len(path))
        self._come_to_rest()
        self._must_find(path, "stored, and not found")
        # What another codec wrote takes room until something has replaced it.
        room = max((tier.capacity - sum(tier.incompatible.values()) for tier in self.tier_levels), default=0)
        if room >= (len(path) + len("mnop")) * self.codec.max_frame_nbytes:
            self.store("mnop", len("mnop"))  # evicts it from the arena
            self._come_to_rest()
            self.manager.lookup(path, "requester")
            self._come_to_rest()
            self.manager.release("requester")
            self._must_find(path, "written down, and not found again")
            self.load("abcdef", known=True)
            self.finish_load(0)

    def _must_find(self, path: Sequence[ChunkKey], otherwise: str) -> None:
        found = self.manager.lookup(path, "finder")
        self.manager.release("finder")
        assert len(found.slots) == len(path), otherwise
