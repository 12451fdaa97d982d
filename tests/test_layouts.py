"""The layouts of chunks: which groups share a frame, what is stored of each, and where it lies."""

from __future__ import annotations

import itertools
import json
import re

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_core.layouts import ChunkLayout, Elements, KVGroup, KVKind, KVStructure, chunk_key, number_of_part, part_key
from kvtier_core.types import FRAME_ALIGNMENT
from kvtier_testing.samples import make_group, make_key, make_layout


def test_a_chunk_of_two_ranks():
    layout = make_layout((4608, 1536, 4608), blocks=4, ranks=2)
    (part,) = layout.parts
    assert [shard.nbytes for shard in part.shards] == [4 * (4608 + 1536 + 4608)] * 2 == [43008] * 2
    assert part.payload_nbytes == layout.payload_nbytes == 86016
    assert part.frame_nbytes == layout.frame_nbytes == 4096 + 86016, "an aligned payload needs no padding"
    assert [part.shard_of(rank).offset for rank in range(2)] == [4096, 4096 + 43008]


def test_a_shard_is_group_after_group():
    """Each has as many pages a layer as its blocks fit into a chunk."""
    layout = ChunkLayout([make_group((1000, 24)), make_group((100,), name="group 1", block_tokens=4)], tokens=32)
    (part,) = layout.parts
    assert part.blocks == (2, 8)
    (shard,) = part.shards
    assert shard.layers == ((0, 0, 1000, 0, 2), (1, 0, 24, 2000, 2), (2, 1, 100, 2048, 8))
    assert shard.nbytes == 2048 + 800


@pytest.mark.parametrize("tokens", [8, 24])
def test_a_chunk_is_whole_blocks_of_every_group(tokens):
    with pytest.raises(ValueError, match=r"are not a multiple of the block size 16 \(group 1\)$"):
        ChunkLayout([make_group((10,), block_tokens=1), make_group((10,), name="group 1")], tokens)
    with pytest.raises(ValueError, match="0 tokens are not a multiple of the block size"):
        ChunkLayout([make_group((10,))], 0)


@pytest.mark.parametrize(
    "change",
    [
        {"name": "group 1"},
        {"page_nbytes": (4096, 8192)},
        {"block_tokens": 32},
        {"dtype": "bfloat16"},
        {"structure": KVStructure.MLA_LATENT},
        {"kind": KVKind.SLIDING_WINDOW, "reach": 512},
    ],
)
def test_a_fact_tells_all_of_a_group(change):
    group = make_group((4096, 4096))
    assert group.fact == "group 0: full attention, 16 tokens a block, uint8, opaque, pages of 4096 4096 bytes"
    assert attrs.evolve(group, **change).fact != group.fact


def test_the_places_of_keys_and_values_are_no_fact():
    """The page layout and the attention backend are, and namespaces of before stay the same."""
    group = make_group((4096, 4096))
    assert attrs.evolve(group, elements=[Elements(2, 16, 64, 0, 64, 128, 1)] * 2, depths=[0, 1]).fact == group.fact


def test_depths_go_with_the_layers_of_a_stage():
    groups = [attrs.evolve(make_group((10, 20, 30)), depths=[0, 1, 2]), make_group((40,), name="group 1")]
    layout = ChunkLayout(groups, 16, ranks=2, stages=[(2, 0), (1, 1)])
    assert [layout.depths_of(rank) for rank in (0, 1)] == [((0, 1), ()), ((2,), ())]
    assert layout.alone(1).groups[0].depths == (2,)


def test_a_group_survives_being_told_in_json():
    elements = [Elements(2, 16, 64, 0, 128, 256, 1), Elements(2, 16, 64, 64, 128, 256, 1)]
    group = attrs.evolve(make_group((4096, 512)), elements=elements, depths=[0, 1])
    assert KVGroup(**json.loads(json.dumps(attrs.asdict(group)))) == group
    with pytest.raises(ValueError, match="half attention"):
        KVGroup(**{**attrs.asdict(group), "kind": "half attention"})


