"""The interface of a stack to the scheduler side of an engine, wherever the stack is; and to what opens its tiers."""

from __future__ import annotations

import abc
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from kvtier_core.forks import ProcessBound
from kvtier_core.interfaces import Medium
from kvtier_core.stack.outcomes import ANY, Lookup, Terms, Whereabouts
from kvtier_core.stack.store_tier.tier import StoreTier
from kvtier_core.types import ChunkKey, Event, FrameRead, Namespace, Slot, StoredFrame, Usage

#: Of a request, for eviction policies.
Hints = Mapping[str, str] | None


class Holders(abc.ABC):
    """The holders of pins and reservations in a stack.

    A *holder* is a name that the caller chooses, one for each request or job; every pin and reservation belongs to a
    holder and lasts until that holder is released.
    """

    @abc.abstractmethod
    def release(self, holder: str) -> None:
        """Unpin everything that the holder looked up and free everything that it reserved. Does nothing otherwise."""


class Lookups(Holders):
    """The lookups of requests, and the loads by workers."""

    @abc.abstractmethod
    def on_request(
        self, path: Sequence[ChunkKey], hints: Hints = None, salt: bytes = b"", memory_only: bool = False
    ) -> None:
        """A request names this path. Call it once per request: eviction policies learn from it.

        If it is ``memory_only``, each tier below the arenas learns only of the leading chunks that it has.
        """

    @abc.abstractmethod
    def lookup(self, path: Sequence[ChunkKey], holder: str, terms: Terms = ANY) -> Lookup:
        """Find the leading chunks of a path and pin the READY ones for ``holder``.

        For chunks of several parts, the slots are those needed to continue after the last restorable chunk.

        Chunks below the arenas are requested on these ``terms``. `step` begins to read them, and they are pinned for
        the holder as they arrive. A holder has one path at a time: looking up another path releases the previous one.
        """

    @abc.abstractmethod
    def still_pending(self, holder: str) -> bool:
        """Is everything that the holder's last lookup awaits still on its way? If so, do not repeat the lookup yet."""

    @abc.abstractmethod
    def ask_again(self, path: Sequence[ChunkKey]) -> str:
        """Let the next lookup ask shared stores again for chunks of this path that they recently did not have.

        Returns the first tier that will be asked; empty if none can be.
        """

    @abc.abstractmethod
    def prefetch(self, path: Sequence[ChunkKey], terms: Terms = ANY) -> None:
        """A request for this path waits in the engine's queue: promote its chunks from below the arenas.

        Nothing is pinned. Prefetched chunks that no request has used take at most a quarter of the hottest arena.
        """

    @abc.abstractmethod
    def load_begins(self, frames: Sequence[StoredFrame], holder: str) -> None:
        """The workers begin to read these frames, which a lookup found for the holder. `load_ended` follows."""

    @abc.abstractmethod
    def load_ended(self, holder: str, unread: Mapping[ChunkKey, FrameRead], *, ok: bool) -> None:
        """All workers have finished reading, if they had begun. Call it before `release`.

        ``unread`` holds those frames that some worker could not use, and why; they are no longer found. ``ok`` is False
        if the load failed, for this or any other reason.
        """


class Stores(Holders):
    """The KV that an engine has computed and hands to the stack."""

    @abc.abstractmethod
    def reserve(
        self,
        path: Sequence[ChunkKey],
        holder: str,
        salt: bytes = b"",
        parts: Sequence[ChunkKey] = (),
        promised_to: str = "",
        memory_only: bool = False,
    ) -> dict[ChunkKey, Slot]:
        """Reserve empty slots for leading chunks of a path that have none and are worth storing; evict as needed.

        ``parts`` are the keys of other parts of chunks. Slots are reserved for them only if all of them fit and their
        chunks have slots.

        ``promised_to`` is the holder for another process that will fetch the path: the chunks are worth storing
        whatever the hottest arena's policy prefers. From `commit` on they are pinned, until that holder is released.

        ``memory_only`` chunks are not written to other tiers or shown to peers until a request that is not memory-only
        names them.

        Fill the slots, then `commit`; or `release` the holder to free them.
        """

    @abc.abstractmethod
    def commit(
        self, holder: str, checksums: Mapping[ChunkKey, Sequence[int]] | None = None, empty: Collection[ChunkKey] = ()
    ) -> None:
        """The holder's reserved slots are filled: their chunks become READY and are written to the tiers below.

        The slots of chunks in ``empty`` were not filled and are freed. ``checksums`` holds the CRC-32 of each shard,
        for chunks whose checksums were computed during the copy. Chunks that the holder looked up stay pinned.
        """

    def copied(self) -> Collection[ChunkKey]:
        """The chunks that other engines have copied from the hottest arena since the last call, once for each copy.

        The oldest are left out if there are too many.
        """
        return ()


