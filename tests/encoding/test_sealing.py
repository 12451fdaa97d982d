"""Frames with a keyed seal: nobody forges them, and encrypted ones are read by nobody without key and salt."""

from __future__ import annotations

import random
import struct
from collections import Counter

import pytest
from machine import NAMESPACE
from sealing import (
    AES,
    DECODED_SUM,
    FIELDS_END,
    FLAGS,
    KEY,
    KEY_AT,
    KEY_ID,
    KEYED_END,
    LENGTH,
    MAC,
    NAMESPACE_AT,
    NONCE,
    OTHER_KEY,
    OTHER_SECRET,
    OURS,
    PAYLOAD,
    PAYLOAD_SUM,
    SEALS,
    SECRET,
    TAG,
    THEIRS,
    codec_of,
    read,
    sealed,
    stored_by,
    summed,
)
from serializing import LossyConfig, XorConfig
from sizes import LONG

from kvtier_core.encoding.keyed_seal import KeyedSeal
from kvtier_core.frames.format import FrameError
from kvtier_core.types import FRAME_ALIGNMENT

# -- what is stored, and what comes back ---------------------------------------------------------------


@SEALS
@pytest.mark.parametrize("config", [None, XorConfig(), LossyConfig()], ids=["raw", "lossless", "lossy"])
def test_a_sealed_frame_comes_back(keyed, config):
    there = PAYLOAD if config is None or config.lossless else bytes(byte & 0xF0 for byte in PAYLOAD)
    codec = codec_of(keyed, config)
    content, slot = read(codec, stored_by(keyed, salt=OURS, config=config), salt=OURS)
    assert content == there
    raw, exact = codec_of(None), codec.identity.lossless
    assert read(raw, bytes(slot))[0] == (there if exact else FrameError.CODEC), "not a frame of the arena"


@SEALS
@pytest.mark.parametrize("shared", [False, True])
def test_a_frame_that_was_read_can_be_written_to_any_other_tier(keyed, shared):
    """The slot holds a frame of the arena: its namespace, and no keyed seal."""
    codec = codec_of(keyed, shared=shared)
    stored = bytes(codec.encode(KEY, sealed(), OURS))
    _, slot = read(codec, stored, salt=OURS)
    assert bytes(slot) == bytes(sealed())


@SEALS
def test_the_slot_is_only_read(keyed):
    """Other tiers write from it at the same time."""
    slot = sealed()
    before = bytes(slot)
    codec_of(keyed).encode(KEY, slot.toreadonly())
    assert bytes(slot) == before


def test_without_a_key_a_frame_is_stored_as_it_always_was():
    slot = sealed()
    assert codec_of(None).encode(KEY, slot, OURS).obj is slot.obj
    assert bytes(slot) == bytes(sealed())


def test_an_authenticated_payload_is_readable_without_the_key():
    assert stored_by(MAC)[FRAME_ALIGNMENT:][: len(PAYLOAD)] == PAYLOAD


@pytest.mark.parametrize("config", [None, XorConfig()], ids=["raw", "serialized"])
def test_an_encrypted_payload_is_not_readable(config):
    """Nor does a header tell whoever guesses a payload that the guess is right."""
    stored, again = (stored_by(AES, salt=OURS, config=config) for _ in range(2))
    body = stored[FRAME_ALIGNMENT:]
    assert not any(PAYLOAD[at : at + 8] in body for at in range(0, len(PAYLOAD), 8))
    plain = stored_by(None, config=config)
    sums = {plain[at : at + 4] for at in (PAYLOAD_SUM, DECODED_SUM)}
    assert not any(each in stored for each in sums), "a checksum of what is hidden"
    assert body != again[FRAME_ALIGNMENT:] and stored[NONCE:TAG] != again[NONCE:TAG], "sealed twice alike"


@pytest.mark.parametrize(
    "other",
    [{"key": OTHER_KEY}, {"namespace": NAMESPACE.renewed()}, {"salt": THEIRS}],
    ids=["key", "namespace", "salt"],
)
def test_two_equal_nonces_give_nothing_away_unless_they_are_of_one_chunk(other, monkeypatch):
    """Each chunk, namespace and salt has a key of its own: equal payloads do not even look alike."""
    monkeypatch.setattr("kvtier_core.encoding.keyed_seal.os.urandom", bytes)
    one, two = (stored_by(AES, content=PAYLOAD, **names) for names in ({"salt": OURS}, {"salt": OURS, **other}))
    assert one[NONCE:TAG] == two[NONCE:TAG]
    assert one[FRAME_ALIGNMENT:] != two[FRAME_ALIGNMENT:]


