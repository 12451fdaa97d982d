"""The learned state of a tier's eviction policy, stored in the tier as a sealed frame and verified when read."""

from __future__ import annotations

import hashlib

from kvtier_core.encoding.codec import FrameCodec
from kvtier_core.frames.format import payload_of
from kvtier_core.interfaces import Backend, EvictionPolicy
from kvtier_core.layouts import frame_nbytes
from kvtier_core.stack.batches import as_many
from kvtier_core.types import FRAME_HEADER_NBYTES, KEY_NBYTES, ChunkKey
from kvtier_core.work.io_pool import Outcome, Pool, Then, run

#: A tier that is not this many times larger than the state does not store it.
_FITS = 64

#: Seconds between two checks for new state: engines are often killed, not closed.
_EVERY = 60.0


def key_of(digest: bytes) -> ChunkKey:
    """The key of the policy state of a namespace with this digest. No chunk has it: digests of chunks cover tokens."""
    return ChunkKey(hashlib.blake2b(b"what the policy learned" + digest, digest_size=KEY_NBYTES).digest())


class PolicyState:
    """Saves and restores the state. Its bytes are reserved from the start, so that storing it evicts no chunk.

    The state is not KV: it stays under the namespace of the first ``codec`` through all later epochs.
    """

    def __init__(self, backend: Backend, policy: EvictionPolicy, codec: FrameCodec, capacity: int):
        self.key = key_of(codec.namespace.digest)
        self._backend = backend
        self._policy = policy
        self._codec = codec
        self._kept = policy.save()  # the state in the store, or that of a new policy
        self._length = len(self._kept)
        self._next: float | None = None  # when to check again
        self._busy = False
        #: Bytes of the frame in the store; 0 if nothing is stored.
        self.nbytes = frame_nbytes(self._length) if self._length else 0
        if self.nbytes * _FITS > capacity or backend.shared:  # engines that share a store learn different things
            self.nbytes = 0

    def recall(self) -> None:
        """Restore the policy from the store if the frame verifies; otherwise it starts cold. Waits for the store."""
        if not self.nbytes:
            return
        buffer = memoryview(bytearray(self.nbytes))
        outcome = run(lambda: as_many(self._backend.read([self.key], [buffer]), [self.key]))
        count = outcome.value[0] if outcome.error is None else 0
        if 0 < count <= len(buffer):
            found = buffer[:count]
            if self._codec.verify_raw(self.key, found, self._length) is None:
                self._policy.restore(bytes(payload_of(found)))
                self._kept = self._policy.save()

    def keep(self) -> None:
        """Store the current state. Waits for the store; raises BackendError."""
        if self.nbytes:
            self._write(self._policy.save())

    def due(self, now: float) -> bool:
        """Is it time to store new state? Once a minute, unless the last write is still under way."""
        if not self.nbytes or self._busy:
            return False
        if self._next is None:
            self._next = now + _EVERY
        return now >= self._next

    def keep_by(self, pool: Pool, now: float, then: Then) -> None:
        """Store the state on a thread of the pool if it has changed; ``then`` receives the outcome."""
        self._next = now + _EVERY
        saved = self._policy.save()
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
        sealed[FRAME_HEADER_NBYTES : FRAME_HEADER_NBYTES + self._length] = saved
        self._codec.seal_raw(self.key, sealed, self._length)
        self._backend.write([self.key], [sealed])