class Attachments(Holders):
    """The access of workers to the memory and the stores of the tiers."""

    @property
    @abc.abstractmethod
    def attachment(self) -> int:
        """When this number changes, workers must attach to the tiers again, and earlier lookups cannot be loaded."""

    def attach_again(self) -> None:
        """A worker could not attach to the tiers: change `attachment` when another attempt is worthwhile."""

    @property
    @abc.abstractmethod
    def packed(self) -> bool:
        """Are shards packed in the slots of its arenas?"""

    @property
    @abc.abstractmethod
    def handles(self) -> dict[str, str]:
        """For each arena's name, the handle with which workers attach to it, in the order of the arenas' numbers."""

    @property
    @abc.abstractmethod
    def reader_handles(self) -> dict[str, str]:
        """For each tier that workers read directly, the handle with which they reach its store."""

    @abc.abstractmethod
    def stop_direct_reads(self, tier: str, why: str) -> None:
        """The workers cannot read this tier's frames directly: from now on they pass through an arena.

        Called before any load from the tier begins. All holders of its frames are released.
        """

    @abc.abstractmethod
    def reserve_self_test_slots(self, holder: str, count: int = 1) -> list[Slot]:
        """Reserve ``count`` empty slots in each arena for ``holder``. A second call returns the same slots.

        A self-test needs at most `ChunkLayout.self_test_slots`.

        Returns an empty list if an arena cannot free enough slots: ask again later.
        """


class Insight(abc.ABC):
    """Information about a stack, for people and routers. Nothing is pinned, requested or learned."""

    media: Mapping[str, Medium]  #: by tier, hottest first
    shared: Collection[str] = ()  #: tiers on stores of which nobody knows all contents
    gaps: int = 0  #: number of times that events may have been lost

    @abc.abstractmethod
    def describe(self) -> list[str]:
        """One line per tier: its contents and effective settings."""

    @abc.abstractmethod
    def usage(self) -> list[Usage]:
        """The current usage of each tier."""

    @abc.abstractmethod
    def whereabouts(self, path: Sequence[ChunkKey]) -> list[Whereabouts]:
        """The place of each chunk of a path, to the knowledge of this engine."""

    def ask_whereabouts(self, path: Sequence[ChunkKey], then: Callable[[Sequence[Whereabouts]], object]) -> None:
        """Have ``then`` called with the whereabouts of a path, now or in a later step."""
        then(self.whereabouts(path))

    @abc.abstractmethod
    def pins_by_holder(self) -> Counter[str]:
        """Number of slots that each holder has pinned, including store tiers that write from them. Empty when idle."""

    @abc.abstractmethod
    def why_cold(self) -> str:
        """How the most similar namespace differs, if the tiers below hold only frames of others. Otherwise empty.

        Queries the stores on this thread. Call it once, after the stack is opened.
        """


class Stack(ProcessBound, Lookups, Stores, Attachments, Insight, closing={"close": list}):
    """An ordered stack of tiers. All methods are called on one thread, the owner's, and return without waiting for I/O.

    A *path* is the chunk keys of a prompt, root first. A *salt* is that of the requests that name the path. It is part
    of the keys that encrypt frames below the arenas, so a path always comes with the same salt.

    A call is done or refused as a whole. One that names a chunk twice, or something that its holder does not have,
    raises ContractError and changes nothing. If a server refuses a call, the engine logs this.
    """

    @abc.abstractmethod
    def step(self) -> list[Event]:
        """Process finished I/O, begin requested reads, and return the events since the last call."""

    @abc.abstractmethod
    def drain(self, timeout: float) -> list[Event]:
        """Step until nothing is in flight, or ``timeout`` seconds have passed."""

    @property
    @abc.abstractmethod
    def jobs(self) -> int:
        """Number of jobs queued or running on the I/O threads."""

    @abc.abstractmethod
    def invalidate_all(self, namespace: Namespace) -> None:
        """Never find anything stored so far again. New frames are sealed under ``namespace``.

        Slots in use stay as they are until their holders are released.
        """

    @abc.abstractmethod
    def close(self, timeout: float = 5.0) -> list[Event]:
        """Wait up to ``timeout`` seconds for writes under way, then close every tier. May be called twice."""


class Later(Protocol):
    """Opens store tiers that could not be opened with the stack."""

    namespace: Namespace | None  #: replaces the one with which they are opened

    def step(self) -> StoreTier | None:
        """A tier that is open now, if there is one; the caller closes it."""

    def close(self, timeout: float) -> None:
        """Open no more tiers."""
