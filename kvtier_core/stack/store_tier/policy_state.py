"""What a tier's policy learned, kept in the tier's own store as one more frame: sealed, and verified."""

from __future__ import annotations

import hashlib

from kvtier_core.frames import format as frame
from kvtier_core.interfaces import Backend
from kvtier_core.stack.batches import as_many
from kvtier_core.stack.index.cache_index import CacheIndex
from kvtier_core.transfer.io_pool import Outcome, Pool, Then, run
from kvtier_core.types import FRAME_ALIGNMENT, KEY_NBYTES, ChunkKey, Namespace

#: The tier must be this many times larger, else nothing is kept.
_FITS = 64

#: Seconds from one look for something new to the next. A server is killed, and not closed.
_EVERY = 60.0


def key_of(namespace: Namespace) -> ChunkKey:
    """No chunk has this key: the digests of chunks cover tokens."""
    return ChunkKey(hashlib.blake2b(b"what the policy learned" + namespace.digest, digest_size=KEY_NBYTES).digest())


class PolicyState:
    """Room for it is set aside from the start, so that writing it evicts nobody.

    It is no KV: under the ``namespace`` that the store was opened with it outlives every epoch.
    """

    def __init__(self, backend: Backend, index: CacheIndex, namespace: Namespace, capacity: int):
        self.key = key_of(namespace)
        self._backend = backend
        self._index = index
        self._namespace = namespace
        self._kept = index.save()  # what the store has, or what need not be kept
        self._length = len(self._kept)
        self._next: float | None = None  # when to look for something new
        self._busy = False
        pages = -(-self._length // FRAME_ALIGNMENT)
        self.nbytes = FRAME_ALIGNMENT * (1 + pages) if pages else 0  #: that the frame takes in the store
        if self.nbytes * _FITS > capacity:
            self.nbytes = 0

    def recall(self) -> None:
        """Give the policy what was kept, if it is whole; else it starts cold. Blocks."""
        if not self.nbytes:
            return
        landed = memoryview(bytearray(self.nbytes))
        outcome = run(lambda: as_many(self._backend.read([self.key], [landed]), [self.key]))
        count = outcome.value[0] if outcome.error is None else 0
        if 0 < count <= len(landed):
            found = landed[:count]
            if frame.check(found, self._namespace, self.key, payload_nbytes=self._length) is None:
                self._index.restore(bytes(frame.payload_of(found)))
                self._kept = self._index.save()

    def keep(self) -> None:
        """Blocks. Raises BackendError."""
        if self.nbytes:
            self._write(self._index.save())

    def due(self, now: float) -> bool:
        """Is it time to look for something new? Once a minute, and not while a thread still keeps what was.

        Never for a store that other engines share: they learn, too.
        """
        if not self.nbytes or self._backend.shared or self._busy:
            return False
        if self._next is None:
            self._next = now + _EVERY
        return now >= self._next

    def keep_by(self, pool: Pool, now: float, then: Then) -> None:
        """If something was learned since it was kept last, a thread keeps it; ``then`` is told how it went."""
        self._next = now + _EVERY
        saved = self._index.save()
        if saved == self._kept:
            return

        def kept(outcome: Outcome) -> None:
            self._busy = False
            if outcome.error is None:
                self._kept = saved
            then(outcome)

        self._busy = True
        pool.submit_store(lambda: self._write(saved), kept)

    def _write(self, saved: bytes) -> None:
        sealed = memoryview(bytearray(self.nbytes))
        sealed[FRAME_ALIGNMENT : FRAME_ALIGNMENT + self._length] = saved
        frame.seal(sealed, self._namespace, self.key, self._length)
        self._backend.write([self.key], [sealed])