def test_the_payload_is_what_its_checksum_in_memory_said():
    """A bit that flipped in the slot before it was encrypted is seen, though the tag is right."""
    for keyed in (MAC, AES):
        slot = sealed()
        slot[FRAME_ALIGNMENT] ^= 1
        assert read(codec_of(keyed), bytes(codec_of(keyed).encode(KEY, slot)))[0] is FrameError.CHECKSUM


# -- whose frames are served ---------------------------------------------------------------------------


@SEALS
def test_a_tier_with_a_key_serves_none_without_one_and_none_of_the_other_kind(keyed):
    other = AES if keyed is MAC else MAC
    for stored in (stored_by(None), stored_by(other)):
        assert read(codec_of(keyed), stored)[0] is FrameError.SEAL
    assert read(codec_of(None), stored_by(keyed))[0] is FrameError.SEAL
    assert FrameError.SEAL.incompatible


@SEALS
def test_frames_of_another_key_are_left_alone(keyed):
    rotated = KeyedSeal.of(OTHER_SECRET, encrypt=keyed.encrypts)
    assert rotated.identity != keyed.identity
    assert read(codec_of(rotated), stored_by(keyed))[0] is FrameError.SEAL


@SEALS
def test_a_frame_of_another_chunk_or_namespace_is_refused(keyed):
    """As they are stored, and with the name of the chunk or namespace written into them, and every checksum right."""
    codec = codec_of(keyed)
    swapped, old = stored_by(keyed, key=OTHER_KEY), stored_by(keyed, namespace=NAMESPACE.renewed())
    assert read(codec, swapped)[0] is FrameError.KEY
    assert read(codec, old)[0] is FrameError.NAMESPACE
    for foreign in (swapped, old):
        named = bytearray(foreign)
        named[NAMESPACE_AT:KEY_AT] = codec.namespace.digest
        named[KEY_AT : KEY_AT + 32] = keyed.names([KEY])[0]
        assert read(codec, summed(named))[0] is FrameError.FORGED


@SEALS
def test_a_frame_of_an_earlier_epoch_is_a_miss(keyed):
    codec = codec_of(keyed)
    renewed = codec.with_namespace(NAMESPACE.renewed())
    assert read(renewed, bytes(codec.encode(KEY, sealed())))[0] is FrameError.NAMESPACE
    named = bytearray(codec.encode(KEY, sealed()))
    named[NAMESPACE_AT:KEY_AT] = renewed.namespace.digest
    assert read(renewed, summed(named))[0] is FrameError.FORGED


def test_the_key_alone_reads_no_frame_of_a_tenant():
    stored = stored_by(AES, salt=OURS)
    assert read(codec_of(AES), stored, salt=OURS)[0] == PAYLOAD
    assert read(codec_of(AES), stored, salt=THEIRS)[0] is FrameError.FORGED
    assert read(codec_of(AES), stored)[0] is FrameError.FORGED


@SEALS
@pytest.mark.parametrize("shared", [False, True])
def test_engines_with_other_keys_write_over_none_of_each_others_frames(keyed, shared):
    others = [None, KeyedSeal.of(OTHER_SECRET, encrypt=keyed.encrypts), AES if keyed is MAC else MAC]
    mine = codec_of(keyed, shared=shared).namespace
    assert mine == codec_of(KeyedSeal.of(SECRET, encrypt=keyed.encrypts), shared=shared).namespace
    assert mine not in [codec_of(other, shared=shared).namespace for other in others]


# -- forgery -------------------------------------------------------------------------------------------


def a_flipped_bit(rng, frame, others):
    place = rng.choice([rng.randrange(KEYED_END), FRAME_ALIGNMENT + rng.randrange(len(PAYLOAD))])
    frame[place] ^= 1 << rng.randrange(8)


def another_payload(rng, frame, others):
    frame[FRAME_ALIGNMENT : FRAME_ALIGNMENT + len(PAYLOAD)] = rng.choice([PAYLOAD[::-1], bytes(len(PAYLOAD))])


def a_payload_cut_short(rng, frame, others):
    struct.pack_into("<Q", frame, LENGTH, rng.randrange(len(PAYLOAD)))


def pieces_of_another_frame(rng, frame, others):
    other = rng.choice(others)
    for begin, end in rng.sample(PIECES, rng.randint(1, len(PIECES) - 1)):
        frame[begin:end] = other[begin:end]


def no_seal_at_all(rng, frame, others):
    frame[FLAGS] &= 1
    frame[KEY_ID:KEYED_END] = bytes(KEYED_END - KEY_ID)


def the_other_kind_of_seal(rng, frame, others):
    frame[FLAGS] ^= 6


def another_checksum_of_what_is_decoded(rng, frame, others):
    struct.pack_into("<I", frame, DECODED_SUM, rng.getrandbits(32))


