"""Times a few frames through one tier: written, found, read, verified, deleted."""

from __future__ import annotations

import mmap
import os
import secrets
import statistics
import time
from collections.abc import Callable

from kvtier_core.config.open import OpenedTier
from kvtier_core.errors import BackendError
from kvtier_core.frames.format import seal
from kvtier_core.interfaces import Backend
from kvtier_core.layouts import ChunkLayout
from kvtier_core.types import FRAME_ALIGNMENT, FRAME_HEADER_NBYTES, KEY_NBYTES, ChunkKey


def seconds(work: Callable[[], object]) -> float:
    """How long this takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def aligned(nbytes: int) -> memoryview:
    """Memory that O_DIRECT can read and write; its pages are allocated."""
    view = memoryview(mmap.mmap(-1, nbytes))
    view[::FRAME_ALIGNMENT] = bytes(-(-nbytes // FRAME_ALIGNMENT))
    return view


class Frames:
    """Random frames for a store tier. Use it with `with`: it deletes them at its end. Methods raise BackendError."""

    def __init__(self, tier: OpenedTier, layout: ChunkLayout, count: int):
        if not isinstance(tier.store, Backend):
            raise BackendError(f"{tier.tier.name} is not a store tier")
        self.nbytes = count * layout.frame_nbytes
        self._store, self._codec = tier.store, tier.codec
        memory = aligned(self.nbytes)
        each = layout.frame_nbytes
        self._slots = [memory[begin : begin + each] for begin in range(0, self.nbytes, each)]
        self._payload_nbytes = layout.payload_nbytes
        self._keys: list[ChunkKey] = []
        self._buffers: list[memoryview] = []  # of the last read
        self._counts: list[int] = []
        for slot in self._slots:
            slot[FRAME_HEADER_NBYTES:] = os.urandom(len(slot) - FRAME_HEADER_NBYTES)
        self.rename()

    def __enter__(self) -> Frames:
        return self

    def __exit__(self, *_: object) -> None:
        self._store.delete(self._keys)

    def rename(self) -> None:
        """Delete the frames, and give them other keys: what is written next replaces nothing."""
        if self._keys:
            self._store.delete(self._keys)
        self._keys = [ChunkKey(secrets.token_bytes(KEY_NBYTES)) for _ in self._slots]
        for key, slot in zip(self._keys, self._slots, strict=True):
            seal(slot, self._codec.namespace, key, self._payload_nbytes)

    def write(self) -> None:
        """Encode and store all frames."""
        encoded = [self._codec.encode(key, slot) for key, slot in zip(self._keys, self._slots, strict=True)]
        for error in self._store.write(self._keys, encoded) or ():
            if error is not None:
                raise error
        self._codec.written(encoded)

    def look(self) -> None:
        """Ask for one frame."""
        if list(self._store.contains(self._keys[:1])) != [True]:
            raise BackendError("a frame that was just written is missing")

    def read(self) -> None:
        """Read all frames."""
        self._codec.was_read(self._buffers)
        buffers = [self._codec.read_buffer(slot) for slot in self._slots]
        counts = []
        for count in self._store.read(self._keys, buffers):
            if isinstance(count, BackendError):
                raise count
            if not count:
                raise BackendError("a frame that was just written is missing")
            counts.append(count)
        self._buffers, self._counts = buffers, counts

    def verify(self) -> None:
        """Verify and decode all that was read."""
        for key, slot, buffer, count in zip(self._keys, self._slots, self._buffers, self._counts, strict=True):
            if error := self._codec.decode_verified(key, buffer, count, slot):
                raise BackendError(f"cannot read back a frame that was just written: {error.value}")


def copied(nbytes: int) -> Callable[[], None]:
    """A copy of ``nbytes`` bytes from memory to memory: no tier can be faster."""
    source, target = aligned(nbytes), aligned(nbytes)

    def copy() -> None:
        target[:] = source

    return copy


def median(
    work: Callable[[], object], rounds: int, before: Callable[[], object] = lambda: None
) -> tuple[float, float, float]:
    """The median, least and most seconds of these rounds; ``before`` runs before each round and is not timed."""
    taken = []
    for _ in range(rounds):
        before()
        taken.append(seconds(work))
    return statistics.median(taken), min(taken), max(taken)
