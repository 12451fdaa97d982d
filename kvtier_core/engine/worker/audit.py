"""Compares the KV that the engine has computed for a chunk with the stored one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kvtier_core.engine.messages import ChunkPages
from kvtier_core.engine.worker.self_test import LayerCaches, pages_of

#: A layer may differ by this many times the precision of its numbers, relative to its norm, and by this share at most.
#: Other kernels, batches and numbers of ranks sum in another order: that changed the deepest of 30 layers by twice the
#: precision of bfloat16, and grows with the square root of their number.
_STEPS, _MOST = 8, 0.25
#: Matrix products may be computed in a type of this precision although the numbers have a better one.
_PRECISION = 2.0**-10


def difference(caches: Sequence[LayerCaches], blocks: int, chunk: ChunkPages, load: Callable[[], bool]) -> str | None:
    """How the pages of a ``chunk`` differ from the KV that ``load`` copies into them; empty if they do not.

    The pages keep what they held. None: nothing was copied, or the numbers are of no floating-point type.
    """
    layers = [
        (name, cache, pages_of(cache, blocks), list(pages))
        for group, pages in zip(caches, chunk, strict=True)
        for name, cache in group.items()
    ]
    if not all(cache.is_floating_point() for _, cache, _, _ in layers):
        return None
    held = [bits[pages] for _, _, bits, pages in layers]  # indexing with a list copies
    try:
        if not load():
            return None
        found = {
            name: _relative(computed.view(cache.dtype), bits[pages].view(cache.dtype))
            for (name, cache, bits, pages), computed in zip(layers, held, strict=True)
        }
    finally:
        for (_, _, bits, pages), computed in zip(layers, held, strict=True):
            bits[pages] = computed
    worst = max(found, key=lambda name: found[name])
    if found[worst] <= (allowed := tolerance(layers[0][1].dtype)):
        return ""
    return f"layer {worst} differs by {found[worst]:.1%}, and {allowed:.1%} are allowed"


def tolerance(dtype: torch.dtype) -> float:
    """The difference, relative to the norm, that KV of this type may have if it was computed in another way."""
    return min(_MOST, _STEPS * max(torch.finfo(dtype).eps, _PRECISION))


def _relative(computed: torch.Tensor, stored: torch.Tensor) -> float:
    """The norm of the difference in the median page, relative to the norm there: a few tokens of a chunk may differ
    more, such as those that pass through other experts.
    """
    ours, theirs = (torch.nan_to_num(each.flatten(1).float()) for each in (computed, stored))
    shares = (theirs - ours).norm(dim=1) / ours.norm(dim=1).clamp(min=torch.finfo(torch.float32).tiny)
    return float(shares.median())
