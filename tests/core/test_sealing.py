"""Tiers with a ``seal_key``: nobody forges their frames, and with ``encrypt`` nobody reads them without the salt."""

from __future__ import annotations

import builtins
import logging
import random
import struct
import traceback
import zlib
from collections import Counter

import attrs
import pytest
from serializing import CONTEXT, LossyConfig, XorConfig
from sizes import LONG

from kvtier_core.builtin.heap import HeapConfig
from kvtier_core.cli import main
from kvtier_core.config.compose import open_stack
from kvtier_core.config.load import load_config
from kvtier_core.config.model import ArenaTierConfig, StackConfig, StoreTierConfig
from kvtier_core.config.registry import Registry
from kvtier_core.errors import ConfigError
from kvtier_core.frames.codec import FrameCodec
from kvtier_core.frames.format import FrameError, header_of, payload_of, seal
from kvtier_core.frames.identity import RAW, identity_of
from kvtier_core.frames.keyed_seal import KeyedSeal
from kvtier_core.policies.gittins import GittinsConfig
from kvtier_core.policies.lru import LruConfig
from kvtier_core.simulate.dry_run import Clock, open_dry_run
from kvtier_core.stack.arena import Arena
from kvtier_core.stack.index.cache_index import CacheIndex
from kvtier_core.stack.manager import StorageManager
from kvtier_core.stack.store_tier.policy_state import PolicyState
from kvtier_core.stack.store_tier.tier import StoreTier
from kvtier_core.testing.machine import LAYOUT, NAMESPACE, SharedShelf, Shelf, Slots, payload
from kvtier_core.testing.pool import ManualPool
from kvtier_core.testing.samples import make_keys
from kvtier_core.types import FRAME_ALIGNMENT, EnvSecret, Nbytes
from kvtier_disk.config import DiskConfig

KEYS = KEY, OTHER_KEY, *_ = make_keys(4)
PAYLOAD = payload(KEY, 0)
SECRET, OTHER_SECRET = "correct horse battery staple, 32 or more", "another secret that is as long as that"
OURS, THEIRS = b"salt of one tenant", b"salt of another"
MAC, AES = KeyedSeal.of(SECRET, encrypt=False), KeyedSeal.of(SECRET, encrypt=True)
SEALS = pytest.mark.parametrize("keyed", [MAC, AES], ids=["mac", "aes"])

FIELDS_END, KEYED_END = 188, 240
FLAGS, LENGTH, NAMESPACE_AT, KEY_AT, PAYLOAD_SUM, DECODED_SUM = 10, 12, 20, 52, 180, 184
KEY_ID, NONCE, TAG = 192, 208, 220


def sealed(key=KEY, namespace=NAMESPACE, content=None):
    """A chunk in an arena's slot."""
    slot = memoryview(bytearray(LAYOUT.frame_nbytes))
    slot[FRAME_ALIGNMENT : FRAME_ALIGNMENT + LAYOUT.payload_nbytes] = content or payload(key, 0)
    seal(slot, namespace, key, LAYOUT.payload_nbytes)
    return slot


def codec_of(keyed, config=None, *, shared=False, namespace=NAMESPACE):
    serializer = config and config.open(CONTEXT)
    identity = identity_of(config) if config else RAW
    return FrameCodec(namespace, LAYOUT, serializer, identity, shared=shared, keyed_seal=keyed)


def read(codec, stored, *, key=KEY, salt=b""):
    """What a tier makes of a stored frame: the error, or its payload; and the slot."""
    slot = memoryview(bytearray(LAYOUT.frame_nbytes))
    buffer = codec.read_buffer(slot)
    stored = stored[: len(buffer)]
    buffer[: len(stored)] = stored
    error = codec.decode_verified(key, buffer, len(stored), slot, salt)
    return error or bytes(payload_of(slot)), slot


def stored_by(keyed, *, key=KEY, salt=b"", namespace=NAMESPACE, content=None, config=None):
    codec = codec_of(keyed, config, namespace=namespace)
    return bytes(codec.encode(key, sealed(key, namespace, content), salt))


# -- what is stored, and what comes back ---------------------------------------------------------------


