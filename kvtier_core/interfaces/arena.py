"""A tier of memory that the engine's device reaches, and the mover between it and the engine's pages."""

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

#: For each slot of a job and each group of the layout: the engine's block ids of the chunk's pages, in token order,
#: or NO_BLOCK. ``pages[slot][group][place]``. All slots of a job hold the same part of their chunks, and of the groups
#: that are in other parts there are no block ids.
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

    layers: tuple[PageRun, ...]  #: all layers that this rank has, group after group
    blocks: int  #: pages in each layer; block ids are less
    device: str  #: in torch's words: ``cpu``, ``cuda:0`` …
    rank: int  #: whose shard this worker copies
    layout: ChunkLayout


class AllocatorBackend(abc.ABC):
    """The memory of an arena: numbered slots that the engine's device can reach. Opened in the stack's process.

    The stack decides which slot holds what; an arena only owns the bytes. All of them are there when
    `ArenaConfig.open` returns: no later touch of a slot may find that there is no memory.
    """

    slots: int  #: how many fit into ``OpenContext.capacity``; at least one
    slot_nbytes: int  #: bytes of a slot: ``OpenContext.slot_nbytes``

    @abc.abstractmethod
    def view(self, slot: int) -> memoryview:
        """A writable view of one slot, ``slot_nbytes`` long, that begins at a multiple of `FRAME_ALIGNMENT` in memory.

        Called on any thread. Slots share no byte.
        """

    @property
    @abc.abstractmethod
    def handle(self) -> str:
        """Plain text with which `ArenaConfig.attach` reaches this memory from a worker process."""

    def facts(self) -> Mapping[str, str]:
        """Settings whose effective value may differ from what was asked: ``{"huge_pages": "auto -> no"}``."""
        return {}

    @abc.abstractmethod
    def close(self) -> None:
        """Release the memory and all that was made for it. May be called twice. No view is used afterwards."""


@runtime_checkable
class SupportsSharing(Protocol):
    """What an `AllocatorBackend` implements as well so that `kvtier serve` can share its memory among engines."""

    @property
    def descriptor(self) -> int:
        """An open file of the memory, which other processes can map: slot 0 begins at its first byte."""


@runtime_checkable
class SupportsKeeping(SupportsSharing, Protocol):
    """What an `AllocatorBackend` implements as well so that its memory outlives `kvtier serve`."""

    @property
    def kept(self) -> bool:
        """Does it lie in the folder ``OpenContext.keep``, where the next process that opens it there finds its bytes?

        The folder is locked while it is open. Processes of before may still have it mapped, so it neither shrinks nor
        is cleared.
        """


class JobResult(NamedTuple):
    """How a job of a mover ended."""

    job: int
    ok: bool  #: were all pages copied?
    #: Of a store: the CRC-32 of this rank's shard of each slot, in the order of the job. Empty: not computed.
    checksums: Sequence[int] = ()
    #: Of a store that is not ``ok``: the places, in the job, of slots that hold their pages all the same.
    filled: Sequence[int] = ()


class Mover(abc.ABC):
    """Copies pages to slots and back, in the engine's worker process. Knows no keys.

    Every method is called on one thread, the one that enqueues the engine's work on its device. Each job has a number
    that no other job under way has. `store` and `load` return at once if they can, and `finished` reports the job
    later. The slots of a job are used by nothing else until it was reported. A job that cannot begin raises, copies
    nothing and is not reported.
    """

    @abc.abstractmethod
    def store(self, job: int, pages: PageList, slots: Sequence[int]) -> None:
        """Begin to copy pages into this rank's shards of the slots.

        The pages are read as the work that the engine has enqueued so far leaves them. The engine may enqueue work that
        overwrites them after `fence` or `wait`. Places of NO_BLOCK in a shard are left as they are; in one that
        is packed they are zeros. Where the pages of a chunk do not fit into a packed shard, its slot is not ``filled``.
        """

    def mark(self) -> object:
        """A mark behind the work that the engine has enqueued so far, for `load`.

        The engine makes one when a step begins: no work of that step, or of a later one, touches pages that are loaded.
        By default there are no marks, and a load waits for more.
        """
        return None

    @abc.abstractmethod
    def load(self, job: int, slots: Sequence[int], pages: PageList, after: object = None) -> None:
        """Begin to copy this rank's shards of the slots into pages.

        A page is overwritten after the engine's work in front of the mark ``after``, without one after all that it has
        enqueued so far, and after the stores under way that read it. The engine uses the pages after the job was
        reported.
        """

    @abc.abstractmethod
    def finished(self) -> Sequence[JobResult]:
        """Jobs that ended since the last call, each once. A failed job is reported when it copies nothing any more."""

    @abc.abstractmethod
    def wait(self, jobs: Collection[int], timeout: float = math.inf) -> None:
        """Return when none of the jobs touches a page any more, or after ``timeout`` seconds.

        `finished` still reports them. A job that was reported already is no error.
        """

    def fence(self, jobs: Collection[int]) -> None:
        """Order the work that the engine enqueues from now on behind these jobs, by default by waiting for them.

        A mover whose device can keep that order returns at once. A job that was reported already is no error.
        """
        self.wait(jobs)

    def facts(self) -> Mapping[str, str]:
        """Settings whose effective value may differ from what was asked: ``{"huge_pages": "auto -> no"}``."""
        return {}

    @abc.abstractmethod
    def close(self) -> None:
        """Wait for the jobs under way and release everything. May be called twice."""


@attrs.frozen
class ArenaConfig(abc.ABC):
    """A tier that owns memory the engine's device can reach."""

    type: ClassVar[str]  #: what users write in ``tiers[].type``
    #: Types of devices, in torch's words, for which `attach` has a mover.
    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    #: Those for which that mover packs the shards of a layout that says so (`Shard.packed`); by default none.
    packs: ClassVar[tuple[str, ...]] = ()
    medium: ClassVar[Medium] = Medium.UNSPECIFIED

    @abc.abstractmethod
    def open(self, ctx: OpenContext) -> AllocatorBackend:
        """Allocate the memory. Called once, on the owner's thread, before the engine serves.

        Raises BackendError, or ConfigError with problems whose path begins at ``$``, the tier.
        """

    @abc.abstractmethod
    def attach(self, handle: str, cache: PagedKVCache) -> Mover:
        """In each worker process: reach the slots behind ``handle`` and the pages of ``cache``.

        Called once, before the first forward. Raises BackendError if it cannot.
        """
