"""Divides the memory of an arena among stacks whose slots have different lengths.

The memory is mapped once, by every process, and stays where it is: a device may have page-locked it, and would continue
to use pages that were returned to the system. What moves between stacks is the right to use an *extent* of it. Slot
``i`` of a stack with slots of ``n`` bytes is at ``i * n``, whoever uses it, so a stack can use each slot if it has all
of its extents, and no table of addresses is needed.

A stack without room borrows a free extent. When none is free, extents move from the stack that replaces its contents
the slowest to the one that does so the fastest. So all keep their chunks for about the same time, as in one cache. A
model beyond its soft quota gives first and takes from no other, and no model exceeds its hard quota.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence

import attrs

from kvtier_core.errors import BackendError
from kvtier_core.interfaces import AllocatorBackend, ArenaConfig, Mover, OpenContext, PagedKVCache
from kvtier_core.types import FRAME_ALIGNMENT
from kvtier_serve.kept.journal import Keeper
from kvtier_serve.tenants import UNBOUNDED, Quota

#: Number of extents of a memory. More are finer, but their edges waste more: half a slot each on average.
_EXTENTS = 256
#: A stack receives as many adjacent extents at a time as hold this many of its slots.
_SLOTS_AT_A_TIME = 4
#: Extents move only to a stack that replaces its contents this many times as fast.
_WORTH_MOVING = 2.0
#: A stack that replaces its contents less often in a second needs no more room.
_CALM = 1e-3
#: The share that the demand of the last interval has in the estimate.
_NEWEST = 0.3


class Extents:
    """The memory of one arena, and which stack has each extent."""

    def __init__(self, memory: mmap.mmap, nbytes: int):
        """The first ``nbytes`` of ``memory`` are divided."""
        self.memory = memoryview(memory)
        self.nbytes = nbytes
        self.extent_nbytes = -(-nbytes // _EXTENTS // FRAME_ALIGNMENT) * FRAME_ALIGNMENT or FRAME_ALIGNMENT
        self.count = -(-nbytes // self.extent_nbytes)  #: of extents; the last one may be shorter
        self._owners: list[Share | None] = [None] * self.count
        self._shares: dict[Share, None] = {}
        self._quotas: dict[str, Quota] = {}  # by model
        self._of_model: Counter[str] = Counter()  # extents of its stacks, without those that they are giving back
        self.free = self.count  #: extents that no stack has

    def share(self, slot_nbytes: int, model: str = "") -> Share:
        """A new share, without extents yet. Raises BackendError if the memory could not hold one of its chunks."""
        share = Share(self, slot_nbytes, model)
        self.add(share)
        return share

    def add(self, share: Share) -> None:
        """Let a share have extents from now on."""
        self._shares[share] = None

    def whole(self) -> Share:
        """A share of the whole memory, which no other share can use then."""
        share = self.share(self.extent_nbytes)
        self._give(share, range(self.count))
        return share

    def _give(self, share: Share, extents: Iterable[int]) -> None:
        """Give a share extents that are free."""
        for extent in extents:
            self._owners[extent] = share
            share.count += 1
            self._of_model[share.model] += 1
            self.free -= 1

    @property
    def free_nbytes(self) -> int:
        """About the bytes that no stack has: the last extent may be shorter."""
        return min(self.nbytes, self.free * self.extent_nbytes)

    def take(self, share: Share, slots: int) -> list[int]:
        """Give a share free extents for about ``slots`` slots; returns the slots that it can use besides its others."""
        windows, taken = self.lendable(share, slots)
        for window in windows:
            self._give(share, window)
        return taken

    def lendable(self, share: Share, slots: int) -> tuple[list[range], list[int]]:
        """The windows that `take` would give to a share, and the slots that it would return."""
        windows: list[range] = []
        usable: list[int] = []
        given: set[int] = set()  # the extents in these windows
        gives_way = self._is_over(share) and self._is_needed_by_others(share)
        for window in () if gives_way else self._free_windows(share):
            if len(usable) >= slots or self.room(share.model) - len(given) < len(window):
                break
            windows.append(window)
            given.update(window)
            usable += self._usable(share, window, given)
        return windows, usable

    def _usable(self, share: Share, window: range, given: Container[int] = ()) -> list[int]:
        """The slots of a share that are partly in this window, and wholly in extents that it has, or that are given."""
        return [
            slot
            for slot in share.slots_in(window)
            if all(self._owners[extent] is share or extent in given for extent in share.extents_of(slot))
        ]

    def _free_windows(self, share: Share) -> list[range]:
        """Free extents for a share, beginning with some beside its own if there are any: a slot may be in both."""
        if not self.free:  # the usual case, and a look at each window takes 0.3 ms
            return []
        free = [window for window in share.windows() if all(self._owners[extent] is None for extent in window)]
        first = next((at for at, window in enumerate(free) if self._is_beside(share, window)), 0)
        return free[first:] + free[:first]

    def _is_beside(self, share: Share, window: range) -> bool:
        beside = self._owners[max(window.start - 1, 0)], self._owners[min(window.stop, self.count - 1)]
        return any(each is share for each in beside)

    def claim(self, share: Share, slots: Iterable[int]) -> None:
        """Give a share the extents of these slots.

        Raises BackendError if there are no such slots, or if another share has one of the extents.
        """
        if not all(0 <= slot < share.slots for slot in slots):
            raise BackendError("no such slots")
        extents = {extent for slot in slots for extent in share.extents_of(slot)}
        if any(self._owners[extent] is not None for extent in extents):
            raise BackendError("another stack holds these slots")
        self._give(share, sorted(extents))

    def complete(self, share: Share) -> list[int]:
        """Give a share the free extents beside its own, as if it had taken them. Returns all slots that it can use."""
        for window in share.windows():
            if any(self._owners[extent] is share for extent in window):
                self._give(share, [extent for extent in window if self._owners[extent] is None])
        return self._usable(share, range(self.count))

    def leave(self, share: Share, extents: Iterable[int]) -> None:
        """Free these extents of a share, which no longer uses them."""
        for extent in extents:
            if self._owners[extent] is share:
                self.begin_to_leave(share, [extent])
                share.leaving.remove(extent)
                self._owners[extent] = None
                share.count -= 1
                self.free += 1

    def begin_to_leave(self, share: Share, extents: Iterable[int]) -> None:
        """Note that a share is giving back those of these extents that it has."""
        for extent in extents:
            if self._owners[extent] is share and extent not in share.leaving:
                share.leaving.add(extent)
                self._of_model[share.model] -= 1

    def of_model(self, model: str) -> int:
        """The number of extents that the stacks of a model have, without those that they are giving back."""
        return self._of_model[model]

    def room(self, model: str) -> int:
        """How many more extents a model may have; negative: it has too many."""
        hard = self._quotas.get(model, UNBOUNDED).hard
        return self.count if hard is None else hard // self.extent_nbytes - self.of_model(model)

    def _is_over(self, share: Share) -> bool:
        """Is its model beyond the soft quota?"""
        soft = self._quotas.get(share.model, UNBOUNDED).soft
        return soft is not None and self.of_model(share.model) > soft // self.extent_nbytes

    def _is_needed_by_others(self, share: Share) -> bool:
        return any(each.turnover > _CALM and not self._is_over(each) for each in self._shares if each is not share)

    def _may_take(self, share: Share) -> bool:
        """May a share have extents of others?"""
        return self.room(share.model) >= share.at_a_time and (not share.count or not self._is_over(share))

    def set_quota(self, model: str, quota: Quota) -> None:
        """Bound a model's share. `shrink` takes back what exceeds the hard quota."""
        self._quotas[model] = quota

    def shrink(self, model: str) -> bool:
        """Take back some of what a model has beyond its hard quota, as soon as its users are done.

        False if there is nothing more to take back.
        """
        return self.room(model) < 0 and any(
            self._recall(share, share.windows()) for share in self._shares if share.model == model
        )

    def end(self, share: Share) -> None:
        """End a share that is no longer used. May be called twice."""
        if share in self._shares:
            self.leave(share, range(self.count))
            del self._shares[share]

    def balance(self, seconds: float) -> None:
        """Move extents to the stack that needs them most, if one does. Call it every ``seconds``."""
        for each in self._shares:
            each.estimate(seconds, each.count * self.extent_nbytes)
        hungry = max(filter(self._may_take, self._shares), key=lambda each: each.turnover, default=None)
        if hungry and hungry.turnover:
            self.make_place(hungry)

    def make_place(self, share: Share) -> None:
        """If there are no free extents for a share, recall some from the share that replaces its contents the slowest.

        But only if that one is slow enough, or beyond its soft quota, or if the first has no extents.
        """
        if not self._may_take(share) or self._free_windows(share):
            return
        donors = [
            each
            for each in self._shares
            if each is not share
            and each.recall_slots is not None
            and each.count > each.at_a_time
            and (not share.count or self._is_over(each) or each.turnover * _WORTH_MOVING < share.turnover)
        ]
        if donors:
            self._recall(min(donors, key=lambda each: (not self._is_over(each), each.turnover)), share.windows())

    def _recall(self, donor: Share, windows: Iterable[range]) -> bool:
        """Recall the window that the donor would miss the least. False if it has none of these."""
        owners = (donor, None)
        own = [
            window
            for window in windows
            if all(self._owners[extent] in owners for extent in window)
            and any(self._owners[extent] is donor and extent not in donor.leaving for extent in window)
        ]
        if own:
            worth = set(donor.next_victims(max(1, len(donor.slots_in(range(len(own[0])))))))
            donor.recall(max(own, key=lambda window: len(worth.intersection(donor.slots_in(window)))))
        return bool(own)


