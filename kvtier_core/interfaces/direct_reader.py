"""The reader with which a worker loads frames of a store directly into pages, without a slot of an arena."""

from __future__ import annotations

import abc
import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from kvtier_core.interfaces.arena import Mover, PageList
from kvtier_core.types import ChunkKey, FrameRead, StoredFrame


class DirectLoad(NamedTuple):
    """The outcome of a `DirectReader`'s job."""

    job: int
    ok: bool  #: were all pages filled?
    unread: Mapping[ChunkKey, FrameRead]  #: frames that could not be used, and why


class DirectReader(abc.ABC):
    """Loads frames of a store into pages, in a worker process of the engine. The store may vanish at any time.

    A page is overwritten only with verified bytes, header and payload, that nothing else can change after
    verification. A missing, damaged or wrong frame fails its job; the engine then computes everything that the job
    should have loaded. `kvtier_core.transfer.staged_reader` implements this for any store that can read a range of a
    frame into memory.

    Every method is called on one thread, the one that enqueues the engine's work on its device; all but `wait` and
    `close` return immediately. Job numbers are unique among the jobs under way.
    """

    #: The movers that copy verified bytes to the pages; the engine's self-test tries each before the first load.
    movers: Sequence[Mover] = ()

    @abc.abstractmethod
    def mark(self) -> object:
        """A mark after the work that the engine has enqueued so far, for `load`; see `Mover.mark`."""

    @abc.abstractmethod
    def load(self, job: int, frames: Sequence[StoredFrame], pages: PageList, after: object = None) -> None:
        """Begin to load ``frames[i]`` into ``pages[i]``, the pages of a chunk.

        A page is overwritten after the engine's work up to the mark ``after``, or without a mark after all work
        enqueued so far. No store under way reads these pages, unless the mark is after it.
        """

    @abc.abstractmethod
    def finished(self) -> Sequence[DirectLoad]:
        """The jobs that ended since the last call, each once. A failed job touches no page any more."""

    @abc.abstractmethod
    def wait(self, jobs: Collection[int], timeout: float = math.inf) -> None:
        """Return when none of the jobs touches a page any more, or after ``timeout`` seconds."""

    def facts(self) -> Mapping[str, str]:
        """Effective values of settings that may differ from the requested ones: ``{"direct": "auto -> on"}``."""
        return {}

    @abc.abstractmethod
    def close(self) -> None:
        """Release everything. May be called twice. Jobs under way are not reported."""
