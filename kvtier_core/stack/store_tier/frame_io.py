"""What a store tier's threads do: encode and write frames, and read, verify and decode them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import attrs

from kvtier_core.errors import BackendError
from kvtier_core.frames.codec import FrameCodec
from kvtier_core.frames.format import FrameError
from kvtier_core.interfaces import Backend
from kvtier_core.stack.batches import as_many
from kvtier_core.stack.outcomes import FrameRead, ReadStatus
from kvtier_core.types import ChunkKey


@attrs.frozen
class FrameWrite:
    """A sealed raw frame in an arena's slot that is offered to a store."""

    key: ChunkKey
    parent: ChunkKey | None
    view: memoryview
    salt: bytes = b""  #: of the requests that the chunk belongs to


def write_frames(backend: Backend, codec: FrameCodec, offers: Sequence[FrameWrite]) -> list[int | BackendError]:
    """Encode and write frames; returns for each the bytes that it takes in the store, or why it was not stored.

    What was not stored is not left in a store that is not shared, as far as it can be deleted. Raises the errors of the
    store as a whole.
    """
    keys = [offer.key for offer in offers]
    frames = [codec.encode(offer.key, offer.view, offer.salt) for offer in offers]
    try:
        errors = backend.write(keys, frames)
    except BaseException:
        _remove_leftovers(backend, keys)
        raise
    errors = as_many([None] * len(keys) if errors is None else errors, keys)
    stored = [len(frame) if error is None else error for frame, error in zip(frames, errors, strict=True)]
    failed = [key for key, error in zip(keys, errors, strict=True) if error is not None]
    if not failed:  # a thread of the backend may still read what failed
        codec.written(frames)
    _remove_leftovers(backend, failed)
    return stored


def _remove_leftovers(backend: Backend, keys: Sequence[ChunkKey]) -> None:
    """Some may have been written before the failure, and the index does not count them."""
    if keys and not backend.shared:  # otherwise they may be frames of other engines
        with contextlib.suppress(BackendError):
            backend.delete(keys)


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
    # One key of a shared store may fail because a server of it is down; in a store of our own the frame is lost.
    failed = ReadStatus.IO_ERROR if backend.shared else ReadStatus.CORRUPT
    return [
        FrameRead(failed, str(count))
        if isinstance(count, BackendError)
        else _decode(codec, key, buffer, count, slot, salts.get(key, b""))
        for (key, slot), buffer, count in zip(wanted, buffers, counts, strict=True)
    ]


def _decode(
    codec: FrameCodec, key: ChunkKey, buffer: memoryview, count: int, slot: memoryview, salt: bytes
) -> FrameRead:
    if count == 0:
        return FrameRead(ReadStatus.MISSING)
    error = codec.decode_verified(key, buffer, count, slot, salt)
    if error is None:
        return FrameRead(ReadStatus.VERIFIED, nbytes=count)
    return unusable(error)


def unusable(error: FrameError) -> FrameRead:
    """The outcome of reading a frame that is not the one asked for."""
    return FrameRead(ReadStatus.INCOMPATIBLE if error.incompatible else ReadStatus.CORRUPT, error.value)
