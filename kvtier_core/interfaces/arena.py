"""A tier of memory that the engine's device reaches, and what copies between it and the engine's pages."""

from __future__ import annotations

import abc
import math
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar, NamedTuple

import attrs

from kvtier_core.interfaces.context import Medium, OpenContext
from kvtier_core.types import ChunkLayout

#: In a `PageList`: this page of the chunk is not wanted.
NO_BLOCK = -1

#: For each slot of a job, the engine's block ids of that chunk's pages in token order, or NO_BLOCK.
PageList = Sequence[Sequence[int]]


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
