"""Sizes, times, namespaces and layouts: what they accept, and the numbers that must never change."""

from __future__ import annotations

import itertools
import json

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_core.testing.samples import make_group, make_layout
from kvtier_core.types import FRAME_ALIGNMENT, ChunkLayout, KVGroup, KVStructure, Namespace, Nbytes, Seconds

FACTS = {"model": "golden", "block": 16}

#: From hashlib by hand: blake2b of `[["block","16"],["model","golden"]]`, personalised with `kvtier-ns`.
GOLDEN = "529ad0bb679655765f1c167f8aae32926e01a523eb153bc4e70003b143cbf9d1"


# -- sizes and times -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0B", 0),
        ("500B", 500),
        ("1KiB", 1 << 10),
        ("12 MiB", 12 << 20),
        (" 8GiB ", 8 << 30),
        ("3TiB", 3 << 40),
        ("2PiB", 2 << 50),
    ],
)
def test_sizes(text, nbytes):
    parsed = Nbytes.parse(text)
    assert parsed == nbytes
    assert type(parsed) is Nbytes


@pytest.mark.parametrize("text", ["", "8", "GiB", "500GB", "8gib", "1.5GiB", "-1B", "1GiB 2MiB", "8GiB!"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError) as caught:
        Nbytes.parse(text)
    assert str(caught.value) == f"{text!r} is not a size; write a whole number and B, KiB, MiB, GiB, TiB or PiB"


@pytest.mark.parametrize("text", ["0B", "1023B", "1KiB", "1025B", "512MiB", "8GiB", "20TiB", "1PiB", "2048PiB"])
def test_a_size_is_told_in_its_largest_unit(text):
    assert str(Nbytes.parse(text)) == text
    assert f"{Nbytes.parse(text)}" == text


@given(st.integers(0, 1 << 64))
def test_a_size_survives_being_told(nbytes):
    assert Nbytes.parse(str(Nbytes(nbytes))) == nbytes


@pytest.mark.parametrize(
    ("text", "seconds"), [("500ms", 0.5), ("2s", 2.0), ("0s", 0.0), ("1.5 s", 1.5), (" 1min ", 60.0), ("0.5min", 30.0)]
)
def test_times(text, seconds):
    parsed = Seconds.parse(text)
    assert parsed == seconds
    assert type(parsed) is Seconds


@pytest.mark.parametrize("text", ["", "2", "s", "1h", "2 sec", "-1s", ".5s", "1e3s", "1s 2ms"])
def test_what_is_no_time(text):
    with pytest.raises(ValueError) as caught:
        Seconds.parse(text)
    assert str(caught.value) == f"{text!r} is not a length of time; write a number and ms, s or min"


def test_a_time_is_told_in_seconds():
    assert [str(Seconds.parse(text)) for text in ("500ms", "2s", "1min", "1.25s")] == ["0.5s", "2s", "60s", "1.25s"]


@given(st.integers(0, 30 * 24 * 3600 * 1000))
def test_a_time_survives_being_told(milliseconds):
    seconds = Seconds.parse(f"{milliseconds}ms")
    assert Seconds.parse(str(seconds)) == pytest.approx(seconds, rel=1e-9)


# -- namespaces ----------------------------------------------------------------------------------------


def test_the_digest_of_a_namespace_is_golden():
    assert Namespace.of(FACTS).digest.hex() == GOLDEN


def test_the_order_of_facts_does_not_matter():
    assert Namespace.of(dict(reversed(FACTS.items()))) == Namespace.of(FACTS)
    assert Namespace.of(dict(reversed(FACTS.items()))).digest.hex() == GOLDEN


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"model": "golden"},
        {**FACTS, "block": 32},
        {**FACTS, "Model": "golden"},
        {**FACTS, "epoch": ""},
        {"model": "16", "block": "golden"},
        {"model": 'golden"],["x","y', "block": 16},
    ],
)
def test_one_differing_fact_is_another_namespace(facts):
    assert Namespace.of(facts).digest.hex() != GOLDEN


