"""What a plugin implements. Each heavy thing has a light, frozen Config that opens it.

A Config is an attrs class that names itself in ``type`` and whose fields are the keys a user may write
in YAML. It imports nothing heavy; its ``open`` does. See `kvtier_core.hookspecs` for how to offer it.
"""

from __future__ import annotations

import abc
import contextlib
import enum
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import ClassVar, NamedTuple

import attrs

from kvtier_core.errors import BackendError
from kvtier_core.types import ChunkKey, ChunkLayout, Namespace, Nbytes

#: Of what an `EvictionPolicy` saves.
MAX_POLICY_STATE_NBYTES = 64 << 10

#: In a `PageList`: this page of the chunk is not wanted.
NO_BLOCK = -1

#: For each slot of a job, the engine's block ids of that chunk's pages in token order, or NO_BLOCK.
PageList = Sequence[Sequence[int]]


class Medium(enum.Enum):
    """What a tier keeps chunks on, for an engine's metrics of where hits came from."""

    HOST = "host"  #: memory of this node
    DISK = "disk"  #: a disk of this node
    UNSPECIFIED = "unspecified"  #: anything else, a remote store for instance


@attrs.frozen
class OpenContext:
    """What the stack knows and a plugin may need when it opens."""

    namespace: Namespace
    layout: ChunkLayout
    engine: str  #: names this engine among those alive on this node
    capacity: Nbytes = Nbytes(0)  #: this engine's share of what the YAML grants this tier, in bytes of frames
    replica: int = 0  #: which of the engines that share this configuration this is (data parallelism), from 0
    replicas: int = 1  #: how many they are; none may touch what another one stores
    max_frame_nbytes: Nbytes = Nbytes(0)  #: no frame that this tier writes is longer; 0: not known


@attrs.frozen
class PageRun:
    """One layer of the engine's paged buffer: page ``b`` lies at ``base + b * stride``."""

    base: int  #: address of page 0
    stride: int  #: bytes from one page to the next; at least ``nbytes``, pages may be padded
    nbytes: int  #: bytes of a page that matter


@attrs.frozen
class PagedKVCache:
    """The engine's paged buffer as one worker process sees it."""

    layers: tuple[PageRun, ...]
    blocks: int  #: pages in each layer
    device: str  #: ``cpu``, ``cuda:0`` …
    rank: int
    layout: ChunkLayout


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


class AllocatorBackend(abc.ABC):
    """The memory of an arena: numbered slots that the engine's device can reach."""

    slots: int
    slot_nbytes: int

    @abc.abstractmethod
    def view(self, slot: int) -> memoryview:
        """Host view of one slot, writable, ``slot_nbytes`` long."""

    @property
    @abc.abstractmethod
    def handle(self) -> str:
        """Plain text with which `ArenaConfig.attach` reaches this memory from a worker process."""

    def facts(self) -> Mapping[str, str]:
        """Settings whose effective value may differ from what was asked, in plain words."""
        return {}

    @abc.abstractmethod
    def close(self) -> None:
        """May be called twice. Views are dead afterwards."""


class JobResult(NamedTuple):
    """A job of a mover that ended. ``sums`` may say the CRC-32 of what a store left in the shard of each slot."""

    job: int
    ok: bool
    checksums: Sequence[int] = ()


class Mover(abc.ABC):
    """Copies pages to slots and back, in the engine's worker process. Knows no keys."""

    @abc.abstractmethod
    def store(self, job: int, pages: PageList, slots: Sequence[int]) -> None:
        """Begin to gather pages into this rank's shards of the slots, as the engine's work so far leaves them."""

    @abc.abstractmethod
    def load(self, job: int, slots: Sequence[int], pages: PageList) -> None:
        """Begin to scatter this rank's shards of the slots into pages.

        Comes after what the engine does with the pages so far, and after the stores of them that have not ended.
        """

    @abc.abstractmethod
    def finished(self) -> Sequence[JobResult]:
        """Jobs that ended since the last call, each once."""

    @abc.abstractmethod
    def wait(self, jobs: Collection[int], timeout: float = math.inf) -> None:
        """Return when none of the jobs touches a page any more, or after ``timeout`` seconds.

        `finished` still reports them, and a job that was reported already is no error.
        """

    def fence(self, jobs: Collection[int]) -> None:
        """What the engine does with pages from now on comes after these jobs. Where it can, without waiting here."""
        self.wait(jobs)

    def facts(self) -> Mapping[str, str]:
        """Settings whose effective value may differ from what was asked, in plain words."""
        return {}

    @abc.abstractmethod
    def close(self) -> None:
        """May be called twice."""


