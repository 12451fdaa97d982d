"""Random bytes through the very copies that will serve, before anything is trusted to them.

Writes into the engine's real pages through the engine's own tensors, stores, wipes, loads and compares. An engine that
changed the layout of its pages is caught here, before traffic. Runs before the first forward, while no page means
anything; what was in the pages is put back.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch

from kvtier_core.interfaces import NO_BLOCK, Mover, PagedKVCache

#: So many pages of each layer are tried, of those that a chunk has.
_TRIED = 4
#: Pages beside them, in which nothing may change.
_WITNESSES = 2
#: Bits are compared, whatever number they are.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_STORE, _LOAD = -1, -2  # jobs


def try_copies(mover: Mover, table: PagedKVCache, caches: Mapping[str, torch.Tensor], slot: int) -> str:
    """What came back wrong from ``slot``, an empty one, in plain words; empty if nothing did."""
    pages = {name: _pages(cache, table.blocks) for name, cache in caches.items()}
    drawn = random.sample(range(table.blocks), min(table.blocks, _TRIED + _WITNESSES))
    tried = drawn[: min(_TRIED, table.layout.blocks, max(1, len(drawn) - _WITNESSES))]
    row = _scattered(tried, table.layout.blocks)
    before = {name: cache[drawn] for name, cache in pages.items()}  # a list of indices copies
    try:
        for name in _one_of_each(pages):
            pages[name][drawn] = _noise(before[name])
        written = {name: cache[drawn] for name, cache in pages.items()}
        mover.store(_STORE, [row], [slot])
        mover.wait([_STORE])
        if where := _difference(pages, drawn, written):
            return f"a store changed {where}"
        for cache in pages.values():
            cache[tried] = 0
        mover.load(_LOAD, [slot], [row])
        mover.wait([_LOAD])
        if where := _difference(pages, drawn, written):
            return f"a load did not restore {where}"
        return "" if all(ended.ok for ended in mover.finished()) else "a copy failed"
    finally:
        for name, cache in pages.items():
            cache[drawn] = before[name]


def _pages(cache: torch.Tensor, blocks: int) -> torch.Tensor:
    """The bits of a layer by block; vLLM may cut a block into several."""
    return cache.view(_BITS[cache.element_size()]).unflatten(0, (blocks, -1))


def _one_of_each(pages: Mapping[str, torch.Tensor]) -> Sequence[str]:
    """Layers that share their pages are filled once."""
    return list({(cache.data_ptr(), cache.stride()): name for name, cache in pages.items()}.values())


def _scattered(blocks: Sequence[int], places: int) -> list[int]:
    """Blocks at the first place of a chunk, at the last, and anywhere between."""
    between = random.sample(range(1, places - 1), max(0, len(blocks) - 2))
    at = dict(zip(sorted({0, places - 1, *between}), blocks, strict=False))
    return [at.get(place, NO_BLOCK) for place in range(places)]


def _noise(like: torch.Tensor) -> torch.Tensor:
    words = torch.empty(-(-like.nbytes // 8), dtype=torch.int64, device=like.device).random_()
    return words.view(like.dtype)[: like.numel()].view(like.shape)


def _difference(pages: Mapping[str, torch.Tensor], blocks: Sequence[int], written: Mapping[str, torch.Tensor]) -> str:
    """Where pages do not hold what was written."""
    for name, cache in pages.items():
        for block, content in zip(blocks, written[name], strict=True):
            if not torch.equal(cache[block], content):
                return f"block {block} of layer {name}"
    return ""
