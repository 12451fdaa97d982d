"""The frame: a part of a chunk outside the engine. A header of 4 KiB, then the payload.

The header carries three CRC-32 checksums: of the stored payload, of the decoded payload, and of the header's fields.
Without a serializer the first two are equal. CRC-32 is used because the checksum of a payload can be computed from
those of the ranks' shards, and because zlib provides it where the compiled extension could not be built.

A frame of several shards has the checksum of each after the header's fields, so that a rank can read and verify its own
shard alone; a flag marks this.

A checksum is not a signature. A frame with a keyed seal (`encoding/keyed_seal.py`) has a flag for it, and a key id, a
nonce and a tag after the fields instead. A reader without the key does not serve it: its payload may be encrypted.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from kvtier_core.frames.checksum import crc32, join
from kvtier_core.frames.identity import (
    DIGEST_NBYTES,
    KEY_ID_NBYTES,
    MAX_TYPE_NBYTES,
    RAW,
    UNKEYED,
    CodecIdentity,
    Protection,
    SealIdentity,
)
from kvtier_core.layouts import Part
from kvtier_core.outside import printable
from kvtier_core.types import (
    FRAME_ALIGNMENT,
    FRAME_HEADER_NBYTES,
    FRAME_MAGIC,
    KEY_NBYTES,
    ChunkKey,
    FrameRead,
    Namespace,
    ReadStatus,
)

FORMAT_VERSION = 2

#: Magic, format version, flags, payload length, namespace digest, key, codec type and digest, checksums of the stored
#: and of the decoded payload; then the checksum of these fields. Magic and version keep their offsets in every version.
_FIELDS = struct.Struct(f"<8sHHQ32s{KEY_NBYTES}s{MAX_TYPE_NBYTES}s{DIGEST_NBYTES}sII")
_CHECKSUM = struct.Struct("<I")
_FIELDS_END = _FIELDS.size + _CHECKSUM.size
_LOSSLESS, _SHARDS = 1, 8  #: flags; the others are those of `Protection`
_FLAGS = {what | lossless for what in (*(each.value for each in Protection), _SHARDS) for lossless in (0, _LOSSLESS)}
#: For a keyed seal: key id, and nonce and tag of AES-GCM; then the checksum of these.
_KEYED = struct.Struct(f"<{KEY_ID_NBYTES}s12s16s")
_KEYED_END = _FIELDS_END + _KEYED.size + _CHECKSUM.size
#: The number of shards. The CRC-32 of each follows, then the checksum of the header's fields and all of these.
_COUNT = struct.Struct("<H")
#: `payload_pieces` reads a payload in pieces of this many bytes.
_PIECE_NBYTES = 4 << 20


class FrameError(enum.Enum):
    """Why a frame is not the requested one."""

    SHORT = "shorter than its header says"
    MAGIC = "not a frame"
    VERSION = "a frame of another format version"
    HEADER = "the checksum of the header does not match"
    NAMESPACE = "a frame of another namespace"
    KEY = "a frame of another key"
    CODEC = "a frame of another codec"
    SEAL = "a frame of another seal key, or of none"
    LENGTH = "a payload of another length"
    SHARDS = "without a checksum of each shard"
    RANKS = "of a number of ranks whose shards cannot be rearranged"
    CHECKSUM = "the checksum does not match"
    FORGED = "the seal does not match: forged, or of another salt"
    UNDECODABLE = "whole, but its codec cannot decode it"
    DECODED = "whole, but its codec decodes it to other bytes than were encoded"

    @property
    def incompatible(self) -> bool:
        """True if the frame may be whole and usable with another codec, seal key or version of kvtier."""
        return self in _INCOMPATIBLE

    def as_read(self) -> FrameRead:
        """The outcome of a read that found a frame with this error."""
        return FrameRead(ReadStatus.INCOMPATIBLE if self.incompatible else ReadStatus.CORRUPT, self.value)


_INCOMPATIBLE = {
    FrameError.VERSION,
    FrameError.SEAL,
    FrameError.CODEC,
    FrameError.SHARDS,
    FrameError.RANKS,
    FrameError.UNDECODABLE,
    FrameError.DECODED,
}


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
    payload_checksum: int  #: CRC-32 of the stored payload
    decoded_checksum: int  #: CRC-32 of the decoded payload; encrypted if the payload is

    @property
    def codec(self) -> CodecIdentity:
        """The codec that encoded the payload."""
        name = printable(self.codec_type.rstrip(b"\0").decode(errors="replace"))
        return CodecIdentity(name, self.codec_digest, bool(self.flags & _LOSSLESS))

    @property
    def protection(self) -> Protection:
        """The protection of the frame."""
        return Protection(self.flags & ~(_LOSSLESS | _SHARDS))

    def protected(self, protection: Protection) -> Header:
        """The same header with this protection."""
        return self._replace(flags=self.flags & _LOSSLESS | protection.value)

    def packed(self) -> bytes:
        """The fields as stored bytes."""
        return _FIELDS.pack(*self)


class KeyedFields(NamedTuple):
    """The fields that a keyed seal adds to a header."""

    key_id: bytes
    nonce: bytes
    tag: bytes


def seal(
    frame: memoryview,
    namespace: Namespace,
    key: ChunkKey,
    payload_nbytes: int,
    *,
    codec: CodecIdentity = RAW,
    payload_checksum: int | None = None,
    decoded_checksum: int | None = None,
    shard_checksums: Sequence[int] = (),
) -> None:
    """Write the header of ``frame``, whose payload is already in place.

    ``payload_checksum`` is the CRC-32 of the payload; without it the payload is read once. Without
    ``decoded_checksum`` the two are equal. ``shard_checksums`` are the CRC-32 of several shards, see `seal_part`.
    """
    if payload_checksum is None:
        payload_checksum = crc32(frame[FRAME_HEADER_NBYTES : FRAME_HEADER_NBYTES + payload_nbytes])
    if decoded_checksum is None:
        decoded_checksum = payload_checksum
    flags = (_LOSSLESS if codec.lossless else 0) | (_SHARDS if shard_checksums else 0)
    fields = (
        FRAME_MAGIC,
        FORMAT_VERSION,
        flags,
        payload_nbytes,
        namespace.digest,
        key,
        codec.type.encode(),
        codec.digest,
    )
    packed = Header(*fields, payload_checksum, decoded_checksum).packed()
    page = _summed(packed)
    if count := len(shard_checksums):
        page += _summed(_COUNT.pack(count) + struct.pack(f"<{count}I", *shard_checksums), packed)
    _write_page(frame, page)


def seal_part(
    frame: memoryview,
    namespace: Namespace,
    key: ChunkKey,
    part: Part,
    checksums: Sequence[int] = (),
    *,
    codec: CodecIdentity = RAW,
) -> None:
    """Write the header of a chunk's frame in a slot, whose shards are already in place.

    ``checksums`` are the CRC-32 of the shards; without them each is read once. The header has room for about 900.
    """
    checksums = checksums or checksums_of(frame, part)
    joined = join(checksums, [shard.nbytes for shard in part.shards])
    several = checksums if len(checksums) > 1 else ()
    seal(frame, namespace, key, part.payload_nbytes, codec=codec, payload_checksum=joined, shard_checksums=several)


def checksums_of(frame: memoryview, part: Part) -> list[int]:
    """The CRC-32 of each shard of a frame in a slot."""
    return [crc32(frame[shard.offset : shard.offset + shard.nbytes]) for shard in part.shards]


def write_header(frame: memoryview, header: Header, keyed: KeyedFields | None = None) -> None:
    """Write the header page of ``frame`` with these fields and their checksums."""
    _write_page(frame, _summed(header.packed()) + (_summed(_KEYED.pack(*keyed)) if keyed else b""))


def _write_page(frame: memoryview, page: bytes) -> None:
    frame[:FRAME_HEADER_NBYTES] = page.ljust(FRAME_HEADER_NBYTES, b"\0")


def _summed(fields: bytes, first: bytes = b"") -> bytes:
    """The fields, followed by the checksum of ``first`` and the fields."""
    return fields + _CHECKSUM.pack(crc32(first + fields))


def verify(
    frame: memoryview,
    namespace: Namespace,
    key: ChunkKey,
    *,
    codec: CodecIdentity = RAW,
    payload_nbytes: int | None = None,
) -> FrameError | None:
    """Returns None if ``frame`` is the requested one and its payload is, byte for byte, the sealed one.

    ``payload_nbytes`` is the required length of the payload; None if its codec encodes to varying lengths.
    """
    header = expected_header(frame, namespace.digest, key, codec=codec, payload_nbytes=payload_nbytes)
    if isinstance(header, FrameError):
        return header
    if header.payload_nbytes > len(frame) - FRAME_HEADER_NBYTES:
        return FrameError.SHORT
    return verify_checksums(header, crc32(payload_of(frame)))


def expected_header(
    frame: memoryview,
    namespace: bytes,
    key: ChunkKey,
    *,
    codec: CodecIdentity = RAW,
    payload_nbytes: int | None = None,
    keyed: SealIdentity = UNKEYED,
) -> Header | FrameError:
    """The header of a frame if it is that of the requested one. The payload is not verified and may be absent.

    See `verify`; ``namespace`` is the digest. The seal must be that of ``keyed``, but is not opened: bytes and
    checksums may be forged until `KeyedSeal.open` returns.
    """
    header = read_header(frame)
    if isinstance(header, FrameError):
        return header
    if header.protection is not keyed.protection:
        return FrameError.SEAL
    if error := _verify_further_fields(header, frame):
        return error
    if keyed != UNKEYED and keyed_fields_of(frame).key_id != keyed.key_id:
        return FrameError.SEAL
    if header.namespace != namespace:
        return FrameError.NAMESPACE
    if header.key != key:
        return FrameError.KEY
    if header.codec != codec:
        return FrameError.CODEC
    if payload_nbytes is not None and header.payload_nbytes != payload_nbytes:
        return FrameError.LENGTH
    return header


def read_header(frame: memoryview) -> Header | FrameError:
    """The header of a frame if it is whole. The payload is not verified."""
    if len(frame) < FRAME_HEADER_NBYTES:
        return FrameError.SHORT
    header = header_of(frame)
    if header.magic != FRAME_MAGIC:
        return FrameError.MAGIC
    if header.version != FORMAT_VERSION:
        return FrameError.VERSION
    (checksum,) = _CHECKSUM.unpack_from(frame, _FIELDS.size)
    if crc32(frame[: _FIELDS.size]) != checksum:
        return FrameError.HEADER
    return header if header.flags in _FLAGS else FrameError.VERSION


def inspect(nbytes: int, read: Callable[[int, int], bytes]) -> Header | FrameError:
    """The header of a frame of ``nbytes`` if header and payload are whole, whatever its namespace, key and codec.

    ``read(offset, nbytes)`` returns bytes of the frame, fewer only at its end; its exceptions propagate. It is called
    for a few MiB at a time, and not for the payload if the header is damaged or states another length.
    """
    page = memoryview(read(0, FRAME_HEADER_NBYTES))
    header = read_header(page)
    if isinstance(header, FrameError):
        return header
    if error := _verify_further_fields(header, page):
        return error
    end = FRAME_HEADER_NBYTES + header.payload_nbytes
    if end > nbytes:
        return FrameError.SHORT
    if nbytes - end >= FRAME_ALIGNMENT:
        return FrameError.LENGTH
    checksum = 0
    for piece in payload_pieces(header, read):
        checksum = crc32(piece, checksum)
        end -= len(piece)
    if end > FRAME_HEADER_NBYTES:
        return FrameError.SHORT
    return verify_checksums(header, checksum) or header


def payload_pieces(header: Header, read: Callable[[int, int], bytes]) -> Iterator[bytes]:
    """The stored payload, or as much as there is, a few MiB at a time. For ``read`` see `inspect`."""
    end = FRAME_HEADER_NBYTES + header.payload_nbytes
    for at in range(FRAME_HEADER_NBYTES, end, _PIECE_NBYTES):
        yield read(at, min(_PIECE_NBYTES, end - at))


def header_of(frame: memoryview) -> Header:
    """The header of a verified frame."""
    return Header._make(_FIELDS.unpack_from(frame))


def payload_of(frame: memoryview) -> memoryview:
    """The payload of a verified frame. A view, not a copy."""
    return frame[FRAME_HEADER_NBYTES : FRAME_HEADER_NBYTES + header_of(frame).payload_nbytes]


def keyed_fields_of(frame: memoryview) -> KeyedFields:
    """The keyed seal's fields in the header of a verified frame."""
    return KeyedFields._make(_KEYED.unpack_from(frame, _FIELDS_END))


