"""Evicts the chunk that is least likely to return soon for the space it takes, by learned odds and Gittins' index.

The class of a chunk is its number of requests so far (one, two, more), and the number of new chunks in the last request
that named it, by powers of two; or the pause that the client announced with that request. For each
class a life table has the share of chunks idle for a given time that returned within the next step of age; it learns
from held chunks and from four ghosts for each of them. The index of a class at an age is the best rate, over all
horizons, of returns per second of space. The lowest index is evicted first, and a newcomer whose index is lower still
is not admitted. While little is known, odds fall with age, as in `lru`.

J. C. Gittins, "Bandit processes and dynamic allocation indices" (J. R. Stat. Soc. B 41(2), 1979); E. L. Kaplan and
P. Meier (J. Am. Stat. Assoc. 53, 1958) for the table. N. Beckmann, H. Chen and A. Cidon, "LHD" (NSDI 2018) rank by
whole remaining lives instead. O(1) for each key requested, admitted, forgotten or evicted: the keys that one request
named move from age to age together. After each 64 requests all ranks are computed again, in about two milliseconds.
csrc/policies/gittins.cpp gives the same answers in every detail, faster and in less memory; it is tested against this.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Literal

import attrs

from kvtier_core.interfaces import EvictionConfig, EvictionPolicy
from kvtier_core.native import choose
from kvtier_core.policies.lifetable import AGES, EDGES, LifeTable
from kvtier_core.types import ChunkKey

_REUSES = 3
#: Number of powers of two of new chunks in a request that are distinguished.
_SIZES = 10
#: The hints that a client will not continue this request, or only after a number of seconds. They are not commands:
#: their value is learned. Pauses shorter than the first step do not count, because to announce a short one before a
#: long one would pay (benchmarks/EVICTION.md).
HINTS, _ENDS, _PAUSES = ("session", "pause"), "ends", (64, 256, 1024, 4096)
#: A pause has at most this many digits.
_DIGITS = 9
#: Number of ghosts for each held key, and the least number that is kept.
_GHOSTS = 4
_FEW = 64
#: Requests after which the ranks are computed again, and the factor by which old votes then count less: half after
#: 50 000 requests.
_RANKING = 64
_FADE = 0.9991131650796176
#: A vote is counted in this many whole parts, so that a cell loses exactly what was added to it. All numbers up to 16
#: divide it, so that equal shares are equal.
_VOTE = 720_720 << 12


@attrs.frozen
class GittinsConfig(EvictionConfig):
    """Evicts by learned odds of return: the default."""

    type: ClassVar[str] = "gittins"
    aliases: ClassVar[tuple[str, ...]] = ("git",)
    classes: Literal["simple", "full"] = "full"  #: simple: only by the number of requests

    def open(self) -> EvictionPolicy:
        """The policy in C++ if that was compiled; for `isinstance` it is an `EvictionPolicy`, too."""
        return EvictionPolicy.register(choose("Gittins", Gittins))(sizes=1 if self.classes == "simple" else _SIZES)


@attrs.define(eq=False)
class _Group:
    """Keys of one class that the same request named last. They share one vote."""

    cls: int
    since: float
    age: int = 0  #: a step of the life table
    held: OrderedDict[ChunkKey, None] = attrs.field(factory=OrderedDict)  #: leaf first
    ghosts: int = 0
    named: int = 1  #: number of keys that it had at first, which share the vote

    @property
    def votes(self) -> int:
        return _VOTE * (len(self.held) + self.ghosts) // self.named


@attrs.define(eq=False)
class _Cell:
    """The groups of one class and step of age, the oldest first."""

    groups: OrderedDict[_Group, None] = attrs.field(factory=OrderedDict)
    holding: OrderedDict[_Group, None] = attrs.field(factory=OrderedDict)  #: those with a held key
    votes: int = 0
    awaited: bool = False  #: `_due` has an entry for its oldest group


def _announced(session: str | None, pause: str | None) -> int:
    """The number of steps of a pause that has been reached: all if the session ends, 0 without a hint."""
    if session == _ENDS:
        return len(_PAUSES)
    seconds = int(pause) if pause and len(pause) <= _DIGITS and pause.isascii() and pause.isdigit() else 0
    return bisect.bisect_right(_PAUSES, seconds)


class Gittins(EvictionPolicy):
    """The policy; ``sizes`` powers of two of new chunks in a request are distinguished, 1 to 32."""

    def __init__(self, sizes: int) -> None:
        self._sizes = sizes
        self._kinds = sizes + len(_PAUSES)  # of requests: by their size, or by the pause that is announced
        self._group: dict[ChunkKey, _Group] = {}  # of held keys and of ghosts
        self._ghosts: OrderedDict[ChunkKey, None] = OrderedDict()  # the oldest first
        self._table = LifeTable(_REUSES, self._kinds)
        self._cells = [[_Cell() for _ in range(AGES)] for _ in range(_REUSES * self._kinds)]
        self._due: list[tuple[float, int, int]] = []  # when the oldest group of a cell reaches the next step of age
        self._live: list[int] = []  # ranks of the cells with a held key, ascending
        self._requests = itertools.count(1)
        self._now = 0.0

    def request(self, path: Sequence[ChunkKey], now: float, hints: Mapping[str, str]) -> None:
        self._grow_older(now)
        size = min(sum(key not in self._group for key in path).bit_length(), self._sizes - 1)
        step = _announced(*map(hints.get, HINTS))
        kind = self._sizes + step - 1 if step else size
        fresh: dict[int, _Group] = {}
        for key in reversed(path):  # leaf before root, so that a prefix is evicted last of its group
            before = self._group.get(key)
            if before is not None and before is fresh.get(before.cls):
                continue  # named twice in one path
            if before is None:
                cls, held = kind, False
            else:
                cls = min(before.cls // self._kinds + 1, _REUSES - 1) * self._kinds + kind
                held = key in before.held
                self._table.returned(before.cls, before.age, 1 / before.named)
                self._leave(before, key, held=held)
            group = fresh.get(cls)
            if group is None:
                group = fresh[cls] = _Group(cls, now)
            self._join(group, key, held=held)
        for group in fresh.values():
            group.named = len(group.held) + group.ghosts
            self._place(group)
        self._bound_ghosts()
        if next(self._requests) % _RANKING == 0:
            self._rank()

    def admit(self, key: ChunkKey, nbytes: int) -> None:
        group = self._group.get(key)
        if group is None:  # no request named it, as after a restart
            group = _Group(0, self._now)
        else:
            self._leave(group, key, held=False)
        self._join(group, key, held=True)
        self._place(group)

    def prefers(self, newcomer: ChunkKey, victim: ChunkKey) -> bool:
        group, other = self._group.get(newcomer), self._group[victim]
        return group is None or self._table.index[group.cls][group.age] >= self._table.index[other.cls][other.age]

    def forget(self, key: ChunkKey, *, evicted: bool) -> None:
        group = self._group[key]
        self._leave(group, key, held=True)
        if evicted:
            self._join(group, key, held=False)
            self._place(group)
        self._bound_ghosts()

    def victims(self) -> Iterator[ChunkKey]:
        for rank in self._live:
            cls, age = self._table.order[rank]
            for group in self._cells[cls][age].holding:
                yield from group.held

    def save(self) -> bytes:
        return self._table.save()

    def restore(self, saved: bytes) -> None:
        if self._table.restore(saved):
            self._rank()

    # -- groups ------------------------------------------------------------------------------------

    def _join(self, group: _Group, key: ChunkKey, *, held: bool) -> None:
        before = group.votes
        self._group[key] = group
        if held:
            group.held[key] = None
        else:
            group.ghosts += 1
            self._ghosts[key] = None
        cell = self._cells[group.cls][group.age]
        if group in cell.groups:
            cell.votes += group.votes - before

    def _leave(self, group: _Group, key: ChunkKey, *, held: bool) -> None:
        before = group.votes
        if held:
            del group.held[key]  # a KeyError if it is not held, and nothing has changed
        else:
            del self._ghosts[key]
            group.ghosts -= 1
        del self._group[key]
        cell = self._cells[group.cls][group.age]
        if not group.held and group in cell.holding:
            del cell.holding[group]
            if not cell.holding:
                self._live.remove(self._table.rank_of[group.cls][group.age])
        if group in cell.groups:
            cell.votes += group.votes - before
            if not group.held and not group.ghosts:
                del cell.groups[group]

    def _place(self, group: _Group) -> None:
        """Put a group into its cell if it is not there."""
        cell = self._cells[group.cls][group.age]
        if group not in cell.groups:
            cell.groups[group] = None
            cell.votes += group.votes
            if group.age + 1 < AGES and not cell.awaited:
                self._await(cell, group)
        if group.held and group not in cell.holding:
            if not cell.holding:
                bisect.insort(self._live, self._table.rank_of[group.cls][group.age])
            cell.holding[group] = None

    def _await(self, cell: _Cell, group: _Group) -> None:
        """Schedule the next step of age of a cell: one entry each, which comes too early if the cell becomes empty."""
        heapq.heappush(self._due, (group.since + EDGES[group.age + 1], group.cls, group.age))
        cell.awaited = True

    def _grow_older(self, now: float) -> None:
        """Move the groups that have reached the next step of age."""
        self._now = now
        while self._due and self._due[0][0] <= now:
            _, cls, age = heapq.heappop(self._due)
            cell = self._cells[cls][age]
            cell.awaited = False
            while cell.groups:
                group = next(iter(cell.groups))
                if group.since + EDGES[age + 1] > now:
                    self._await(cell, group)
                    break
                self._move_on(cell, group)

    def _move_on(self, cell: _Cell, group: _Group) -> None:
        self._table.went_on(group.cls, group.age, group.votes / _VOTE)
        del cell.groups[group]
        cell.votes -= group.votes
        if group.held:
            del cell.holding[group]
            if not cell.holding:
                self._live.remove(self._table.rank_of[group.cls][group.age])
        group.age += 1
        self._place(group)

    def _bound_ghosts(self) -> None:
        most = max(_FEW, _GHOSTS * (len(self._group) - len(self._ghosts)))
        while len(self._ghosts) > most:
            key = next(iter(self._ghosts))
            self._leave(self._group[key], key, held=False)

    def _rank(self) -> None:
        self._table.fade(_FADE)
        self._table.rank([[float(cell.votes) / _VOTE for cell in row] for row in self._cells])
        self._live = [rank for rank, (cls, age) in enumerate(self._table.order) if self._cells[cls][age].holding]
