"""What a tier stores beside its chunks, as sealed frames: here the learned state of its eviction policy."""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Mapping
from typing import Any

from kvtier_core.encoding.codec import FrameCodec
from kvtier_core.frames.format import payload_of
from kvtier_core.interfaces import Backend, EvictionPolicy
from kvtier_core.layouts import frame_nbytes
from kvtier_core.stack.batches import as_many
from kvtier_core.types import FRAME_HEADER_NBYTES, KEY_NBYTES, ChunkKey
from kvtier_core.work.io_pool import Outcome, Pool, Then, run

#: A tier is this many times larger than all that is stored beside its chunks.
FITS = 64

#: Seconds between two checks for something new: engines are often killed, not closed.
_EVERY = 60.0


def derived_key(what: bytes, digest: bytes) -> ChunkKey:
    """A key that no chunk of the namespace with this digest has: digests of chunks cover tokens."""
    return ChunkKey(hashlib.blake2b(what + digest, digest_size=KEY_NBYTES).digest())


def key_of(digest: bytes) -> ChunkKey:
    """The key of the policy state of a namespace with this digest."""
    return derived_key(b"what the policy learned", digest)


class Kept(abc.ABC):
    """Saves something beside the chunks, once a minute if it has changed, and when the tier closes.

    It is not KV: it stays under the namespace of the first ``codec`` through all later epochs.
    """

    #: Bytes reserved in the tier from the start, so that saving evicts no chunk; 0 if nothing is saved.
    nbytes: int
    frames: Mapping[ChunkKey, int]  #: that may be in the store, with their lengths

    def __init__(self, backend: Backend, codec: FrameCodec):
        self._backend = backend
        self._codec = codec
        self._next: float | None = None  # when to check again
        self._busy = False

    def keep(self) -> None:
        """Save what has changed. Waits for the store; raises BackendError."""
        if self.nbytes and (changed := self._changed()) is not None:
            self._write(changed)

    def due(self, now: float) -> bool:
        """Is it time to save? Once a minute, unless the last write is still under way."""
        if not self.nbytes or self._busy:
            return False
        if self._next is None:
            self._next = now + _EVERY
        return now >= self._next

    def keep_by(self, pool: Pool, now: float, then: Then) -> None:
        """Save on a thread of the pool what has changed, if anything; ``then`` receives the outcome."""
        self._next = now + _EVERY
        changed = self._changed()
        if changed is None:
            return

        def kept(outcome: Outcome) -> None:
            self._busy = False
            if outcome.error is None:
                self._written(changed)
            then(outcome)

        self._busy = True
        pool.submit_store(lambda: self._write(changed), kept)

    @abc.abstractmethod
    def _changed(self) -> Any:
        """A snapshot of what is to be saved; None if everything is saved."""

    @abc.abstractmethod
    def _write(self, changed: Any) -> None:
        """Store it, on any thread. Raises BackendError."""

    @abc.abstractmethod
    def _written(self, changed: Any) -> None:
        """The snapshot is in the store."""

    def _put(self, key: ChunkKey, payload: bytes, nbytes: int) -> None:
        """Store a payload, padded to ``nbytes``, as a sealed frame. Raises BackendError."""
        sealed = memoryview(bytearray(frame_nbytes(nbytes)))
        sealed[FRAME_HEADER_NBYTES : FRAME_HEADER_NBYTES + len(payload)] = payload
        self._codec.seal_raw(key, sealed, nbytes)
        for error in self._backend.write([key], [sealed]) or ():
            if error is not None:
                raise error

    def _get(self, key: ChunkKey, nbytes: int) -> memoryview | None:
        """A payload of ``nbytes`` from the store, if its frame verifies. Waits for the store."""
        buffer = memoryview(bytearray(frame_nbytes(nbytes)))
        outcome = run(lambda: as_many(self._backend.read([key], [buffer]), [key]))
        count = outcome.value[0] if outcome.error is None else 0
        if not isinstance(count, int) or not 0 < count <= len(buffer):
            return None
        return payload_of(buffer) if self._codec.verify_raw(key, buffer[:count], nbytes) is None else None


class PolicyState(Kept):
    """Saves and restores the state of a policy."""

    def __init__(self, backend: Backend, policy: EvictionPolicy, codec: FrameCodec, capacity: int):
        super().__init__(backend, codec)
        self.key = key_of(codec.namespace.digest)
        self._policy = policy
        self._kept = policy.save()  # the state in the store, or that of a new policy
        self._length = len(self._kept)
        self.nbytes = frame_nbytes(self._length) if self._length else 0
        if self.nbytes * FITS > capacity or backend.shared:  # engines that share a store learn different things
            self.nbytes = 0
        self.frames = {self.key: self.nbytes} if self.nbytes else {}

    def recall(self) -> None:
        """Restore the policy from the store if the frame verifies; otherwise it starts cold. Waits for the store."""
        if self.nbytes and (found := self._get(self.key, self._length)) is not None:
            self._policy.restore(bytes(found))
            self._kept = self._policy.save()

    def _changed(self) -> bytes | None:
        saved = self._policy.save()
        return None if saved == self._kept else saved

    def _write(self, saved: bytes) -> None:
        self._put(self.key, saved, self._length)

    def _written(self, saved: bytes) -> None:
        self._kept = saved
