"""The interface of a stack to the scheduler side of an engine, wherever the stack lives."""

from __future__ import annotations

import abc
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from kvtier_core.interfaces import Medium
from kvtier_core.stack.outcomes import LoadLimit, Lookup, Whereabouts
from kvtier_core.types import ChunkKey, Event, FrameRead, Namespace, Slot, StoredFrame, Usage


class Stack(abc.ABC):
    """An ordered stack of tiers. All methods are called on one thread, the owner's, and return without waiting for I/O.

    A *path* is the chunk keys of a prompt, root first. A *holder* is a name that the caller chooses, one for each
    request or job; everything that is pinned or reserved belongs to a holder and stays until that holder is released.
    A *salt* is that of the requests whose chunks a path names: what is encrypted below the arenas depends on it, so the
    same path always comes with the same one.
    """

    @abc.abstractmethod
    def on_request(self, path: Sequence[ChunkKey], hints: Mapping[str, str] | None = None, salt: bytes = b"") -> None:
        """A request names this path. Call it once a request: eviction policies learn from it."""

    @abc.abstractmethod
    def lookup(
        self,
        path: Sequence[ChunkKey],
        holder: str,
        limit: LoadLimit | None = None,
        salt: bytes = b"",
        skipped: int = 0,
    ) -> Lookup:
        """Find the leading chunks of a path and pin those that are READY for ``holder``.

        The path may begin behind ``skipped`` chunks of the prompt, which the engine has. Where chunks have several
        parts, the slots are those that are needed to continue behind the last restorable chunk.

        Chunks that lie below the arenas are requested, as far as they are worth loading within ``limit``, without
        one all of them. `step` begins to read them, and they are pinned for the holder as they arrive. A holder has
        one path at a time: another path releases what was found for the one before.
        """

    @abc.abstractmethod
    def still_pending(self, holder: str) -> bool:
        """Is all that the holder's last lookup waits for still on its way? That lookup need not be repeated before."""

    @abc.abstractmethod
    def ask_again(self, path: Sequence[ChunkKey]) -> str:
        """The next lookup asks shared stores for chunks of this path though they did not have them just now.

        Returns the first tier that is asked; empty if no store can be.
        """

    @abc.abstractmethod
    def load_begins(self, frames: Sequence[StoredFrame], holder: str) -> None:
        """The workers begin to read these frames, which a lookup found for the holder. `load_ended` follows."""

    @abc.abstractmethod
    def load_ended(self, holder: str, unread: Mapping[ChunkKey, FrameRead], *, ok: bool) -> None:
        """All workers have ended that, if it began. Call it before `release`.

        ``unread`` are the frames that one of them could not use, and why: they are not found any more. Not ``ok``: the
        load has failed, for that or for another reason.
        """

    @abc.abstractmethod
    def prefetch(self, path: Sequence[ChunkKey], limit: LoadLimit | None = None, salt: bytes = b"") -> None:
        """A request for this path waits in the engine's queue: bring up what lies below the arenas.

        Nothing is pinned. What was brought up and is not used yet takes at most a quarter of the hottest arena.
        """

    @abc.abstractmethod
    def reserve(
        self, path: Sequence[ChunkKey], holder: str, salt: bytes = b"", parts: Sequence[ChunkKey] = ()
    ) -> dict[ChunkKey, Slot]:
        """Empty slots for leading chunks of a path that have none and are worth storing, evicting others as needed.

        ``parts`` are the keys of other parts of chunks, which get slots too if there is room for all of them and their
        chunks have one.

        Fill them, then `commit`; or `release` the holder, and they are free again.
        """

    @abc.abstractmethod
    def commit(
        self,
        holder: str,
        checksums: Mapping[ChunkKey, Sequence[int]] | None = None,
        empty: Collection[ChunkKey] = (),
    ) -> None:
        """The slots that the holder reserved are filled: their chunks are READY, and are written to the tiers below.

        Those of the chunks in ``empty`` are not, and are free again. ``checksums`` holds the CRC-32 of each rank's
        shard, for the chunks whose bytes were summed while copying.
        """

    @abc.abstractmethod
    def stop_direct_reads(self, tier: str, why: str) -> None:
        """The workers do not read the frames of this tier by themselves: from now on they pass through an arena.

        Called before any load from it begins. What is held of it is released.
        """

    @abc.abstractmethod
    def release(self, holder: str) -> None:
        """Unpin all that the holder looked up and free all that it reserved. Nothing happens if there is none."""

    @abc.abstractmethod
    def reserve_self_test_slots(self, holder: str, count: int = 1) -> list[Slot]:
        """So many empty slots of each arena, for ``holder``. The same ones if called again.

        None if an arena has not as many that could be free: ask again later.
        """

    @abc.abstractmethod
    def step(self) -> list[Event]:
        """Process what the I/O threads finished, begin what was requested; returns the events since the last call."""

    @abc.abstractmethod
    def drain(self, timeout: float) -> list[Event]:
        """Step until nothing is in flight, or ``timeout`` seconds have passed."""

    @abc.abstractmethod
    def invalidate_all(self, namespace: Namespace) -> None:
        """Never find again what was stored so far. New frames are sealed under ``namespace``.

        Slots in use stay as they are until their holders are released.
        """

    @property
    @abc.abstractmethod
    def jobs(self) -> int:
        """Pieces of work that are queued or running on the I/O threads."""

    @property
    @abc.abstractmethod
    def attachment(self) -> int:
        """Another number than before: workers must reach the tiers anew, and what was found before cannot be loaded."""

    @property
    @abc.abstractmethod
    def packed(self) -> bool:
        """Are shards packed in the slots of its arenas?"""

    @property
    @abc.abstractmethod
    def handles(self) -> dict[str, str]:
        """How a worker process reaches each arena, by its name, in the order of the arenas' numbers."""

    @property
    @abc.abstractmethod
    def reader_handles(self) -> dict[str, str]:
        """How a worker process reaches the files of each tier whose frames it reads, by the name of the tier."""

    @property
    @abc.abstractmethod
    def media(self) -> dict[str, Medium]:
        """The medium of each tier, by its name, hottest first."""

    @abc.abstractmethod
    def describe(self) -> list[str]:
        """A line a tier: what it holds, and its effective settings."""

    @abc.abstractmethod
    def usage(self) -> list[Usage]:
        """The contents of each tier now, in numbers."""

    @abc.abstractmethod
    def whereabouts(self, path: Sequence[ChunkKey]) -> list[Whereabouts]:
        """Where each chunk of a path is, as far as this engine knows. Nothing is pinned, asked for or learned."""

    @abc.abstractmethod
    def pins_by_holder(self) -> Counter[str]:
        """How many slots each holder has pinned, store tiers that write from one included. Empty when idle."""

    @abc.abstractmethod
    def why_cold(self) -> str:
        """If the tiers below hold frames of other namespaces only: how the most similar one differs. Else empty.

        Asks the stores on this thread. Call it once, when the stack was opened.
        """

    @abc.abstractmethod
    def close(self, timeout: float = 5.0) -> list[Event]:
        """Give writes under way ``timeout`` seconds, then close every tier. May be called twice."""
