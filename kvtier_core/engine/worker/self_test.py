"""The self-test: copies random bytes with the movers that will serve, before any KV is trusted to them.

It writes to the engine's real pages through the engine's own tensors, stores, wipes, loads and compares. So an engine
that changed the layout of its pages is detected before traffic. It runs before the first forward, while no page holds
KV, and restores the contents of the pages. It has its own generators of random numbers: the engine samples from those
of Python and torch.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import cycle, islice

import torch

from kvtier_core.interfaces import NO_BLOCK, Mover, PagedKVCache
from kvtier_core.layouts import Part

#: Maximum number of pages of each layer that are copied; fewer if a chunk has fewer.
_COPIED_PAGES = 4
#: Other pages, which must not change.
_UNTOUCHED_PAGES = 2
#: The type for comparing contents as bits, by the bytes of an element.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_STORE, _LOAD, _WHOLE = -1, -2, -3  # jobs

#: The engine's tensors of a group, by the name of the layer.
LayerCaches = Mapping[str, torch.Tensor]


def try_copies(mover: Mover, table: PagedKVCache, caches: Sequence[LayerCaches], slots: Sequence[int]) -> str:
    """Store pages to empty slots and load them back. Returns the problem in plain words; empty if there is none.

    ``caches`` are those of each group; ``table`` has their places in memory. There is a slot for each part.
    """
    for part, slot in zip(table.layout.parts, slots, strict=True):
        layers = {name: cache for group in part.groups for name, cache in caches[group].items()}
        if wrong := _try_part(mover, table, part, layers, slot):
            return wrong
    return ""


def _try_part(mover: Mover, table: PagedKVCache, part: Part, caches: LayerCaches, slot: int) -> str:
    """The same for one part of a chunk: layers of other parts may use the same memory."""
    drawn_from = random.Random()
    pages = {name: pages_of(cache, table.blocks) for name, cache in caches.items()}
    drawn = drawn_from.sample(range(table.blocks), min(table.blocks, _COPIED_PAGES + _UNTOUCHED_PAGES))
    most = min(_COPIED_PAGES, max(1, len(drawn) - _UNTOUCHED_PAGES))
    copied = drawn[: min(most, *(part.blocks[group] for group in part.groups))]
    chunk = [_scattered(copied, places, drawn_from) for places in part.blocks]  # the same blocks of every group
    before = {name: cache[drawn] for name, cache in pages.items()}  # indexing with a list copies
    try:
        each_once = {(cache.data_ptr(), cache.stride()): name for name, cache in pages.items()}.values()
        for name in each_once:  # layers may share their pages
            pages[name][drawn] = _noise(before[name], drawn_from, packs=table.layout.packed)
        written = {name: cache[drawn] for name, cache in pages.items()}
        mover.store(_STORE, [chunk], [slot])
        mover.wait([_STORE])
        if where := _difference(pages, drawn, written):
            return f"a store changed {where}"
        for cache in pages.values():
            cache[copied] = 0
        mover.load(_LOAD, [slot], [chunk])
        mover.wait([_LOAD])
        if where := _difference(pages, drawn, written):
            return f"a load did not restore {where}"
        # As most stores are: without holes. A mover that computes checksums compares its first ones with the slot.
        mover.store(_WHOLE, [[list(islice(cycle(copied), places)) for places in part.blocks]], [slot])
        mover.wait([_WHOLE])
        if where := _difference(pages, drawn, written):
            return f"a store changed {where}"
        return "" if all(result.ok for result in mover.finished()) else "a copy failed"
    finally:
        for name, cache in pages.items():
            cache[drawn] = before[name]


def pages_of(cache: torch.Tensor, blocks: int) -> torch.Tensor:
    """The bits of a layer by block. The engine may have split a block into several rows."""
    return torch.unflatten(cache.view(_BITS[cache.element_size()]), 0, (blocks, -1))


def _scattered(blocks: Sequence[int], places: int, drawn_from: random.Random) -> list[int]:
    """The blocks at the first and last of ``places`` places and at random ones between, and NO_BLOCK elsewhere."""
    if not places:
        return []
    between = drawn_from.sample(range(1, places - 1), max(0, len(blocks) - 2))
    at = dict(zip(sorted({0, places - 1, *between}), blocks, strict=False))
    return [at.get(place, NO_BLOCK) for place in range(places)]


def _noise(like: torch.Tensor, drawn_from: random.Random, *, packs: bool) -> torch.Tensor:
    """Random bits in the shape of a tensor and on its device; of numbers in bfloat16 if they must pack."""
    generator = torch.Generator(like.device).manual_seed(drawn_from.getrandbits(63))
    words = torch.empty(-(-like.nbytes // 8), dtype=torch.int64, device=like.device).random_(generator=generator)
    if packs:
        words = torch.empty(4 * len(words), device=like.device).normal_(generator=generator).bfloat16()
    return words.view(like.dtype)[: like.numel()].view(like.shape)


def _difference(pages: LayerCaches, blocks: Sequence[int], written: LayerCaches) -> str:
    """A place where pages do not hold what was written; empty if they all do."""
    for name, cache in pages.items():
        for block, content in zip(blocks, written[name], strict=True):
            if not torch.equal(cache[block], content):
                return f"block {block} of layer {name}"
    return ""
