"""Packs KV in bfloat16: a value of 16 bits in 12, without loss. csrc/packed.h has the encoded form."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import compress

from kvtier_core.native import choose
from kvtier_core.packed_form import HEAD_NBYTES, HEADER_NBYTES, TILE_NBYTES, PackedForm

_HEADER = struct.Struct(f"<8sQ{HEADER_NBYTES - 16}x")
_MAGIC = b"kvp\2\0\0\0\0"
_ESCAPE = struct.Struct("<HB")
_ESCAPES = 9
_RAW = 255
_NUMBER = struct.Struct("<I")


def payload_nbytes(encoded: memoryview) -> int:
    """Bytes of the payload that was encoded."""
    _, nbytes = _HEADER.unpack_from(encoded)
    return int(nbytes)


def bound(nbytes: int) -> int:
    """The most bytes that encoding a payload of this length takes."""
    return PackedForm.of(nbytes).bound


def plain_pack(payload: memoryview, into: memoryview) -> int:
    """Encode ``payload`` to ``into`` and return the length; 0, with undefined content there, if it does not fit.

    `bound` bytes always suffice.
    """
    form = PackedForm.of(len(payload))
    if len(into) < form.ends:
        return 0
    into[: form.bodies] = _HEADER.pack(_MAGIC, len(payload)).ljust(form.bodies, b"\0")
    used, raw = form.ends, 0
    for head_at, body_at, tile in _tiles(payload, form):
        kept = len(tile) * 3 // 4
        head, body = _packed(bytes(tile)) or (bytes([0, 0, _RAW]) + _NUMBER.pack(raw), tile[:kept])
        end = tile[kept:] if head[2] == _RAW else b""
        if used + len(end) > len(into):
            return 0
        into[used : used + len(end)] = end
        used, raw = used + len(end), raw + bool(end)
        into[head_at : head_at + len(head)] = head
        into[body_at : body_at + len(body)] = body
    into[form.ends - form.rest : form.ends] = payload[len(payload) - form.rest :]
    return used


def _packed(tile: bytes) -> tuple[bytes, bytes] | None:
    """Head and body of a tile; None if it stays raw. All values are shifted together, as the bytes of one integer."""
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
    return None


def plain_unpack(encoded: memoryview, into: memoryview) -> bool:
    """Decode to the whole of ``into``. False, with any content there, unless a payload of its length was encoded.

    Zeros may follow the encoded form.
    """
    form = PackedForm.of(len(into))
    if len(encoded) < form.ends or _HEADER.unpack_from(encoded) != (_MAGIC, len(into)):
        return False
    used, raw = form.ends, 0
    for head_at, body_at, tile in _tiles(into, form):
        head, body = encoded[head_at : head_at + HEAD_NBYTES], encoded[body_at : body_at + len(tile) * 3 // 4]
        if head[2] == _RAW:
            end = encoded[used : used + len(tile) // 4]
            if _NUMBER.unpack_from(head, 3) != (raw,) or len(end) < len(tile) // 4:
                return False
            tile[: len(body)], tile[len(body) :] = body, end
            used, raw = used + len(end), raw + 1
        elif values := _unpacked(bytes(head), bytes(body)):
            tile[:] = values
        else:
            return False
    into[len(into) - form.rest :] = encoded[form.ends - form.rest : form.ends]
    return not any(encoded[used:])


def _tiles(payload: memoryview, form: PackedForm) -> Iterator[tuple[int, int, memoryview]]:
    """The offsets of each tile's head and body in the encoded form, and the tile's part of the payload."""
    for number, begin in enumerate(range(0, 2 * form.values, TILE_NBYTES)):
        yield (
            HEADER_NBYTES + number * HEAD_NBYTES,
            form.bodies + begin * 3 // 4,
            payload[begin : min(begin + TILE_NBYTES, 2 * form.values)],
        )


def _unpacked(head: bytes, body: bytes) -> bytes:
    """The values of a tile; empty if it is damaged."""
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
