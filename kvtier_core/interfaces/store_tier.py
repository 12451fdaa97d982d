"""A tier that stores frames: on a disk, or on another machine."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar

import attrs

from kvtier_core.errors import BackendError
from kvtier_core.interfaces.context import Medium, OpenContext
from kvtier_core.types import ChunkKey, Namespace


class Backend(abc.ABC):
    """Stores frames under keys. Called on its tier's I/O threads, several at once.

    Promise to the backend: no two calls in flight name the same key. Only BackendError may escape.
    """

    #: May other processes add or drop keys? Then absence is asked, never assumed.
    shared: ClassVar[bool] = False

    @abc.abstractmethod
    def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]: ...

    @abc.abstractmethod
    def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> Sequence[int | BackendError]:
        """Fill ``into[i]`` with the frame of ``keys[i]`` and return its bytes; 0 is a miss.

        Touches nothing but ``into[i]`` up to the returned length and keeps no view. A frame that is
        longer than its view is a miss.

        Returns for a key, instead of its bytes, the BackendError for which the frame of this key alone cannot be
        read, now or ever: it is quarantined, and stored again when its chunk is. ``into[i]`` may hold anything then.

        Raises BackendError when the store as a whole cannot be read: nothing is deleted, and a store that raises
        again and again is left alone for a while.
        """

    @abc.abstractmethod
    def write(self, keys: Sequence[ChunkKey], frames: Sequence[memoryview]) -> None:
        """Per key the whole frame or nothing, whatever happens to the process. Keeps no view.

        Frames are whole multiples of `FRAME_ALIGNMENT`. Raises StoreFull when there is no room though the tier keeps
        within its capacity: then it keeps within less for a while, and evicts its own frames for newcomers.
        """

    @abc.abstractmethod
    def delete(self, keys: Sequence[ChunkKey]) -> None:
        """A key that is not there is no error."""

    def quarantine(self, keys: Sequence[ChunkKey]) -> None:
        """These frames failed verification: nobody may find them again. They may be kept aside to be looked at."""
        self.delete(keys)

    def scan(self) -> Iterator[tuple[ChunkKey, int]]:
        """What survived a restart: keys of this namespace and bytes of their frames, oldest first."""
        return iter(())

    def namespaces(self) -> Iterator[Namespace]:
        """Other namespaces that have frames in this store, as far as it knows their facts.

        Called once, when the tier is opened, so that a cold start can be explained.
        """
        return iter(())

    def facts(self) -> Mapping[str, str]:
        """Settings whose effective value may differ from what was asked, in plain words."""
        return {}

    def close(self) -> None:
        """May be called twice."""


@attrs.frozen
class BackendConfig(abc.ABC):
    """A tier that stores frames and borrows an arena's slots to read into."""

    type: ClassVar[str]
    medium: ClassVar[Medium] = Medium.UNSPECIFIED

    @abc.abstractmethod
    def open(self, ctx: OpenContext) -> Backend:
        """Raises BackendError, or ConfigError with problems whose path begins at ``$``, the tier."""

    @contextlib.contextmanager
    def walk(self) -> Iterator[Iterator[Stored]]:
        """All that lies in the store, of every namespace, while no engine uses it. Raises BackendError."""
        raise BackendError(f"a tier of type {self.type} cannot be walked", retryable=False)


@attrs.frozen
class Stored:
    """Something that lies in a store, for `kvtier fsck` to look at."""

    where: str  #: for people: a path, a URL
    nbytes: int
    home: bytes | None  #: how the digest of the namespace begins under which it is kept; None: it is no frame
    key: ChunkKey | None  #: under which it is kept; None: it is no frame
    read: Callable[[int, int], bytes]  #: bytes from an offset on, fewer only at the end; raises BackendError
    remove: Callable[[], None]  #: raises BackendError
