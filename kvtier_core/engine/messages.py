"""Messages between the scheduler side and the worker sides. Plain data: no tensors, no pointers, no views."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from kvtier_core.layouts import ChunkLayout, KVGroup
from kvtier_core.types import ChunkKey, FrameRead, Slot, StoredFrame


def _pairs(rows: Iterable[Iterable[str]]) -> tuple[tuple[str, str], ...]:
    return tuple((name, fact) for name, fact in rows)


def _groups(rows: Iterable[KVGroup | Mapping[str, Any]]) -> tuple[KVGroup, ...]:
    return tuple(row if isinstance(row, KVGroup) else KVGroup(**row) for row in rows)


@attrs.frozen
class WorkerReport:
    """The findings of a worker that inspected the engine's pages. Each worker sends one at start-up, as JSON."""

    device: str  #: type of its device, as torch names it
    groups: tuple[KVGroup, ...] = attrs.field(converter=_groups)  #: with the layers that this worker has
    facts: tuple[tuple[str, str], ...] = attrs.field(converter=_pairs)  #: other facts that make pages interchangeable
    refusal: str = ""  #: why these pages cannot be moved, in plain words; empty if they can
    failure_policy: str = ""  #: the engine's reaction to a failed load, in its own words; empty if not known
    is_alone: bool = False  #: the engine has no other connector beside this one; False if that is not known
    replicas: int = 1  #: number of consecutive ranks that hold the same bytes, as the engine states
    #: Why only engines with the same number of ranks can use its frames; empty if engines with any number can.
    own_ranks: str = "ranks: own"
    #: The NUMA node of its device; None if it is not known, or the machine has one. Ranks may have different ones.
    numa_node: int | None = attrs.field(default=None, eq=False)


@attrs.frozen
class Refusal:
    """This engine is not served: nothing is stored or loaded, and it works as without kvtier."""

    reason: str  #: in plain words


#: The engine's block ids of one chunk, for each group, in token order, or NO_BLOCK.
ChunkPages = tuple[tuple[int, ...], ...]


@attrs.frozen
class Transfer:
    """Chunks to be copied between ``slots[i]`` and ``pages[i]``. A load may have stored frames in place of slots."""

    slots: tuple[Slot | StoredFrame, ...]
    pages: tuple[ChunkPages, ...]


@attrs.frozen
class StepPlan:
    """The work of the workers in one step. Sent by the scheduler side to every worker side."""

    attachment: int = 0  #: a new number: attach to the arenas and store tiers again
    arenas: tuple[str, ...] = ()  #: handles by which workers reach the arenas, by the number of the arena
    reader_handles: dict[str, str] = attrs.field(factory=dict)  #: the same for store tiers that they read, by name
    layout: ChunkLayout | None = None  #: of the chunks in them; None once the self-test is over
    self_test_slots: tuple[Slot, ...] = ()  #: empty slots of each arena, as many as the layout requires
    loads: tuple[tuple[str, Transfer], ...] = ()  #: by request id
    stores: tuple[tuple[int, Transfer], ...] = ()  #: by store job
    stores_to_fence: tuple[int, ...] = ()  #: store jobs not known to have ended, whose pages this step overwrites
    failed_loads: tuple[str, ...] = ()  #: requests that were promised a load which cannot begin
    audits: tuple[tuple[int, Transfer], ...] = ()  #: by audit: slots to compare with pages that the step has computed
    epoch: int = 0  #: number of changes of the weights that the scheduler side knows of


@attrs.frozen
class WorkerProgress:
    """The work that workers have finished. Sent by the worker sides, merged over the ranks, to the scheduler side."""

    ended: Counter[int] = attrs.field(factory=Counter)  #: by store job: number of workers that ended it
    failed: Counter[int] = attrs.field(factory=Counter)  #: by store job: number of those that failed
    #: Number of workers by the attachment of the plan, and by the problem that their self-test found; "": none.
    self_tests: Counter[tuple[int, str]] = attrs.field(factory=Counter)
    #: Attachments that a worker could not make because the server did not answer.
    unanswered: set[int] = attrs.field(factory=set)
    checksums: dict[tuple[int, int], tuple[int, ...]] = attrs.field(factory=dict)  #: of shards, by job and shard
    filled: dict[int, int] = attrs.field(factory=dict)  #: by store job, if not all: number of leading slots filled
    #: By request whose load failed: the frames of stores that could not be used, and why.
    unread: dict[str, dict[ChunkKey, FrameRead]] = attrs.field(factory=dict)
    #: By store tier whose frames a worker should read directly: why it does not.
    no_readers: dict[str, str] = attrs.field(factory=dict)
    #: By epoch of the plan, if the weights are no longer those of that epoch: how a worker noticed.
    changed: dict[int, str] = attrs.field(factory=dict)
    #: Number of workers by audit and by the difference that they found; "": none, None: they could not compare.
    audits: Counter[tuple[int, str | None]] = attrs.field(factory=Counter)
    off: str = ""  #: why a worker failed, which now does nothing; empty if none failed

    def merge(self, other: WorkerProgress) -> WorkerProgress:
        """The progress of both together."""
        return WorkerProgress(
            self.ended + other.ended,
            self.failed + other.failed,
            self.self_tests + other.self_tests,
            self.unanswered | other.unanswered,
            self.checksums | other.checksums,
            {
                job: min(counts[job] for counts in (self.filled, other.filled) if job in counts)
                for job in self.filled | other.filled
            },
            {
                request_id: self.unread.get(request_id, {}) | other.unread.get(request_id, {})
                for request_id in self.unread | other.unread
            },
            self.no_readers | other.no_readers,
            self.changed | other.changed,
            self.audits + other.audits,
            self.off or other.off,
        )
