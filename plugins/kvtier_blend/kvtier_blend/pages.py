"""The keys and values in the engine's pages, token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kvtier_core.layouts import ChunkLayout, Elements, KVKind


class TokenPages:
    """Keys and values of single tokens in the pages of all layers."""

    def __init__(self, caches: Mapping[str, torch.Tensor], layout: ChunkLayout):
        """``caches`` are the engine's tensors by layer. Raises ValueError if where tokens are in them is not known."""
        group = layout.groups[0]
        if len(layout.groups) > 1 or group.kind is not KVKind.FULL_ATTENTION:
            raise ValueError("not all of its layers attend to every token")
        if len(group.elements) != 2:
            raise ValueError("the places of keys and values in its pages are not known")
        if not all(cache.dtype.is_floating_point and cache.element_size() > 1 for cache in caches.values()):
            raise ValueError("its keys are not numbers of two bytes or more")
        each_once = {(cache.data_ptr(), cache.stride()): name for name, cache in caches.items()}.values()
        #: By layer: keys and values, each [blocks, tokens, heads, channels]. Of layers that share pages one is here.
        self.layers = {name: [_by_token(caches[name], each) for each in group.elements] for name in each_once}
        self._block_tokens = group.block_tokens

    def find(self, blocks: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The blocks of tokens at these ``places`` of a request, and the places in them, to index a layer with."""
        return blocks[places // self._block_tokens], places % self._block_tokens

    def read(self, index: tuple[torch.Tensor, torch.Tensor]) -> dict[str, list[torch.Tensor]]:
        """Copies of the keys and values of some tokens, each [tokens, heads, channels], by layer."""
        return {name: [each[index] for each in layer] for name, layer in self.layers.items()}


def _by_token(cache: torch.Tensor, elements: Elements) -> torch.Tensor:
    shape: Sequence[int] = (cache.shape[0], elements.tokens, elements.heads, elements.channels)
    strides = cache.stride(0), elements.of_token, elements.of_head, elements.of_channel
    return cache.as_strided(shape, strides, cache.storage_offset() + elements.first)
