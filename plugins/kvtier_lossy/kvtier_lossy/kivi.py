"""`serializer: kivi`: two or four bits per element, as described by Z. Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit
Quantization for KV Cache", ICML 2024.

Keys are quantized per channel, in groups of tokens, because a few of their channels are large for all tokens; values
per token, in groups of channels. The least and the greatest element of each group are kept as they are, in the type of
the payload; the levels are evenly spaced between them: each element is off by at most half a step, plus its rounding to
the type.

KIVI keeps the most recent tokens of a sequence in full precision, and quantizes them when others have followed. What is
stored here never changes, and no chunk knows what follows. But a sequence that is answered from chunks ends with tokens
that the engine computes itself: those after the last whole chunk, at least one. Just before them are the last tokens of
that chunk. So the last ``residual`` tokens of every chunk are kept as they are, in whole pages, if they are no more
than a quarter of it; where the next chunk is also found, this costs room and gains nothing. ``residual: 0`` turns it
off.

A group of tokens is as long as the option says, or the greatest common divisor of that and the tokens of a page: it
never crosses the end of a page.

The code of a half (`coding.py` has the frame around it; all is in the order of the page):

  the least elements of all groups, then the greatest ones
  the codes: of n elements, byte i has that of i in its lowest bits, above it that of n/2 + i (4 bits), or those of
  n/4 + i, n/2 + i, 3n/4 + i (2 bits)
  the elements of the residual

An element is least + code * ((greatest - least) / (2 ** bits - 1)), computed in float32.
"""

from __future__ import annotations

import math

import attrs
import numpy as np

from kvtier_core.layouts import ChunkLayout
from kvtier_lossy.coding import Codes, HalfByHalf
from kvtier_lossy.halves import BLOCKS, CHANNELS, LEAST, TOKENS, Floats, Half, Raw, floats, put, reduced


class Kivi(HalfByHalf):
    """Two or four bits per element."""

    def __init__(self, name: str, layout: ChunkLayout, group: int, bits: int, residual: int):
        super().__init__(name, layout, group)
        self._bits = bits
        self._residual = residual

    def _nbytes(self, half: Half) -> int:
        coded, rest = self._cut(half)
        return self._extremes(coded) * half.itemsize + coded.count * self._bits // 8 + rest

    def _cut(self, half: Half) -> tuple[Half, int]:
        """The blocks of a half that are quantized, and the bytes of those after them, which are kept as they are."""
        kept = -(-self._residual // half.length(TOKENS))
        if 4 * kept > half.length(BLOCKS):
            kept = 0
        coded = attrs.evolve(half, shape=(half.shape[0] - kept, *half.shape[1:]))
        return coded, (half.count - coded.count) * half.itemsize

    def _groups(self, half: Half) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        if half.is_keys:
            return half.in_groups(TOKENS, math.gcd(self._group, half.length(TOKENS)))
        return half.in_groups(CHANNELS, self._group)

    def _extremes(self, half: Half) -> int:
        """How many there are: two for each group."""
        return 2 * math.prod(self._groups(half)[2])

    def _encode(self, half: Half, raw: Raw, into: Codes) -> None:
        coded, rest = self._cut(half)
        shape, inside, of_groups = self._groups(coded)
        numbers = floats(raw[: coded.shape[0]], half.dtype).reshape(shape)
        extremes = np.stack([reduced(np.minimum, numbers, inside), reduced(np.maximum, numbers, inside)])
        extremes[np.abs(extremes) < LEAST] = 0
        least, step = self._least_and_step(extremes, of_groups)
        numbers -= least
        numbers *= np.divide(1, step, out=np.zeros_like(step), where=step > 0)
        np.rint(numbers, out=numbers)
        end = extremes.size * half.itemsize
        put(extremes.ravel(), into[:end].view(half.element), half.dtype)
        _pack(numbers.astype(np.uint8).ravel(), self._bits, into[end : len(into) - rest])
        into[len(into) - rest :] = np.frombuffer(raw[coded.shape[0] :].tobytes(), np.uint8)

    def _decode(self, half: Half, codes: Codes, raw: Raw) -> None:
        coded, rest = self._cut(half)
        shape, _, of_groups = self._groups(coded)
        end = self._extremes(coded) * half.itemsize
        extremes = floats(codes[:end].view(half.element), half.dtype).reshape(2, -1)
        least, step = self._least_and_step(extremes, of_groups)
        numbers = _unpack(codes[end : len(codes) - rest], self._bits).reshape(shape)
        numbers *= step
        numbers += least
        put(numbers.reshape(coded.shape), raw[: coded.shape[0]], half.dtype)
        kept = raw[coded.shape[0] :]
        kept[...] = codes[len(codes) - rest :].view(kept.dtype).reshape(kept.shape)

    def _least_and_step(self, extremes: Floats, of_groups: tuple[int, ...]) -> tuple[Floats, Floats]:
        """For each group; the step of a group of equal elements is 0."""
        least, step = extremes[0].reshape(of_groups), (extremes[1] - extremes[0]).reshape(of_groups)
        step /= np.float32(2**self._bits - 1)
        step[step < LEAST] = 0
        return least, step


def _pack(codes: Codes, bits: int, into: Codes) -> None:
    shares = codes.reshape(8 // bits, -1)
    into[...] = shares[0]
    for place, share in enumerate(shares[1:], 1):
        into |= share << place * bits


def _unpack(packed: Codes, bits: int) -> Floats:
    numbers = np.empty((8 // bits, len(packed)), np.float32)
    for place, share in enumerate(numbers):
        share[...] = packed >> place * bits & 2**bits - 1
    return numbers.ravel()