def a_tag_of_zeros(rng, frame, others):
    frame[TAG : TAG + 16] = bytes(16)


def random_bytes_in_a_field(rng, frame, others):
    begin, end = rng.choice(PIECES)
    end = min(end, begin + rng.choice([1, 4, 16, 32]))
    frame[begin:end] = rng.randbytes(end - begin)


#: Every field that a reader looks at, and the payload.
PIECES = [(0, 8), (8, 10), (10, 12), (12, 20), (20, 52), (52, 84), (84, 148), (148, 180), (180, 184), (184, 188)]
PIECES += [(KEY_ID, NONCE), (NONCE, TAG), (TAG, KEYED_END - 4), (FRAME_ALIGNMENT, FRAME_ALIGNMENT + len(PAYLOAD))]
FORGERIES = [
    a_flipped_bit,
    another_payload,
    a_payload_cut_short,
    pieces_of_another_frame,
    no_seal_at_all,
    the_other_kind_of_seal,
    another_checksum_of_what_is_decoded,
    a_tag_of_zeros,
    random_bytes_in_a_field,
]
#: Those of them that leave a frame which says that it is this tier's own: only the tag tells.
ONLY_THE_TAG_TELLS = {another_payload, a_tag_of_zeros}


def attackers_frames(keyed, config):
    """What lies in the store: other chunks, other namespaces, other keys, this chunk at another time or salt."""
    other = KeyedSeal.of(OTHER_SECRET, encrypt=keyed.encrypts)
    return [
        stored_by(keyed, salt=OURS, config=config, content=PAYLOAD[::-1], namespace=NAMESPACE.renewed()),
        stored_by(keyed, salt=OURS, config=config, key=OTHER_KEY),
        stored_by(keyed, salt=OURS, config=config),
        stored_by(other, salt=OURS, config=config),
        stored_by(AES if keyed is MAC else MAC, salt=OURS, config=config),
        stored_by(None, config=config),
        *([stored_by(keyed, salt=THEIRS, config=config)] if keyed.encrypts else []),
    ]


@pytest.mark.long
@SEALS
@pytest.mark.parametrize("config", [None, XorConfig()], ids=["raw", "serialized"])
def test_no_forged_frame_is_served(keyed, config):
    """Whoever can write to the store knows the format, all that lies there, and computes every checksum anew."""
    rng, codec = random.Random(0), codec_of(keyed, config)
    genuine = stored_by(keyed, salt=OURS, config=config)
    others, found = attackers_frames(keyed, config), {forge: Counter() for forge in FORGERIES}
    for number in range(2000 * LONG):
        frame, forge = bytearray(genuine), FORGERIES[number % len(FORGERIES)]
        forge(rng, frame, others)
        for again in rng.sample(FORGERIES, rng.choice([0, 0, 1, 2])):
            again(rng, frame, others)
        seen, _ = read(codec, summed(frame), salt=OURS)
        if seen == PAYLOAD:
            assert covered(summed(frame)) == covered(genuine) or served_before(summed(frame), others)
        else:
            assert isinstance(seen, FrameError), "other bytes are served"
            found[forge][seen] += 1
    assert all(found.values())
    assert all(FrameError.FORGED in found[forge] for forge in ONLY_THE_TAG_TELLS)
    assert read(codec, genuine, salt=OURS)[0] == PAYLOAD


def covered(frame):
    """What a seal speaks for: checksums of stored bytes are the reader's own affair."""
    return frame[:PAYLOAD_SUM], frame[DECODED_SUM:FIELDS_END], frame[KEY_ID : KEYED_END - 4], frame[FRAME_ALIGNMENT:]


def served_before(frame, others):
    """Is it this chunk's frame of another time, put back whole?"""
    return covered(frame) in map(covered, others)


@SEALS
def test_a_frame_cut_anywhere_is_refused(keyed):
    genuine = stored_by(keyed)
    for nbytes in [*range(1, 300), FRAME_ALIGNMENT - 1, FRAME_ALIGNMENT, FRAME_ALIGNMENT + len(PAYLOAD) - 1]:
        assert read(codec_of(keyed), genuine[:nbytes])[0] is FrameError.SHORT


@SEALS
def test_a_damaged_frame_is_called_neither_forged_nor_of_another_key(keyed):
    """Without anybody's will, the checksums tell, and the frame is not left alone as one of another key."""
    genuine = stored_by(keyed)
    for place in [*range(FLAGS, KEYED_END), *range(FRAME_ALIGNMENT, FRAME_ALIGNMENT + len(PAYLOAD))]:
        spoiled = bytearray(genuine)
        spoiled[place] ^= 1
        assert read(codec_of(keyed), bytes(spoiled))[0] in (FrameError.HEADER, FrameError.CHECKSUM), place