@SEALS
@pytest.mark.parametrize("config", [None, XorConfig(), LossyConfig()], ids=["raw", "lossless", "lossy"])
def test_what_was_sealed_comes_back(keyed, config):
    there = PAYLOAD if config is None or config.lossless else bytes(byte & 0xF0 for byte in PAYLOAD)
    codec = codec_of(keyed, config)
    content, slot = read(codec, stored_by(keyed, salt=OURS, config=config), salt=OURS)
    assert content == there
    raw = codec_of(None)
    assert read(raw, bytes(slot))[0] == there if codec.lossless else FrameError.CODEC, "not a frame of the arena"


@SEALS
@pytest.mark.parametrize("shared", [False, True])
def test_what_was_read_can_be_written_to_any_other_tier(keyed, shared):
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
    assert codec_of(None).encode(KEY, slot, OURS) is slot
    assert slot[KEY_ID:KEYED_END] == bytes(KEYED_END - KEY_ID)


def test_what_is_authenticated_alone_can_be_read():
    assert stored_by(MAC)[FRAME_ALIGNMENT:][: len(PAYLOAD)] == PAYLOAD


@pytest.mark.parametrize("config", [None, XorConfig()], ids=["raw", "serialized"])
def test_what_is_encrypted_cannot(config):
    """Nor does a header tell whoever guesses a payload that the guess is right."""
    stored, again = (stored_by(AES, salt=OURS, config=config) for _ in range(2))
    body = stored[FRAME_ALIGNMENT:]
    assert not any(PAYLOAD[at : at + 4] in body for at in range(0, len(PAYLOAD), 4))
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
    monkeypatch.setattr("kvtier_core.frames.keyed_seal.os.urandom", bytes)
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
def test_a_frame_of_another_chunk_or_namespace_is_none(keyed):
    """As they are stored, and with the name of the chunk or namespace written into them, and every checksum right."""
    codec = codec_of(keyed)
    swapped, old = stored_by(keyed, key=OTHER_KEY), stored_by(keyed, namespace=NAMESPACE.renewed())
    assert read(codec, swapped)[0] is FrameError.KEY
    assert read(codec, old)[0] is FrameError.NAMESPACE
    for foreign in (swapped, old):
        named = bytearray(foreign)
        named[NAMESPACE_AT:KEY_AT], named[KEY_AT : KEY_AT + 32] = NAMESPACE.digest, KEY
        assert read(codec, summed(named))[0] is FrameError.FORGED


@SEALS
def test_a_frame_of_an_earlier_epoch_is_none(keyed):
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
def test_in_a_shared_store_engines_with_other_keys_write_over_none_of_each_others_frames(keyed):
    others = [None, KeyedSeal.of(OTHER_SECRET, encrypt=keyed.encrypts), AES if keyed is MAC else MAC]
    mine = codec_of(keyed, shared=True).namespace
    assert mine == codec_of(KeyedSeal.of(SECRET, encrypt=keyed.encrypts), shared=True).namespace
    assert mine not in [codec_of(other, shared=True).namespace for other in others]
    assert codec_of(keyed).namespace == NAMESPACE, "a store of its own needs no room for others"


# -- forgery -------------------------------------------------------------------------------------------


def summed(frame):
    """Every checksum right, as whoever can write to the store makes them."""
    frame = bytearray(frame)
    nbytes = struct.unpack_from("<Q", frame, LENGTH)[0]
    body = memoryview(frame)[FRAME_ALIGNMENT : FRAME_ALIGNMENT + nbytes]
    encrypted = frame[FLAGS] & 4
    struct.pack_into("<I", frame, PAYLOAD_SUM, zlib.crc32(body))
    if not encrypted and frame[84:87] == b"raw":
        struct.pack_into("<I", frame, DECODED_SUM, zlib.crc32(body))
    struct.pack_into("<I", frame, FIELDS_END, zlib.crc32(frame[:FIELDS_END]))
    struct.pack_into("<I", frame, KEYED_END - 4, zlib.crc32(frame[KEY_ID : KEYED_END - 4]))
    return bytes(frame)


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
def test_a_frame_cut_anywhere_is_none(keyed):
    genuine = stored_by(keyed)
    for nbytes in [*range(1, 300), FRAME_ALIGNMENT - 1, FRAME_ALIGNMENT, FRAME_ALIGNMENT + len(PAYLOAD) - 1]:
        assert read(codec_of(keyed), genuine[:nbytes])[0] is FrameError.SHORT


