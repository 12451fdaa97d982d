"""Test data for the laws: layouts, contexts, keys, frames, poisoned buffers, paged buffers."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence
from itertools import chain

from kvtier_core.frames.format import seal
from kvtier_core.interfaces import OpenContext, PagedKVCache, PageRun
from kvtier_core.layouts import ChunkLayout, KVGroup, KVKind, KVStructure
from kvtier_core.types import FRAME_HEADER_NBYTES, KEY_NBYTES, ChunkKey, Namespace, Nbytes

_POISON = 0xA5
_BLOCK_TOKENS = 16


def make_group(
    page_nbytes: Sequence[int] = (4608, 1536, 4608),
    *,
    name: str = "group 0",
    block_tokens: int = _BLOCK_TOKENS,
    kind: KVKind = KVKind.FULL_ATTENTION,
    reach: int = 0,
) -> KVGroup:
    """Layers of these page sizes, of which nothing else is known."""
    return KVGroup(name, kind, page_nbytes, block_tokens, "uint8", KVStructure.OPAQUE, reach)


def make_layout(
    page_nbytes: Sequence[int] = (4608, 1536, 4608), blocks: int = 4, ranks: int = 1, replicas: int = 1
) -> ChunkLayout:
    """One group, by default small, with layers of two sizes and a payload that is not a multiple of FRAME_ALIGNMENT."""
    return ChunkLayout([make_group(page_nbytes)], blocks * _BLOCK_TOKENS, ranks, replicas)


def make_namespace(model: str = "tiny") -> Namespace:
    """A namespace with one fact, the model."""
    return Namespace.of({"model": model})


def make_context(
    *, layout: ChunkLayout | None = None, namespace: Namespace | None = None, capacity: int = 1 << 30
) -> OpenContext:
    """The context from the stack, ``capacity`` in bytes of frames."""
    return OpenContext(namespace or make_namespace(), layout or make_layout(), Nbytes(capacity))


def make_key(number: int) -> ChunkKey:
    """The key of a number: as evenly distributed as a digest, the same in every run."""
    return ChunkKey(random.Random(number).randbytes(KEY_NBYTES))


def make_keys(count: int) -> list[ChunkKey]:
    """The keys of the first numbers, the same at every run."""
    return [make_key(number) for number in range(count)]


def make_frame(
    key: ChunkKey, nbytes: int | None = None, seed: int = 0, namespace: Namespace | None = None
) -> memoryview:
    """A sealed frame of ``nbytes``, by default that of `make_layout`, with a random payload."""
    nbytes = make_layout().frame_nbytes if nbytes is None else nbytes
    sealed = memoryview(bytearray(FRAME_HEADER_NBYTES) + random.Random(seed).randbytes(nbytes - FRAME_HEADER_NBYTES))
    seal(sealed, namespace or make_namespace(), key, nbytes - FRAME_HEADER_NBYTES)
    return sealed


class Poisoned:
    """A view of ``nbytes`` inside a larger buffer of known bytes, at an odd offset if none is named."""

    def __init__(self, nbytes: int, offset: int = 333):
        self._buffer = bytearray([_POISON]) * (offset + nbytes + 333)
        self._offset = offset
        self.view = memoryview(self._buffer)[offset : offset + nbytes]

    def untouched_beyond(self, nbytes: int) -> bool:
        """Is everything as it was, before the view and after its first ``nbytes``?"""
        start, end = self._offset, self._offset + nbytes
        return is_poison(memoryview(self._buffer)[:start]) and is_poison(memoryview(self._buffer)[end:])


def poison(view: memoryview) -> None:
    """Fill with bytes that `is_poison` recognizes."""
    view[:] = bytes([_POISON]) * len(view)


def is_poison(view: memoryview) -> bool:
    """Is every byte as `poison` left it?"""
    return view == bytes([_POISON]) * len(view)


def address_of(view: memoryview) -> int:
    """The address at which a writable view begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class PagedBuffer:
    """An engine's KV cache in host memory: random strides, padding, an odd start; all of it poisoned.

    Layers are those of a rank, numbered group after group.
    """

    device = "cpu"

    def __init__(self, layout: ChunkLayout, blocks: int, rng: random.Random, rank: int = 0):
        self.blocks = blocks
        self._layout = layout
        self._rank = rank
        self._page_nbytes = list(chain(*layout.pages_of(rank)))
        self._strides = [nbytes + rng.choice((0, 64, 512)) for nbytes in self._page_nbytes]
        self._starts = [rng.randrange(256) for _ in self._page_nbytes]
        self._layers = [
            memoryview(bytearray(start + stride * blocks))
            for start, stride in zip(self._starts, self._strides, strict=True)
        ]
        for layer in self._layers:
            poison(layer)

    def kv_cache(self) -> PagedKVCache:
        """The pages as a mover sees them."""
        runs = tuple(
            PageRun(address_of(layer) + start, stride, nbytes)
            for layer, start, stride, nbytes in zip(
                self._layers, self._starts, self._strides, self._page_nbytes, strict=True
            )
        )
        return PagedKVCache(runs, self.blocks, self.device, self._rank, self._layout)

    def page(self, layer: int, block: int) -> bytes:
        """A copy of one page."""
        return bytes(self._page(layer, block))

    def put(self, layer: int, block: int, page: bytes) -> None:
        """Overwrite one page."""
        self._page(layer, block)[:] = page

    def fill(self, rng: random.Random) -> None:
        """Other bytes in every page; the padding stays as it is."""
        for layer, nbytes in enumerate(self._page_nbytes):
            for block in range(self.blocks):
                self.put(layer, block, rng.randbytes(nbytes))

    def everything(self) -> list[bytes]:
        """Pages and padding of every layer."""
        return [bytes(layer) for layer in self._layers]

    def _page(self, layer: int, block: int) -> memoryview:
        begin = self._starts[layer] + block * self._strides[layer]
        return self._layers[layer][begin : begin + self._page_nbytes[layer]]


def same(found: object, expected: object) -> bool:
    """Are both equal? Compared here because pytest would spend minutes on showing how two frames differ."""
    return found == expected
