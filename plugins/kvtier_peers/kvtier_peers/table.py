"""The digests of all nodes in one table: a lookup takes nearly as long for a thousand nodes as for one."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Generic, TypeVar

import attrs
import numpy as np
import numpy.typing as npt

from kvtier_core.errors import BackendError
from kvtier_core.types import ChunkKey
from kvtier_peers.digest import MOST_CHUNKS, Changes, Fingerprint, Fingerprints, fingerprints

N = TypeVar("N")
#: A fingerprint, and in the low bits the number of a node. Arrays of them are sorted, and never changed in place.
Entries = npt.NDArray[np.uint64]
_NUMBER_BITS = 16
_MOST_NODES = 1 << _NUMBER_BITS
#: Changes are merged into the array when they are more than this many, and more than one in 64 of its entries.
_MOST_CHANGED = 1024


@attrs.define
class _Node(Generic[N]):
    node: N
    version: int = 0  #: of its digest; 0: none has come
    length: int = 0


class DigestTable(Generic[N]):
    """Which nodes show which fingerprints, in eight bytes a chunk. All methods may be called on any thread.

    A sorted array has nearly all of it. Since an array can only be copied as a whole, recent changes are kept apart: a
    node shows the entries that are in one of the two, but not in both. A lookup takes no lock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # for changes
        self._numbers = count()
        self._nodes: dict[int, _Node[N]] = {}  # by number
        self._has_left = False  # are there entries of nodes that have left?
        #: Entries, and by fingerprint the numbers of the nodes that have changed theirs since. Replaced at once.
        self._state: tuple[Entries, dict[Fingerprint, frozenset[int]]] = np.empty(0, np.uint64), {}

    def enter(self, node: N) -> int:
        """Returns the number under which this node's changes come. It shows nothing yet."""
        with self._lock:
            if self._has_left:
                self._has_left = False
                self._keep(set(self._nodes))
            number = next(free for each in self._numbers if (free := each % _MOST_NODES) not in self._nodes)
            self._nodes[number] = _Node(node)
            return number

    def leave(self, number: int) -> None:
        """The node shows nothing from now on. What it showed is removed when the next one enters."""
        del self._nodes[number]
        self._has_left = True

    def apply(self, number: int, changes: Changes) -> int:
        """Returns the version of the node's digest that they make.

        Raises BackendError, and changes nothing, if they do not apply to its version, or to what it shows.
        """
        with self._lock:
            known = self._nodes.get(number)
            if known is None:
                raise BackendError("it has left")
            if changes.base not in (0, known.version) or not changes.version:
                raise BackendError("its digest has gaps")
            is_whole = not changes.base
            gone, come = (0 if is_whole else self._shown(number, marks) for marks in (changes.gone, changes.come))
            if gone < len(changes.gone) or come:
                raise BackendError("its digest contradicts itself")
            length = (0 if is_whole else known.length) - len(changes.gone) + len(changes.come)
            if length > MOST_CHUNKS:
                raise BackendError(f"it announces more than {MOST_CHUNKS} chunks")
            if is_whole:
                if known.length:
                    self._keep(self._nodes.keys() - {number})
                merged, changed = self._state
                self._state = _flipped(merged, _entries(changes.come, number)), changed
            else:
                self._change(number, [*changes.gone.tolist(), *changes.come.tolist()])
            known.version, known.length = changes.version, length
            return changes.version

    def _shown(self, number: int, marks: Fingerprints) -> int:
        """How many of these fingerprints a node shows."""
        merged, changed = self._state
        are_in = _are_in(merged, _entries(marks, number)).tolist()
        return sum(
            is_in != (number in changed.get(mark, ())) for is_in, mark in zip(are_in, marks.tolist(), strict=True)
        )

    def _change(self, number: int, marks: list[Fingerprint]) -> None:
        merged, changed = self._state
        for mark in marks:
            changed[mark] = changed.get(mark, frozenset()) ^ {number}
        if len(changed) > max(_MOST_CHANGED, len(merged) // 64):
            entries = [mark << _NUMBER_BITS | each for mark, numbers in changed.items() for each in numbers]
            self._state = _flipped(merged, np.sort(np.array(entries, np.uint64))), {}

    def _keep(self, numbers: set[int]) -> None:
        """Forget the entries of all other nodes."""
        merged, changed = self._state
        is_kept = np.zeros(_MOST_NODES, np.bool_)
        is_kept[list(numbers)] = True
        self._state = merged[is_kept[_numbers(merged)]], {mark: some & numbers for mark, some in changed.items()}

    def holders(self, keys: Sequence[ChunkKey]) -> list[list[N]]:
        """For each key, the nodes that show its frame, or seem to."""
        merged, changed = self._state
        marks = fingerprints(keys)
        found = set(_found(merged, marks))
        if changed:
            found ^= {(at, number) for at, mark in enumerate(marks.tolist()) for number in changed.get(mark, ())}
        holders: list[list[N]] = [[] for _ in keys]
        for at, number in sorted(found):
            if known := self._nodes.get(number):
                holders[at].append(known.node)
        return holders


def _entries(marks: Fingerprints, number: int) -> Entries:
    return marks.astype(np.uint64) << np.uint64(_NUMBER_BITS) | np.uint64(number)


def _numbers(entries: Entries) -> Entries:
    return entries & np.uint64(_MOST_NODES - 1)


def _are_in(entries: Entries, wanted: Entries) -> npt.NDArray[np.bool_]:
    """For each wanted entry: is it among these?"""
    if not len(entries):
        return np.zeros(len(wanted), np.bool_)
    return np.equal(entries.take(entries.searchsorted(wanted), mode="clip"), wanted)


def _found(entries: Entries, marks: Fingerprints) -> Iterator[tuple[int, int]]:
    """For each entry with one of these fingerprints, the index of that and the number of the node."""
    wanted = _entries(marks, 0)
    begins, ends = entries.searchsorted(wanted), entries.searchsorted(wanted + np.uint64(_MOST_NODES))
    counts = ends - begins
    at = np.repeat(ends - counts.cumsum(), counts) + np.arange(counts.sum())
    return zip(np.repeat(np.arange(len(marks)), counts).tolist(), _numbers(entries[at]).tolist(), strict=True)


def _flipped(entries: Entries, others: Entries) -> Entries:
    """The entries that are in one of the two, but not in both: as `numpy.setxor1d`, which sorts everything again."""
    are_in = _are_in(entries, others)
    rest, new = np.delete(entries, entries.searchsorted(others[are_in])), others[~are_in]
    return np.insert(rest, rest.searchsorted(new), new)
