"""Lets a tier of peers read the frames of a private store, on its own threads, between the calls of the store's tier.

No two simultaneous calls of a `Backend` may name the same key. So a call waits while another call names one of its
keys: the tier waits on its I/O threads, for one frame at most.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from kvtier_core.encoding.codec import FrameCodec
from kvtier_core.errors import BackendError
from kvtier_core.interfaces import Backend, KeyChanges, StoredFrames
from kvtier_core.relays.relay import Relay
from kvtier_core.types import ChunkKey
from kvtier_core.work.buffers import Buffers
from kvtier_core.work.io_pool import run

#: Number of frames read for peers simultaneously: they take drive time that the tier needs.
_AT_ONCE = 4
#: Memory for frames that were read and are being sent, perhaps over slow links; and the least number of such frames.
_SENDING_NBYTES, _SENDING = 256 << 20, 2 * _AT_ONCE
#: Seconds that a further read waits: a reader that waits longer for an answer may conclude that this node hangs.
_TURN = 0.2
#: Seconds for which peers read nothing after an error of the store as a whole.
_REST = 1.0
#: Number of changes that are remembered; a reader that has missed more receives all keys.
_REMEMBERED = 1 << 14


class ShownStore(Relay, StoredFrames):
    """The tier calls the methods of `Backend`, and peers those of `StoredFrames`."""

    def __init__(self, inner: Backend, codec: FrameCodec):
        super().__init__(inner)
        self._codec = codec
        self._buffers = Buffers(codec.max_frame_nbytes)
        self._turns = threading.Semaphore(_AT_ONCE)
        self._places = threading.Semaphore(max(_SENDING, _SENDING_NBYTES // codec.max_frame_nbytes))  # for buffers
        self._changed = threading.Condition()  # guards all below
        self._named: set[ChunkKey] = set()  # by calls under way
        self._shown: dict[ChunkKey, None] = {}  # keys of frames believed to be whole
        self._position = 1
        self._recent: deque[tuple[ChunkKey, bool]] = deque(maxlen=_REMEMBERED)  # keys, and whether they have come
        self._rests_until = 0.0
        self._closed = False

    # -- the tier ----------------------------------------------------------------------------------

    def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> Sequence[int | BackendError]:
        with self._naming(keys):
            return super().read(keys, into)

    def write(self, keys: Sequence[ChunkKey], frames: Sequence[memoryview]) -> Sequence[BackendError | None] | None:
        with self._naming(keys):
            self._hide(keys)
            errors = super().write(keys, frames)
            outcomes = [None] * len(keys) if errors is None else errors
            self._show([key for key, error in zip(keys, outcomes, strict=True) if error is None])
            return errors

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        with self._naming(keys):
            self._hide(keys)
            super().delete(keys)

    def quarantine(self, keys: Sequence[ChunkKey]) -> None:
        with self._naming(keys):
            self._hide(keys)
            super().quarantine(keys)

    def erase(self, keys: Sequence[ChunkKey]) -> None:
        with self._naming(keys):
            self._hide(keys)
            super().erase(keys)

    def scan(self) -> Iterator[tuple[ChunkKey, int]]:
        for key, nbytes in super().scan():
            self._show([key])
            yield key, nbytes

    def facts(self) -> Mapping[str, str]:
        return {**super().facts(), "shown to peers": "yes"}

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._named)
        super().close()

    # -- peers -------------------------------------------------------------------------------------

    def changes(self, position: int) -> KeyChanges:
        with self._changed:
            missed = self._position - position
            if not position or missed > len(self._recent):
                return KeyChanges(list(self._shown), (), self._position, is_complete=True)
            recent = list(islice(reversed(self._recent), missed))
            position = self._position
        come, gone = set[ChunkKey](), set[ChunkKey]()
        for key, came in reversed(recent):
            here, away = (come, gone) if came else (gone, come)
            away.discard(key) if key in away else here.add(key)
        return KeyChanges(come, gone, position, is_complete=False)

    @contextlib.contextmanager
    def frame(self, key: ChunkKey) -> Iterator[memoryview | None]:
        ends = time.monotonic() + _TURN
        if key not in self._shown or not self._places.acquire(timeout=_TURN):
            yield None
            return
        buffer = self._buffers.take()
        try:
            frame = None
            if self._turns.acquire(timeout=max(0.0, ends - time.monotonic())):
                try:
                    frame = self._read_verified(key, buffer)
                finally:
                    self._turns.release()
            yield frame
        finally:
            self._buffers.give_back([buffer])
            self._places.release()

    def _read_verified(self, key: ChunkKey, buffer: memoryview) -> memoryview | None:
        with self._naming([key]):
            if self._closed or key not in self._shown or time.monotonic() < self._rests_until:
                return None
            outcome = run(lambda: super(ShownStore, self).read([key], [buffer])[0])
            if outcome.error is not None:
                self._rests_until = time.monotonic() + _REST
                return None
            nbytes = outcome.value
            is_read = isinstance(nbytes, int) and 0 < nbytes <= len(buffer)
            if not is_read or self._codec.verify(key, buffer[:nbytes]) is not None:
                self._hide([key])
                return None
            return buffer[:nbytes]

    # -- both --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _naming(self, keys: Sequence[ChunkKey]) -> Iterator[None]:
        """A context in which no other call names these keys."""
        with self._changed:
            self._changed.wait_for(lambda: self._named.isdisjoint(keys))
            self._named.update(keys)
        try:
            yield
        finally:
            with self._changed:
                self._named.difference_update(keys)
                self._changed.notify_all()

    def _show(self, keys: Sequence[ChunkKey]) -> None:
        with self._changed:
            for key in keys:
                if key not in self._shown:
                    self._shown[key] = None
                    self._note(key, came=True)

    def _hide(self, keys: Sequence[ChunkKey]) -> None:
        with self._changed:
            for key in keys:
                if key in self._shown:
                    del self._shown[key]
                    self._note(key, came=False)

    def _note(self, key: ChunkKey, *, came: bool) -> None:
        self._recent.append((key, came))
        self._position += 1