@SEALS
def test_what_is_damaged_is_neither_forged_nor_of_another_key(keyed):
    """Without anybody's will, the checksums tell, and the frame is not left alone as one of another key."""
    genuine = stored_by(keyed)
    for place in [*range(FLAGS, KEYED_END), *range(FRAME_ALIGNMENT, FRAME_ALIGNMENT + len(PAYLOAD))]:
        spoiled = bytearray(genuine)
        spoiled[place] ^= 1
        assert read(codec_of(keyed), bytes(spoiled))[0] in (FrameError.HEADER, FrameError.CHECKSUM), place


# -- in a tier -----------------------------------------------------------------------------------------


class Tiers:
    """An arena over one tier, driven to rest after each call."""

    def __init__(self, keyed, shelf, *, salt=b""):
        self.shelf, self.salt = shelf, salt
        self.memory = Slots(8)
        codec = codec_of(keyed, shared=shelf.shared)
        self.tier = StoreTier(
            "tier",
            shelf,
            pool=ManualPool(),
            index=CacheIndex(LruConfig().open()),
            codec=codec,
            capacity=100 * codec.max_frame_nbytes,
            inflight=1 << 20,
        )
        self.arena = Arena("arena", 0, self.memory, CacheIndex(LruConfig().open()))
        self.manager = StorageManager([self.arena, self.tier], namespace=NAMESPACE, layout=LAYOUT, pool=ManualPool())

    def store(self, *keys):
        for key, slot in self.manager.reserve(keys, "store", self.salt).items():
            self.view(slot)[:] = payload(key, 0)
        self.manager.commit("store")
        return self.settle()

    def load(self, *keys):
        """The payloads that a request gets, and what was reported on the way."""
        self.manager.on_request(keys, salt=self.salt)
        self.manager.lookup(keys, "load", self.salt)
        events = self.settle()
        payloads = [bytes(self.view(slot)) for slot in self.manager.lookup(keys, "load", self.salt).slots]
        self.manager.release("load")
        return payloads, events

    def settle(self):
        return {event.kind.value for event in self.manager.drain(timeout=10.0)}

    def view(self, slot):
        return self.memory.view(slot.index)[FRAME_ALIGNMENT : FRAME_ALIGNMENT + LAYOUT.payload_nbytes]


class KeptShelf(Shelf):
    def scan(self):
        return iter([(key, len(found)) for key, found in self.frames.items()])


def after_a_restart(keyed, shelf, salt=b""):
    kept = type(shelf)()
    kept.frames.update(shelf.frames)
    return Tiers(keyed, kept, salt=salt)


def filled(keyed, *, kind=KeptShelf, salt=b"", keys=(KEY,)):
    stack = Tiers(keyed, kind(), salt=salt)
    assert "written" in stack.store(*keys)
    return stack.shelf


@SEALS
@pytest.mark.parametrize("kind", [KeptShelf, SharedShelf])
def test_a_salt_goes_with_a_chunk_to_the_store_and_back(keyed, kind):
    shelf = filled(keyed, salt=OURS, kind=kind)
    stack = after_a_restart(keyed, shelf, salt=OURS)
    stack.load(KEY)  # a shared store is asked first
    assert stack.load(KEY)[0] == [PAYLOAD]


def test_a_chunk_that_is_offered_again_has_its_salt():
    """It was stored while the tier could not take it, or the tier has lost it since."""
    stack = Tiers(AES, KeptShelf(), salt=OURS)
    stack.store(KEY)
    stack.tier.index.remove([KEY])
    stack.shelf.frames.clear()
    assert "written" in stack.load(KEY)[1]
    assert after_a_restart(AES, stack.shelf, salt=OURS).load(KEY)[0] == [PAYLOAD]


def test_a_chunk_that_comes_up_goes_to_the_tiers_between_with_its_salt():
    low = after_a_restart(AES, filled(AES, salt=OURS)).tier
    stack = Tiers(AES, KeptShelf(), salt=OURS)
    stack.manager = StorageManager(
        [stack.arena, stack.tier, low], namespace=NAMESPACE, layout=LAYOUT, pool=ManualPool()
    )
    assert "written" in stack.load(KEY)[1]
    assert after_a_restart(AES, stack.shelf, salt=OURS).load(KEY)[0] == [PAYLOAD]


def test_another_tenants_salt_is_a_miss():
    shelf = filled(AES, salt=OURS)
    for salt in (THEIRS, b""):
        payloads, events = after_a_restart(AES, shelf, salt=salt).load(KEY)
        assert (payloads, events) == ([], {"corrupt"})