class EvictionPolicy(abc.ABC):
    """An opinion about order: no bytes, no pins, no lock; time is handed in, in seconds that never run backwards."""

    #: The tier then passes over a chunk whose child in the prefix tree is still held.
    leaf_first: ClassVar[bool] = True

    @abc.abstractmethod
    def request(self, path: Sequence[ChunkKey], now: float, hints: Mapping[str, str]) -> None:
        """One prompt's chunks, root first, held or not. It comes before the path's newcomers are admitted."""

    @abc.abstractmethod
    def admit(self, key: ChunkKey, nbytes: int) -> None:
        """Take in a newcomer. Of one path, leaves come before roots."""

    def prefers(self, newcomer: ChunkKey, victim: ChunkKey) -> bool:
        """Is this newcomer worth the room of a held key? Asked before anything is copied; changes nothing."""
        return True

    @abc.abstractmethod
    def forget(self, key: ChunkKey, *, evicted: bool) -> None:
        """The key is gone; ``evicted`` may leave a ghost. Ghosts are bounded."""

    @abc.abstractmethod
    def victims(self) -> Iterator[ChunkKey]:
        """Each held key at most once, best victim first; forgets none."""

    def save(self) -> bytes:
        """What was learned and may outlive a restart.

        Always of one length, `MAX_POLICY_STATE_NBYTES` at most; nothing by default.
        """
        return b""

    def restore(self, saved: bytes) -> None:
        """What `save` returned once, or anything else: then nothing is learned from it. Comes first of all calls."""


class Serializer(abc.ABC):
    """Encodes payloads at a tier's door. Its code is written in every frame."""

    code: ClassVar[int]  #: 1 … 65535, stable for ever; 0 is raw
    lossless: ClassVar[bool]

    @abc.abstractmethod
    def bound(self, layout: ChunkLayout) -> int:
        """The most bytes that an encoded payload can have."""

    @abc.abstractmethod
    def encode(self, payload: memoryview, into: memoryview) -> int:
        """Bytes written to ``into``."""

    @abc.abstractmethod
    def decode(self, encoded: memoryview, into: memoryview) -> int:
        """Bytes written to ``into``; raises BackendError on what it cannot decode."""


class TokenDatabase(abc.ABC):
    """Names chunks. The same tokens get the same keys in every process and on every machine."""

    @abc.abstractmethod
    def keys(
        self,
        tokens: Sequence[int],
        *,
        known: Sequence[ChunkKey] = (),
        salt: bytes = b"",
        extra: Mapping[int, bytes] | None = None,
    ) -> list[ChunkKey]:
        """One key per full chunk of ``tokens``, chained over the prefix.

        ``known`` are the keys of the leading chunks from an earlier call with the same salt and extra;
        they are not computed again. ``salt`` separates tenants and adapters; it enters the first key.
        ``extra[i]`` is what else the KV of chunk i depends on: its multimodal items, for instance.
        """


@attrs.frozen
class Stored:
    """Something that lies in a store, for `kvtier fsck` to look at."""

    where: str  #: for people: a path, a URL
    nbytes: int
    home: bytes | None  #: how the digest of the namespace begins under which it is kept; None: it is no frame
    key: ChunkKey | None  #: under which it is kept; None: it is no frame
    read: Callable[[int, int], bytes]  #: bytes from an offset on, fewer only at the end; raises BackendError
    remove: Callable[[], None]  #: raises BackendError


@attrs.frozen
class ArenaConfig(abc.ABC):
    """A tier that owns memory the engine's device can reach."""

    type: ClassVar[str]
    #: Types of devices, in torch's words, for whose pages `attach` has a mover.
    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    medium: ClassVar[Medium] = Medium.UNSPECIFIED

    @abc.abstractmethod
    def open(self, ctx: OpenContext) -> AllocatorBackend:
        """Raises BackendError, or ConfigError with problems whose path begins at ``$``, the tier."""

    @abc.abstractmethod
    def attach(self, handle: str, table: PagedKVCache) -> Mover:
        """In a worker process: reach the slots and the pages. Raises BackendError when it cannot."""


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
class EvictionConfig(abc.ABC):
    type: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()  #: other names by which a user may choose it

    @abc.abstractmethod
    def open(self) -> EvictionPolicy: ...


@attrs.frozen
class SerializerConfig(abc.ABC):
    type: ClassVar[str]

    @abc.abstractmethod
    def open(self, ctx: OpenContext) -> Serializer | None:
        """None: frames are stored as they are."""


@attrs.frozen
class TokenDatabaseConfig(abc.ABC):
    type: ClassVar[str]

    @abc.abstractmethod
    def open(self, namespace: Namespace, chunk_tokens: int) -> TokenDatabase: ...
