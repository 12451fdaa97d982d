"""How frames lie in Mooncake Store, and what is written again."""

from __future__ import annotations

import pytest
from patience import wait_until
from servers.mooncake import ROOM

from kvtier_core.errors import BackendError, StoreFull
from kvtier_core.types import FRAME_ALIGNMENT
from kvtier_testing.samples import make_frame, make_keys, make_namespace, same

ONE, TWO = make_keys(2)
NBYTES = 5 * FRAME_ALIGNMENT


def frame(key, seed=0):
    return make_frame(key, nbytes=NBYTES, seed=seed)


def found(tier, key, nbytes=NBYTES):
    view = memoryview(bytearray(nbytes))
    (count,) = tier.read([key], [view])
    return view[:count]


def name_of(key, prefix="kvtier"):
    return f"{prefix}/{make_namespace().digest.hex()[:16]}/{key.hex()}"


def test_a_frame_is_an_object_with_some_bytes_behind_it(master, tier):
    tier.write([ONE, TWO], [frame(ONE), frame(TWO)])
    lengths = master.ask(["get_size", name_of(ONE)], ["get_size", name_of(TWO)])
    assert all(NBYTES < length < NBYTES + FRAME_ALIGNMENT for length in lengths)


def test_a_frame_that_is_there_is_not_written_again(master, tier, open_tier):
    """Several engines that compute one prompt store it once. The length of the object tells one write from another."""
    other = open_tier(master)
    tier.write([ONE], [frame(ONE)])
    before = master.ask(["get_size", name_of(ONE)])
    for _ in range(3):
        other.write([ONE, TWO], [frame(ONE), frame(TWO)])
    assert master.ask(["get_size", name_of(ONE)]) == before


@pytest.mark.parametrize("damaged", [FRAME_ALIGNMENT, NBYTES - 1], ids=["first byte of the payload", "last byte"])
def test_a_frame_that_differs_in_one_byte_is_replaced(tier, damaged):
    """Its header is that of the whole frame."""
    harmed = frame(ONE)
    harmed[damaged] ^= 1
    tier.write([ONE], [harmed])
    tier.write([ONE], [frame(ONE)])
    assert same(found(tier, ONE), frame(ONE))


def test_a_frame_is_not_written_in_place_of_another(master, tier):
    """Mooncake does that where an object has the same length: a reader would get a mixture."""
    lengths = set()
    for seed in range(3):  # one length in 4095 is that of the object before
        tier.write([ONE], [frame(ONE, seed)])
        lengths.update(master.ask(["get_size", name_of(ONE)]))
    assert len(lengths) > 1


def test_the_memory_of_a_deleted_frame_is_not_used_at_once(master, owner, open_tier):
    """A reader may be at it. So a store that was full remains full for some time."""
    tier, large = open_tier(master, hard_pin=True), 12 << 20
    keys = make_keys(4)
    assert tier.write(keys, [make_frame(key, nbytes=large) for key in keys]) is None
    tier.delete(keys)
    assert tier.contains(keys) == [False] * len(keys)
    with pytest.raises(StoreFull):
        tier.write(keys, [make_frame(key, nbytes=large, seed=1) for key in keys])


def test_an_entry_that_is_no_frame_is_removed_when_read(master, tier):
    """A deletion that was cut short leaves one byte."""
    assert master.ask(["upsert", name_of(ONE), b"x"]) == [0]
    assert tier.contains([ONE]) == [True]
    assert len(found(tier, ONE)) == 0
    assert tier.contains([ONE]) == [False]


def test_a_recently_read_frame_can_be_replaced_and_deleted(master, tier):
    """A lease that a reader has keeps Mooncake from removing an object."""
    tier.write([ONE, TWO], [frame(ONE, seed=1), frame(TWO)])
    for key in (ONE, TWO):
        assert len(found(tier, key)) == NBYTES
    assert master.ask(["remove", name_of(TWO)]) == [-706], "there is no lease: then this test shows nothing"
    tier.write([ONE], [frame(ONE)])
    tier.delete([TWO])
    assert same(found(tier, ONE), frame(ONE))
    assert tier.contains([ONE, TWO]) == [True, False]


def test_a_frame_longer_than_a_lane_fails_its_call_alone(tier):
    with pytest.raises(BackendError, match="is longer than its tier declared"):
        tier.write([ONE], [make_frame(ONE, nbytes=33 << 20)])
    assert len(found(tier, ONE, 64 << 20)) == 0
    tier.write([ONE], [frame(ONE)])
    assert same(found(tier, ONE, 64 << 20), frame(ONE))


def test_many_frames_go_through_a_lane_in_parts(tier):
    keys = make_keys(10)
    frames = [make_frame(key, nbytes=(1 << 20) * (1 + i % 3)) for i, key in enumerate(keys)]
    views = [memoryview(bytearray(4 << 20)) for _ in keys]
    assert tier.write(keys, frames) is None
    counts = tier.read(keys, views)
    assert counts == list(map(len, frames))
    assert all(same(view[: len(frame)], frame) for view, frame in zip(views, frames, strict=True))


def test_tiers_with_other_prefixes_share_nothing(master, tier, open_tier):
    other = open_tier(master, prefix="team/kv")
    other.write([ONE], [frame(ONE)])
    assert tier.contains([ONE]) == [False]
    assert master.ask(["batch_is_exist", [name_of(ONE), name_of(ONE, "team/kv")]]) == [[0, 1]]


def test_replicas_and_the_preferred_segment_are_mooncakes(master, owner, open_tier):
    """With a copy in each of two segments one owner may go: the frame is there again when the master has noticed."""
    with master.owner(ROOM) as other:
        tier = open_tier(master, replicas=2)
        tier.write([ONE], [frame(ONE)])
        for each in (owner, other):
            each_tier = open_tier(master, preferred_segment=each.name, prefix=each.name)
            each_tier.write([TWO], [frame(TWO)])
        other.kill()
        assert same(found(open_tier(master, prefix=owner.name), TWO), frame(TWO))
        (error,) = open_tier(master, prefix=other.name).read([TWO], [memoryview(bytearray(NBYTES))])
        assert "gone" in str(error)
        view = memoryview(bytearray(NBYTES))
        wait_until(lambda: tier.read([ONE], [view]) == [NBYTES], "the master never looks for the other copy")
        assert same(view, frame(ONE))


def test_a_capacity_is_not_kept_and_the_log_says_so(master, owner, open_tier):
    assert open_tier(master, capacity=1 << 30).facts() == {"capacity": "1GiB -> none: Mooncake bounds itself"}
