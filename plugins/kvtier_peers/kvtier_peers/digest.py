"""What a node shows, in few bytes: a fingerprint of each chunk, and what has changed since a version of these.

A fingerprint is the first four bytes of a key: a key is a digest, and its bits are as good as drawn. So a chunk costs
32 bits. A key that a node does not show has the fingerprint of one of its *n* chunks with a probability of n / 2^32: 8
in a million for 32 768 chunks; that one of a thousand such nodes seems to show it, 0.8 %. That is a question in vain,
and a miss. A Bloom filter of 32 bits a chunk errs less often, 1 in 5 million. But each change would move all of its
probes, what goes would need counters, and a lookup would take a step in Python for each key, probe and node, where sets
intersect in a microsecond a node. In a reader's memory such a set has some 90 bytes a chunk.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

import attrs

from kvtier_core.errors import BackendError
from kvtier_core.types import KEY_NBYTES, ChunkKey

#: Chunks that a node announces at most; of more than these the newest.
MOST_CHUNKS = 1 << 20

Fingerprint = int
FINGERPRINT_NBYTES = 4


def fingerprints(keys: Iterable[ChunkKey]) -> list[Fingerprint]:
    """One for each key, in the order of bytes of this machine: as numbers they mean nothing on another one."""
    words = memoryview(b"".join(keys)).cast("I")
    return words[:: KEY_NBYTES // FINGERPRINT_NBYTES].tolist()


@attrs.frozen
class Changes:
    """What makes a version of a digest from an earlier one. Nothing is both gone and come."""

    base: int  #: the version to which they apply; 0: to nothing, so that all of the digest is in ``come``
    version: int
    gone: frozenset[Fingerprint] = frozenset()
    come: frozenset[Fingerprint] = frozenset()

    def __len__(self) -> int:
        return len(self.gone) + len(self.come)

    def then(self, later: Changes) -> Changes:
        """Both in one: what came and went is in neither."""
        gone = self.gone | (later.gone - self.come)
        come = (self.come - later.gone) | (later.come - self.gone)
        return Changes(self.base, later.version, gone - later.come, come)


class Digest:
    """What a node shows of one namespace, for any number of readers. All methods may be called on any thread.

    It remembers no more changes than chunks: who is further behind gets all of the digest.
    """

    def __init__(self, namespace: bytes, shown: Callable[[], list[ChunkKey]]):
        """``shown`` returns the keys that are shown now."""
        self.namespace = namespace
        self._shown = shown
        self._keys: list[ChunkKey] = []
        #: Of its beginning drawn, so that no version is one of another digest.
        self._now = Changes(0, 1 + secrets.randbits(62))
        self._past: deque[Changes] = deque()  # the last changes, each of the version before it
        self._changed = threading.Condition()
        self._ended = False

    def look(self) -> None:
        """Look for what has changed, and wake those who wait for that."""
        with self._changed:
            keys = self._shown()
            if keys == self._keys:
                return
            self._keys = keys
            before, come = self._now, frozenset(fingerprints(keys[-MOST_CHUNKS:]))
            self._now = Changes(0, before.version + 1, come=come)
            self._past.append(Changes(before.version, self._now.version, before.come - come, come - before.come))
            while sum(map(len, self._past)) > len(come):
                self._past.popleft()
            self._changed.notify_all()

    def since(self, version: int, within: float) -> Changes:
        """What has changed since that version, when there is something, or after ``within`` seconds."""
        if not version:
            self.look()
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._now.version != version, within)
            if self._now.version == version:
                return Changes(version, version)
            changes: Changes | None = None
            for each in self._past:
                if changes is not None:
                    changes = changes.then(each)
                elif each.base == version:
                    changes = each
            return self._now if changes is None else changes

    def end(self) -> None:
        """Nobody waits any longer."""
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
        if not changes.gone <= shown or not changes.come.isdisjoint(shown):
            raise BackendError("its digest contradicts itself")
        if len(shown) - len(changes.gone) + len(changes.come) > MOST_CHUNKS:
            raise BackendError(f"it announces more than {MOST_CHUNKS} chunks")
        self._shown = (shown - changes.gone) | changes.come
        self.version = changes.version

    def shown(self, wanted: set[Fingerprint]) -> set[Fingerprint]:
        """Which of these the node shows, or seems to."""
        return wanted & self._shown


class Shows(Protocol):
    """A node of which a digest is known."""

    def shown(self, wanted: set[Fingerprint]) -> set[Fingerprint]:
        """Which of these it shows, or seems to."""


N = TypeVar("N", bound=Shows)


def holders(keys: Sequence[ChunkKey], nodes: Iterable[N]) -> list[list[N]]:
    """For each key the nodes that show its frame, or seem to."""
    marks = fingerprints(keys)
    wanted = set(marks)
    found: dict[Fingerprint, list[N]] = {mark: [] for mark in marks}
    for node in nodes:
        for mark in node.shown(wanted):
            found[mark].append(node)
    return [list(found[mark]) for mark in marks]