@given(*[st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=3)] * 2)
def test_facts_never_run_into_each_other(ours, theirs):
    assert (Namespace.of(ours).digest == Namespace.of(theirs).digest) == (ours == theirs)


# -- layouts -------------------------------------------------------------------------------------------


def test_a_chunk_of_two_ranks():
    layout = make_layout((4608, 1536, 4608), blocks=4, ranks=2)
    assert layout.shard_nbytes == 4 * (4608 + 1536 + 4608) == 43008
    assert layout.payload_nbytes == 86016
    assert layout.frame_nbytes == 4096 + 86016, "an aligned payload needs no padding"
    assert [layout.shard_offset(rank) for rank in range(2)] == [4096, 4096 + 43008]


def test_a_shard_is_group_after_group():
    """Each has as many pages a layer as its blocks fit into a chunk."""
    layout = ChunkLayout([make_group((1000, 24)), make_group((100,), name="group 1", block_tokens=4)], tokens=32)
    assert layout.blocks == (2, 8)
    assert [(layer.group, layer.page_nbytes, layer.offset, layer.blocks) for layer in layout.layers] == [
        (0, 1000, 0, 2),
        (0, 24, 2000, 2),
        (1, 100, 2048, 8),
    ]
    assert layout.shard_nbytes == 2048 + 800


@pytest.mark.parametrize("tokens", [8, 24])
def test_a_chunk_is_whole_blocks_of_every_group(tokens):
    with pytest.raises(ValueError, match=r"are no whole blocks of 16 \(group 1\)$"):
        ChunkLayout([make_group((10,), block_tokens=1), make_group((10,), name="group 1")], tokens)
    with pytest.raises(ValueError, match="0 tokens are no whole blocks"):
        ChunkLayout([make_group((10,))], 0)


@pytest.mark.parametrize(
    "change",
    [
        {"name": "group 1"},
        {"page_nbytes": (4096, 8192)},
        {"block_tokens": 32},
        {"dtype": "bfloat16"},
        {"structure": KVStructure.MLA_LATENT},
    ],
)
def test_a_fact_tells_all_of_a_group(change):
    group = make_group((4096, 4096))
    assert group.fact == "group 0: full attention, 16 tokens a block, uint8, opaque, pages of 4096 4096 bytes"
    assert attrs.evolve(group, **change).fact != group.fact


def test_a_group_survives_being_told_in_json():
    group = make_group((4096, 512))
    assert KVGroup(**json.loads(json.dumps(attrs.asdict(group)))) == group
    with pytest.raises(ValueError, match="half attention"):
        KVGroup(**{**attrs.asdict(group), "kind": "half attention"})


def test_a_frame_is_a_multiple_of_its_alignment():
    assert make_layout((1,), blocks=1).frame_nbytes == 2 * FRAME_ALIGNMENT
    assert make_layout((FRAME_ALIGNMENT,), blocks=1).frame_nbytes == 2 * FRAME_ALIGNMENT
    assert make_layout((FRAME_ALIGNMENT + 1,), blocks=1).frame_nbytes == 3 * FRAME_ALIGNMENT


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=5), st.integers(1, 20), st.integers(1, 8))
def test_shards_lie_side_by_side_in_the_frame(pages, blocks, ranks):
    layout = make_layout(tuple(pages), blocks, ranks)
    offsets = [layout.shard_offset(rank) for rank in range(ranks + 1)]
    assert offsets[0] == FRAME_ALIGNMENT
    assert {after - before for before, after in itertools.pairwise(offsets)} == {layout.shard_nbytes}
    assert 0 <= layout.frame_nbytes - offsets[-1] < FRAME_ALIGNMENT
    assert layout.frame_nbytes % FRAME_ALIGNMENT == 0
