"""The interface of a stack to the scheduler side of an engine, wherever the stack lives."""

from __future__ import annotations

import abc
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from kvtier_core.forks import ProcessBound
from kvtier_core.interfaces import Medium
from kvtier_core.stack.outcomes import LoadLimit, Lookup, Whereabouts
from kvtier_core.types import ChunkKey, Event, FrameRead, Namespace, Slot, StoredFrame, Usage


class Stack(ProcessBound, abc.ABC, closing={"close": list}):
    """An ordered stack of tiers. All methods are called on one thread, the owner's, and return without waiting for I/O.

    A *path* is the chunk keys of a prompt, root first. A *holder* is a name that the caller chooses, one for each
    request or job; every pin and reservation belongs to a holder and lasts until that holder is released. A *salt* is
    that of the requests that name the path. It is part of the keys that encrypt frames below the arenas, so a path
    always comes with the same salt.
    """

    @abc.abstractmethod
    def on_request(self, path: Sequence[ChunkKey], hints: Mapping[str, str] | None = None, salt: bytes = b"") -> None:
        """A request names this path. Call it once per request: eviction policies learn from it."""

    @abc.abstractmethod
    def lookup(
        self,
        path: Sequence[ChunkKey],
        holder: str,
        limit: LoadLimit | None = None,
        salt: bytes = b"",
        skipped: int = 0,
        not_direct: Collection[str] = (),
    ) -> Lookup:
        """Find the leading chunks of a path and pin the READY ones for ``holder``.

        The path may begin after ``skipped`` chunks of the prompt that the engine has. For chunks of several parts, the
        slots are those needed to continue behind the last restorable chunk.

        Chunks below the arenas are requested if they are worth loading within ``limit``; without a limit, all are.
        `step` begins to read them, and they are pinned for the holder as they arrive. Chunks of the tiers in
        ``not_direct`` are requested too, even if workers could read them directly. A holder has one path at a time:
        looking up another path releases the previous one.
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
    def load_begins(self, frames: Sequence[StoredFrame], holder: str) -> None:
        """The workers begin to read these frames, which a lookup found for the holder. `load_ended` follows."""

    @abc.abstractmethod
    def load_ended(self, holder: str, unread: Mapping[ChunkKey, FrameRead], *, ok: bool) -> None:
        """All workers have finished reading, if they had begun. Call it before `release`.

        ``unread`` holds the frames that some worker could not use, and why; they are no longer found. ``ok`` is False
        if the load failed, for this or any other reason.
        """

    @abc.abstractmethod
    def prefetch(self, path: Sequence[ChunkKey], limit: LoadLimit | None = None, salt: bytes = b"") -> None:
        """A request for this path waits in the engine's queue: bring up its chunks from below the arenas.

        Nothing is pinned. Prefetched chunks that no request has used take at most a quarter of the hottest arena.
        """

    @abc.abstractmethod
    def reserve(
        self, path: Sequence[ChunkKey], holder: str, salt: bytes = b"", parts: Sequence[ChunkKey] = ()
    ) -> dict[ChunkKey, Slot]:
        """Reserve empty slots for leading chunks of a path that have none and are worth storing; evict as needed.

        ``parts`` are the keys of other parts of chunks. They get slots only if all of them fit and their chunks have
        slots.

        Fill the slots, then `commit`; or `release` the holder to free them.
        """

    @abc.abstractmethod
    def commit(
        self,
        holder: str,
        checksums: Mapping[ChunkKey, Sequence[int]] | None = None,
        empty: Collection[ChunkKey] = (),
    ) -> None:
        """The holder's reserved slots are filled: their chunks become READY and are written to the tiers below.

        The slots of chunks in ``empty`` were not filled and are freed. ``checksums`` holds the CRC-32 of each rank's
        shard, for chunks that were summed while they were copied.
        """

    @abc.abstractmethod
    def stop_direct_reads(self, tier: str, why: str) -> None:
        """The workers cannot read this tier's frames directly: from now on they pass through an arena.

        Called before any load from the tier begins. All holders of its frames are released.
        """

    @abc.abstractmethod
    def release(self, holder: str) -> None:
        """Unpin everything that the holder looked up and free everything that it reserved. Does nothing otherwise."""

    @abc.abstractmethod
    def reserve_self_test_slots(self, holder: str, count: int = 1) -> list[Slot]:
        """Reserve ``count`` empty slots in each arena for ``holder``. A second call returns the same slots.

        Returns an empty list if an arena cannot free enough slots: ask again later.
        """

    @abc.abstractmethod
    def step(self) -> list[Event]:
        """Process finished I/O, begin requested reads, and return the events since the last call."""

    @abc.abstractmethod
    def drain(self, timeout: float) -> list[Event]:
        """Step until nothing is in flight, or ``timeout`` seconds have passed."""

    @abc.abstractmethod
    def invalidate_all(self, namespace: Namespace) -> None:
        """Never find anything stored so far again. New frames are sealed under ``namespace``.

        Slots in use stay as they are until their holders are released.
        """

    @property
    @abc.abstractmethod
    def jobs(self) -> int:
        """Number of jobs queued or running on the I/O threads."""

    @property
    @abc.abstractmethod
    def attachment(self) -> int:
        """When this number changes, workers must attach to the tiers again, and earlier lookups cannot be loaded."""

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

    @property
    @abc.abstractmethod
    def media(self) -> dict[str, Medium]:
        """The medium of each tier by name, hottest first."""

    @abc.abstractmethod
    def describe(self) -> list[str]:
        """One line per tier: its contents and effective settings."""

    @abc.abstractmethod
    def usage(self) -> list[Usage]:
        """The current usage of each tier."""

    @abc.abstractmethod
    def whereabouts(self, path: Sequence[ChunkKey]) -> list[Whereabouts]:
        """Where each chunk of a path is, as far as this engine knows. Nothing is pinned, requested or learned."""

    @abc.abstractmethod
    def pins_by_holder(self) -> Counter[str]:
        """Number of slots that each holder has pinned, including store tiers that write from them. Empty when idle."""

    @abc.abstractmethod
    def why_cold(self) -> str:
        """How the most similar namespace differs, if the tiers below hold only frames of others. Otherwise empty.

        Asks the stores on this thread. Call it once, after the stack is opened.
        """

    @abc.abstractmethod
    def close(self, timeout: float = 5.0) -> list[Event]:
        """Wait up to ``timeout`` seconds for writes under way, then close every tier. May be called twice."""
