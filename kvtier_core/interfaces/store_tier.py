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

    Called on I/O threads of its tier, and of a tier of peers, concurrently, but never twice at the same time for one
    key. While the tier opens, the owner's thread calls it too. Methods raise BackendError and nothing else. A call may
    block; if the medium permits, it gives up after `OpenContext.timeout`, which covers the whole call. While a call
    takes longer, the tier makes no other.

    A *shared* store has no owner: other engines add frames, and frames vanish, at any time.

    - The tier asks for keys that it does not know, and remembers an absent key for at most a second. It never
      lists the store and keeps no policy state there.
    - No engine deletes frames that others may use. The tier calls neither `delete` nor `scan`, whatever its capacity or
      epoch; a frame that it cannot use is a miss, stays in place, and is replaced by the next write of its key.
    - Concurrent writers of one key leave the whole frame of one of them; a reader finds a whole frame or none.
    - Each key succeeds or fails alone: if the store cannot serve one key, the others of the batch are served.
    - Unfinished writes of others are left alone as long as they may still be under way.
    - The store limits itself: by its own means, or, if the user set a ``capacity``, by `SharedSpace`, the common
      account of all its users.
    """

    #: The same as its config's.
    shared: ClassVar[bool] = False
    #: Possible remains of a frame after `erase`, for people; empty if there are none.
    remains: ClassVar[str] = "the store may keep the bytes of frames that it deleted"

    @property
    def used(self) -> int | None:
        """Bytes of all users' frames in a shared store with a ``capacity``, as last reported; None if that is unknown.

        Read on the owner's thread: it makes no call to the store.
        """
        return None

    @abc.abstractmethod
    def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """Whether the store has a frame for each key; False if it cannot tell. Raises BackendError."""

    @abc.abstractmethod
    def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> Sequence[int | BackendError]:
        """Read the frame of ``keys[i]`` into ``into[i]``, from its beginning.

        Views are contiguous and writable; a view of an arena slot is aligned to `FRAME_ALIGNMENT`. Nothing is written
        beyond the returned length, except that the view of a frame that vanished during the read may hold anything. No
        view is kept.

        Returns for each key the length of its frame; 0 if there is none, or if it is longer than its view; or the
        BackendError that prevents reading only this frame, now or ever. The frame is then quarantined and stored again
        with its chunk; in a shared store it is not requested again for a second. Its view may hold anything. The stack
        verifies every frame.

        Raises BackendError if the store as a whole cannot be read: nothing is deleted, and after repeated errors the
        store is not called for a while.
        """

    @abc.abstractmethod
    def write(self, keys: Sequence[ChunkKey], frames: Sequence[memoryview]) -> Sequence[BackendError | None] | None:
        """Store ``frames[i]`` under ``keys[i]``, replacing any earlier frame.

        Readers find a whole frame or none, whatever happens to the process. The length of a frame is a multiple of
        `FRAME_ALIGNMENT`. No view is kept.

        Returns None if all were stored; otherwise for each key None, or the BackendError with which storing it failed.

        Raises StoreFull if there is no room although the tier keeps within its capacity: for a while the tier then
        keeps less, and evicts its own frames for new ones. Raises BackendError if the store failed. After either, the
        tier deletes all of ``keys``, unless the store is shared.
        """

    @abc.abstractmethod
    def delete(self, keys: Sequence[ChunkKey]) -> None:
        """Remove frames. A missing key is not an error. Raises BackendError."""

    def quarantine(self, keys: Sequence[ChunkKey]) -> None:
        """Hide frames that failed verification; by default delete them. A store may keep them for examination.

        A shared store deletes nothing here: another engine may have replaced the frame since it was read, or may be
        able to read it. It only ensures that the next `write` of the key replaces the frame; by default every write
        does. Raises BackendError.
        """
        if not self.shared:
            self.delete(keys)

    def erase(self, keys: Sequence[ChunkKey]) -> None:
        """Delete frames so that their bytes cannot be read again, except what `remains` names; by default as `delete`.

        A store that keeps damaged frames removes all of its namespace. Not called if the store is shared. Raises
        BackendError.
        """
        self.delete(keys)

    def facts(self) -> Mapping[str, str]:
        """Effective values of settings that may differ from the requested ones: ``{"huge_pages": "auto -> no"}``."""
        return {}

    def resize(self, capacity: int) -> None:
        """Keep within this capacity, in bytes, in place of that in `OpenContext`.

        Called if the config is `BackendConfig.resizable`, on the owner's thread, and returns immediately. The tier
        deletes the excess frames. By default there is nothing to do.
        """

    def close(self) -> None:
        """Release all threads, descriptors and processes. May be called twice; no other call is under way.

        Later calls raise BackendError, or succeed.
        """


@runtime_checkable
class SupportsListing(Protocol):
    """A backend that can list its frames. One that cannot starts cold."""

    @abc.abstractmethod
    def scan(self) -> Iterator[tuple[ChunkKey, int]]:
        """The keys of this namespace in the store, and the lengths of their frames, oldest first.

        Called once, when the tier opens, unless the store is shared. A frame that is deleted meanwhile may or may not
        be listed, and causes no error.
        """


@runtime_checkable
class SupportsNamespaces(Protocol):
    """A backend that keeps the facts of each namespace beside its frames."""

    @abc.abstractmethod
    def namespaces(self) -> Iterator[Namespace]:
        """The other namespaces that have frames in this store, if it knows their facts.

        Called once, when the tier opens, so that the log can state why an engine starts cold.
        """

    @abc.abstractmethod
    def drop_namespace(self) -> None:
        """Remove everything of this namespace except frames: its facts, and unfinished writes.

        Called by commands that examine a tier, never by an engine, when all frames are deleted and the namespace is no
        longer used. Raises BackendError.
        """


@runtime_checkable
class SupportsTrial(Protocol):
    """A backend that can try each of the nodes that it reads from."""

    @abc.abstractmethod
    def trial(self) -> Mapping[str, str]:
        """By node, for people: whether it answers, and how fast. Waits for the nodes; `kvtier doctor` calls it."""


@runtime_checkable
class SupportsDirectReads(Protocol):
    """A backend whose frames the engine's workers can read directly, without a slot of an arena.

    The `DirectReader` of its config reads them.
    """

    @abc.abstractmethod
    def reader_handle(self) -> str:
        """Plain text with which `BackendConfig.attach_reader` reaches this store from a worker process.

        Empty if its settings require that frames pass through an arena. The config in the worker has the same
        settings; the worker may belong to an engine of a server, with another environment.
        """

    @abc.abstractmethod
    def locate(self, keys: Sequence[ChunkKey]) -> Sequence[Location | None]:
        """The location of each key's frame; None if there is none. A server sends locations to engines.

        Called on the owner's thread, and answered without access to the medium. The frame stays there until the tier
        calls `write`, `delete` or `quarantine` for its key, once no worker reads it any more. In a shared store others
        may replace or remove it at any time: a reader then finds nothing, or bytes that fail verification. Raises
        BackendError.
        """


@attrs.frozen
class BackendConfig(abc.ABC):
    """Names a tier that stores frames and reads them into arena slots, and opens it."""

    type: ClassVar[str]  #: the name in ``tiers[].type``
    medium: ClassVar[Medium] = Medium.UNSPECIFIED
    #: May other processes add or delete frames? See `Backend`. May be a field that users set. A shared tier needs no
    #: ``capacity``.
    shared: ClassVar[bool] = False
    #: Are its frames those of other engines? Then the tier reads them there, writes nothing, and shows the others its
    #: own: `OpenContext.sealed` and `OpenContext.stored`. A tier of peers is shared.
    of_peers: ClassVar[bool] = False
    #: Does nothing write to its store? Then the tier only reads. It is shared.
    read_only: ClassVar[bool] = False
    #: May ``capacity`` change while the tier is open, unless it is shared? See `Backend.resize`.
    resizable: ClassVar[bool] = False
    #: Does the reader of `attach_reader` unpack the shards of a packed layout (`Shard.packed`)? A `StagedReader` whose
    #: lanes have a mover of `open_mover` does.
    reads_packed: ClassVar[bool] = False

    @abc.abstractmethod
    def open(self, ctx: OpenContext) -> Backend:
        """Open the store. Called once, on the owner's thread, before the engine serves.

        Raises BackendError, or ConfigError with problems whose path begins at ``$``, the tier.
        """

    def staging_arena(self) -> tuple[ArenaConfig, Nbytes] | None:
        """The arena, with its capacity, to put above this tier in a stack without one: frames pass through it.

        By default None: the user has to configure one. Raises BackendError or ImportError.
        """
        return None

    def attach_reader(self, handle: str, cache: PagedKVCache, timeout: float) -> DirectReader:
        """Open a reader of the store behind a `SupportsDirectReads.reader_handle` in each worker, for these pages.

        A read fails after ``timeout`` seconds. Called once, before the first forward pass. Raises BackendError if it
        cannot, by default always: the tier's frames then pass through an arena for all workers.
        """
        raise BackendError(f"frames of a tier of type {self.type} pass through an arena")

    @contextlib.contextmanager
    def apart(self) -> Iterator[BackendConfig]:
        """The store in which `kvtier conform` tries the laws, as a context.

        By default this store itself, with separate namespaces and unlimited capacity. A store that takes its capacity
        when it opens yields a separate store, made in the same place and removed at the end, which is opened with at
        most 256 MiB. Raises BackendError.
        """
        yield self

    def recount(self, capacity: Nbytes) -> None:
        """A command removed frames of a shared store with this capacity: count its bytes again.

        Other engines may have written meanwhile. Raises BackendError.
        """


@runtime_checkable
class SupportsWalk(Protocol):
    """A config whose store can be listed completely, for `kvtier fsck` and `kvtier clear`."""

    @abc.abstractmethod
    def walk(self) -> contextlib.AbstractContextManager[Iterator[Stored]]:
        """Everything in the store, of every namespace.

        No engine uses the store within the context, unless it is shared: then entries may come and go.
        Raises BackendError.
        """


@attrs.frozen
class Stored:
    """One entry of a store, for `kvtier fsck` to examine."""

    where: str  #: for people: a path, a URL
    nbytes: int
    home: bytes | None  #: the first bytes of its namespace's digest; None if it is not a frame
    key: ChunkKey | None  #: its key; None if it is not a frame
    #: ``read(offset, nbytes)`` returns fewer bytes only at the end. Raises BackendError; Gone if another engine of a
    #: shared store has replaced or removed the entry.
    read: Callable[[int, int], bytes]
    remove: Callable[[], None]  #: deletes it; raises as ``read`` does