def test_two_tenants_in_one_batch():
    shelf = filled(AES, salt=OURS)
    shelf.frames.update(filled(AES, salt=THEIRS, keys=[OTHER_KEY]).frames)
    stack = after_a_restart(AES, shelf)
    for key, salt in ((KEY, OURS), (OTHER_KEY, THEIRS)):
        stack.manager.lookup([key], f"request {key.hex()}", salt)
    stack.settle()
    assert [bytes(stack.view(stack.arena.slots([key])[0])) for key in (KEY, OTHER_KEY)] == [
        payload(KEY, 0),
        payload(OTHER_KEY, 0),
    ]


@SEALS
def test_after_a_rotation_of_the_key_old_frames_are_misses_and_are_replaced(keyed):
    rotated = KeyedSeal.of(OTHER_SECRET, encrypt=keyed.encrypts)
    stack = after_a_restart(rotated, filled(keyed))
    old = dict(stack.shelf.frames)
    assert stack.load(KEY) == ([], {"incompatible"})
    assert stack.shelf.frames == old, "deleted, though an engine with the old key may run"
    assert "another codec or seal key" in stack.manager.lookup([KEY], "look").miss_reason
    assert "written" in stack.store(KEY)
    assert after_a_restart(rotated, stack.shelf).load(KEY)[0] == [PAYLOAD]


@SEALS
def test_a_forged_frame_is_reported_and_not_found_again(keyed):
    shelf = filled(keyed)
    forged = bytearray(shelf.frames[KEY])
    another_payload(random.Random(0), forged, ())
    shelf.frames[KEY] = summed(forged)
    stack = after_a_restart(keyed, shelf)
    assert stack.load(KEY) == ([], {"corrupt"})
    assert KEY not in stack.shelf.frames


@SEALS
def test_what_a_policy_learned_is_sealed(keyed):
    shelf, learned, cold = Shelf(), CacheIndex(GittinsConfig().open()), GittinsConfig().open().save()
    for now in range(1, 200):
        learned.request(KEYS, float(now), {})
    PolicyState(shelf, learned, codec_of(keyed), 1 << 30).keep()

    def recalled(seal):
        index = CacheIndex(GittinsConfig().open())
        PolicyState(shelf, index, codec_of(seal), 1 << 30).recall()
        return index.save()

    assert recalled(keyed) != cold
    assert recalled(None) == recalled(KeyedSeal.of(OTHER_SECRET, encrypt=keyed.encrypts)) == cold
    ((place, frame),) = shelf.frames.items()
    assert (learned.save() in frame) is not keyed.encrypts
    forged = bytearray(frame)
    forged[FRAME_ALIGNMENT + 40] ^= 1
    shelf.frames[place] = summed(forged)
    assert recalled(keyed) == cold


# -- configuration -------------------------------------------------------------------------------------


def config_of(folder, *, variable="KVTIER_TEST_SEAL", encrypt=False):
    return StackConfig(
        tiers=(
            ArenaTierConfig("heap", HeapConfig(), Nbytes(1 << 20)),
            StoreTierConfig(
                *("disk", DiskConfig(path=folder, min_free=Nbytes(0)), Nbytes(1 << 24)),
                seal_key=EnvSecret(variable),
                encrypt=encrypt,
            ),
        ),
        chunk_tokens=32,
    )


@pytest.fixture
def secret(monkeypatch):
    monkeypatch.setenv("KVTIER_TEST_SEAL", SECRET)


def problem_of(config):
    with pytest.raises(ConfigError) as caught:
        open_stack(config, CONTEXT)
    (problem,) = caught.value.problems
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    return str(problem)


@pytest.mark.parametrize("encrypt", [False, True])
def test_a_stack_is_opened_from_its_settings(tmp_path, secret, encrypt):
    manager = open_stack(config_of(tmp_path, encrypt=encrypt), CONTEXT)
    for key, slot in manager.reserve(KEYS, "store", OURS).items():
        memory = manager._levels[0].memory.view(slot.index)
        memory[FRAME_ALIGNMENT : FRAME_ALIGNMENT + LAYOUT.payload_nbytes] = payload(key, 0)
    manager.commit("store")
    manager.close()
    (file,) = tmp_path.rglob(f"{KEY.hex()}.kv")
    assert header_of(memoryview(file.read_bytes())).protection is (AES if encrypt else MAC).identity.protection
    manager = open_stack(config_of(tmp_path, encrypt=encrypt), CONTEXT)
    manager.lookup(KEYS, "load", OURS)
    manager.drain(10.0)
    assert len(manager.lookup(KEYS, "load", OURS).slots) == len(KEYS)
    manager.close()


