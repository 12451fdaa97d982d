"""`serializer: fp8` and `serializer: int8`: a number of eight bits for each element, times a scale.

There is a scale for each head and for each group of channels, over all tokens of the chunk. The channels of keys differ
a lot, but each varies little between tokens: one scale for all of them would spend the bits on the largest.

The code of a half (`coding.py` has the frame around it):

  the scales, 4 bytes each: float32, little-endian, in the order of the page
  the elements in the order of the page, a byte each

An element is its byte times the scale: a signed integer from -127 to 127, or a number of type E4M3 (P. Micikevicius et
al., "FP8 Formats for Deep Learning", 2022): a sign, four bits of exponent with a bias of 7, three of mantissa. The
largest element of a group is 127 or 448. An integer is off by at most half of the scale; E4M3 by a sixteenth of itself,
or by 2 ** -10 of the scale if that is more. A number midway is rounded away from zero in E4M3, to even in int8.
"""

from __future__ import annotations

import abc

import numpy as np

from kvtier_core.layouts import ChunkLayout
from kvtier_lossy.coding import Codes, HalfByHalf
from kvtier_lossy.halves import BLOCKS, CHANNELS, HEADS, LEAST, TOKENS, Floats, Half, Raw, floats, put, reduced

#: Bytes 0 to 126 of E4M3 as numbers; 127 is NaN.
_MAGNITUDES = np.array(
    [(code % 8) * 2.0**-9 if code < 8 else (8 + code % 8) * 2.0 ** (code // 8 - 10) for code in range(127)]
)


class Scaled(HalfByHalf):
    """The part that both have in common."""

    greatest: float  #: number of the type

    @abc.abstractmethod
    def _round(self, numbers: Floats, into: Codes) -> None:
        """Write the bytes of numbers that are relative to the scales. May change ``numbers``."""

    @abc.abstractmethod
    def _numbers(self, codes: Codes) -> Floats:
        """The numbers of bytes, in a new array."""

    def _nbytes(self, half: Half) -> int:
        return 4 * self._scales(half) + half.count

    def _scales(self, half: Half) -> int:
        return half.length(HEADS) * half.length(CHANNELS) // self._group

    def _encode(self, half: Half, raw: Raw, into: Codes) -> None:
        shape, shared, _ = self._groups(half)
        numbers = floats(raw, half.dtype).reshape(shape)
        scales = np.maximum(reduced(np.maximum, numbers, shared), -reduced(np.minimum, numbers, shared))
        scales /= np.float32(self.greatest)
        scales[scales < LEAST] = 0
        into[: scales.nbytes] = scales.astype("<f4").ravel().view(np.uint8)
        factors = np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0)
        numbers *= factors
        self._round(numbers, into[scales.nbytes :].reshape(shape))

    def _decode(self, half: Half, codes: Codes, raw: Raw) -> None:
        shape, _, of_scales = self._groups(half)
        end = 4 * self._scales(half)
        numbers = self._numbers(codes[end:]).reshape(shape)
        numbers *= np.frombuffer(codes[:end], "<f4").reshape(of_scales)
        put(numbers.reshape(half.shape), raw, half.dtype)

    def _groups(self, half: Half) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        return half.in_groups(CHANNELS, self._group, BLOCKS, TOKENS)


class Int8(Scaled):
    """Signed integers."""

    greatest = 127.0

    def _round(self, numbers: Floats, into: Codes) -> None:
        np.rint(numbers, out=numbers)
        into.view(np.int8)[...] = numbers

    def _numbers(self, codes: Codes) -> Floats:
        return codes.view(np.int8).astype(np.float32)


class Fp8(Scaled):
    """E4M3, which has more numbers near zero."""

    greatest = 448.0

    def __init__(self, name: str, layout: ChunkLayout, group: int):
        super().__init__(name, layout, group)
        # Numbers that differ only in the lower half of a float32 lie on the same side of every midpoint.
        finite = np.minimum(np.arange(1 << 15, dtype=np.uint32), 0x7F7F)
        halfway = (finite << 16 | 0x8000).view(np.float32)
        codes = np.searchsorted((_MAGNITUDES[1:] + _MAGNITUDES[:-1]) / 2, halfway).astype(np.uint8)
        self._code_of = np.concatenate([codes, codes | 0x80])  #: of the upper half of a float32
        magnitudes = np.append(_MAGNITUDES, 0).astype(np.float32)
        self._number_of = np.concatenate([magnitudes, -magnitudes])

    def _round(self, numbers: Floats, into: Codes) -> None:
        np.take(self._code_of, numbers.view(np.uint16)[..., 1::2], out=into, mode="clip")

    def _numbers(self, codes: Codes) -> Floats:
        return np.take(self._number_of, codes, mode="clip")
