"""What a tier's threads do: frames through the door and into its backend, and back, verified."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import attrs

from kvtier_core.errors import BackendError
from kvtier_core.frames.codec import FrameCodec
from kvtier_core.frames.format import Damage
from kvtier_core.interfaces import Backend
from kvtier_core.stack.batches import as_many
from kvtier_core.types import ChunkKey

#: Of one key's read: True, False for a miss, or why its frame can never be served.
Verdict = bool | Damage | BackendError


@attrs.frozen
class FrameWrite:
    """A sealed frame that lies in an arena's slot."""

    key: ChunkKey
    parent: ChunkKey | None
    view: memoryview


def write_frames(backend: Backend, codec: FrameCodec, offers: Sequence[FrameWrite]) -> list[int]:
    """The bytes that each frame takes in the store."""
    keys = [offer.key for offer in offers]
    frames = [codec.encode(offer.key, offer.view) for offer in offers]
    try:
        backend.write(keys, frames)
    except BaseException:
        # Some may have been written before the failure; nothing may lie in the store unaccounted.
        with contextlib.suppress(BackendError):
            backend.delete(keys)
        raise
    return [len(encoded) for encoded in frames]


def read_frames(backend: Backend, codec: FrameCodec, wanted: Sequence[tuple[ChunkKey, memoryview]]) -> list[Verdict]:
    """Fill slots; what became of each."""
    keys = [key for key, _ in wanted]
    landings = [codec.landing(slot) for _, slot in wanted]
    counts = as_many(backend.read(keys, landings), keys)
    return [
        _verdict(codec, key, landed, count, slot)
        for (key, slot), landed, count in zip(wanted, landings, counts, strict=True)
    ]


def _verdict(
    codec: FrameCodec, key: ChunkKey, landed: memoryview, count: int | BackendError, slot: memoryview
) -> Verdict:
    if isinstance(count, BackendError):
        return count
    return bool(count) and (codec.check(key, landed, count, slot) or True)