class Share(AllocatorBackend):
    """A stack's share of the memory: its slots, of which it may use those that it borrowed."""

    def __init__(self, extents: Extents, slot_nbytes: int, model: str = ""):
        self._extents = extents
        self.model = model  #: whose quota bounds it
        self.keeper: Keeper | None = None  #: records what the stack does with its slots, if the memory is kept
        self.slot_nbytes = slot_nbytes
        self.slots = extents.nbytes // slot_nbytes
        wanted = -(-_SLOTS_AT_A_TIME * slot_nbytes // extents.extent_nbytes)
        #: Extents that it receives together: a power of two, so that windows of several lengths leave no gaps.
        self.at_a_time = min(1 << (wanted - 1).bit_length(), extents.count)
        self.turnover = 0.0  #: an estimate: how many times per second its contents are replaced
        #: Set by the stack's owner: takes slots back, and names those that would be evicted first.
        self.recall_slots: Callable[[range], object] | None = None
        self.next_victims: Callable[[int], Iterable[int]] = lambda count: ()
        self._used: set[int] = set()  # slots that the stack has
        self.leaving: set[int] = set()  #: extents that it gives back as soon as their slots are not in use
        self._short = 0  # slots that it lacked since the last estimate
        self.count = 0  #: number of extents that it has
        if not self.slots:
            raise BackendError(f"its {extents.nbytes} bytes are less than one chunk ({slot_nbytes})")

    def view(self, slot: int) -> memoryview:
        return self._extents.memory[slot * self.slot_nbytes : (slot + 1) * self.slot_nbytes]

    @property
    def handle(self) -> str:
        return ""  # the client makes one, for its session

    def close(self) -> None:
        self._extents.end(self)

    @property
    def unused(self) -> int:
        """The approximate number of slots in the free extents."""
        extents = max(0, min(self._extents.free, self._extents.room(self.model)))
        return extents * self._extents.extent_nbytes // self.slot_nbytes

    def lendable(self, slots: int) -> int:
        """How many slots `borrow` would return. Unused ones may be too scattered, or kept for others."""
        return sum(slot not in self._used for slot in self._extents.lendable(self, slots)[1])

    def borrow(self, slots: int) -> list[int]:
        """Numbers of further slots, in extents that are free: about as many as asked for, or none."""
        borrowed = [slot for slot in self._extents.take(self, slots) if slot not in self._used]
        self._short += max(0, slots - len(borrowed))
        self._used.update(borrowed)
        return borrowed

    def claim(self, slots: Iterable[int]) -> None:
        """Claim the extents of these slots, which a former server lent. Raises BackendError if that is impossible."""
        self._extents.claim(self, slots)

    def borrow_claimed(self) -> list[int]:
        """The numbers of all slots in what was claimed. Call it when every share has claimed what it had."""
        borrowed = self._extents.complete(self)
        self._used.update(borrowed)
        return borrowed

    def give_back(self, slots: Sequence[int]) -> None:
        """Give back slots that the stack no longer uses."""
        self._used.difference_update(slots)
        if self.leaving:
            self._leave_empty(dict.fromkeys(extent for slot in slots for extent in self.extents_of(slot)))

    def _leave_empty(self, extents: Iterable[int]) -> None:
        leaving = [extent for extent in extents if extent in self.leaving]
        used = self._used
        self._extents.leave(self, [each for each in leaving if used.isdisjoint(self.slots_in(range(each, each + 1)))])

    def recall(self, window: range) -> None:
        """Stop using these extents, as soon as their slots are free."""
        self._extents.begin_to_leave(self, window)
        assert self.recall_slots is not None, "its stack is not open"
        self.recall_slots(self.slots_in(window))
        self._leave_empty(window)

    def estimate(self, seconds: float, nbytes: int) -> None:
        """Note the demand of the last ``seconds``; the share has ``nbytes``."""
        newest = self._short * self.slot_nbytes / seconds / nbytes if nbytes else float(bool(self._short))
        self.turnover += _NEWEST * (newest - self.turnover)
        self._short = 0

    # -- where slots are -----------------------------------------------------------------------------

    def windows(self) -> Iterable[range]:
        """The windows in which this share receives extents."""
        count, step = self._extents.count, self.at_a_time
        return (range(first, min(first + step, count)) for first in range(0, count, step))

    def extents_of(self, slot: int) -> range:
        """The extents that a slot is in."""
        size = self._extents.extent_nbytes
        return range(slot * self.slot_nbytes // size, ((slot + 1) * self.slot_nbytes - 1) // size + 1)

    def slots_in(self, window: range) -> range:
        """The slots that are at least partly in these extents."""
        size = self._extents.extent_nbytes
        end = -(-window.stop * size // self.slot_nbytes)
        return range(window.start * size // self.slot_nbytes, min(self.slots, end))


@attrs.frozen
class ShareConfig(ArenaConfig):
    """Opens a `Share`, in place of the arena whose memory is shared."""

    extents: Extents
    model: str = ""
    claimed: Share | None = None  #: for chunks of a former server

    def open(self, ctx: OpenContext) -> Share:
        return self.claimed or Share(self.extents, ctx.slot_nbytes, self.model)

    def attach(self, handle: str, cache: PagedKVCache) -> Mover:
        raise BackendError("workers attach to a server's arena through its socket")
