"""The frame: a chunk as it is stored outside the engine. A header of 4 KiB, then the payload.

The header carries three CRC-32 checksums: of the stored payload, of the payload once it is decoded, and of the header's
own fields. Without a serializer the first two are the same number. CRC-32 is used because the checksum of a payload can
be computed from those of the ranks' shards, and because zlib has it where the compiled extension could not be built.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable
from typing import NamedTuple

from kvtier_core.frames.checksum import crc32
from kvtier_core.frames.identity import DIGEST_NBYTES, MAX_TYPE_NBYTES, RAW, CodecIdentity
from kvtier_core.types import FRAME_ALIGNMENT, KEY_NBYTES, ChunkKey, Namespace

FORMAT_VERSION = 2

_MAGIC = b"kvtier\r\n"
#: Magic, format version, flags, payload bytes, namespace digest, key, codec type and digest, checksums of the stored
#: and of the decoded payload; then the checksum of these fields. Magic and version keep their place in every version.
_FIELDS = struct.Struct(f"<8sHHQ32s{KEY_NBYTES}s{MAX_TYPE_NBYTES}s{DIGEST_NBYTES}sII")
_CHECKSUM = struct.Struct("<I")
_FIELDS_END = _FIELDS.size + _CHECKSUM.size
_LOSSLESS = 1  #: the only flag
#: `inspect` reads a payload in pieces of this many bytes.
_PIECE_NBYTES = 4 << 20


class FrameError(enum.Enum):
    """Why a frame is not the one that its reader asked for."""

    SHORT = "shorter than its header says"
    MAGIC = "not a frame"
    VERSION = "a frame of another format version"
    HEADER = "the checksum of the header does not match"
    NAMESPACE = "a frame of another namespace"
    KEY = "a frame of another key"
    CODEC = "a frame of another codec"
    LENGTH = "a payload of another length"
    CHECKSUM = "the checksum does not match"
    UNDECODABLE = "whole, but its codec cannot decode it"
    DECODED = "whole, but its codec decodes it to other bytes than were encoded"

    @property
    def incompatible(self) -> bool:
        """True if the frame may be whole and of use to a reader with another codec or version of kvtier."""
        return self in _INCOMPATIBLE


_INCOMPATIBLE = {FrameError.VERSION, FrameError.CODEC, FrameError.UNDECODABLE, FrameError.DECODED}


class Header(NamedTuple):
    """The fields of a header, without their checksum."""

    magic: bytes
    version: int
    flags: int
    payload_nbytes: int
    namespace: bytes
    key: bytes
    codec_type: bytes
    codec_digest: bytes
    payload_checksum: int  #: CRC-32 of the payload as it is stored
    decoded_checksum: int  #: CRC-32 of the payload as its codec decodes it

    @property
    def codec(self) -> CodecIdentity:
        """The codec that encoded the payload."""
        name = self.codec_type.rstrip(b"\0").decode(errors="replace")
        return CodecIdentity(name, self.codec_digest, bool(self.flags & _LOSSLESS))


def seal(
    frame: memoryview,
    namespace: Namespace,
    key: ChunkKey,
    payload_nbytes: int,
    *,
    codec: CodecIdentity = RAW,
    payload_checksum: int | None = None,
    decoded_checksum: int | None = None,
) -> None:
    """Write the header of ``frame``, whose payload is already in place.

    Without ``payload_checksum``, the CRC-32 of the payload, the payload is read once to compute it. Without
    ``decoded_checksum`` the payload counts as decoded.
    """
    if payload_checksum is None:
        payload_checksum = crc32(frame[FRAME_ALIGNMENT : FRAME_ALIGNMENT + payload_nbytes])
    if decoded_checksum is None:
        decoded_checksum = payload_checksum
    fields = _FIELDS.pack(
        *(_MAGIC, FORMAT_VERSION, _LOSSLESS if codec.lossless else 0, payload_nbytes, namespace.digest, key),
        *(codec.type.encode(), codec.digest, payload_checksum, decoded_checksum),
    )
    frame[:_FIELDS_END] = fields + _CHECKSUM.pack(crc32(fields))
    frame[_FIELDS_END:FRAME_ALIGNMENT] = bytes(FRAME_ALIGNMENT - _FIELDS_END)


def verify(
    frame: memoryview,
    namespace: Namespace,
    key: ChunkKey,
    *,
    codec: CodecIdentity = RAW,
    payload_nbytes: int | None = None,
) -> FrameError | None:
    """Returns None if ``frame`` is the one asked for and its payload is, byte for byte, the one that was sealed.

    ``payload_nbytes`` is the length that the payload must have; None if its codec encodes to varying lengths.
    """
    header = read_header(frame)
    if isinstance(header, FrameError):
        return header
    if header.namespace != namespace.digest:
        return FrameError.NAMESPACE
    if header.key != key:
        return FrameError.KEY
    if header.codec != codec:
        return FrameError.CODEC
    if payload_nbytes is not None and header.payload_nbytes != payload_nbytes:
        return FrameError.LENGTH
    if header.payload_nbytes > len(frame) - FRAME_ALIGNMENT:
        return FrameError.SHORT
    return _verify_checksums(header, crc32(payload_of(frame)))


def read_header(frame: memoryview) -> Header | FrameError:
    """The header of a frame if it is whole. The payload is not verified."""
    if len(frame) < FRAME_ALIGNMENT:
        return FrameError.SHORT
    header = header_of(frame)
    if header.magic != _MAGIC:
        return FrameError.MAGIC
    if header.version != FORMAT_VERSION:
        return FrameError.VERSION
    (checksum,) = _CHECKSUM.unpack_from(frame, _FIELDS.size)
    if crc32(frame[: _FIELDS.size]) != checksum:
        return FrameError.HEADER
    return header if header.flags in (0, _LOSSLESS) else FrameError.VERSION


def inspect(nbytes: int, read: Callable[[int, int], bytes]) -> Header | FrameError:
    """The header of a frame of ``nbytes`` if frame and payload are whole, whatever its namespace, key and codec.

    ``read(offset, nbytes)`` returns bytes of the frame, fewer only at its end; its exceptions propagate. It is
    called for a few MiB at a time, and not for the payload if the header is damaged or states another length.
    """
    header = read_header(memoryview(read(0, FRAME_ALIGNMENT)))
    if isinstance(header, FrameError):
        return header
    end = FRAME_ALIGNMENT + header.payload_nbytes
    if end > nbytes:
        return FrameError.SHORT
    if nbytes - end >= FRAME_ALIGNMENT:
        return FrameError.LENGTH
    checksum = 0
    for at in range(FRAME_ALIGNMENT, end, _PIECE_NBYTES):
        wanted = min(_PIECE_NBYTES, end - at)
        piece = read(at, wanted)
        if len(piece) != wanted:
            return FrameError.SHORT
        checksum = crc32(piece, checksum)
    return _verify_checksums(header, checksum) or header


def header_of(frame: memoryview) -> Header:
    """The header of a frame that `verify` accepted: it is not verified again."""
    return Header._make(_FIELDS.unpack_from(frame))


def payload_of(frame: memoryview) -> memoryview:
    """The payload of a frame that `verify` accepted. A view, not a copy."""
    return frame[FRAME_ALIGNMENT : FRAME_ALIGNMENT + header_of(frame).payload_nbytes]


def _verify_checksums(header: Header, payload_checksum: int) -> FrameError | None:
    if header.payload_checksum != payload_checksum:
        return FrameError.CHECKSUM
    # Nothing decodes a raw payload, so it must have the same checksum twice.
    if header.codec_digest == RAW.digest and header.decoded_checksum != payload_checksum:
        return FrameError.CHECKSUM
    return None
