"""A tier that stores frames: on a disk, or on another machine."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar, Protocol, runtime_checkable

import attrs

from kvtier_core.errors import BackendError
from kvtier_core.interfaces.arena import ArenaConfig, PagedKVCache
from kvtier_core.interfaces.context import Medium, OpenContext
from kvtier_core.interfaces.direct_reader import DirectReader
from kvtier_core.types import ChunkKey, Location, Namespace, Nbytes


class Backend(abc.ABC):
    """Stores frames under keys.

    Called on its tier's I/O threads, several at once, but never twice at once for the same key. While the tier opens,
    the owner's thread calls, too. Methods raise BackendError and nothing else. A call may block; where the medium lets
    it give up, it does so after `OpenContext.timeout`, which is for the whole call. While one takes longer, the tier
    makes no other.

    A *shared* store belongs to nobody: other engines add frames, and frames vanish, at any time.

    - The tier asks for a key that it does not know, and remembers for a second at most that it was absent. It never
      lists the store, and keeps no policy state there.
    - Nobody deletes what another may use. The tier calls neither `delete` nor `scan`, whatever its capacity or epoch; a
      frame that it cannot use is a miss, stays where it is, and is replaced by the next write of its key.
    - Two writers of one key leave the whole frame of one of them; a reader finds a whole frame or none.
    - Each key succeeds or fails alone: if the store cannot serve one key, the others of the batch are served.
    - Unfinished writes of others are left alone, for as long as one may still be under way.
    - The store bounds itself: by its own means, or, if the user wrote a ``capacity``, by `SharedSpace`, with which all
      its users account together.
    """

    #: The same as its config's.
    shared: ClassVar[bool] = False

    @abc.abstractmethod
    def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """Whether the store has a frame of each key; False too if it cannot tell for this one. Raises BackendError."""

    @abc.abstractmethod
    def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> Sequence[int | BackendError]:
        """Read the frame of ``keys[i]`` into ``into[i]``, from its beginning.

        A view is contiguous and writable; one that lies in an arena's slot begins at a multiple of `FRAME_ALIGNMENT` in
        memory. Nothing beyond the returned length is written, but the view of a frame that vanished while it was read
        may hold anything. No view is kept.

        Returns for each key the bytes of its frame; 0 if there is none, or if it is longer than its view; or the
        BackendError for which the frame of this key alone cannot be read, now or ever. Such a frame is quarantined, and
        stored again with its chunk; in a shared store it is merely not asked for during a second. Its view may hold
        anything. The stack verifies every frame that was read.

        Raises BackendError if the store as a whole cannot be read: nothing is deleted, and a store that raises again
        and again is not asked for a while.
        """

    @abc.abstractmethod
    def write(self, keys: Sequence[ChunkKey], frames: Sequence[memoryview]) -> Sequence[BackendError | None] | None:
        """Store ``frames[i]`` under ``keys[i]``, in place of any earlier frame.

        Of each key readers find the whole frame or none, whatever happens to the process. A frame is a multiple of
        `FRAME_ALIGNMENT` bytes long. No view is kept.

        Returns None if all were stored; or for each key None, or the BackendError for which this frame alone was not.

        Raises StoreFull if there is no room although the tier keeps within its capacity: for a while it then keeps
        within less, and evicts its own frames for new ones. Raises BackendError if the store failed. After either, the
        tier deletes all of ``keys``, unless the store is shared.
        """

    @abc.abstractmethod
    def delete(self, keys: Sequence[ChunkKey]) -> None:
        """Remove frames. A key that is not there is no error. Raises BackendError."""

    def quarantine(self, keys: Sequence[ChunkKey]) -> None:
        """Make frames that failed verification unfindable. A store may keep them aside to be examined; by default they
        are deleted. Raises BackendError.

        A shared store deletes nothing here: another engine may have replaced the frame since it was read, or may read
        it well. It only ensures that the next `write` of the key replaces what is there; by default every write does.
        """
        if not self.shared:
            self.delete(keys)

    def facts(self) -> Mapping[str, str]:
        """Settings whose effective value may differ from what was asked: ``{"huge_pages": "auto -> no"}``."""
        return {}

    def close(self) -> None:
        """Release threads, descriptors, processes: everything. May be called twice; no other call is under way.

        A call after it raises BackendError, or answers.
        """


@runtime_checkable
class SupportsListing(Protocol):
    """A backend that can list its frames. One that cannot starts cold."""

    @abc.abstractmethod
    def scan(self) -> Iterator[tuple[ChunkKey, int]]:
        """The keys of this namespace that the store already has, and the bytes of their frames, oldest first.

        Called once, when the tier opens, unless the store is shared. A frame that is deleted meanwhile may be named or
        not, and makes nothing fail.
        """


@runtime_checkable
class SupportsNamespaces(Protocol):
    """A backend that keeps the facts of each namespace beside its frames."""

    @abc.abstractmethod
    def namespaces(self) -> Iterator[Namespace]:
        """Other namespaces that have frames in this store, as far as it knows their facts.

        Called once, when the tier opens, so that the log can say why an engine starts cold.
        """

    @abc.abstractmethod
    def drop_namespace(self) -> None:
        """Remove everything of this namespace besides frames: its facts, and writes that were never finished.

        Called by commands that look at a tier, when all frames are deleted and nobody uses the namespace any more, and
        never by an engine. Raises BackendError.
        """


@runtime_checkable
class SupportsDirectReads(Protocol):
    """A backend whose frames the engine's workers can read by themselves, without the slot of an arena.

    The `DirectReader` of its config reads them.
    """

    @abc.abstractmethod
    def reader_handle(self) -> str:
        """Plain text with which `BackendConfig.attach_reader` reaches this store from a worker process.

        Empty if its settings are such that frames pass through the slots of an arena. The config there has the same
        settings; the process may be that of an engine of a server, with another environment.
        """

    @abc.abstractmethod
    def locate(self, keys: Sequence[ChunkKey]) -> Sequence[Location | None]:
        """Where the frame of each key is; None if there is none. A server sends that to engines, see `Location`.

        Called on the owner's thread, and answered without the medium. The frame stays there until the tier calls
        `write`, `delete` or `quarantine` for its key, which it does when no worker reads it any more. In a shared store
        others may replace or remove it at any time: then a reader finds nothing, or what fails verification. Raises
        BackendError.
        """


@attrs.frozen
class BackendConfig(abc.ABC):
    """A tier that stores frames, and reads them into an arena's slots."""

    type: ClassVar[str]  #: what users write in ``tiers[].type``
    medium: ClassVar[Medium] = Medium.UNSPECIFIED
    #: May other processes add or delete frames? See `Backend`. May be a field, where the user decides. A shared tier
    #: needs no ``capacity``.
    shared: ClassVar[bool] = False
    #: Are its frames those in the arenas of other engines? Then the tier reads them there, writes nothing, and shows
    #: the others `OpenContext.sealed`. It is shared.
    of_peers: ClassVar[bool] = False
    #: Does the reader of `attach_reader` unpack the shards of a layout that says so (`Shard.packed`)? A `StagedReader`
    #: whose lanes have a mover of `open_mover` does.
    reads_packed: ClassVar[bool] = False

    @abc.abstractmethod
    def open(self, ctx: OpenContext) -> Backend:
        """Open the store. Called once, on the owner's thread, before the engine serves.

        Raises BackendError, or ConfigError with problems whose path begins at ``$``, the tier.
        """

    def staging_arena(self) -> tuple[ArenaConfig, Nbytes] | None:
        """The arena, and its capacity, that goes above this tier in a stack that has none: frames pass through it.

        By default None: then the user has to write one. Raises BackendError or ImportError.
        """
        return None

    def attach_reader(self, handle: str, cache: PagedKVCache, timeout: float) -> DirectReader:
        """In each worker process: a reader of the store behind a `SupportsDirectReads.reader_handle`, for these pages.

        ``timeout`` is the seconds after which a read has failed. Called once, before the first forward. Raises
        BackendError if it cannot, by default always: then the tier's frames pass through an arena, for all workers.
        """
        raise BackendError(f"frames of a tier of type {self.type} pass through an arena")

    @contextlib.contextmanager
    def apart(self) -> Iterator[BackendConfig]:
        """The store in which `kvtier conform` tries the laws, until the end.

        By default this store itself: what is tried has namespaces of its own, and a capacity without end. A store that
        takes its capacity when it opens yields another one, made in the same place and removed at the end; it is opened
        with 256 MiB at most. Raises BackendError.
        """
        yield self

    def recount(self, capacity: Nbytes) -> None:
        """Frames of a shared store with this capacity were removed by a command: correct its account.

        Others may have written meanwhile: what is there is counted anew. Raises BackendError.
        """


@runtime_checkable
class SupportsWalk(Protocol):
    """A config whose store can be listed as a whole, for `kvtier fsck` and `kvtier clear`."""

    @abc.abstractmethod
    def walk(self) -> contextlib.AbstractContextManager[Iterator[Stored]]:
        """Everything in the store, of every namespace.

        No engine uses the store until the end, unless it is shared: then anything may come and go meanwhile.
        Raises BackendError.
        """


@attrs.frozen
class Stored:
    """One thing that lies in a store, for `kvtier fsck` to examine."""

    where: str  #: for people: a path, a URL
    nbytes: int
    home: bytes | None  #: the first bytes of the digest of the namespace that it is stored under; None: it is no frame
    key: ChunkKey | None  #: that it is stored under; None: it is no frame
    #: ``read(offset, nbytes)``, fewer bytes only at its end. Raises BackendError; in a shared store Gone, if another
    #: engine has replaced or removed it.
    read: Callable[[int, int], bytes]
    remove: Callable[[], None]  #: deletes it; raises as ``read`` does
