"""Tiers with a ``seal_key``: salts on their way, rotation, what a policy learned, and the settings."""

from __future__ import annotations

import builtins
import logging
import random
import string
import traceback

import attrs
import pytest
from machine import LAYOUT, NAMESPACE, SharedShelf, Shelf, Slots, payload
from manual_pool import ManualPool
from patience import HANG
from sealing import (
    AES,
    KEY,
    KEYS,
    MAC,
    OTHER_KEY,
    OTHER_SECRET,
    OURS,
    PAYLOAD,
    SEALS,
    SECRET,
    THEIRS,
    codec_of,
    summed,
)
from serializing import CONTEXT

from kvtier_core.builtin.heap import HeapConfig
from kvtier_core.cli import main
from kvtier_core.config.load import load_config
from kvtier_core.config.model import ArenaTierConfig, StackConfig, StoreTierConfig
from kvtier_core.config.open import open_stack
from kvtier_core.config.registry import Registry
from kvtier_core.encoding.keyed_seal import KeyedSeal
from kvtier_core.errors import ConfigError
from kvtier_core.frames.format import header_of
from kvtier_core.policies.gittins import GittinsConfig
from kvtier_core.policies.lru import LruConfig
from kvtier_core.stack.arena import Arena
from kvtier_core.stack.index.cache_index import CacheIndex
from kvtier_core.stack.manager import StorageManager
from kvtier_core.stack.outcomes import Terms
from kvtier_core.stack.store_tier.policy_state import PolicyState
from kvtier_core.stack.store_tier.tier import StoreTier
from kvtier_core.types import FRAME_ALIGNMENT, EnvSecret, Nbytes
from kvtier_disk.config import DiskConfig
from kvtier_simulate.dry_run import Clock, open_dry_run

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
        self.manager.lookup(keys, "load", Terms(salt=self.salt))
        events = self.settle()
        payloads = [bytes(self.view(slot)) for slot in self.manager.lookup(keys, "load", Terms(salt=self.salt)).slots]
        self.manager.release("load")
        return payloads, events

    def settle(self):
        return {event.kind.value for event in self.manager.drain(timeout=HANG)}

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
        stack.manager.lookup([key], f"request {key.hex()}", Terms(salt=salt))
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
    assert "another codec, seal key or number of ranks" in stack.manager.lookup([KEY], "look").miss_reason
    assert "written" in stack.store(KEY)
    assert after_a_restart(rotated, stack.shelf).load(KEY)[0] == [PAYLOAD]


@SEALS
def test_a_forged_frame_is_reported_and_not_found_again(keyed):
    shelf = filled(keyed)
    forged = bytearray(shelf.frames[KEY])
    forged[FRAME_ALIGNMENT] ^= 1
    shelf.frames[KEY] = summed(forged)
    stack = after_a_restart(keyed, shelf)
    assert stack.load(KEY) == ([], {"corrupt"})
    assert KEY not in stack.shelf.frames


@SEALS
def test_a_policys_state_is_sealed(keyed):
    shelf, learned, cold = Shelf(), CacheIndex(GittinsConfig().open()), GittinsConfig().open().save()
    state = PolicyState(shelf, learned.policy, codec_of(keyed), 1 << 30)
    for now in range(1, 200):
        learned.request(KEYS, float(now), {})
    state.keep()

    def recalled(seal):
        index = CacheIndex(GittinsConfig().open())
        PolicyState(shelf, index.policy, codec_of(seal), 1 << 30).recall()
        return index.policy.save()

    assert recalled(keyed) != cold
    assert recalled(None) == recalled(KeyedSeal.of(OTHER_SECRET, encrypt=keyed.encrypts)) == cold
    ((place, frame),) = shelf.frames.items()
    assert (learned.policy.save() in frame) is not keyed.encrypts
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
    keyed = AES if encrypt else MAC
    (file,) = tmp_path.rglob(f"{keyed.names([KEY])[0].hex()}.kv")
    assert header_of(memoryview(file.read_bytes())).protection is keyed.identity.protection
    manager = open_stack(config_of(tmp_path, encrypt=encrypt), CONTEXT)
    manager.lookup(KEYS, "load", Terms(salt=OURS))
    manager.drain(HANG)
    assert len(manager.lookup(KEYS, "load", Terms(salt=OURS)).slots) == len(KEYS)
    manager.close()


def test_a_variable_that_is_not_set(tmp_path):
    told = problem_of(config_of(tmp_path, variable="KVTIER_TEST_NOT_SET"))
    why = "the environment variable KVTIER_TEST_NOT_SET is not set; set it for the engine"
    assert told == f"StackConfig: $.tiers[1].seal_key: {why}"


def test_a_secret_that_is_too_short(tmp_path, monkeypatch):
    monkeypatch.setenv("KVTIER_TEST_SEAL", SECRET[:31])
    told = problem_of(config_of(tmp_path))
    assert "$.tiers[1].seal_key: invalid secret in KVTIER_TEST_SEAL: it has fewer than 32" in told
    assert SECRET[:31] not in told
    monkeypatch.setenv("KVTIER_TEST_SEAL", SECRET[:32])
    open_stack(config_of(tmp_path), CONTEXT).close()


@pytest.mark.parametrize(
    "weak",
    [
        " " * 40,
        "x" * 64,
        "ab" * 32,
        "passwordpasswordpasswordpassword",
        "0123456789abcdef" * 4,
        "abcdefghijklmnopqrstuvwxyz0123456789",
        "01101001100101101001011001101001" * 2,
        "äößéèêçñøåæþðüïô",
    ],
)
def test_a_secret_that_could_be_guessed_is_refused_whatever_its_length(tmp_path, monkeypatch, weak):
    monkeypatch.setenv("KVTIER_TEST_SEAL", weak)
    told = problem_of(config_of(tmp_path))
    assert "$.tiers[1].seal_key: invalid secret in KVTIER_TEST_SEAL: it " in told
    assert told.endswith("; create one with openssl rand -hex 32") and weak not in told
    assert ("fewer than 32 characters" in told) == (len(weak) < 32)


def test_every_random_secret_of_32_characters_is_accepted():
    """Of the alphabets that `openssl rand` writes; and a sentence of words."""
    rng = random.Random(0)
    for alphabet in ("0123456789abcdef", string.ascii_letters + string.digits + "+/"):
        for _ in range(3000):
            KeyedSeal.of("".join(rng.choices(alphabet, k=32)), encrypt=True)
    KeyedSeal.of("einunddreißig Zeichen und eines mehr", encrypt=True)


def test_without_the_library(tmp_path, secret, monkeypatch):
    imported = builtins.__import__

    def without(name, *more, **named):
        if name == "kvtier_core.encoding.keyed_seal":
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
    events = manager.drain(HANG)
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
    assert {"written"} <= {event.kind.value for event in stack.drain(HANG)}
    stack.close()
