"""Encodes the frames that a store tier writes, and verifies and decodes those that it reads."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Self

from kvtier_core.errors import BackendError, ContractError
from kvtier_core.frames.checksum import crc32, join
from kvtier_core.frames.format import (
    FrameError,
    checksums_of,
    expected_header,
    header_of,
    payload_of,
    read_header,
    seal,
    seal_part,
    shard_checksums_of,
    verify,
)
from kvtier_core.frames.identity import (
    RAW,
    CodecIdentity,
    codec_of_slots,
    lossy,
    namespace_of_ranks,
    namespace_of_slots,
)
from kvtier_core.interfaces import Serializer
from kvtier_core.layouts import ChunkLayout, Part, frame_nbytes
from kvtier_core.transfer.regroup import Regrouping
from kvtier_core.types import FRAME_HEADER_NBYTES, ChunkKey, Namespace
from kvtier_core.work.buffers import Buffers

if TYPE_CHECKING:  # its library is needed only for a tier with a key
    from kvtier_core.encoding.keyed_seal import KeyedSeal


class FrameCodec:
    """The codec of one tier: its serializer and keyed seal, if any, and their identities in every frame.

    All of the tier's threads use it at the same time. Without a serializer, frames are read into the arena's slots and
    written from there; a keyed seal needs a copy, because others may read the slot.
    """

    def __init__(
        self,
        namespace: Namespace,
        layout: ChunkLayout,
        serializer: Serializer | None = None,
        identity: CodecIdentity | None = None,
        *,
        shared: bool = False,
        keyed_seal: KeyedSeal | None = None,
    ):
        """``identity`` is that of the serializer. In a ``shared`` store each codec has its own namespace."""
        if (serializer is None) != (identity is None):
            raise ContractError(f"{identity} is not the identity of {serializer}")
        self._of_slots = codec_of_slots(layout)
        self.identity = identity or self._of_slots
        self._arena_namespace = namespace_of_slots(namespace, layout)
        self.namespace = self._arena_namespace  #: of stored frames
        if shared and serializer is not None:
            self.namespace = self.namespace.narrowed("codec", self.identity.digest.hex())
        #: For frames of another number of ranks; None if the tier's namespace has no such frames.
        self._regrouping: Regrouping | None = None
        if layout.any_ranks and serializer is None and keyed_seal is None and not layout.packed:
            self._regrouping = Regrouping(layout)
        else:
            self.namespace = namespace_of_ranks(self.namespace, layout)
        if keyed_seal is not None:  # frames written before a new key have names that nothing looks up
            self.namespace = self.namespace.narrowed("seal", str(keyed_seal.identity))
        self.keyed_seal = keyed_seal  #: None if frames have none
        self._shared = shared
        self.layout = layout  #: of the slots
        self._serializer = serializer
        #: Bytes of the longest frame that the tier writes.
        self.max_frame_nbytes = layout.frame_nbytes if serializer is None else frame_nbytes(serializer.bound(layout))
        self._buffers = Buffers(self.max_frame_nbytes)
        self._decoded = Buffers(layout.payload_nbytes)

    @property
    def is_raw(self) -> bool:
        """Are frames stored exactly as in a slot, header and payload?"""
        return self._serializer is None and self.keyed_seal is None

    @property
    def regroups(self) -> bool:
        """May frames of engines with another number of ranks be rearranged in the slot?"""
        return self._regrouping is not None and self._regrouping.divides

    def with_namespace(self, namespace: Namespace) -> Self:
        """The same codec, with the same serializer, for frames of another namespace."""
        serializer, keyed_seal = self._serializer, self.keyed_seal
        identity = None if serializer is None else self.identity
        return type(self)(namespace, self.layout, serializer, identity, shared=self._shared, keyed_seal=keyed_seal)

    def encode(self, key: ChunkKey, sealed: memoryview, salt: bytes = b"") -> memoryview:
        """The frame to store for a sealed frame in a slot. Its length is a multiple of `FRAME_ALIGNMENT`.

        ``salt`` is that of the chunk's requests; an encrypted frame cannot be read without it.

        Raises ContractError if the payload passed through a lossy codec: it must not be stored as exact. Raises
        BackendError if a lossy serializer cannot decode its own encoding.
        """
        header = read_header(sealed)
        if isinstance(header, FrameError):
            raise ContractError(f"a slot to be written is not sealed: {header.value}")
        if header.codec != self._of_slots:
            raise ContractError(f"a slot to be written holds a frame of codec {header.codec}")
        if self.is_raw:
            return sealed[: frame_nbytes(header.payload_nbytes)]
        frame, payload, serializer = self._buffers.take(), payload_of(sealed), self._serializer
        nbytes, decoded = len(payload), header.payload_checksum
        if serializer is not None:
            nbytes = serializer.encode(payload, frame[FRAME_HEADER_NBYTES:])
            if not self.identity.lossless:
                encoded = frame[FRAME_HEADER_NBYTES : FRAME_HEADER_NBYTES + nbytes]
                decoded = self._decoded_checksum(serializer, encoded, len(payload))
        name, stored = self._name(key), header.payload_checksum if serializer is None else None
        seal(
            frame, self.namespace, name, nbytes, codec=self.identity, payload_checksum=stored, decoded_checksum=decoded
        )
        if self.keyed_seal is not None:  # it copies a payload that is not encoded
            self.keyed_seal.close(frame, payload if serializer is None else None, salt=salt)
        return _padded(frame, nbytes)

    def written(self, frames: list[memoryview]) -> None:
        """Take back frames of `encode` that were stored and are no longer read: their memory is reused."""
        if not self.is_raw:
            self._buffers.give_back(frames)

    def seal_raw(self, key: ChunkKey, frame: memoryview, nbytes: int) -> None:
        """Seal a payload of ``nbytes`` that is in place and is not KV but a policy's state."""
        seal(frame, self.namespace, self._name(key), nbytes)
        if self.keyed_seal is not None:
            self.keyed_seal.close(frame)

    def verify_raw(self, key: ChunkKey, frame: memoryview, nbytes: int) -> FrameError | None:
        """Verify, and decrypt in place, a frame of `seal_raw`."""
        return self._verify(key, frame, RAW, nbytes, b"")

    def verify(self, key: ChunkKey, frame: memoryview, salt: bytes = b"") -> FrameError | None:
        """Verify a stored frame, and decrypt it in place."""
        nbytes = self.layout.part_of(key).payload_nbytes if self._serializer is None else None
        return self._verify(key, frame, self.identity, nbytes, salt)

    def read_buffer(self, slot: memoryview) -> memoryview:
        """The buffer that a frame is read into: the slot itself if nothing is decoded. Call `was_read` afterwards."""
        return slot if self._serializer is None else self._buffers.take()

    def was_read(self, buffers: list[memoryview]) -> None:
        """Take back buffers of `read_buffer` that are no longer used: their memory is reused."""
        if self._serializer is not None:
            self._buffers.give_back(buffers)

    def decode_verified(
        self, key: ChunkKey, buffer: memoryview, count: int, slot: memoryview, salt: bytes = b""
    ) -> FrameError | None:
        """Verify the frame of ``key`` in the first ``count`` bytes of ``buffer``, and decode it into ``slot``.

        Returns None if the frame is as it was written; ``slot`` then holds a sealed frame. Otherwise the content of
        ``slot`` is undefined. Raises ContractError if ``count`` is not a possible result of reading into ``buffer``.
        """
        if not 0 < count <= len(buffer):
            raise ContractError(f"read returned {count} bytes for a view of {len(buffer)}")
        frame = buffer[:count]
        part = self.layout.part_of(key)
        nbytes = part.payload_nbytes
        serializer = self._serializer
        if error := self.verify(key, frame, salt):
            return error
        if serializer is None:
            if self.keyed_seal is not None:  # other tiers store the slot as it is, under the arena's namespace
                known = (header_of(frame).payload_checksum,) if len(part.shards) == 1 else ()
                seal_part(slot, self._arena_namespace, key, part, known, codec=self._of_slots)
            return self._regroup(key, frame, slot, part)
        payload = slot[FRAME_HEADER_NBYTES : FRAME_HEADER_NBYTES + nbytes]
        decoded = None
        with contextlib.suppress(Exception):  # an exception of a plugin must not fail the other frames of the batch
            decoded = serializer.decode(payload_of(frame), payload)
        if decoded is None:
            return FrameError.UNDECODABLE
        checksums = checksums_of(slot, part)
        checksum = join(checksums, [shard.nbytes for shard in part.shards])
        if decoded != nbytes or header_of(frame).decoded_checksum != checksum:
            return FrameError.DECODED
        codec = self._of_slots if self.identity.lossless else lossy(self._of_slots)
        seal_part(slot, self._arena_namespace, key, part, checksums, codec=codec)
        return None

    def _regroup(self, key: ChunkKey, frame: memoryview, slot: memoryview, part: Part) -> FrameError | None:
        """Rearrange a verified frame in its slot if an engine with another number of ranks wrote it."""
        if self._regrouping is None:
            return None
        checksums = shard_checksums_of(frame)
        shards = len(checksums) or 1
        if shards == len(part.shards):
            return None
        found = self._regrouping.part_with(shards)
        if found is None or (checksums and checksums_of(frame, found) != list(checksums)):
            return FrameError.RANKS
        self._regrouping.rearrange(slot, found)
        seal_part(slot, self._arena_namespace, key, part, codec=self._of_slots)
        return None

    def _verify(
        self, key: ChunkKey, frame: memoryview, codec: CodecIdentity, nbytes: int | None, salt: bytes
    ) -> FrameError | None:
        if self.keyed_seal is None:
            return verify(frame, self.namespace, key, codec=codec, payload_nbytes=nbytes)
        digest, name, keyed = self.namespace.digest, self._name(key), self.keyed_seal.identity
        header = expected_header(frame, digest, name, codec=codec, payload_nbytes=nbytes, keyed=keyed)
        return header if isinstance(header, FrameError) else self.keyed_seal.open(frame, salt=salt)

    def _name(self, key: ChunkKey) -> ChunkKey:
        """The name that replaces a key in the header of a stored frame."""
        return key if self.keyed_seal is None else self.keyed_seal.names([key])[0]

    def _decoded_checksum(self, serializer: Serializer, encoded: memoryview, nbytes: int) -> int:
        """The checksum of a payload of ``nbytes`` that a lossy serializer encoded and decoded."""
        buffer = self._decoded.take()
        if serializer.decode(encoded, buffer[:nbytes]) != nbytes:
            raise BackendError(f"{self.identity} decodes its own output to the wrong length")
        checksum = crc32(buffer[:nbytes])
        self._decoded.give_back([buffer])
        return checksum


def _padded(buffer: memoryview, payload_nbytes: int) -> memoryview:
    """The frame in a buffer, padded with zeros, so that no bytes of an earlier frame are stored."""
    frame = buffer[: frame_nbytes(payload_nbytes)]
    frame[FRAME_HEADER_NBYTES + payload_nbytes :] = bytes(len(frame) - FRAME_HEADER_NBYTES - payload_nbytes)
    return frame
