"""Times a few frames through one tier: written, found, read, verified, deleted."""

from __future__ import annotations

import mmap
import os
import secrets
import statistics
import time
from collections.abc import Callable, Sequence

from kvtier_core.config.compose import OpenedTier
from kvtier_core.errors import BackendError
from kvtier_core.frames.format import seal
from kvtier_core.layouts import ChunkLayout
from kvtier_core.types import FRAME_ALIGNMENT, FRAME_HEADER_NBYTES, KEY_NBYTES, ChunkKey


def seconds(work: Callable[[], object]) -> float:
    """How long this takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def aligned(nbytes: int) -> memoryview:
    """Memory that O_DIRECT can read and write; its pages are there."""
    view = memoryview(mmap.mmap(-1, nbytes))
    view[::FRAME_ALIGNMENT] = bytes(-(-nbytes // FRAME_ALIGNMENT))
    return view


class Frames:
    """Random frames for a store tier. Use it with `with`: at its end they are deleted. Methods raise BackendError."""

    def __init__(self, tier: OpenedTier, layout: ChunkLayout, count: int):
        self.nbytes = count * layout.frame_nbytes
        self._tier = tier
        memory = aligned(self.nbytes)
        each = layout.frame_nbytes
        self._slots = [memory[begin : begin + each] for begin in range(0, self.nbytes, each)]
        self._payload_nbytes = layout.payload_nbytes
        self._keys: list[ChunkKey] = []
        self._buffers: list[memoryview] = []  # of the last read
        self._counts: Sequence[int] = ()
        for slot in self._slots:
            slot[FRAME_HEADER_NBYTES:] = os.urandom(len(slot) - FRAME_HEADER_NBYTES)
        self.rename()

    def __enter__(self) -> Frames:
        return self

    def __exit__(self, *_: object) -> None:
        self._tier.store.delete(self._keys)

    def rename(self) -> None:
        """Delete the frames, and give them other keys: what is written next replaces nothing."""
        if self._keys:
            self._tier.store.delete(self._keys)
        self._keys = [ChunkKey(secrets.token_bytes(KEY_NBYTES)) for _ in self._slots]
        for key, slot in zip(self._keys, self._slots, strict=True):
            seal(slot, self._tier.codec.namespace, key, self._payload_nbytes)

    def write(self) -> None:
        """Encode and store all frames."""
        encoded = [self._tier.codec.encode(key, slot) for key, slot in zip(self._keys, self._slots, strict=True)]
        for error in self._tier.store.write(self._keys, encoded) or ():
            if error is not None:
                raise error
        self._tier.codec.written(encoded)

    def look(self) -> None:
        """Ask for one frame."""
        if list(self._tier.store.contains(self._keys[:1])) != [True]:
            raise BackendError("a frame that was just written is not there")

    def read(self) -> None:
        """Read all frames."""
        self._tier.codec.was_read(self._buffers)
        buffers = [self._tier.codec.read_buffer(slot) for slot in self._slots]
        counts = self._tier.store.read(self._keys, buffers)
        for count in counts:
            if isinstance(count, BackendError):
                raise count
            if not count:
                raise BackendError("a frame that was just written is not there")
        self._buffers, self._counts = buffers, counts

    def verify(self) -> None:
        """Verify and decode all that was read."""
        for key, slot, buffer, count in zip(self._keys, self._slots, self._buffers, self._counts, strict=True):
            if error := self._tier.codec.decode_verified(key, buffer, count, slot):
                raise BackendError(f"a frame that was just written does not come back: {error.value}")


def copied(nbytes: int) -> Callable[[], None]:
    """A copy of so many bytes from memory to memory: what no tier can be faster than."""
    source, target = aligned(nbytes), aligned(nbytes)

    def copy() -> None:
        target[:] = source

    return copy


def median(
    work: Callable[[], object], rounds: int, before: Callable[[], object] = lambda: None
) -> tuple[float, float, float]:
    """The median, the least and the most seconds of so many rounds; what comes ``before`` each does not count."""
    taken = []
    for _ in range(rounds):
        before()
        taken.append(seconds(work))
    return statistics.median(taken), min(taken), max(taken)
