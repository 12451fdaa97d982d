"""CRC-32 as zlib computes it, over bytes or from the checksums of their parts. Releases the GIL."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from kvtier_core.native import choose

_POLYNOMIAL = 0xEDB88320  # bit i is the coefficient of x^(31-i)
_ONE = 0x80000000


def plain_combine(first: int, second: int, second_nbytes: int) -> int:
    """The checksum of two parts in sequence, from the checksum of each and the length of the second in bytes.

    This is ``first`` times x^(8 second_nbytes), plus ``second``, over GF(2).
    """
    power = second_nbytes * 8
    square = _times_x(_ONE)
    while power:
        if power & 1:
            first = _times(first, square)
        square = _times(square, square)
        power >>= 1
    return first ^ second


def _times(a: int, b: int) -> int:
    """The product of two polynomials modulo the polynomial of CRC-32."""
    product = 0
    for i in range(31, -1, -1):
        if a >> i & 1:
            product ^= b
        b = _times_x(b)
    return product


def _times_x(a: int) -> int:
    return a >> 1 ^ (_POLYNOMIAL if a & 1 else 0)


#: ``crc32(data, crc=0)``: the checksum of ``data``; with ``crc``, of data with that checksum followed by ``data``.
crc32 = choose("crc32", zlib.crc32)
#: `plain_combine`, compiled where the extension could be built.
combine = choose("crc32_combine", plain_combine)


def join(checksums: Sequence[int], nbytes: Sequence[int]) -> int:
    """The checksum of parts in sequence, from the checksum and the length of each; at least one part."""
    joined = checksums[0]
    for checksum, length in zip(checksums[1:], nbytes[1:], strict=True):
        joined = combine(joined, checksum, length)
    return joined
