"""What a tier's policy learned, kept in the tier's own store as one more frame: sealed, and verified."""

from __future__ import annotations

import hashlib

from kvtier_core import frame
from kvtier_core.batches import as_many
from kvtier_core.interfaces import Backend
from kvtier_core.residents import Residents
from kvtier_core.types import KEY_NBYTES, PAGE_NBYTES, ChunkKey, Namespace
from kvtier_core.workers import run

#: The tier must be this many times larger, else nothing is kept.
_FITS = 64


def key_of(namespace: Namespace) -> ChunkKey:
    """No chunk has this key: the digests of chunks cover tokens."""
    return ChunkKey(hashlib.blake2b(b"what the policy learned" + namespace.digest, digest_size=KEY_NBYTES).digest())


class Memo:
    """Room for it is set aside from the start, so that writing it evicts nobody."""

    def __init__(self, backend: Backend, residents: Residents, capacity: int):
        self._backend = backend
        self._residents = residents
        self._length = len(residents.save())
        pages = -(-self._length // PAGE_NBYTES)
        self.nbytes = PAGE_NBYTES * (1 + pages) if pages else 0  #: that the frame takes in the store
        if self.nbytes * _FITS > capacity:
            self.nbytes = 0

    def recall(self, namespace: Namespace) -> None:
        """Give the policy what was kept, if it is whole; else it starts cold. Blocks."""
        if not self.nbytes:
            return
        key, landed = key_of(namespace), memoryview(bytearray(self.nbytes))
        outcome = run(lambda: as_many(self._backend.read([key], [landed]), [key]))
        count = outcome.value[0] if outcome.error is None else 0
        if 0 < count <= len(landed):
            found = landed[:count]
            if frame.check(found, namespace, key, payload_nbytes=self._length) is None:
                self._residents.restore(bytes(frame.payload_of(found)))

    def keep(self, namespace: Namespace) -> None:
        """Blocks. Raises BackendError."""
        if not self.nbytes:
            return
        key, sealed = key_of(namespace), memoryview(bytearray(self.nbytes))
        sealed[PAGE_NBYTES : PAGE_NBYTES + self._length] = self._residents.save()
        frame.seal(sealed, namespace, key, self._length)
        self._backend.write([key], [sealed])
