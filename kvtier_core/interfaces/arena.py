"""A tier of memory that the engine's device can reach, and the mover between it and the engine's pages."""

from __future__ import annotations

import abc
import math
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import attrs

from kvtier_core.interfaces.context import Medium, OpenContext
from kvtier_core.layouts import ChunkLayout

#: In a `PageList`, in place of a block id: this page of the chunk is not copied.
NO_BLOCK = -1

#: For each slot of a job and each group of the layout, the engine's block ids of the chunk's pages in token order, or
#: NO_BLOCK: ``pages[slot][group][place]``. All slots of a job hold the same part of their chunks; groups of other parts
#: have no block ids.
PageList = Sequence[Sequence[Sequence[int]]]


@attrs.frozen
class PageRun:
    """The pages of one layer in the engine's KV cache: page ``b`` begins at ``base + b * stride``."""

    base: int  #: address of page 0
    stride: int  #: bytes from one page to the next; at least ``nbytes``, pages may be padded
    nbytes: int  #: bytes of a page that matter


@attrs.frozen
class PagedKVCache:
    """The engine's KV cache as one worker process sees it."""

    layers: tuple[PageRun, ...]  #: all layers of this rank, group after group
    blocks: int  #: pages in each layer; block ids are smaller
    device: str  #: as torch names it: ``cpu``, ``cuda:0`` …
    rank: int  #: of this worker, which copies its own shard
    layout: ChunkLayout


class AllocatorBackend(abc.ABC):
    """The memory of an arena: numbered slots that the engine's device can reach. Opened in the stack's process.

    The stack decides what each slot holds; an arena only owns the bytes. All memory is allocated when
    `ArenaConfig.open` returns: no later access to a slot may run out of memory.
    """

    slots: int  #: the number that fits in ``OpenContext.capacity``; at least one
    slot_nbytes: int  #: bytes of a slot: ``OpenContext.slot_nbytes``

    @abc.abstractmethod
    def view(self, slot: int) -> memoryview:
        """A writable view of one slot, ``slot_nbytes`` long, whose address is a multiple of `FRAME_ALIGNMENT`.

        Called on any thread. Slots do not overlap.
        """

    @property
    @abc.abstractmethod
    def handle(self) -> str:
        """Plain text with which `ArenaConfig.attach` reaches this memory from a worker process."""

    def facts(self) -> Mapping[str, str]:
        """Effective values of settings that may differ from the requested ones: ``{"huge_pages": "auto -> no"}``."""
        return {}

    @abc.abstractmethod
    def close(self) -> None:
        """Release the memory and everything made for it. May be called twice. No view is used afterwards."""


@runtime_checkable
class SupportsSharing(Protocol):
    """An `AllocatorBackend` whose memory `kvtier serve` can share among engines."""

    @property
    def descriptor(self) -> int:
        """An open file of the memory that other processes can map; slot 0 begins at its first byte."""


@runtime_checkable
class SupportsKeeping(SupportsSharing, Protocol):
    """An `AllocatorBackend` whose memory can outlive `kvtier serve`."""

    @property
    def kept(self) -> bool:
        """Is the memory in the folder ``OpenContext.keep``, where the next process that opens it finds its bytes?

        The folder is locked while it is open. Earlier processes may still map the memory, so it is neither shrunk nor
        cleared.
        """


class JobResult(NamedTuple):
    """The outcome of a mover's job."""

    job: int
    ok: bool  #: were all pages copied?
    #: For a store: the CRC-32 of this rank's shard of each slot, in the order of the job. Empty: not computed.
    checksums: Sequence[int] = ()
    #: For a store that is not ``ok``: indices in the job of slots that were filled nevertheless.
    filled: Sequence[int] = ()


class Mover(abc.ABC):
    """Copies pages to slots and back, in the engine's worker process. Knows no keys.

    Every method is called on one thread, the one that enqueues the engine's work on its device. Job numbers are unique
    among the jobs under way. `store` and `load` return immediately if they can, and `finished` reports the job later.
    Nothing else uses the slots of a job until it is reported. A job that cannot begin raises, copies nothing and is not
    reported.
    """

    @abc.abstractmethod
    def store(self, job: int, pages: PageList, slots: Sequence[int]) -> None:
        """Begin to copy pages into this rank's shards of the slots.

        The pages are read after all work that the engine has enqueued so far. After `fence` or `wait` the engine may
        enqueue work that overwrites them. Bytes of a shard for NO_BLOCK are left unchanged; in a packed shard they are
        zeros. If the pages of a chunk do not fit in a packed shard, its slot is not ``filled``.
        """

    def mark(self) -> object:
        """A mark after the work that the engine has enqueued so far, for `load`.

        The engine takes one when a step begins: no work of that step or a later one touches the pages to load. By
        default there are no marks, and loads wait longer.
        """
        return None

    @abc.abstractmethod
    def load(self, job: int, slots: Sequence[int], pages: PageList, after: object = None) -> None:
        """Begin to copy this rank's shards of the slots into pages.

        A page is overwritten after the engine's work up to the mark ``after``, or without a mark after all work
        enqueued so far, and after all stores under way that read it. The engine uses the pages once the job is
        reported.
        """

    @abc.abstractmethod
    def finished(self) -> Sequence[JobResult]:
        """The jobs that ended since the last call, each once. A failed job is reported once it has stopped copying."""

    @abc.abstractmethod
    def wait(self, jobs: Collection[int], timeout: float = math.inf) -> None:
        """Return when none of the jobs touches a page any more, or after ``timeout`` seconds.

        `finished` still reports them. Naming a reported job is not an error.
        """

    def fence(self, jobs: Collection[int]) -> None:
        """Order all later work of the engine after these jobs; by default, wait for them.

        A mover whose device keeps that order returns immediately. Naming a reported job is not an error.
        """
        self.wait(jobs)

    def facts(self) -> Mapping[str, str]:
        """Effective values of settings that may differ from the requested ones: ``{"huge_pages": "auto -> no"}``."""
        return {}

    @abc.abstractmethod
    def close(self) -> None:
        """Wait for the jobs under way and release everything. May be called twice."""


@attrs.frozen
class ArenaConfig(abc.ABC):
    """Names a tier of memory that the engine's device can reach, and opens it."""

    type: ClassVar[str]  #: the name in ``tiers[].type``
    #: Device types, as torch names them, for which `attach` has a mover.
    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    #: Device types for which that mover packs the shards of a packed layout (`Shard.packed`); by default none.
    packs: ClassVar[tuple[str, ...]] = ()
    medium: ClassVar[Medium] = Medium.UNSPECIFIED

    @abc.abstractmethod
    def open(self, ctx: OpenContext) -> AllocatorBackend:
        """Allocate the memory. Called once, on the owner's thread, before the engine serves.

        Raises BackendError, or ConfigError with problems whose path begins at ``$``, the tier.
        """

    @abc.abstractmethod
    def attach(self, handle: str, cache: PagedKVCache) -> Mover:
        """Open a mover between the slots behind ``handle`` and the pages of ``cache``, in each worker process.

        Called once, before the first forward pass. Raises BackendError if it cannot.
        """
