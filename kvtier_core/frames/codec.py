"""What happens to a frame at a tier's door: encoded going down; checked and decoded coming up."""

from __future__ import annotations

from kvtier_core.errors import BackendError, ContractError
from kvtier_core.frames import format as frame
from kvtier_core.frames.format import Damage
from kvtier_core.interfaces import Serializer
from kvtier_core.types import FRAME_ALIGNMENT, ChunkKey, ChunkLayout, Namespace


class FrameCodec:
    """Used on a tier's threads; it has no state. Without a serializer nothing is copied."""

    def __init__(self, namespace: Namespace, layout: ChunkLayout, serializer: Serializer | None):
        self.namespace = namespace
        self._layout = layout
        self._serializer = serializer
        #: the most bytes that a frame takes in the store
        self.bound = layout.frame_nbytes if serializer is None else _whole_pages(serializer.bound(layout))

    def of(self, namespace: Namespace) -> FrameCodec:
        """The same door for another namespace."""
        return type(self)(namespace, self._layout, self._serializer)

    def encode(self, key: ChunkKey, sealed: memoryview) -> memoryview:
        """The frame as the store keeps it; whole pages, so that it can be written directly."""
        if self._serializer is None:
            return sealed
        encoded = memoryview(bytearray(self.bound))
        nbytes = self._serializer.encode(frame.payload_of(sealed), encoded[FRAME_ALIGNMENT:])
        frame.seal(encoded, self.namespace, key, nbytes, self._serializer.code)
        return encoded[: _whole_pages(nbytes)]

    def landing(self, slot: memoryview) -> memoryview:
        """Where a frame from the store is read to: the slot itself if nothing need be decoded."""
        return slot if self._serializer is None else memoryview(bytearray(self.bound))

    def check(self, key: ChunkKey, landed: memoryview, count: int, slot: memoryview) -> Damage | None:
        """None if ``count`` bytes of ``landed`` are this key's frame; then ``slot`` holds it, sealed and raw."""
        if not 0 < count <= len(landed):
            raise ContractError(f"read returned {count} bytes for a view of {len(landed)}")
        nbytes = self._layout.payload_nbytes
        if self._serializer is None:
            return frame.check(landed[:count], self.namespace, key, payload_nbytes=nbytes)
        damage = frame.check(landed[:count], self.namespace, key, codec=self._serializer.code)
        if damage is not None:
            return damage
        try:
            decoded = self._serializer.decode(
                frame.payload_of(landed[:count]), slot[FRAME_ALIGNMENT : FRAME_ALIGNMENT + nbytes]
            )
        except BackendError:
            return Damage.CODEC
        if decoded != nbytes:
            return Damage.LENGTH
        frame.seal(slot, self.namespace, key, nbytes)
        return None


def _whole_pages(payload_nbytes: int) -> int:
    return FRAME_ALIGNMENT + -(-payload_nbytes // FRAME_ALIGNMENT) * FRAME_ALIGNMENT
