"""What a node shows, in few bytes: a fingerprint of each chunk, and the changes since a version of these.

A fingerprint is the first four bytes of a key: a key is a digest, and its bits are as good as random. So a chunk costs
32 bits. A key that a node does not show has the fingerprint of one of its *n* chunks with a probability of n / 2^32: 8
in a million for 32 768 chunks; that one of a thousand such nodes seems to show it, 0.8 %. The cost is a question in
vain, and a miss. A Bloom filter of 32 bits per chunk errs less often, 1 in 5 million. But each change would move all of
its probes, and removals would need counters.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

import attrs
import numpy as np
import numpy.typing as npt

from kvtier_core.interfaces import KeyChanges
from kvtier_core.types import KEY_NBYTES, ChunkKey

#: The most chunks that a node announces.
MOST_CHUNKS = 1 << 20
#: Number of versions of a digest whose changes are remembered.
_MOST_PAST = 256

Fingerprint = int
FINGERPRINT_NBYTES = 4
#: Fingerprints in four bytes each. "Sorted" ones are also different.
Fingerprints = npt.NDArray[np.uint32]
_NONE: Fingerprints = np.empty(0, np.uint32)


def fingerprints(keys: Iterable[ChunkKey]) -> Fingerprints:
    """One for each key, in the byte order of this machine: as numbers they mean nothing on another."""
    return np.frombuffer(b"".join(keys), np.uint32)[:: KEY_NBYTES // FINGERPRINT_NBYTES]


def _in_order(marks: Collection[Fingerprint]) -> Fingerprints:
    """These fingerprints, sorted."""
    return np.unique(np.fromiter(marks, np.uint32, len(marks)))


@attrs.frozen(eq=False)
class Changes:
    """The changes from one version of a digest to a later one, each sorted. Nothing is both gone and come."""

    base: int  #: the version to which they apply; 0: to nothing, so that all of the digest is in ``come``
    version: int
    gone: Fingerprints = _NONE
    come: Fingerprints = _NONE

    def __len__(self) -> int:
        return len(self.gone) + len(self.come)

    def then(self, later: Changes) -> Changes:
        """Both in one: what came and then went is in neither set."""
        gone = np.union1d(self.gone, _without(later.gone, self.come))
        come = np.union1d(_without(self.come, later.gone), _without(later.come, self.gone))
        return Changes(self.base, later.version, _without(gone, later.come), come)


def _without(some: Fingerprints, others: Fingerprints) -> Fingerprints:
    return np.setdiff1d(some, others, assume_unique=True)


class Source(Protocol):
    """Some of the frames that a node shows."""

    def changes(self, position: int) -> KeyChanges:
        """As `StoredFrames.changes`."""


class Memory:
    """The frames in memory, for one digest at a time."""

    def __init__(self, shown: Iterable[ChunkKey]):
        """``shown`` always has the present ones."""
        self._shown = shown
        self._keys: list[ChunkKey] = []  # at the last look

    def changes(self, position: int) -> KeyChanges:
        """The owner changes the table meanwhile, but not while it is copied to a list, which no thread interrupts."""
        before, now = self._keys if position else [], list(self._shown)
        self._keys = now
        if now == before:
            return KeyChanges((), (), 1, is_complete=not position)
        return KeyChanges(set(now).difference(before), set(before).difference(now), 1, is_complete=not position)


class Digest:
    """What a node shows of one namespace, for any number of readers. All methods may be called on any thread.

    It remembers no more changes than chunks, of a limited number of versions: a reader further behind gets all of it.
    """

    def __init__(self, namespace: bytes, sources: Callable[[], Sequence[Source]]):
        """``sources`` returns the present ones."""
        self.namespace = namespace
        self._sources = sources
        self._positions: dict[Source, int] = {}  # up to which their changes are in it
        self._keys: dict[Fingerprint, int] = {}  # how many keys have each fingerprint
        self._version = 1 + secrets.randbits(62)  # so that no other digest has it
        self._all = Changes(0, 0)  # all of it, when a reader last asked for that: the next may share it
        self._past: deque[Changes] = deque()  # the last changes, each of the version before it
        self._past_length = 0  # of all of them
        self._changed = threading.Condition()
        self._ended = False

    def look(self) -> None:
        """Look for changes, and wake those who wait for them."""
        with self._changed:
            sources = self._sources()
            found = [source.changes(self._positions.get(source, 0)) for source in sources]
            begins = list(self._positions) != sources or any(changes.is_complete for changes in found)
            if begins:
                found = [source.changes(0) for source in sources]
                self._keys.clear()
                self._past.clear()
                self._past_length = 0
            self._positions = {source: changes.position for source, changes in zip(sources, found, strict=True)}
            gone, come = self._count(found)
            if not begins and not gone and not come:
                return
            changes = Changes(self._version, self._version + 1, _in_order(gone), _in_order(come))
            self._version = changes.version
            if not begins:
                self._remember(changes)
            self._changed.notify_all()

    def _count(self, found: Sequence[KeyChanges]) -> tuple[list[Fingerprint], list[Fingerprint]]:
        """Count keys that have come or gone. Returns the fingerprints that no key has any more, and the new ones."""
        keys, before = self._keys, dict[Fingerprint, int]()
        for changes in found:
            for step, changed in (1, changes.come), (-1, changes.gone):
                for mark in fingerprints(changed).tolist():
                    count = keys.get(mark, 0)
                    before.setdefault(mark, count)
                    if count + step > 0 and (count or len(keys) < MOST_CHUNKS):
                        keys[mark] = count + step
                    else:
                        keys.pop(mark, None)
        gone = [mark for mark, count in before.items() if count and mark not in keys]
        return gone, [mark for mark, count in before.items() if not count and mark in keys]

    def _remember(self, changes: Changes) -> None:
        self._past.append(changes)
        self._past_length += len(changes)
        while self._past_length > len(self._keys) or len(self._past) > _MOST_PAST:
            self._past_length -= len(self._past.popleft())

    def since(self, version: int, within: float) -> Changes:
        """The changes since that version: as soon as there are any, or after ``within`` seconds."""
        if not version:
            self.look()
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._version != version, within)
            if self._version == version:
                return Changes(version, version)
            changes: Changes | None = None
            for each in self._past:
                if changes is not None:
                    changes = changes.then(each)
                elif each.base == version:
                    changes = each
            if changes is None and self._all.version != self._version:
                self._all = Changes(0, self._version, come=_in_order(self._keys))
            return self._all if changes is None else changes

    def end(self) -> None:
        """End all waits."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
