"""The reader with which a worker loads frames of a store into the pages by itself, without the slot of an arena."""

from __future__ import annotations

import abc
import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from kvtier_core.interfaces.arena import Mover, PageList
from kvtier_core.types import ChunkKey, FrameRead, StoredFrame


class DirectLoad(NamedTuple):
    """How a job of a `DirectReader` ended."""

    job: int
    ok: bool  #: were all pages filled?
    unread: Mapping[ChunkKey, FrameRead]  #: frames that could not be used, and why


class DirectReader(abc.ABC):
    """Loads frames of a store into pages, in a worker process of the engine. The other end may vanish at any time.

    A page is overwritten only with bytes that were verified, header and payload, where nobody else can change them
    afterwards. A frame that is missing, damaged or another one fails its job; the engine then computes all that the job
    was to load. `kvtier_core.transfer.staged_reader` does all this for a store that can read a range of a frame into
    memory.

    Every method is called on one thread, the one that enqueues the engine's work on its device, and returns at once,
    but for `wait` and `close`. Each job has a number that no other job under way has.
    """

    #: Copy to the pages what was verified; the engine's self-test tries each, before the first load.
    movers: Sequence[Mover] = ()

    @abc.abstractmethod
    def mark(self) -> object:
        """A mark behind the work that the engine has enqueued so far, for `load`; see `Mover.mark`."""

    @abc.abstractmethod
    def load(self, job: int, frames: Sequence[StoredFrame], pages: PageList, after: object = None) -> None:
        """Begin to load ``frames[i]`` into ``pages[i]``, the pages of a chunk.

        A page is overwritten after the engine's work in front of the mark ``after``, without one after all that it has
        enqueued so far. The movers of arenas have no store under way that reads these pages, or the mark is behind it.
        """

    @abc.abstractmethod
    def finished(self) -> Sequence[DirectLoad]:
        """Jobs that ended since the last call, each once. A failed job touches no page any more."""

    @abc.abstractmethod
    def wait(self, jobs: Collection[int], timeout: float = math.inf) -> None:
        """Return when none of the jobs touches a page any more, or after ``timeout`` seconds."""

    def facts(self) -> Mapping[str, str]:
        """Settings whose effective value may differ from what was asked: ``{"direct": "auto -> on"}``."""
        return {}

    @abc.abstractmethod
    def close(self) -> None:
        """Release everything. May be called twice. Jobs under way are not reported."""
