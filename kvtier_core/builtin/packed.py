"""A lossless codec for KV in bfloat16, which takes 12 bits for a value of 16. csrc/packed.h has the encoded form.

It asks for no dtype: what does not pack is kept as it is. float16 is, too: of KV its exponent has
2.9 bits of information in five, and a code of four would save one bit in sixteen.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import compress
from typing import ClassVar

import attrs

from kvtier_core.errors import BackendError
from kvtier_core.interfaces import OpenContext, Serializer, SerializerConfig
from kvtier_core.layouts import ChunkLayout
from kvtier_core.native import choose

_HEADER = struct.Struct("<8sQ48x")
_MAGIC = b"kvp\1\0\0\0\0"
_HEAD_NBYTES = 32  #: of a tile
_TILE_NBYTES = 4096  #: of its values
_UNIT_NBYTES = 256  #: the last tile has a multiple of these
_ESCAPE = struct.Struct("<HB")
_ESCAPES = 9
_RAW = 255


@attrs.frozen
class PackedConfig(SerializerConfig):
    """Three quarters of the bytes of bfloat16, at the speed of memory."""

    type: ClassVar[str] = "packed"
    lossless: ClassVar[bool] = True

    def open(self, ctx: OpenContext) -> Packed:
        return Packed()


class Packed(Serializer):
    """Keeps nothing: each call is by itself."""

    def bound(self, layout: ChunkLayout) -> int:
        return bound(layout.payload_nbytes)

    def encode(self, payload: memoryview, into: memoryview) -> int:
        return pack(payload, into)

    def decode(self, encoded: memoryview, into: memoryview) -> int:
        if not unpack(encoded, into):
            raise BackendError(f"packed: this encodes no payload of {len(into)} bytes")
        return len(into)


def bound(nbytes: int) -> int:
    """The most bytes that a payload of this length becomes."""
    return _bodies(nbytes) + nbytes


def _bodies(nbytes: int) -> int:
    """Where the bodies begin in the encoded form of a payload of this length."""
    tiles = -(-(nbytes // _UNIT_NBYTES * _UNIT_NBYTES) // _TILE_NBYTES)
    return _HEADER.size + -(-tiles * _HEAD_NBYTES // 64) * 64


def _tiles(payload: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Where the head of each tile lies in the encoded form, and the tile's part of the payload."""
    whole = len(payload) // _UNIT_NBYTES * _UNIT_NBYTES
    for number, begin in enumerate(range(0, whole, _TILE_NBYTES)):
        yield _HEADER.size + number * _HEAD_NBYTES, payload[begin : min(begin + _TILE_NBYTES, whole)]


def plain_pack(payload: memoryview, into: memoryview) -> int:
    """Encode ``payload`` to ``into``, which has room for its `bound`, and return how many bytes that took."""
    if len(into) < bound(len(payload)):
        raise ValueError("no room for the encoding")
    end = _bodies(len(payload))
    into[:end] = _HEADER.pack(_MAGIC, len(payload)).ljust(end, b"\0")
    for at, tile in _tiles(payload):
        head, body = _packed(bytes(tile))
        into[at : at + len(head)] = head
        into[end : end + len(body)] = body
        end += len(body)
    rest = payload[len(payload) // _UNIT_NBYTES * _UNIT_NBYTES :]
    into[end : end + len(rest)] = rest
    return end + len(rest)


def _packed(tile: bytes) -> tuple[bytes, bytes]:
    """Head and body of a tile. All values of a tile are shifted at once, as the bytes of one long number."""
    n, pairs = len(tile) // 2, len(tile) // 4
    low, high = int.from_bytes(tile[::2], "little"), int.from_bytes(tile[1::2], "little")
    ones, sevens = _repeated(0x01, n), _repeated(0x7F, n)
    exponents = ((high & sevens) << 1 | low >> 7 & ones).to_bytes(n, "little")
    rests = ((low & sevens) << 1 | high >> 7 & ones).to_bytes(n, "little")
    base = max(0, max(exponents) - 15)
    for least in (base, 0):
        known = bytes([least, *range(base + 1, base + 16)])
        if len(exponents.translate(None, known)) > _ESCAPES:
            continue
        escapes = exponents.translate(bytes(exponent not in known for exponent in range(256)))
        places = sorted(compress(range(n), escapes), key=lambda place: (place % pairs, place))
        listed = b"".join(_ESCAPE.pack(place, exponents[place]) for place in places)
        codes = exponents.translate((bytes(base + 1) + bytes(range(1, 16))).ljust(256, b"\0"))
        both = int.from_bytes(codes[:pairs], "little") | int.from_bytes(codes[pairs:], "little") << 4
        return bytes([base, least, len(places)]) + listed, rests + both.to_bytes(pairs, "little")
    return bytes([0, 0, _RAW]), tile


def plain_unpack(encoded: memoryview, into: memoryview) -> bool:
    """Decode to the whole of ``into``. False, with any content there, unless a payload as long as it was encoded."""
    end = _bodies(len(into))
    rest = memoryview(into)[len(into) // _UNIT_NBYTES * _UNIT_NBYTES :]
    if len(encoded) < end + len(rest) or _HEADER.unpack_from(encoded) != (_MAGIC, len(into)):
        return False
    for at, tile in _tiles(into):
        raw = encoded[at + 2] == _RAW
        nbytes = len(tile) if raw else len(tile) * 3 // 4
        if end + nbytes > len(encoded):
            return False
        body = bytes(encoded[end : end + nbytes])
        values = body if raw else _unpacked(bytes(encoded[at : at + _HEAD_NBYTES]), body)
        if not values:
            return False
        tile[:] = values
        end += nbytes
    if len(encoded) - end != len(rest):
        return False
    rest[:] = encoded[end:]
    return True


def _unpacked(head: bytes, body: bytes) -> bytes:
    """The values of a tile; none if it is damaged."""
    base, least, escapes = head[:3]
    n, pairs = len(body) * 2 // 3, len(body) // 3
    if escapes > _ESCAPES:
        return b""
    both, nibbles = int.from_bytes(body[n:], "little"), _repeated(0x0F, pairs)
    codes = (both & nibbles).to_bytes(pairs, "little") + (both >> 4 & nibbles).to_bytes(pairs, "little")
    exponents = bytearray(codes.translate(bytes([least, *(base + code & 255 for code in range(1, 16))]).ljust(256)))
    for place, exponent in _ESCAPE.iter_unpack(head[3 : 3 + _ESCAPE.size * escapes]):
        if place >= n:
            return b""
        exponents[place] = exponent
    ones, sevens = _repeated(0x01, n), _repeated(0x7F, n)
    high, low = int.from_bytes(exponents, "little"), int.from_bytes(body[:n], "little")
    values = bytearray(2 * n)
    values[::2] = (low >> 1 & sevens | (high & ones) << 7).to_bytes(n, "little")
    values[1::2] = (high >> 1 & sevens | (low & ones) << 7).to_bytes(n, "little")
    return bytes(values)


def _repeated(byte: int, n: int) -> int:
    return int.from_bytes(bytes([byte]) * n, "little")


#: `plain_pack` and `plain_unpack`, compiled where the extension could be built.
pack = choose("pack", plain_pack)
unpack = choose("unpack", plain_unpack)
