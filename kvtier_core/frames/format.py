"""The one shape of a chunk outside the engine: a header page, then the payload.

The checksum is CRC-32 over the header's other fields and the payload. Not for its strength, which all of 32 bits
have: it can be put together from the sums of the ranks' shards, and zlib knows it where nothing native could be built.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable
from typing import NamedTuple

from kvtier_core.frames.checksum import combine, crc32
from kvtier_core.types import FRAME_ALIGNMENT, KEY_NBYTES, ChunkKey, Namespace

FORMAT_VERSION = 1
RAW = 0  #: the codec of a payload that no serializer touched

_MAGIC = b"kvtier\r\n"
#: magic, format version, codec, payload bytes, namespace digest, key; then the checksum
_FIELDS = struct.Struct(f"<8sHHQ32s{KEY_NBYTES}s")
_CHECKSUM = struct.Struct("<I")
_FIELDS_END = _FIELDS.size + _CHECKSUM.size
#: `inspect` reads a payload in pieces.
_PIECE_NBYTES = 4 << 20


class Damage(enum.Enum):
    """Why a frame is not what its reader asked for."""

    SHORT = "shorter than its header says"
    MAGIC = "not a frame"
    VERSION = "a frame of another format version"
    CODEC = "encoded by another serializer"
    LENGTH = "a payload of another length"
    NAMESPACE = "a frame of another namespace"
    KEY = "a frame of another key"
    CHECKSUM = "the checksum does not match"


class Header(NamedTuple):
    """What a frame says of itself."""

    magic: bytes
    version: int
    codec: int
    payload_nbytes: int
    namespace: bytes
    key: bytes


def seal(
    frame: memoryview,
    namespace: Namespace,
    key: ChunkKey,
    payload_nbytes: int,
    codec: int = RAW,
    *,
    summed: int | None = None,
) -> None:
    """Write the header of ``frame``, whose payload is already in place; ``summed`` is its CRC-32 if that is known."""
    fields = _FIELDS.pack(_MAGIC, FORMAT_VERSION, codec, payload_nbytes, namespace.digest, key)
    if summed is None:
        checksum = crc32(frame[FRAME_ALIGNMENT : FRAME_ALIGNMENT + payload_nbytes], crc32(fields))
    else:
        checksum = combine(crc32(fields), summed, payload_nbytes)
    frame[:_FIELDS_END] = fields + _CHECKSUM.pack(checksum)
    frame[_FIELDS_END:FRAME_ALIGNMENT] = bytes(FRAME_ALIGNMENT - _FIELDS_END)


def check(
    frame: memoryview, namespace: Namespace, key: ChunkKey, *, codec: int = RAW, payload_nbytes: int | None = None
) -> Damage | None:
    """None if ``frame`` is whole and is the one asked for, down to the last byte of its payload.

    ``payload_nbytes`` is the length that a raw payload must have; None for a codec whose lengths vary.
    """
    header = _header(frame)
    if isinstance(header, Damage):
        return header
    if header.namespace != namespace.digest:
        return Damage.NAMESPACE
    if header.key != key:
        return Damage.KEY
    if header.codec != codec:
        return Damage.CODEC
    if payload_nbytes is not None and header.payload_nbytes != payload_nbytes:
        return Damage.LENGTH
    return _unsound(frame, header)


def inspect(nbytes: int, read: Callable[[int, int], bytes]) -> Header | Damage:
    """What a frame of ``nbytes`` says of itself if it is whole, under any namespace and key.

    ``read(offset, nbytes)`` returns bytes of it, fewer only at its end. What it raises escapes. It is asked for a
    few MiB at a time, and for nothing beyond the header if the length is not that of the frame.
    """
    page = memoryview(read(0, FRAME_ALIGNMENT))
    header = _header(page)
    if isinstance(header, Damage):
        return header
    whole = FRAME_ALIGNMENT + header.payload_nbytes
    if whole > nbytes:
        return Damage.SHORT
    if nbytes - whole >= FRAME_ALIGNMENT:
        return Damage.LENGTH
    (checksum,) = _CHECKSUM.unpack_from(page, _FIELDS.size)
    found = crc32(page[: _FIELDS.size])
    for at in range(FRAME_ALIGNMENT, whole, _PIECE_NBYTES):
        asked = min(_PIECE_NBYTES, whole - at)
        piece = read(at, asked)
        if len(piece) != asked:
            return Damage.SHORT
        found = crc32(piece, found)
    return header if found == checksum else Damage.CHECKSUM


def payload_of(frame: memoryview) -> memoryview:
    """The payload of a frame that `check` found whole."""
    nbytes = Header._make(_FIELDS.unpack_from(frame)).payload_nbytes
    return frame[FRAME_ALIGNMENT : FRAME_ALIGNMENT + nbytes]


def _header(frame: memoryview) -> Header | Damage:
    if len(frame) < FRAME_ALIGNMENT:
        return Damage.SHORT
    header = Header._make(_FIELDS.unpack_from(frame))
    if header.magic != _MAGIC:
        return Damage.MAGIC
    return header if header.version == FORMAT_VERSION else Damage.VERSION


def _unsound(frame: memoryview, header: Header) -> Damage | None:
    if header.payload_nbytes > len(frame) - FRAME_ALIGNMENT:
        return Damage.SHORT
    (checksum,) = _CHECKSUM.unpack_from(frame, _FIELDS.size)
    payload = frame[FRAME_ALIGNMENT : FRAME_ALIGNMENT + header.payload_nbytes]
    return None if crc32(payload, crc32(frame[: _FIELDS.size])) == checksum else Damage.CHECKSUM