def test_a_variable_that_is_not_set(tmp_path):
    told = problem_of(config_of(tmp_path, variable="KVTIER_TEST_NOT_SET"))
    assert told == "StackConfig: $.tiers[1].seal_key: the environment variable KVTIER_TEST_NOT_SET is not set"


def test_a_secret_that_is_too_short(tmp_path, monkeypatch):
    monkeypatch.setenv("KVTIER_TEST_SEAL", SECRET[:31])
    told = problem_of(config_of(tmp_path))
    assert "$.tiers[1].seal_key: the secret in KVTIER_TEST_SEAL cannot be used: it has fewer than 32" in told
    assert SECRET[:31] not in told
    monkeypatch.setenv("KVTIER_TEST_SEAL", SECRET[:32])
    open_stack(config_of(tmp_path), CONTEXT).close()


def test_without_the_library(tmp_path, secret, monkeypatch):
    imported = builtins.__import__

    def without(name, *more, **named):
        if name == "kvtier_core.frames.keyed_seal":
            raise ModuleNotFoundError("No module named 'cryptography'")
        return imported(name, *more, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    told = problem_of(config_of(tmp_path))
    assert "$.tiers[1].seal_key: No module named 'cryptography'; pip install 'kvtier[seal]'" in told


def written(folder, settings):
    (folder / "kvtier.yaml").write_text(
        "version: 1\ntiers:\n  - {type: heap, capacity: 1MiB}\n"
        f"  - {{type: disk, capacity: 1GiB, path: {folder / 'store'}, {settings}}}\n"
    )
    return folder / "kvtier.yaml"


def test_encrypt_needs_a_key(tmp_path):
    with pytest.raises(ConfigError, match=r"\$\.tiers\[1\]\.encrypt: 'encrypt' needs a 'seal_key'"):
        load_config(written(tmp_path, "encrypt: true"), Registry.discover())


def test_a_secret_in_the_file_is_refused_and_not_repeated(tmp_path):
    with pytest.raises(ConfigError, match=r"\$\.tiers\[1\]\.seal_key: write env:NAME") as caught:
        load_config(written(tmp_path, f"seal_key: '{SECRET}'"), Registry.discover())
    assert SECRET not in str(caught.value)


def test_the_secret_is_shown_nowhere(tmp_path, secret, capsys, caplog):
    """Not in the settings, a log line, an event, a fact, a repr, nor in a name or frame in the store."""
    caplog.set_level(logging.DEBUG)
    file = written(tmp_path, "seal_key: env:KVTIER_TEST_SEAL, encrypt: true")
    assert main(["check", str(file)]) == 0
    told = capsys.readouterr().out
    assert next(line.replace(str(tmp_path) + "/", "").split() for line in told.splitlines() if "seal_key" in line) == [
        "$.tiers[1].seal_key",
        "env:KVTIER_TEST_SEAL",
        "kvtier.yaml:4",
    ]
    config = attrs.evolve(load_config(file, Registry.discover()), chunk_tokens=32)
    manager = open_stack(config, CONTEXT)
    manager.reserve(KEYS, "store")
    manager.commit("store")
    events = manager.drain(10.0)
    shown = [told, repr(config), *config.describe(), *manager.describe(), *map(repr, events), caplog.text, repr(AES)]
    shown += [repr(codec_of(AES, shared=True).namespace)]
    manager.close()
    stored = [str(path).encode() + path.read_bytes() for path in tmp_path.rglob("store/**/*") if path.is_file()]
    assert len(stored) > len(KEYS)
    root = AES._root
    for hidden in (SECRET.encode(), root, root.hex().encode(), repr(root).encode()):
        assert not any(hidden in text for text in [*stored, *(text.encode() for text in shown)])


def test_a_simulation_needs_no_secret():
    """Nor does it seal anything."""
    config = config_of("nowhere", variable="KVTIER_TEST_NOT_SET", encrypt=True)
    stack = open_dry_run(config, LAYOUT, Clock())
    stack.reserve(KEYS, "store", OURS)
    stack.commit("store")
    assert {"written"} <= {event.kind.value for event in stack.drain(10.0)}
    stack.close()