def test_a_frame_is_a_multiple_of_its_alignment():
    assert make_layout((1,), blocks=1).frame_nbytes == 2 * FRAME_ALIGNMENT
    assert make_layout((FRAME_ALIGNMENT,), blocks=1).frame_nbytes == 2 * FRAME_ALIGNMENT
    assert make_layout((FRAME_ALIGNMENT + 1,), blocks=1).frame_nbytes == 3 * FRAME_ALIGNMENT


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=5), st.integers(1, 20), st.integers(1, 8))
def test_shards_are_adjacent_in_the_frame(pages, blocks, ranks):
    layout = make_layout(tuple(pages), blocks, ranks)
    (part,) = layout.parts
    shards = [part.shard_of(rank) for rank in range(ranks)]
    assert shards[0].offset == FRAME_ALIGNMENT
    assert all(before.offset + before.nbytes == after.offset for before, after in itertools.pairwise(shards))
    assert 0 <= layout.frame_nbytes - (shards[-1].offset + shards[-1].nbytes) < FRAME_ALIGNMENT
    assert layout.frame_nbytes % FRAME_ALIGNMENT == 0


@pytest.mark.parametrize(
    "layout",
    [
        make_layout(ranks=3),
        make_layout(ranks=4, replicas=2),
        ChunkLayout([make_group((8, 16, 24)), make_group((5, 6), name="latent")], 32, 4, stages=((1, 2), (2, 0))),
    ],
    ids=["ranks", "replicas", "stages"],
)
def test_a_rank_alone_has_its_shard_after_the_header(layout):
    for rank in range(layout.ranks):
        alone = layout.alone(rank)
        (own,) = alone.parts[0].shards
        shard = layout.parts[0].shard_of(rank)
        assert (own.offset, own.layers, own.nbytes) == (FRAME_ALIGNMENT, shard.layers, shard.nbytes)
        assert alone.payload_nbytes == shard.nbytes and alone.parts[0].blocks == layout.parts[0].blocks
        assert alone.stores(0), "to try its copies"


# -- groups that are needed at other places ------------------------------------------------------------

FULL = make_group((100,), block_tokens=4)
WINDOW = make_group((20, 20), name="window", block_tokens=4, kind=KVKind.SLIDING_WINDOW, reach=10)
LOCAL = make_group((30,), name="local", block_tokens=4, kind=KVKind.CHUNKED_LOCAL, reach=32)
STATE = make_group((700,), name="state", block_tokens=8, kind=KVKind.STATE)


@pytest.mark.parametrize(
    ("group", "needed"),
    [
        (FULL, {0: (0, 0), 4: (0, 1), 64: (0, 16)}),
        (WINDOW, {4: (0, 1), 8: (0, 2), 12: (0, 3), 16: (1, 4), 64: (13, 16)}),  # the last 9 tokens
        (LOCAL, {4: (0, 1), 28: (0, 7), 32: (8, 8), 36: (8, 9), 64: (16, 16)}),
        (STATE, {8: (0, 1), 64: (7, 8)}),
    ],
)
def test_the_blocks_that_a_group_needs_after_a_prefix(group, needed):
    for tokens, (first, end) in needed.items():
        assert (group.needed(tokens).start, group.needed(tokens).stop) == (first, end), tokens


def test_groups_that_need_every_token_share_a_frame_and_the_others_have_their_own():
    layout = ChunkLayout([WINDOW, FULL, STATE, attrs.evolve(FULL, name="latent")], 16, ranks=2)
    assert [part.groups for part in layout.parts] == [(1, 3), (0,), (2,)]
    assert [part.blocks for part in layout.parts] == [(0, 4, 0, 4), (3, 0, 0, 0), (0, 0, 1, 0)]
    assert [place.layer for part in layout.parts for place in part.shard_of(1).layers] == [2, 4, 0, 1, 3]
    assert [part.payload_nbytes for part in layout.parts] == [2 * 800, 2 * 3 * 40, 2 * 700]
    assert layout.payload_nbytes == 1600 and layout.frame_nbytes == 2 * FRAME_ALIGNMENT


