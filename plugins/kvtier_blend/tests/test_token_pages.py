"""Tokens in the engine's pages, in the order of their backend."""

from __future__ import annotations

import attrs
import pytest
import torch

from kvtier_blend.pages import TokenPages
from kvtier_core.layouts import ChunkLayout, Elements, KVGroup

BLOCKS, HEADS, TOKENS, WIDTH = 5, 2, 4, 3


def layout(**changed):
    """Keys before values in each token, as on GPUs."""
    of_token, of_head = 2 * WIDTH, 2 * WIDTH * TOKENS
    elements = [Elements(HEADS, TOKENS, WIDTH, first, of_head, of_token, 1) for first in (0, WIDTH)]
    nbytes = HEADS * of_head * 4
    group = KVGroup("layers", "full attention", [nbytes] * 2, TOKENS, "float32", "keys and values", elements=elements)
    return ChunkLayout([attrs.evolve(group, **changed)], 2 * TOKENS)


def caches():
    return {name: torch.randn(BLOCKS, HEADS, TOKENS, 2 * WIDTH) for name in ("first", "second")}


def test_a_token_is_found_in_its_block():
    pages, tensors = TokenPages(found := caches(), layout()), found
    places = torch.tensor([0, 5, 7])
    keys, values = pages.read(pages.find(torch.tensor([3, 1]), places))["second"]
    for number, (block, at) in enumerate([(3, 0), (1, 1), (1, 3)]):
        assert torch.equal(keys[number], tensors["second"][block, :, at, :WIDTH])
        assert torch.equal(values[number], tensors["second"][block, :, at, WIDTH:])


def test_pages_that_layers_share_are_there_once():
    """Otherwise their keys would be turned twice."""
    shared = caches()
    shared["third"] = shared["first"]
    assert len(TokenPages(shared, layout()).layers) == 2


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"kind": "sliding window", "reach": 8}, "not all of its layers attend to every token"),
        ({"elements": ()}, "the places of keys and values in its pages are not known"),
    ],
    ids=repr,
)
def test_pages_of_other_kinds_are_refused(changed, why):
    with pytest.raises(ValueError, match=why):
        TokenPages(caches(), layout(**changed))


def test_keys_of_one_byte_are_refused():
    with pytest.raises(ValueError, match="its keys are not numbers of two bytes or more"):
        TokenPages({"first": torch.zeros(BLOCKS, HEADS, TOKENS, 2 * WIDTH, dtype=torch.uint8)}, layout())
