"""What a store tier's threads do: encode and write frames, and read, verify and decode them."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Mapping, Sequence

import attrs

from kvtier_core.errors import BackendError
from kvtier_core.frames.codec import FrameCodec
from kvtier_core.interfaces import Backend
from kvtier_core.stack.batches import as_many
from kvtier_core.types import ChunkKey, EventKind


class ReadStatus(enum.Enum):
    """What became of the read of one frame."""

    VERIFIED = "verified"  #: the slot holds the chunk, sealed and raw
    MISSING = "missing"  #: the store has no such frame
    CORRUPT = "corrupt"  #: the frame is damaged, or can never be read
    INCOMPATIBLE = "incompatible"  #: the frame may be whole, and this tier's codec cannot serve it

    @property
    def event(self) -> EventKind | None:
        """The event that reports this outcome; None if the frame is served."""
        return None if self is ReadStatus.VERIFIED else EventKind(self.value)


@attrs.frozen
class FrameRead:
    """The outcome of one read, and the reason if the frame is not served."""

    status: ReadStatus
    why: str = ""


@attrs.frozen
class FrameWrite:
    """A sealed raw frame in an arena's slot that is offered to a store."""

    key: ChunkKey
    parent: ChunkKey | None
    view: memoryview
    salt: bytes = b""  #: of the requests that the chunk belongs to


def write_frames(backend: Backend, codec: FrameCodec, offers: Sequence[FrameWrite]) -> list[int]:
    """Encode and write frames; returns the bytes that each takes in the store.

    If the write fails, none of the keys is left in a store that is not shared, as far as they can be deleted.
    """
    keys = [offer.key for offer in offers]
    frames = [codec.encode(offer.key, offer.view, offer.salt) for offer in offers]
    try:
        backend.write(keys, frames)
    except BaseException:
        # Some may have been written before the failure, and the index does not count them.
        if not backend.shared:  # otherwise they may be frames of other engines
            with contextlib.suppress(BackendError):
                backend.delete(keys)
        raise
    return [len(encoded) for encoded in frames]


def read_frames(
    backend: Backend,
    codec: FrameCodec,
    wanted: Sequence[tuple[ChunkKey, memoryview]],
    salts: Mapping[ChunkKey, bytes],
) -> list[FrameRead]:
    """Read frames, verify them and decode them into slots. Raises the errors of the store as a whole.

    ``salts`` has those of the chunks whose requests have one.
    """
    keys = [key for key, _ in wanted]
    buffers = [codec.read_buffer(slot) for _, slot in wanted]
    counts = as_many(backend.read(keys, buffers), keys)
    return [
        _decode(codec, key, buffer, count, slot, salts.get(key, b""))
        for (key, slot), buffer, count in zip(wanted, buffers, counts, strict=True)
    ]


def _decode(
    codec: FrameCodec, key: ChunkKey, buffer: memoryview, count: int | BackendError, slot: memoryview, salt: bytes
) -> FrameRead:
    if isinstance(count, BackendError):
        return FrameRead(ReadStatus.CORRUPT, str(count))
    if count == 0:
        return FrameRead(ReadStatus.MISSING)
    error = codec.decode_verified(key, buffer, count, slot, salt)
    if error is None:
        return FrameRead(ReadStatus.VERIFIED)
    return FrameRead(ReadStatus.INCOMPATIBLE if error.incompatible else ReadStatus.CORRUPT, error.value)