def test_groups_that_are_never_needed_have_no_frame():
    """A window of one token, and local attention over chunks as long as ours."""
    layout = ChunkLayout([FULL, attrs.evolve(WINDOW, reach=1), attrs.evolve(LOCAL, reach=16)], 16)
    assert [part.groups for part in layout.parts] == [(0,)]


def test_local_attention_is_over_whole_chunks():
    with pytest.raises(ValueError, match=r"32 tokens of local attention are not whole chunks \(local\)"):
        ChunkLayout([FULL, LOCAL], 24)


def test_the_key_of_a_part_names_its_chunk():
    chunk = chunk_key(make_key(1))
    assert len({part_key(chunk, number) for number in range(256)}) == 256
    for number in (0, 1, 255):
        key = part_key(chunk, number)
        assert (chunk_key(key), number_of_part(key)) == (chunk, number)


# -- ranks that do not all have the same layers, or the same bytes ------------------------------------


def test_a_stage_has_its_own_layers_of_each_group():
    """Three stages of two ranks, the first without the second group."""
    groups = [make_group((100, 10, 1)), make_group((7,), name="group 1", block_tokens=8)]
    layout = ChunkLayout(groups, 16, ranks=6, stages=((1, 0), (1, 1), (1, 0)))
    assert [layout.pages_of(rank) for rank in (0, 1)] == [((100,), ())] * 2
    assert [layout.pages_of(rank) for rank in (2, 3)] == [((10,), (7,))] * 2
    assert [layout.pages_of(rank) for rank in (4, 5)] == [((1,), ())] * 2
    (part,) = layout.parts
    assert [shard.nbytes for shard in part.shards] == [100, 100, 24, 24, 1, 1]
    assert [part.shard_of(rank).offset - FRAME_ALIGNMENT for rank in range(6)] == [0, 100, 200, 224, 248, 249]
    assert part.shard_of(3).layers == ((0, 0, 10, 0, 1), (1, 1, 7, 10, 2))
    assert part.payload_nbytes == 250


def test_ranks_with_the_same_bytes_have_one_shard_which_the_first_one_stores():
    layout = ChunkLayout([make_group((100, 10))], 16, ranks=8, replicas=2, stages=((1,), (1,)))
    (part,) = layout.parts
    assert layout.shards == len(part.shards) == 4
    assert [layout.stores(rank) for rank in range(8)] == [True, False] * 4
    assert [part.shard_of(rank).nbytes for rank in range(8)] == [100] * 4 + [10] * 4
    assert [part.shard_of(rank) is part.shard_of(rank + 1) for rank in (0, 1, 2, 3)] == [True, False, True, False]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"ranks": 3, "replicas": 2}, "3 ranks for 1 stages of 2 replicas"),
        ({"ranks": 4, "replicas": 4, "stages": ((1,), (1,))}, "4 ranks for 2 stages of 4 replicas"),
        ({"ranks": 2, "stages": ((1,), (2,))}, "stages have ((1,), (2,)) layers, but groups have (2,)"),
    ],
)
def test_ranks_are_of_whole_stages_and_have_all_layers(more, why):
    with pytest.raises(ValueError, match=f"^{re.escape(why)}$"):
        ChunkLayout([make_group((100, 10))], 16, **more)


@pytest.mark.parametrize(
    "change",
    [
        {"page_nbytes": (0,)},
        {"page_nbytes": (-4096,)},
        {"block_tokens": 0},
        {"kind": KVKind.SLIDING_WINDOW, "reach": 0},
    ],
    ids=str,
)
def test_a_group_with_nothing_in_it_is_refused(change):
    with pytest.raises(ValueError, match="must not be empty"):
        make_group(**change)


@pytest.mark.parametrize("change", [{"ranks": 0}, {"ranks": 1 << 40}, {"replicas": 0}, {"groups": ()}], ids=str)
def test_a_layout_without_ranks_or_groups_is_refused(change):
    with pytest.raises(ValueError, match="ranks|store"):
        attrs.evolve(make_layout(), **change)
