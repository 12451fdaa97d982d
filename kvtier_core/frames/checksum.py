"""CRC-32 as zlib computes it, whole or put together from pieces. Releases the GIL."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from kvtier_core.native import extension

_POLYNOMIAL = 0xEDB88320  # bit i is the coefficient of x^(31-i)
_ONE = 0x80000000


def plain_combine(first: int, second: int, second_nbytes: int) -> int:
    """The checksum of two pieces one after the other: ``first`` times x^(8 second_nbytes), and ``second``."""
    power = second_nbytes * 8
    square = _times_x(_ONE)
    while power:
        if power & 1:
            first = _times(first, square)
        square = _times(square, square)
        power >>= 1
    return first ^ second


def _times(a: int, b: int) -> int:
    """The product of two polynomials, modulo that of the checksum."""
    product = 0
    for i in range(31, -1, -1):
        if a >> i & 1:
            product ^= b
        b = _times_x(b)
    return product


def _times_x(a: int) -> int:
    return a >> 1 ^ (_POLYNOMIAL if a & 1 else 0)


#: ``crc32(data, crc=0)``
crc32 = getattr(extension, "crc32", zlib.crc32)
combine = getattr(extension, "crc32_combine", plain_combine)


def join(checksums: Sequence[int], nbytes: int) -> int:
    """The checksum of pieces one after the other, each of ``nbytes``."""
    joined, *others = checksums
    for each in others:
        joined = combine(joined, each, nbytes)
    return joined
