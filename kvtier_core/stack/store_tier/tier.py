"""A tier below the arenas: an index of the frames in a backend, and the guards around it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence

from kvtier_core.encoding.codec import FrameCodec
from kvtier_core.interfaces import Backend, SupportsDirectReads, SupportsListing
from kvtier_core.stack.batches import leading
from kvtier_core.stack.index.cache_index import CacheIndex
from kvtier_core.stack.load_choice import LoadChoice, LoadChooser, StoreSpeed
from kvtier_core.stack.outcomes import LoadLimit
from kvtier_core.stack.store_tier.calls import Calls
from kvtier_core.stack.store_tier.deletes import Deletes
from kvtier_core.stack.store_tier.direct_reads import DirectReads
from kvtier_core.stack.store_tier.frame_table import CapacityLimit, FrameTable, Use
from kvtier_core.stack.store_tier.health import StoreHealth
from kvtier_core.stack.store_tier.policy_state import FITS, PolicyState
from kvtier_core.stack.store_tier.reads import Arrived, Reads
from kvtier_core.stack.store_tier.remote_lookup import RemoteLookup
from kvtier_core.stack.store_tier.request_log import RequestLog, keys_beside
from kvtier_core.stack.store_tier.writes import FrameWrite, Release, Writes
from kvtier_core.types import ChunkKey, Event, EventKind, Namespace, StoredFrame, Usage
from kvtier_core.work.io_pool import Pool, run, run_within

#: Number of frames that leave in one step when the capacity becomes smaller.
_LEAVE_AT_ONCE = 64


class StoreTier:
    """A store tier. Call every method on the owner's thread. Errors of the backend do not raise: they become events."""

    lossless: bool  #: False if promoted chunks may differ from the stored ones
    not_direct: str  #: why workers do not read its frames directly; empty if they do

    def __init__(
        self,
        name: str,
        backend: Backend,
        *,
        pool: Pool,
        index: CacheIndex,
        codec: FrameCodec,
        capacity: int,
        inflight: int,
        timeout: float = 5.0,
        threads: int = 4,
        not_direct: str = "it is not set up for that",
        takes_writes: bool = True,
        of_all: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """``capacity`` is bytes of frames; ``inflight`` is bytes of arena slots that calls may hold together.

        ``timeout`` is the seconds after which a call should have given up; ``threads`` is the size of ``pool``. If
        ``not_direct`` is empty, workers read its frames directly. Unless it ``takes_writes``, it admits nothing.
        ``of_all`` is the capacity of a shared store for all its users, if it has one.
        """
        self.name = name
        self.backend = backend
        self.pool = pool
        self.index = index
        self._budget = index.budget
        self.capacity = self._wanted = capacity
        self._of_all = of_all
        self.lossless = codec.identity.lossless
        self.longest = codec.max_frame_nbytes  #: bytes of a frame at most
        self.not_direct = not_direct
        self._codec = codec
        self._takes_writes = takes_writes
        self._inflight_limit = inflight
        self._clock = clock
        self._health = StoreHealth(name, pool, timeout, clock)
        self.events: list[Event] = self._health.events  #: since the caller last cleared this list
        self._policy_state = PolicyState(backend, index.policy, codec, capacity)
        self._log = RequestLog(backend, codec, capacity // FITS - self._policy_state.nbytes)
        self._kept = (self._policy_state, self._log)
        kept_nbytes = sum(kept.nbytes for kept in self._kept)
        self._table = FrameTable(index, CapacityLimit(capacity), kept_nbytes, clock)
        #: The frames in the store that this tier's codec cannot read, with their sizes in bytes.
        self.incompatible: Mapping[ChunkKey, int] = self._table.incompatible
        speed = StoreSpeed()
        self.chooser = LoadChooser(name, speed, clock)
        calls = Calls(backend, self._table, pool, self._health, clock)
        self.remote = RemoteLookup(calls, speed=speed)  #: what a shared store is asked for
        self._deletes = Deletes(calls)
        self._writes = Writes(calls, deletes=self._deletes, concurrent=max(1, threads - 1))
        self._reads = Reads(calls, deletes=self._deletes, remote=self.remote, speed=speed)
        self.direct_reads = DirectReads(calls, deletes=self._deletes, reads=self._reads, speed=speed)
        self._recover()

    def adjust(self, capacity: int, inflight: int) -> None:
        """Keep within other bounds from now on. Frames beyond the capacity leave in the next steps, some in each."""
        self._wanted = capacity
        self._inflight_limit = inflight
        self._resize()

    def _resize(self) -> None:
        """Approach the wanted capacity: immediately, unless frames must leave; then by some frames in each step."""
        if self.capacity != self._wanted:
            least = min(self.capacity, self._table.stored_nbytes) - _LEAVE_AT_ONCE * self.longest
            self.capacity = max(self._wanted, least)
            self.backend.resize(self.capacity)
            self._table.limit = CapacityLimit(self.capacity)
            self._deletes.make_room()
            self._deletes.evict_excess("beyond its capacity")

    @property
    def reader_handle(self) -> str:
        """The handle with which workers can read the store directly; empty if it does not support that."""
        return self.backend.reader_handle() if isinstance(self.backend, SupportsDirectReads) else ""

    def is_direct(self, not_direct: Collection[str] = ()) -> bool:
        """Do workers read its frames directly, without slots? Not if its name is in ``not_direct``."""
        return not self.not_direct and self.name not in not_direct

    @property
    def namespace(self) -> Namespace:
        """The namespace of the frames that it writes and finds."""
        return self._codec.namespace

    def usage(self) -> Usage:
        """The tier's current usage; for a shared store with a capacity, that of all its users, as last reported."""
        chunks, nbytes, capacity = len(self.index), self.index.resident.used, self.capacity
        if self._of_all is not None:
            capacity = self._of_all
            frame_nbytes = nbytes // chunks if chunks else self._codec.max_frame_nbytes
            nbytes = min(nbytes, capacity) if self.backend.used is None else self.backend.used
            chunks = nbytes // frame_nbytes
        return Usage(
            self.name,
            chunks,
            nbytes,
            capacity,
            inflight=self._inflight,
            can_read=not self._health.blocks(self._health.reads),
            can_write=not self._health.blocks(self._health.writes),
            writes=self._budget.use() if self._budget else None,
        )

    # -- what is here ------------------------------------------------------------------------------

    @property
    def can_read(self) -> bool:
        """May reads begin now?"""
        return self._health.can_read

    def readable(self, keys: Sequence[ChunkKey], start: int = 0) -> int:
        """Length of the run of keys from ``start`` on that can be read into slots now."""
        return self._table.readable(keys, start) if self._health.can_read else 0

    def leasable(self, keys: Sequence[ChunkKey], start: int = 0) -> int:
        """Length of the run of keys from ``start`` on that workers can read directly now; see `lease`."""
        return self._table.readable(keys, start, beside=Use.DIRECT_READ) if self._health.can_read else 0

    def has(self, key: ChunkKey) -> bool:
        """Can the frame of this key be read into a slot now?"""
        return self.readable([key]) == 1

    def holds(self, key: ChunkKey) -> bool:
        """Is the frame of this key in the store, and not about to leave, even if it cannot be read now?"""
        return any(self._table.readable([key], 0, use) for use in (Use.READING, Use.DIRECT_READ))

    def miss_reason(self, key: ChunkKey) -> str:
        """Why a frame that is in the store cannot be read now; empty if the store is not known to have it."""
        if key in self.incompatible:
            return f"{self.name} has it with another codec, seal key or number of ranks"
        if not self._health.can_read and (key in self.index or self.backend.shared):
            return f"{self.name} cannot be queried now"
        if key not in self.index:
            return ""
        if key in self._table.in_use:
            return f"its frame in {self.name} {self._table.in_use[key].value}"
        return f"its frame in {self.name} can no longer be used"

    def choose(self, chunks: int, limit: LoadLimit | None) -> LoadChoice:
        """How many chunks of a readable run to load."""
        return self.chooser.choose(chunks, self._codec.max_frame_nbytes, self._reading_nbytes, limit)

    def probe(self, chunks: int) -> int:
        """How many chunks of a declined run to load anyway, with no request waiting."""
        return self.chooser.probe(chunks, self._codec.max_frame_nbytes, self._reading_nbytes)

    def request(self, path: Sequence[ChunkKey], now: float, hints: Mapping[str, str]) -> None:
        """A request names these chunks, root first, at ``now``, in seconds of the tier's clock."""
        self.index.request(path, now, hints)
        self._log.note(path, now)

    def poll(self) -> None:
        """After calls have returned: begin writes that waited for them, retry deletes, save what outlives a restart.

        A shared store is asked for the keys that `RemoteLookup.request` noted.
        """
        now = self._clock()
        self._health.watch_for_hangs()
        self._resize()
        self._deletes.retry()
        self._writes.start()
        for kept in self._kept:
            if kept.due(now) and self._health.can_write:
                kept.keep_by(self.pool, now, lambda saved: self._health.record(self._health.writes, [], saved.error))
        self.remote.start(self._index_found)

    # -- writing -----------------------------------------------------------------------------------

    def would_admit(self, path: Sequence[ChunkKey]) -> list[ChunkKey]:
        """The chunks of a path, root first, that are writable and preferred to the victims they would need.

        The other parts of these chunks, and of chunks that are already here, follow. A shared store has no victims:
        frames that this tier forgets stay there.
        """
        return self.index.with_their_parts(self._writable(path), self._preferred)

    def _preferred(self, path: Sequence[ChunkKey]) -> Sequence[ChunkKey]:
        """The writable chunks that enough requests have named, that are affordable, and preferred to their victims."""
        nbytes = self._codec.max_frame_nbytes
        frequent = self.index.meets_frequency(path)
        affordable = self.index.affordable(frequent, nbytes)
        if refused := frequent[len(affordable) :]:
            self._report_spent(refused)
        if self.backend.shared:
            return affordable
        room = self._table.room + self._table.evictable(path)
        spared = self._table.in_use, set(path)
        admitted, _ = self.index.plan_admission(affordable, nbytes, room, self.index.resident.nbytes, spared)
        return admitted

    def write(self, frames: Sequence[FrameWrite], release: Release) -> None:
        """Store frames of one path, root first, that `would_admit` returned. Calls ``release`` once for each.

        Capacity, the limit in flight and the health of the store are checked again; frames that fail are rejected.
        Waiting writes make room for newer ones, the oldest first.
        """
        writable = set(self._writable([frame.key for frame in frames]))
        fresh = [frame for frame in frames if frame.key in writable]
        self._writes.shed(self._inflight + sum(len(frame.view) for frame in fresh) - self._inflight_limit)
        fitting = leading(fresh, self._inflight_limit - self._inflight, lambda frame: len(frame.view))
        parents = {frame.parent for frame in fitting}
        affordable = fitting if self._budget is None else fitting[: max(0, self._budget.left) // self.longest]
        accepted, victims = self._make_room(affordable, parents)
        self._reject([frame for frame in frames if frame.key not in writable], self._not_writable_reason, release)
        self._reject(fresh[len(fitting) :], lambda key: "too many bytes are in flight", release)
        if refused := [frame.key for frame in fitting[len(affordable) :]]:
            self._report_spent(refused)
            release(refused)
        self._reject(affordable[len(accepted) :], lambda key: "no room, and nothing can be evicted", release)
        if accepted:
            self._writes.add(accepted, victims, self._codec, release)

    def _report_spent(self, keys: Sequence[ChunkKey]) -> None:
        self._health.report(EventKind.REJECTED, keys, why="its write budget is spent")

    def _make_room(
        self, frames: Sequence[FrameWrite], parents: set[ChunkKey | None]
    ) -> tuple[Sequence[FrameWrite], list[ChunkKey]]:
        """The leading frames that can be stored, and the victims to evict for them."""
        weigh, bound = self.index.resident.nbytes, self._codec.max_frame_nbytes
        room = self._table.room + self._table.evictable([frame.key for frame in frames])
        victims = self.index.select_victims(len(frames) * bound - room, weigh, spared=(self._table.in_use, parents))
        freed = sum(map(weigh, victims))
        fitting = frames[: max(0, room + freed) // bound]
        while victims and freed - weigh(victims[-1]) >= len(fitting) * bound - room:
            freed -= weigh(victims.pop())
        return fitting, victims

    def _writable(self, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        """The keys for which a write would be considered now."""
        if not self._takes_writes or self._begun_nbytes >= self._inflight_limit or not self._health.can_write:
            return []
        if not self._table.limit.open(self._clock()):
            return []
        return [key for key in self.index.resident.missing(keys) if key not in self._table.in_use]

    def _not_writable_reason(self, key: ChunkKey) -> str:
        """Why a frame cannot be written; empty if it is stored or being written."""
        use = self._table.in_use.get(key)
        if use in (Use.DELETING, Use.QUARANTINING):
            return f"its last frame {use.value}"
        if use is not None or key in self.index:
            return ""
        if self._begun_nbytes >= self._inflight_limit:
            return "too many bytes are in flight"
        return "the store is full" if self._health.can_write else "the store cannot be written now"

    def _reject(self, frames: Sequence[FrameWrite], reason: Callable[[ChunkKey], str], release: Release) -> None:
        by_reason: dict[str, list[ChunkKey]] = {}
        for frame in frames:
            by_reason.setdefault(reason(frame.key), []).append(frame.key)
        for why, keys in by_reason.items():
            if why:
                self._health.report(EventKind.REJECTED, keys, why=why)
        if frames:
            release([frame.key for frame in frames])

    # -- reading -----------------------------------------------------------------------------------

    def may_read(self, view_nbytes: int) -> int:
        """How many more reads into views of this many bytes may begin now."""
        return max(0, self._inflight_limit - self._begun_nbytes) // view_nbytes

    def read(
        self,
        wanted: Sequence[tuple[ChunkKey, memoryview]],
        arrived: Arrived,
        salts: Mapping[ChunkKey, bytes] | None = None,
    ) -> list[ChunkKey]:
        """Begin to fill views with verified raw frames; returns the keys whose read has begun.

        ``arrived(good, bad)`` is called later, once per group, with each of its keys in one of the two. ``salts`` maps
        chunks to the salts of their requests, if they have one.
        """
        room = self._inflight_limit - self._begun_nbytes
        begun = leading([pair for pair in wanted if self.has(pair[0])], room, lambda pair: len(pair[1]))
        self._writes.shed(self._inflight + sum(len(view) for _, view in begun) - self._inflight_limit)
        self._reads.begin(begun, self._codec, arrived, salts or {})
        return [key for key, _ in begun]

    # -- direct reads -------------------------------------------------------------------------------

    def lease(self, keys: Sequence[ChunkKey], holder: str) -> list[StoredFrame]:
        """Lease the frames of as many leading keys as possible: they stay in place until the holder is released.

        The tier is direct, the keys are leasable, and the holder has none of them yet.
        """
        locations = self.direct_reads.lease(keys, holder)
        namespace = self._codec.namespace.digest
        return [
            StoredFrame(self.name, location, key, namespace) for key, location in zip(keys, locations, strict=False)
        ]

    @property
    def _reading_nbytes(self) -> int:
        """Bytes that are being read or leased."""
        return self._reads.inflight_nbytes + self.direct_reads.leased_nbytes

    @property
    def _inflight(self) -> int:
        """Bytes of arena slots held by reads, writes and waiting writes."""
        return self._begun_nbytes + self._writes.waiting_nbytes

    @property
    def _begun_nbytes(self) -> int:
        """Bytes of arena slots held by calls under way: they cannot be shed."""
        return self._reads.inflight_nbytes + self._writes.begun_nbytes

    # -- endings -----------------------------------------------------------------------------------

    def erase(self, keys: Sequence[ChunkKey]) -> int:
        """Never find these frames again, and erase them. Returns the number that were here. The store is not shared.

        The log of requests is erased with them: their keys could confirm a guess of what was erased.
        """
        held = [key for key in dict.fromkeys([*keys, *self.index.other_parts(keys)]) if key in self.index]
        self._deletes.erase(held)
        if held:
            self._log.forget(self.namespace, erase=True)
        return len(held)

    @property
    def erasing(self) -> int:
        """Number of frames that are still to be erased; all damaged ones count as one, and so does the log."""
        return len(self._deletes.condemned) + self._deletes.keeps_damaged + self._log.erasing

    def invalidate_all(self, namespace: Namespace) -> None:
        """Never find any of these frames again; new ones are encoded under ``namespace``."""
        self._codec = self._codec.with_namespace(namespace)
        self._deletes.invalidate(self.index.resident)
        self._log.forget(self.namespace)

    def close(self, timeout: float) -> bool:
        """Close the tier. False if a call still hangs after ``timeout`` seconds; the backend then stays open."""
        if not self.pool.close(timeout):
            return False
        return run_within(self._close, timeout) is not None

    def _close(self) -> None:
        try:
            for kept in self._kept:
                kept.keep()
        finally:
            self.backend.close()

    # -- inside ------------------------------------------------------------------------------------

    def _recover(self) -> None:
        """Index the frames that survived a restart, in the order of their requests; evict those beyond the capacity.

        A shared store is asked for each key when a request names it: listing it would take long, and a frame beyond
        this engine's capacity may belong to another engine.
        """
        if self.backend.shared:
            return
        self._policy_state.recall()
        if not isinstance(self.backend, SupportsListing):
            return
        found = dict(self.backend.scan())
        lengths = {**self._policy_state.frames, **self._log.frames}
        beside = [key for key in keys_beside(self.namespace.digest) if key in found]
        stale = [key for key in beside if found.pop(key) != lengths.get(key)]  # of another capacity or policy
        self._log.replay(self.index, found, self._clock())
        if stale:
            run(lambda: self.backend.delete(stale))
        self._deletes.evict_excess("beyond its capacity")

    def _index_found(self, keys: Sequence[ChunkKey]) -> None:
        """Index the keys that the store has; forget others if there are too many."""
        self.index.admit(keys, [None] * len(keys), self._codec.max_frame_nbytes)
        self._deletes.evict_excess("beyond its capacity")
