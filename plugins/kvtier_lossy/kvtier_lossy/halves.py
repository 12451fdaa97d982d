"""The keys and the values in a payload, as numpy arrays: every lossy codec encodes them one after another.

A *half* is the keys or the values of one layer of one shard. Its array has the axes ``blocks``, ``heads``, ``tokens``
and ``channels``: blocks first, the others in their order in memory, outermost first, so that codes can be computed and
written in one sweep. Only what codes are relative to (a scale, an anchor) depends on which axis is which.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvtier_core.errors import ConfigError, Problem
from kvtier_core.layouts import ChunkLayout, Elements, KVGroup, Part
from kvtier_core.types import FRAME_HEADER_NBYTES

BLOCKS, HEADS, TOKENS, CHANNELS = range(4)

#: numpy has no bfloat16: its bits are used.
DTYPES: Mapping[str, np.dtype[Any]] = {
    "bfloat16": np.dtype("<u2"),
    "float16": np.dtype("<f2"),
    "float32": np.dtype("<f4"),
}
#: Numbers are cut off here before they are encoded, so that no difference of two overflows a float32.
LIMITS = {"bfloat16": 2.0**126, "float16": 65504.0, "float32": 2.0**126}
#: A scale below this counts as zero, so that nothing depends on how a machine treats subnormals.
LEAST = np.float32(2.0**-100)

Floats = npt.NDArray[np.float32]
Raw = npt.NDArray[Any]


@attrs.frozen
class Half:
    """The place and the form of the keys or the values of one layer of one shard in a payload."""

    dtype: str
    is_keys: bool
    depth: int  #: of the layer in its model; -1 where no codec asks
    offset: int  #: bytes from the start of the payload
    order: tuple[int, ...]  #: BLOCKS, HEADS, TOKENS and CHANNELS as they lie in memory, outermost first
    shape: tuple[int, ...]  #: in this order
    strides: tuple[int, ...]  #: bytes

    def axis(self, name: int) -> int:
        """The axis of the array that is BLOCKS, HEADS, TOKENS or CHANNELS."""
        return self.order.index(name)

    def length(self, name: int) -> int:
        return self.shape[self.axis(name)]

    @property
    def count(self) -> int:
        return int(np.prod(self.shape))

    @property
    def element(self) -> np.dtype[Any]:
        return DTYPES[self.dtype]

    @property
    def itemsize(self) -> int:
        return self.element.itemsize

    def in_payload(self, payload: memoryview) -> Raw:
        return np.ndarray(self.shape, self.element, payload, self.offset, self.strides)

    def in_groups(self, name: int, size: int, *shared: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Cuts the axis ``name`` into groups of ``size``, which divides it.

        Returns the shape with two axes in place of that one, the axes inside a group (the inner one of the two, and
        all of ``shared``), and the shape with one number for each group.
        """
        cut = self.axis(name)
        shape = (*self.shape[:cut], self.shape[cut] // size, size, *self.shape[cut + 1 :])
        inside = (cut + 1, *(axis + (axis > cut) for axis in map(self.axis, shared)))
        return shape, inside, tuple(1 if axis in inside else length for axis, length in enumerate(shape))


def floats(raw: Raw, dtype: str) -> Floats:
    """A copy as float32. NaN becomes 0, and numbers beyond the limit of the dtype, infinities too, become the limit."""
    if dtype == "bfloat16":
        bits = raw.astype(np.uint32)
        bits <<= 16
        numbers = bits.view(np.float32)
    else:
        with np.errstate(invalid="ignore"):  # signalling NaNs
            numbers = raw.astype(np.float32)
    limit = LIMITS[dtype]
    if not (numbers.max() <= limit and numbers.min() >= -limit):
        np.nan_to_num(numbers, copy=False, posinf=limit, neginf=-limit)
        np.clip(numbers, -limit, limit, out=numbers)
    return numbers


def put(numbers: Floats, raw: Raw, dtype: str) -> None:
    """Write numbers as elements of this type, rounded to the nearest. Changes ``numbers``."""
    if dtype == "bfloat16":
        bits = numbers.view(np.uint32)
        odd = bits >> 16
        odd &= 1
        odd += 0x7FFF
        bits += odd
        raw[...] = bits.view(np.uint16)[..., 1::2]
        return
    with np.errstate(over="ignore", invalid="ignore"):  # of damaged scales
        np.clip(numbers, -LIMITS[dtype], LIMITS[dtype], out=numbers)
        raw[...] = numbers


def reduced(reduction: np.ufunc, numbers: Floats, axes: Iterable[int]) -> Floats:
    """The least or the greatest along these axes, each of which stays, with length 1.

    `np.maximum.reduce` along a short last axis takes fifty times as long as along the first; comparing its halves is as
    fast.
    """
    for axis in sorted(axes):
        if axis < numbers.ndim - 1:
            numbers = reduction.reduce(numbers, axis, keepdims=True)
            continue
        while numbers.shape[-1] % 2 == 0:
            middle = numbers.shape[-1] // 2
            numbers = reduction(numbers[..., :middle], numbers[..., middle:])
        numbers = reduction.reduce(numbers, axis, keepdims=True)
    return numbers


def halves_by_payload(codec: str, layout: ChunkLayout, *, depths: bool = False) -> dict[int, tuple[Half, ...]]:
    """The halves of each payload of a layout, by its length: all that a serializer knows of its part.

    With ``depths``, halves of layers at different depths of the model differ. Raises ConfigError for a layout that the
    codec cannot encode.
    """
    for group in layout.groups:
        if why := _why_not(group, depths):
            raise refusal(codec, f"{group.name} {why}")
    found: dict[int, tuple[Half, ...]] = {}
    for part in layout.parts:
        halves = tuple(_halves(layout, part, depths))
        if found.setdefault(part.payload_nbytes, halves) != halves:
            raise refusal(codec, "the parts of a chunk have the same length, but are not alike")
    return found


def refusal(codec: str, why: str) -> ConfigError:
    """The codec cannot be used for this engine."""
    hint = "omit `serializer`, or write `serializer: packed`, to store any KV"
    return ConfigError([Problem("this engine", "$", f"{codec} cannot encode its KV: {why}", hint)])


def _why_not(group: KVGroup, depths: bool) -> str:
    if group.dtype not in DTYPES:
        return f"is in {group.dtype}, but it encodes only {', '.join(DTYPES)}"
    if len(group.elements) != 2:
        return f"({group.needs}, {group.structure}) has pages in which the place of keys and values is unknown"
    if depths and len(group.depths) != len(group.page_nbytes):
        return "has layers whose depth in the model is unknown"
    if any(nbytes != DTYPES[group.dtype].itemsize * _covered(group.elements) for nbytes in group.page_nbytes):
        return "has pages that are more than keys and values"
    return ""


def _covered(elements: tuple[Elements, ...]) -> int:
    """How many elements keys and values are, if they lie side by side without overlap; else 0."""
    places = np.concatenate([
        each.first
        + np.add.outer(
            np.add.outer(np.arange(each.heads) * each.of_head, np.arange(each.tokens) * each.of_token),
            np.arange(each.channels) * each.of_channel,
        ).ravel()
        for each in elements
    ])  # fmt: skip
    return len(places) if np.array_equal(np.sort(places), np.arange(len(places))) else 0


def _halves(layout: ChunkLayout, part: Part, depths: bool) -> Iterator[Half]:
    for number, shard in enumerate(part.shards):
        known = layout.depths_of(number * part.replicas)
        firsts = list(accumulate(map(len, layout.pages_of(number * part.replicas)), initial=0))
        for layer in shard.layers:
            group = layout.groups[layer.group]
            itemsize = DTYPES[group.dtype].itemsize
            for elements in group.elements:
                axes = {
                    BLOCKS: (layer.page_nbytes, layer.blocks),
                    HEADS: (elements.of_head * itemsize, elements.heads),
                    TOKENS: (elements.of_token * itemsize, elements.tokens),
                    CHANNELS: (elements.of_channel * itemsize, elements.channels),
                }
                order = (BLOCKS, *sorted((HEADS, TOKENS, CHANNELS), key=axes.__getitem__, reverse=True))
                yield Half(
                    dtype=group.dtype,
                    is_keys=elements is group.elements[0],
                    depth=known[layer.group][layer.layer - firsts[layer.group]] if depths else -1,
                    offset=shard.offset - FRAME_HEADER_NBYTES + layer.offset + elements.first * itemsize,
                    order=order,
                    shape=tuple(axes[name][1] for name in order),
                    strides=tuple(axes[name][0] for name in order),
                )
