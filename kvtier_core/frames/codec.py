"""Encodes frames that are written to a store tier, and verifies and decodes those that are read from it."""

from __future__ import annotations

import contextlib
from typing import Self

from kvtier_core.errors import BackendError, ContractError
from kvtier_core.frames.checksum import crc32
from kvtier_core.frames.format import FrameError, header_of, payload_of, read_header, seal, verify
from kvtier_core.frames.identity import DECODED_LOSSY, RAW, CodecIdentity, identity_of
from kvtier_core.interfaces import OpenContext, Serializer, SerializerConfig
from kvtier_core.types import FRAME_ALIGNMENT, ChunkKey, ChunkLayout, Namespace


class FrameCodec:
    """The codec of one tier: its serializer if it has one, and the identity that goes into every frame.

    A tier opens one serializer. All of the tier's threads use it at the same time; this class has no other state.
    Without a serializer nothing is copied: a frame is stored from the arena's slot and read into one.
    """

    def __init__(
        self,
        namespace: Namespace,
        layout: ChunkLayout,
        serializer: Serializer | None = None,
        identity: CodecIdentity = RAW,
        *,
        shared: bool = False,
    ):
        """``shared``: the store has other users, who may have another codec; neither finds the frames of the other."""
        if (serializer is None) != (identity == RAW):
            raise ContractError(f"{identity} is not the identity of {serializer}")
        apart = shared and identity != RAW
        self.namespace = namespace.narrowed("codec", identity.digest.hex()) if apart else namespace  #: of stored frames
        self.identity = identity
        self._shared = shared
        self._arena_namespace = namespace
        self._layout = layout
        self._serializer = serializer
        #: Bytes of the longest frame that the tier writes.
        self.max_frame_nbytes = layout.frame_nbytes if serializer is None else _frame_nbytes(serializer.bound(layout))

    @classmethod
    def open(cls, config: SerializerConfig, ctx: OpenContext) -> Self:
        """Open the serializer of a tier. Raises ConfigError if its codec cannot be named."""
        serializer = config.open(ctx)
        return cls(ctx.namespace, ctx.layout, serializer, RAW if serializer is None else identity_of(config))

    @property
    def lossless(self) -> bool:
        """False if a decoded payload may differ from the one that was encoded."""
        return self.identity.lossless

    def with_namespace(self, namespace: Namespace) -> Self:
        """The same codec, with the same serializer, for frames of another namespace."""
        return type(self)(namespace, self._layout, self._serializer, self.identity, shared=self._shared)

    def encode(self, key: ChunkKey, sealed: memoryview) -> memoryview:
        """The frame to store for a sealed raw frame in a slot. Its length is a multiple of `FRAME_ALIGNMENT`.

        Raises ContractError if the payload has been through a lossy codec: it must not be stored as if it were exact.
        Raises BackendError if a lossy serializer cannot decode what it encoded.
        """
        header = read_header(sealed)
        if isinstance(header, FrameError):
            raise ContractError(f"a slot that is to be written is not sealed: {header.value}")
        if header.codec != RAW:
            raise ContractError(f"a slot that is to be written holds a frame that is {header.codec}")
        if self._serializer is None:
            return sealed
        encoded = memoryview(bytearray(self.max_frame_nbytes))
        nbytes = self._serializer.encode(payload_of(sealed), encoded[FRAME_ALIGNMENT:])
        if self.identity.lossless:
            decoded_checksum = header.payload_checksum
        else:
            decoded_checksum = self._decoded_checksum(encoded[FRAME_ALIGNMENT : FRAME_ALIGNMENT + nbytes])
        seal(encoded, self.namespace, key, nbytes, codec=self.identity, decoded_checksum=decoded_checksum)
        return encoded[: _frame_nbytes(nbytes)]

    def read_buffer(self, slot: memoryview) -> memoryview:
        """The buffer that a frame is read into: the slot itself if nothing needs to be decoded."""
        return slot if self._serializer is None else memoryview(bytearray(self.max_frame_nbytes))

    def decode_verified(self, key: ChunkKey, buffer: memoryview, count: int, slot: memoryview) -> FrameError | None:
        """Verify the frame of ``key`` in the first ``count`` bytes of ``buffer``, and decode it into ``slot``.

        Returns None if the frame is as it was written; ``slot`` then holds a sealed raw frame. Otherwise the content of
        ``slot`` is undefined. Raises ContractError if a read of ``buffer`` cannot have returned ``count``.
        """
        if not 0 < count <= len(buffer):
            raise ContractError(f"read returned {count} bytes for a view of {len(buffer)}")
        frame = buffer[:count]
        nbytes = self._layout.payload_nbytes
        if self._serializer is None:
            return verify(frame, self.namespace, key, payload_nbytes=nbytes)
        if error := verify(frame, self.namespace, key, codec=self.identity):
            return error
        payload = slot[FRAME_ALIGNMENT : FRAME_ALIGNMENT + nbytes]
        decoded = None
        with contextlib.suppress(Exception):  # whatever a plugin raises must not fail the other frames of the batch
            decoded = self._serializer.decode(payload_of(frame), payload)
        if decoded is None:
            return FrameError.UNDECODABLE
        checksum = crc32(payload)
        if decoded != nbytes or header_of(frame).decoded_checksum != checksum:
            return FrameError.DECODED
        codec = RAW if self.identity.lossless else DECODED_LOSSY
        seal(slot, self._arena_namespace, key, nbytes, codec=codec, payload_checksum=checksum)
        return None

    def _decoded_checksum(self, encoded: memoryview) -> int:
        """The checksum of a payload that a lossy serializer has encoded and decoded."""
        nbytes = self._layout.payload_nbytes
        decoded = memoryview(bytearray(nbytes))
        if self._serializer.decode(encoded, decoded) != nbytes:
            raise BackendError(f"{self.identity} decodes what it encoded to another length")
        return crc32(decoded)


def _frame_nbytes(payload_nbytes: int) -> int:
    return FRAME_ALIGNMENT + -(-payload_nbytes // FRAME_ALIGNMENT) * FRAME_ALIGNMENT
