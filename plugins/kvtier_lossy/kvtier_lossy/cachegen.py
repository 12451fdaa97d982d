"""`serializer: cachegen`: differences between tokens, quantized by layer and entropy-coded, as described by Y. Liu et
al., "CacheGen: KV Cache Compression and Streaming for Fast Large Language Model Serving", SIGCOMM 2024.

Every ``anchors``-th token of a chunk, including the first, is an anchor: each of its elements is an integer of eight
bits times a scale of the channel. For the tokens up to the next anchor, the differences to the decoded anchor are
quantized: integers from -n to n, times a second scale of the channel. n is ``levels`` in the first third of the model's
layers, to which answers are most sensitive, two thirds of that in the second, and half of it in the last. An element is
off by at most half of its scale, plus its rounding to the type.

The integers of the differences are coded by their frequencies, as `rans.py` explains. Each channel of a layer uses the
best of 32 tables, whose number takes a byte: in a chunk of a few hundred tokens, counted frequencies would take more
than they save.

The encoded form, integers little-endian; a *channel* is that of one head; they come half after half, head by head:

  the header of `coding.py`
  for each channel, the scale of anchors: 2 bytes, the upper half of a float32
  for each channel, the scale of differences: the same
  for each channel, the number of its table: 1 byte
  the anchors, token after token, one byte for each channel
  the state of each stream: 4 bytes
  the words of all streams: 2 bytes each
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kvtier_core.errors import BackendError
from kvtier_core.interfaces import Serializer
from kvtier_core.layouts import ChunkLayout
from kvtier_lossy import rans
from kvtier_lossy.coding import HEADER, MAGIC, check_header, of_payload
from kvtier_lossy.halves import BLOCKS, CHANNELS, HEADS, LEAST, TOKENS, Floats, Half, Raw, floats, put, refusal

_GREATEST = 127  #: integer of an anchor


class _Form:
    """The channels and the tokens of a payload, and where the parts of its encoded form begin."""

    def __init__(self, halves: tuple[Half, ...], anchors: int):
        self.halves = halves
        ends = np.cumsum([half.length(HEADS) * half.length(CHANNELS) for half in halves])
        self.channels = int(ends[-1])
        self.shares = [slice(begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
        self.tokens = halves[0].length(BLOCKS) * halves[0].length(TOKENS)
        self.is_anchor = np.arange(self.tokens) % anchors == 0
        self.anchors = int(self.is_anchor.sum())
        self.steps = self.tokens - self.anchors
        self.anchor_of = (np.arange(self.tokens) // anchors)[~self.is_anchor]
        self.streams = rans.streams(self.steps, self.channels)
        sizes = [HEADER.size, 2 * self.channels, 2 * self.channels, self.channels, self.anchors * self.channels]
        self.begins = np.cumsum([*sizes, 4 * self.streams]).tolist()

    @property
    def bound(self) -> int:
        """The most bytes: no symbol takes more than one word."""
        return int(self.begins[-1]) + 2 * self.steps * self.channels


class Cachegen(Serializer):
    """Keeps nothing between calls."""

    def __init__(self, name: str, halves: Mapping[int, tuple[Half, ...]], anchors: int, levels: int):
        """Raises ConfigError if layers of one frame have different numbers of tokens, or only one."""
        for each in halves.values():
            if len({half.length(BLOCKS) * half.length(TOKENS) for half in each}) > 1:
                raise refusal(name, "its layers have different numbers of tokens in a chunk")
            if each[0].length(BLOCKS) * each[0].length(TOKENS) == 1:
                raise refusal(name, "a frame has one token")
        self._name = name
        self._forms = {nbytes: _Form(each, anchors) for nbytes, each in halves.items()}
        layers = 1 + max(half.depth for each in halves.values() for half in each)
        self._levels_of_thirds = [levels, levels * 2 // 3, levels // 2]
        self._layers = layers
        self._tables = rans.Tables(levels)

    def _levels(self, half: Half) -> int:
        return self._levels_of_thirds[3 * half.depth // self._layers]

    def bound(self, layout: ChunkLayout) -> int:
        return max(form.bound for form in self._forms.values())

    def encode(self, payload: memoryview, into: memoryview) -> int:
        form = of_payload(self._name, self._forms, payload)
        scales = np.empty((2, form.channels), np.uint16)
        anchors = np.empty((form.anchors, form.channels), np.int8)
        symbols = np.empty((form.steps, form.channels), np.int8)
        for half, share in zip(form.halves, form.shares, strict=True):
            numbers = _by_token(half, floats(half.in_payload(payload), half.dtype))
            scales[0, share], anchors[:, share], decoded = _quantized(numbers[form.is_anchor], _GREATEST)
            differences = numbers[~form.is_anchor] - decoded[form.anchor_of]
            scales[1, share], symbols[:, share], _ = _quantized(differences, self._levels(half))
        tables = self._tables.cheapest(symbols)
        states, words = rans.encode(symbols, tables, self._tables)
        content = (scales.astype("<u2"), tables, anchors, states.astype("<u4"), words.astype("<u2"))
        encoded = b"".join([HEADER.pack(MAGIC, len(payload)), *(each.tobytes() for each in content)])
        into[: len(encoded)] = encoded
        return len(encoded)

    def decode(self, encoded: memoryview, into: memoryview) -> int:
        check_header(self._name, encoded, into)
        form = of_payload(self._name, self._forms, into)
        if len(encoded) < form.begins[-1] or (len(encoded) - form.begins[-1]) % 2:
            raise BackendError(f"{self._name}: {len(encoded)} encoded bytes do not match a payload of {len(into)}")
        parts = iter(np.split(np.frombuffer(encoded, np.uint8), form.begins))
        next(parts)  # the header
        scales = np.stack([_upper_half(next(parts)), _upper_half(next(parts))])
        tables, anchors = next(parts), next(parts).view(np.int8).reshape(form.anchors, form.channels)
        symbols = None
        if tables.max() < rans.TABLES:
            states, words = next(parts).view("<u4"), next(parts).view("<u2")
            symbols = rans.decode(states, words, tables, form.steps, self._tables)
        if symbols is None:
            raise BackendError(f"{self._name}: its streams end at the wrong place")
        with np.errstate(all="ignore"):  # of damaged scales
            for half, share in zip(form.halves, form.shares, strict=True):
                decoded = anchors[:, share] * scales[0, share]
                numbers = np.empty((form.tokens, decoded.shape[1]), np.float32)
                numbers[form.is_anchor] = decoded
                numbers[~form.is_anchor] = symbols[:, share] * scales[1, share] + decoded[form.anchor_of]
                _put_by_token(half, numbers, half.in_payload(into))
        return len(into)


def _quantized(numbers: Floats, greatest: int) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.int8], Floats]:
    """For each column, a scale, rounded up to its upper half; the integers; and what they decode to."""
    scales = np.maximum(numbers.max(0), -numbers.min(0)) / np.float32(greatest)
    scales[scales < LEAST] = 0
    upper = (scales.view(np.uint32) + 0xFFFF >> 16).astype(np.uint16)
    scales = _upper_half(upper)
    numbers = numbers * np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0)
    np.rint(numbers, out=numbers)
    return upper, numbers.astype(np.int8), numbers * scales


def _upper_half(upper: Raw) -> Floats:
    """The float32 numbers whose upper halves are these bytes, or numbers."""
    return (upper.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _by_token(half: Half, numbers: Floats) -> Floats:
    """A row for each token, with the channels of all heads."""
    axes = [half.axis(name) for name in (BLOCKS, TOKENS, HEADS, CHANNELS)]
    return numbers.transpose(axes).reshape(half.length(BLOCKS) * half.length(TOKENS), -1)


def _put_by_token(half: Half, numbers: Floats, raw: Raw) -> None:
    axes = [half.axis(name) for name in (BLOCKS, TOKENS, HEADS, CHANNELS)]
    put(numbers.reshape([half.shape[axis] for axis in axes]), raw.transpose(axes), half.dtype)
