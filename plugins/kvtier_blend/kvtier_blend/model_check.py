"""Tests with the engine's own model that KV can be moved, before any is.

The KV of some tokens with nothing before them is the same at all positions, except that keys are turned. A model that
is told greater positions must therefore compute what `Rotation` makes of the first KV. That fails for models with other
embeddings of positions, with layers that have none, or whose embeddings change with the length of the prompt, and for
pages that are not where `TokenPages` looks for them. The same tokens in several runs must have the same KV, too.
"""

from __future__ import annotations

import random

import torch

from kvtier_blend.link_pass import LinkPass
from kvtier_blend.pages import TokenPages
from kvtier_blend.rotation import Rotation
from kvtier_core.engine.worker.audit import tolerance

#: Tokens of the test; fewer if the model has fewer positions or pages.
_TOKENS = 64
#: Token ids below this one: every model has them.
_VOCABULARY = 256

_KV = dict[str, list[torch.Tensor]]


def fault(link: LinkPass, rotation: Rotation, pages: TokenPages, positions: int) -> str:
    """Why KV cannot be moved with a model for ``positions`` positions; empty if it can. Pages keep what they hold."""
    keys, _ = next(iter(pages.layers.values()))
    size, device = keys.shape[1], keys.device
    count = min(_TOKENS, positions // 2, (keys.shape[0] - 1) * size)
    blocks = list(range(1, 1 + -(-count // size)))  # vLLM's first block is no request's
    index = pages.find(torch.tensor(blocks, device=device), torch.arange(count, device=device))
    tokens = random.Random(count).choices(range(1, _VOCABULARY), k=count)
    before = {name: [each[blocks] for each in layer] for name, layer in pages.layers.items()}

    def compute(runs: list[tuple[int, int]], shift: int = 0) -> _KV:
        for layer in pages.layers.values():
            for each in layer:
                each[blocks] = torch.randn_like(each[blocks])  # else what is not written would be the same each time
        link.compute([token for begin, end in runs for token in tokens[begin:end]], runs, blocks, shift)
        return pages.read(index)

    try:
        first = compute([(0, count)])
        middle = count // 3
        if where := _difference(first, compute([(0, middle), (middle, middle + 1), (middle + 1, count)])):
            return f"in several runs it computes something else, in {where}"
        here = torch.arange(count, device=device)
        for shift in (1, positions // 2, positions - count):
            turned = {name: [rotation.turn(keys, here, here + shift), values] for name, (keys, values) in first.items()}
            if where := _difference(turned, compute([(0, count)], shift)):
                return f"{shift} positions further it does not compute the turned keys and the same values, in {where}"
    finally:
        for name, layer in pages.layers.items():
            for each, held in zip(layer, before[name], strict=True):
                each[blocks] = held
    return ""


def _difference(expected: _KV, found: _KV) -> str:
    """The layer that differs by more than rounding; empty if none does. A wrong rotation differs by the whole norm."""
    for name, layer in expected.items():
        for ours, theirs in zip(layer, found[name], strict=True):
            if not (theirs.float() - ours.float()).norm() <= tolerance(ours.dtype) * ours.float().norm():
                return f"layer {name}"
    return ""
