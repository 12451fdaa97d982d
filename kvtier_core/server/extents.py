"""Divides the memory of an arena among stacks whose slots have different lengths.

The memory is mapped once, by everyone, and stays where it is: a device may have page-locked it, and would go on to use
pages that were given back to the system. What moves between stacks is the right to use an *extent* of it. Slot ``i`` of
a stack with slots of ``n`` bytes lies at ``i * n``, whoever uses it, so that a stack can use each slot all of whose
extents it has, and no table of addresses is needed.

A stack without room borrows a free extent. When there is none, extents go to the stack that replaces its contents the
fastest from the one that does so the slowest. So all keep their chunks for about the same time, as in one cache. A
model beyond its soft quota gives first and takes from no other, and none goes beyond its hard quota.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Sequence

import attrs

from kvtier_core.errors import BackendError
from kvtier_core.interfaces import AllocatorBackend, ArenaConfig, Mover, OpenContext, PagedKVCache
from kvtier_core.server.kept.journal import Keeper
from kvtier_core.server.tenants import UNBOUNDED, Quota
from kvtier_core.types import FRAME_ALIGNMENT

#: Extents of a memory. More are finer, and their edges waste more: half a slot each on average.
_EXTENTS = 256
#: A stack gets so many extents at a time, side by side, that they hold this many of its slots.
_SLOTS_AT_A_TIME = 4
#: Extents move only to a stack that replaces its contents this many times as fast.
_WORTH_MOVING = 2.0
#: A stack that replaces its contents less often in a second needs no more room.
_CALM = 1e-3
#: The share that the demand of the last interval has in the estimate.
_NEWEST = 0.3


class Extents:
    """The memory of one arena, and whose each extent is."""

    def __init__(self, memory: mmap.mmap, nbytes: int):
        """The first ``nbytes`` of ``memory`` are divided."""
        self.memory = memoryview(memory)
        self.nbytes = nbytes
        self.extent_nbytes = -(-nbytes // _EXTENTS // FRAME_ALIGNMENT) * FRAME_ALIGNMENT or FRAME_ALIGNMENT
        self.count = -(-nbytes // self.extent_nbytes)  #: of extents; the last one may be shorter
        self._owners: list[Share | None] = [None] * self.count
        self._shares: list[Share] = []
        self._quotas: dict[str, Quota] = {}  # by model

    def share(self, slot_nbytes: int, model: str = "") -> Share:
        """A new share, without extents yet. Raises BackendError if the memory could not hold one of its chunks."""
        share = Share(self, slot_nbytes, model)
        if not share.slots:
            raise BackendError(f"its {self.nbytes} bytes have no room for a chunk of {slot_nbytes}")
        self._shares.append(share)
        return share

    def whole(self) -> Share:
        """A share of the whole memory, which nobody else can use then."""
        share = self.share(self.extent_nbytes)
        self._owners = [share] * self.count
        return share

    @property
    def free(self) -> int:
        """Extents that no stack has."""
        return self._owners.count(None)

    def take(self, share: Share, slots: int) -> list[int]:
        """Give a share free extents for about so many slots; returns the slots that it can use besides its others."""
        taken: list[int] = []
        if self._is_over(share) and self._is_needed_by_others(share):
            return taken
        while len(taken) < slots and (window := self._free_window(share)) and self.room(share.model) >= len(window):
            self._owners[window.start : window.stop] = [share] * len(window)
            taken += self._usable(share, window)
        return taken

    def _usable(self, share: Share, window: range) -> list[int]:
        """The slots of a share of which a part is in this window, if all of each is in extents that it has."""
        return [
            slot
            for slot in share.slots_in(window)
            if all(self._owners[extent] is share for extent in share.extents_of(slot))
        ]

    def _free_window(self, share: Share) -> range | None:
        """Free extents for a share, beside some that it has if there are any: a slot may lie in both."""
        if not self.free:  # as nearly always, and a look at each window takes 0.3 ms
            return None
        free = [window for window in share.windows() if all(self._owners[extent] is None for extent in window)]
        return min(free, key=lambda window: not self._is_beside(share, window), default=None)

    def _is_beside(self, share: Share, window: range) -> bool:
        beside = self._owners[max(window.start - 1, 0)], self._owners[min(window.stop, self.count - 1)]
        return any(each is share for each in beside)

    def claim(self, share: Share, slots: Iterable[int]) -> None:
        """Give a share the extents of these slots.

        Raises BackendError if there are no such slots, or another share has one of the extents.
        """
        if not all(0 <= slot < share.slots for slot in slots):
            raise BackendError("there are no such slots")
        extents = {extent for slot in slots for extent in share.extents_of(slot)}
        if any(self._owners[extent] is not None for extent in extents):
            raise BackendError("another stack has these slots")
        for extent in extents:
            self._owners[extent] = share

    def complete(self, share: Share) -> list[int]:
        """Give a share what is free beside its extents, as if it had taken them. Returns all slots that it can use."""
        for window in share.windows():
            if any(self._owners[extent] is share for extent in window):
                for extent in window:
                    self._owners[extent] = self._owners[extent] or share
        return self._usable(share, range(self.count))

    def leave(self, share: Share, extents: Iterable[int]) -> None:
        """A share no longer uses these extents."""
        for extent in extents:
            if self._owners[extent] is share:
                self._owners[extent] = None

    def of(self, share: Share) -> int:
        """The number of extents that a share has."""
        return sum(each is share for each in self._owners)

    def of_model(self, model: str) -> int:
        """The number of extents that the stacks of a model have, without those that they are giving back."""
        return sum(self.of(each) - len(each.leaving) for each in self._shares if each.model == model)

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
        return self.room(share.model) >= share.at_a_time and (not self.of(share) or not self._is_over(share))

    def set_quota(self, model: str, quota: Quota) -> None:
        """Bound a model's share. What exceeds the hard quota leaves now, and as soon as its users are done."""
        self._quotas[model] = quota
        for share in self._shares:
            while share.model == model and self.room(model) < 0 and self._recall(share, share.windows()):
                pass

    def end(self, share: Share) -> None:
        """A share is not used any more. May be called twice."""
        self.leave(share, range(self.count))
        self._shares = [each for each in self._shares if each is not share]

    def balance(self, seconds: float) -> None:
        """Move extents to the stack that needs them most, if one does. Call it every ``seconds``."""
        for each in self._shares:
            each.estimate(seconds, self.of(each) * self.extent_nbytes)
        hungry = max(filter(self._may_take, self._shares), key=lambda each: each.turnover, default=None)
        if hungry and hungry.turnover:
            self.make_place(hungry)

    def make_place(self, share: Share) -> None:
        """If there are no free extents for a share, recall some from the one that replaces its contents the slowest.

        But only if that is slow enough, or beyond its soft quota, or the share has none.
        """
        if not self._may_take(share) or self._free_window(share) is not None:
            return
        has_none = not self.of(share)
        donors = [
            each
            for each in self._shares
            if each is not share
            and each.recall_slots is not None
            and self.of(each) > each.at_a_time
            and (has_none or self._is_over(each) or each.turnover * _WORTH_MOVING < share.turnover)
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
        #: Extents that it gets together: a power of two, so that windows of several lengths leave no gaps.
        self.at_a_time = min(1 << (wanted - 1).bit_length(), extents.count)
        self.turnover = 0.0  #: how often its contents are replaced in a second, an estimate
        #: Set by the stack's owner: takes slots back, and names those that would be evicted first.
        self.recall_slots: Callable[[range], object] | None = None
        self.next_victims: Callable[[int], Iterable[int]] = lambda count: ()
        self._used: set[int] = set()  # slots that the stack has
        self.leaving: set[int] = set()  #: extents that it gives back as soon as nobody uses their slots
        self._short = 0  # slots that it lacked since the last estimate

    def view(self, slot: int) -> memoryview:
        return self._extents.memory[slot * self.slot_nbytes : (slot + 1) * self.slot_nbytes]

    @property
    def handle(self) -> str:
        return ""  # the client makes one, for its session

    def close(self) -> None:
        self._extents.end(self)

    @property
    def unused(self) -> int:
        """About how many slots the free extents have."""
        extents = max(0, min(self._extents.free, self._extents.room(self.model)))
        return extents * self._extents.extent_nbytes // self.slot_nbytes

    def borrow(self, slots: int) -> list[int]:
        """Numbers of further slots, in extents that are free: about as many as asked for, or none."""
        borrowed = [slot for slot in self._extents.take(self, slots) if slot not in self._used]
        self._short += max(0, slots - len(borrowed))
        self._used.update(borrowed)
        return borrowed

    def claim(self, slots: Iterable[int]) -> None:
        """Have the extents of these slots, which a former server lent. Raises BackendError if that cannot be."""
        self._extents.claim(self, slots)

    def borrow_claimed(self) -> list[int]:
        """The numbers of all slots in what was claimed. Call it when every share has claimed what it had."""
        borrowed = self._extents.complete(self)
        self._used.update(borrowed)
        return borrowed

    def give_back(self, slots: Sequence[int]) -> None:
        """The stack no longer uses these slots."""
        self._used.difference_update(slots)
        empty = [extent for extent in self.leaving if self._used.isdisjoint(self.slots_in(range(extent, extent + 1)))]
        self.leaving.difference_update(empty)
        self._extents.leave(self, empty)

    def recall(self, window: range) -> None:
        """Stop using these extents, as soon as their slots are free."""
        self.leaving.update(window)
        self.recall_slots(self.slots_in(window))
        self.give_back(())

    def estimate(self, seconds: float, nbytes: int) -> None:
        """Note the demand of the last ``seconds``; the share has ``nbytes``."""
        newest = self._short * self.slot_nbytes / seconds / nbytes if nbytes else float(bool(self._short))
        self.turnover += _NEWEST * (newest - self.turnover)
        self._short = 0

    # -- where slots are -----------------------------------------------------------------------------

    def windows(self) -> Iterable[range]:
        """The places at which this share gets extents."""
        count, step = self._extents.count, self.at_a_time
        return (range(first, min(first + step, count)) for first in range(0, count, step))

    def extents_of(self, slot: int) -> range:
        """The extents in which a slot lies."""
        size = self._extents.extent_nbytes
        return range(slot * self.slot_nbytes // size, ((slot + 1) * self.slot_nbytes - 1) // size + 1)

    def slots_in(self, window: range) -> range:
        """The slots of which a part lies in these extents."""
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
        return self.claimed or self.extents.share(ctx.slot_nbytes, self.model)

    def attach(self, handle: str, cache: PagedKVCache) -> Mover:
        raise BackendError("workers attach to a server's arena through its socket")
