"""Frames of engines with other numbers of ranks, whose shards are rearranged head by head."""

from __future__ import annotations

import itertools
import random

import attrs
import pytest
import serializing

from kvtier_core.encoding.codec import FrameCodec
from kvtier_core.encoding.keyed_seal import KeyedSeal
from kvtier_core.frames.format import FrameError, payload_of, seal, seal_part, verify
from kvtier_core.frames.identity import identity_of, namespace_of_slots
from kvtier_core.layouts import ChunkLayout, Elements, KVGroup, KVKind, KVStructure
from kvtier_core.transfer import regroup
from kvtier_core.transfer.copier import PlainCopier
from kvtier_core.types import FRAME_HEADER_NBYTES
from kvtier_testing.samples import make_key, make_namespace

HEADS, TOKENS, CHANNELS, LAYERS, BLOCKS = 4, 3, 5, 2, 2
KEY, NAMESPACE = make_key(0), make_namespace()


def page(heads, order):
    """Keys and values in a page whose axes have this order, outermost first, and its places by head, part and element.

    ``order`` has the letters h, t, c (of keys; values may have other ones behind a slash) and p, which is both parts.
    """
    lengths = {"p": 2, "h": heads, "t": TOKENS, "c": CHANNELS}
    elements = []
    for part, axes in enumerate(order.split("/") if "/" in order else [order, order]):
        steps, step = {}, 1
        for axis in reversed(axes):
            steps[axis], step = step, step * lengths[axis]
        elements.append(Elements(heads, TOKENS, CHANNELS, part * steps["p"], steps["h"], steps["t"], steps["c"]))
    return tuple(elements)


#: Heads first, with keys beside values or apart, both parts first, tokens first; values in another order than keys.
ORDERS = ["hptc", "htpc", "phtc", "ptch", "tphc", "pthc", "thpc", "thcp", "tpch", "hpct/hptc"]


def layout(ranks, order="thpc", **changes):
    group = KVGroup(
        "group 0",
        KVKind.FULL_ATTENTION,
        [4 * 2 * HEADS // ranks * TOKENS * CHANNELS] * LAYERS,
        TOKENS,
        "float32",
        KVStructure.KEYS_AND_VALUES,
        elements=page(HEADS // ranks, order),
    )
    return ChunkLayout([attrs.evolve(group, **changes)], TOKENS * BLOCKS, ranks, any_ranks=True)


#: Every element of a chunk by layer, block, head, part, token and channel.
PLACES = itertools.product(*map(range, (LAYERS, BLOCKS, HEADS, 2, TOKENS, CHANNELS)))
NUMBERS = {place: random.Random(number).randbytes(4) for number, place in enumerate(PLACES)}


def frame_of(of):
    """The frame that engines with this layout write, put together element by element."""
    frame = memoryview(bytearray(of.frame_nbytes))
    (part,) = of.parts
    for (layer, block, head, half, token, channel), number in NUMBERS.items():
        rank, own = divmod(head, HEADS // of.ranks)
        shard, elements = part.shards[rank], of.groups[0].elements[half]
        place = elements.first + own * elements.of_head + token * elements.of_token + channel * elements.of_channel
        at = shard.offset + shard.layers[layer].offset + block * shard.layers[layer].page_nbytes + 4 * place
        frame[at : at + 4] = number
    seal_part(frame, NAMESPACE, KEY, part)
    return frame


def read(frame, of):
    """What an engine with this layout makes of a frame in its slot: an error, or the slot."""
    codec = FrameCodec(NAMESPACE, of)
    slot = codec.read_buffer(memoryview(bytearray(of.frame_nbytes)))
    slot[:] = frame
    return codec.decode_verified(KEY, slot, len(frame), slot) or slot


@pytest.fixture(params=["compiled", "plain"])
def copier(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setattr(regroup, "Copier", PlainCopier)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("stored", "own"), list(itertools.product([1, 2, 4], [1, 2, 4])))
def test_each_head_comes_to_its_place(stored, own, order, copier):
    slot = read(frame_of(layout(stored, order)), layout(own, order))
    assert slot == frame_of(layout(own, order))
    assert verify(slot, NAMESPACE, KEY) is None


def test_a_frame_of_the_same_ranks_is_left_as_it_is():
    stored = frame_of(layout(2))
    stored[FRAME_HEADER_NBYTES - 1] = 1  # where nobody looks, and a new header has a zero
    assert read(stored, layout(2)) == stored


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(3, id="that no head is divided by"),
        pytest.param(8, id="more than heads"),
        pytest.param(4, id="whose checksums are those of other shards"),
    ],
)
def test_a_number_of_shards_that_is_not_true_is_a_miss(count):
    stored = frame_of(layout(2))
    payload = payload_of(stored)
    seal(stored, NAMESPACE, KEY, len(payload), shard_checksums=[1] * count)
    assert read(stored, layout(1)) is FrameError.RANKS
    assert FrameError.RANKS.incompatible


def test_a_damaged_frame_is_not_rearranged():
    stored = frame_of(layout(2))
    stored[FRAME_HEADER_NBYTES] ^= 1
    assert read(stored, layout(1)) is FrameError.CHECKSUM


@pytest.mark.parametrize(
    "elements",
    [
        (),
        page(2, "thpc")[:1],
        (page(2, "thpc")[0], attrs.evolve(page(2, "thpc")[1], of_head=1)),
        tuple(attrs.evolve(each, first=each.first + 1) for each in page(2, "thpc")),
        tuple(attrs.evolve(each, of_token=each.of_token + 1) for each in page(2, "thpc")),
    ],
    ids=["not known", "without values", "unlike", "behind something else", "rows that overlap"],
)
def test_pages_that_do_not_divide_by_head_are_left_alone(elements):
    assert not regroup.divides_by_head(layout(2, elements=elements).groups[0])
    assert read(frame_of(layout(1)), layout(2, elements=elements)) is FrameError.RANKS


@pytest.mark.parametrize("kind", ["raw", "serializer", "keyed seal", "packed"])
def test_only_frames_arranged_like_pages_are_found_by_other_ranks(kind):
    options = {"serializer": (serializing.Xor(1), identity_of(serializing.XorConfig(1))), "keyed seal": (None, None)}
    keyed_seal = KeyedSeal.of("correct horse battery staple, 32 or more", encrypt=False)
    one, two = (
        FrameCodec(
            NAMESPACE,
            attrs.evolve(layout(ranks), packed=kind == "packed"),
            *options.get(kind, ()),
            keyed_seal=keyed_seal if kind == "keyed seal" else None,
        )
        for ranks in (1, 2)
    )
    assert (one.namespace == two.namespace) == (kind == "raw") == one.regroups == two.regroups
    if kind in ("raw", "packed"):
        of_slots = attrs.evolve(layout(1), packed=kind == "packed")
        assert one.namespace == namespace_of_slots(NAMESPACE, of_slots), "frames go down as they lie in slots"