def verify_checksums(header: Header, payload_checksum: int) -> FrameError | None:
    """Compare a header with the CRC-32 of the stored payload."""
    if header.payload_checksum != payload_checksum:
        return FrameError.CHECKSUM
    # A raw payload is not decoded, so its two checksums must be equal, unless the second one is encrypted.
    decoded = header.codec_digest != RAW.digest or header.protection is Protection.READING
    return None if decoded or header.decoded_checksum == payload_checksum else FrameError.CHECKSUM


def shard_checksums_of(frame: memoryview) -> Sequence[int]:
    """The CRC-32 of each shard, from a header that `expected_header` accepted; empty if it has none."""
    if not header_of(frame).flags & _SHARDS:
        return ()
    (count,) = _COUNT.unpack_from(frame, _FIELDS_END)
    return struct.unpack_from(f"<{count}I", frame, _FIELDS_END + _COUNT.size)


def _verify_further_fields(header: Header, frame: memoryview) -> FrameError | None:
    """Verify the bytes after the header's fields. A damaged key id would look like that of another key."""
    if header.flags & _SHARDS:
        (count,) = _COUNT.unpack_from(frame, _FIELDS_END)
        end = _FIELDS_END + _COUNT.size + 4 * count + _CHECKSUM.size
        table = frame[_FIELDS_END : end - _CHECKSUM.size]
        if end > FRAME_HEADER_NBYTES or frame[_FIELDS_END:end] != _summed(bytes(table), header.packed()):
            return FrameError.HEADER
    elif header.protection is not Protection.NONE:
        fields = _KEYED.pack(*keyed_fields_of(frame))
        if frame[_FIELDS_END:_KEYED_END] != _summed(fields):
            return FrameError.HEADER
    return None
