"""What a node shows, in few bytes: a fingerprint of each chunk, and the changes since a version of these.

A fingerprint is the first four bytes of a key: a key is a digest, and its bits are as good as random. So a chunk costs
32 bits. A key that a node does not show has the fingerprint of one of its *n* chunks with a probability of n / 2^32: 8
in a million for 32 768 chunks; that one of a thousand such nodes seems to show it, 0.8 %. The cost is a question in
vain, and a miss. A Bloom filter of 32 bits per chunk errs less often, 1 in 5 million. But each change would move all of
its probes, removals would need counters, and a lookup would take a step in Python for each key, probe and node, where
sets intersect in a microsecond per node. In a reader's memory, such a set takes about 90 bytes per chunk.
"""

from __future__ import annotations

import secrets
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Protocol, TypeVar

import attrs

from kvtier_core.errors import BackendError
from kvtier_core.interfaces import KeyChanges
from kvtier_core.types import KEY_NBYTES, ChunkKey

#: The most chunks that a node announces.
MOST_CHUNKS = 1 << 20
#: Number of versions of a digest whose changes are remembered.
_MOST_PAST = 256

Fingerprint = int
FINGERPRINT_NBYTES = 4


def fingerprints(keys: Iterable[ChunkKey]) -> list[Fingerprint]:
    """One for each key, in the byte order of this machine: as numbers they mean nothing on another."""
    words = memoryview(b"".join(keys)).cast("I")
    return words[:: KEY_NBYTES // FINGERPRINT_NBYTES].tolist()


class Marks(Set[Fingerprint]):
    """Fingerprints to be sent, in four bytes each."""

    def __init__(self, marks: Iterable[Fingerprint]):
        self._marks = array("I", marks)

    def __contains__(self, mark: object) -> bool:
        return mark in self._marks

    def __iter__(self) -> Iterator[Fingerprint]:
        return iter(self._marks)

    def __len__(self) -> int:
        return len(self._marks)


@attrs.frozen
class Changes:
    """The changes from one version of a digest to a later one. Nothing is both gone and come."""

    base: int  #: the version to which they apply; 0: to nothing, so that all of the digest is in ``come``
    version: int
    gone: Set[Fingerprint] = frozenset()
    come: Set[Fingerprint] = frozenset()

    def __len__(self) -> int:
        return len(self.gone) + len(self.come)

    def then(self, later: Changes) -> Changes:
        """Both in one: what came and then went is in neither set."""
        gone = self.gone | (later.gone - self.come)
        come = (self.come - later.gone) | (later.come - self.gone)
        return Changes(self.base, later.version, gone - later.come, come)


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
            changes = Changes(self._version, self._version + 1, gone, come)
            self._version = changes.version
            if not begins:
                self._remember(changes)
            self._changed.notify_all()

    def _count(self, found: Sequence[KeyChanges]) -> tuple[frozenset[Fingerprint], frozenset[Fingerprint]]:
        """Count keys that have come or gone. Returns the fingerprints that no key has any more, and the new ones."""
        keys, before = self._keys, dict[Fingerprint, int]()
        for changes in found:
            for step, changed in (1, changes.come), (-1, changes.gone):
                for mark in fingerprints(changed):
                    count = keys.get(mark, 0)
                    before.setdefault(mark, count)
                    if count + step > 0 and (count or len(keys) < MOST_CHUNKS):
                        keys[mark] = count + step
                    else:
                        keys.pop(mark, None)
        gone = frozenset(mark for mark, count in before.items() if count and mark not in keys)
        return gone, frozenset(mark for mark, count in before.items() if not count and mark in keys)

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
                self._all = Changes(0, self._version, come=Marks(self._keys))
            return self._all if changes is None else changes

    def end(self) -> None:
        """End all waits."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()


class Copy:
    """A reader's copy of a node's digest. One thread applies changes; any may look."""

    def __init__(self) -> None:
        self.version = 0
        self._shown: set[Fingerprint] = set()

    def apply(self, changes: Changes) -> None:
        """Raises BackendError, and changes nothing, if they do not apply to this version, or to what it has."""
        if changes.base not in (0, self.version) or not changes.version:
            raise BackendError("its digest has gaps")
        shown = self._shown if changes.base else set()
        if not changes.gone <= shown or not shown.isdisjoint(changes.come):
            raise BackendError("its digest contradicts itself")
        if len(shown) - len(changes.gone) + len(changes.come) > MOST_CHUNKS:
            raise BackendError(f"it announces more than {MOST_CHUNKS} chunks")
        shown -= changes.gone
        shown.update(changes.come)
        self._shown = shown
        self.version = changes.version

    def shown(self, wanted: set[Fingerprint]) -> set[Fingerprint]:
        """The fingerprints among these that the node shows, or seems to."""
        return wanted & self._shown


class Shows(Protocol):
    """A node whose digest is known."""

    def shown(self, wanted: set[Fingerprint]) -> set[Fingerprint]:
        """The fingerprints among these that it shows, or seems to."""


N = TypeVar("N", bound=Shows)


def holders(keys: Sequence[ChunkKey], nodes: Iterable[N]) -> list[list[N]]:
    """For each key, the nodes that show its frame, or seem to."""
    marks = fingerprints(keys)
    wanted = set(marks)
    found: dict[Fingerprint, list[N]] = {mark: [] for mark in marks}
    for node in nodes:
        for mark in node.shown(wanted):
            found[mark].append(node)
    return [list(found[mark]) for mark in marks]
