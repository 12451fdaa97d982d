"""The state machine over StorageManager in several shapes of stack, and planted bugs that it must find."""

from __future__ import annotations

import itertools
import zlib
from collections import Counter
from typing import ClassVar

import attrs
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from machine import SharedShelf, Shelf, StackMachine
from sizes import LONG, some

from kvtier_core.builtin import plugin
from kvtier_core.encoding.codec import FrameCodec
from kvtier_core.errors import BackendError, ContractError
from kvtier_core.interfaces import Serializer, SerializerConfig, SupportsDirectReads
from kvtier_core.policies.gittins import GittinsConfig
from kvtier_core.policies.lru import LruConfig
from kvtier_core.stack.arena import Arena
from kvtier_core.stack.index.cache_index import CacheIndex
from kvtier_core.stack.outcomes import Terms
from kvtier_core.stack.promotion import Promotions
from kvtier_core.stack.store_tier.direct_reads import DirectReads
from kvtier_core.stack.store_tier.frame_table import FrameTable
from kvtier_core.stack.store_tier.tier import StoreTier
from kvtier_core.stack.write_through import WriteThrough
from kvtier_core.transfer.own_shard import OwnShard
from kvtier_core.types import FrameRead, Location, ReadStatus, Slot
from kvtier_policies import plugin as policies

#: Together about half a minute, most of it for the shapes: what goes wrong there is not a policy's fault.
THOROUGH = settings(
    max_examples=150 * LONG,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=False,
)
BRIEF = settings(THOROUGH, max_examples=60 * LONG)
HUNT = settings(
    THOROUGH, max_examples=5000, database=None, derandomize=True, report_multiple_bugs=False, phases=THOROUGH.phases[:3]
)


class Zip(Serializer):
    def bound(self, layout):
        return layout.payload_nbytes + 64

    def encode(self, payload, into):
        encoded = zlib.compress(payload, 1)
        into[: len(encoded)] = encoded
        return len(encoded)

    def decode(self, encoded, into):
        try:
            into[:] = zlib.decompress(encoded)
        except (zlib.error, ValueError) as error:
            raise BackendError(str(error)) from error
        return len(into)


@attrs.frozen
class ZipConfig(SerializerConfig):
    type: ClassVar[str] = "zip"
    lossless: ClassVar[bool] = True

    def open(self, ctx):
        return Zip()


class Slab(Shelf, SupportsDirectReads):
    """A store in which a new frame takes the first place that is free, and whose frames are read there."""

    def __init__(self):
        super().__init__()
        self.places = {}

    def write(self, keys, frames):
        super().write(keys, frames)
        for key in keys:
            taken = self.places.values()
            self.places.setdefault(key, next(place for place in itertools.count() if place not in taken))

    def delete(self, keys):
        super().delete(keys)
        for key in keys:
            self.places.pop(key, None)

    def reader_handle(self):
        return "in this process"

    def locate(self, keys):
        self._gate()
        return [Location((self.places[key],), len(self.frames[key])) if key in self.frames else None for key in keys]

    def read(self, keys, into):
        raise AssertionError("a frame was read into a slot")

    def bytes_at(self, location, key):
        assert self.places.get(key) == location.place[0], "the place of a frame that is held was given away"
        return self.frames.get(key, b"")


class SharedSlab(Slab):
    """The same as a shared store."""

    shared = True


class SomeReadDirectly(StackMachine):
    """The workers of every other holder do not read the store by themselves."""

    class shelf(Slab):
        def read(self, keys, into):
            return Shelf.read(self, keys, into)

    def lookup(self, path, holder):
        through_slots = int(holder.removeprefix("holder ")) % 2
        found = self.manager.lookup(path, holder, Terms(not_direct=self.manager.media if through_slots else ()))
        assert not through_slots or all(isinstance(slot, Slot) for slot in found.slots)
        return found


SHAPES = {
    "arena alone": {"tiers": ()},
    "arena and tier": {},
    "tier smaller than the arena": {"tiers": (4,)},
    "two arenas": {"arenas": (5, 7), "tiers": ()},
    "two arenas, two tiers": {"arenas": (4, 5), "tiers": (4, 12)},
    "a serializer": {"serializer": ZipConfig()},
    "a shared store": {"shelf": SharedShelf},
    "workers read the tier": {"shelf": Slab},
    "workers read a shared store": {"shelf": SharedSlab},
    "workers read both tiers": {"shelf": Slab, "tiers": (4, 12)},
}
ALL_POLICIES = [*plugin.kvtier_eviction_policies(), *policies.kvtier_eviction_policies()]
SOME_POLICIES = some([config() for config in ALL_POLICIES], GittinsConfig(), LruConfig())


@pytest.mark.long
@pytest.mark.parametrize(
    "shape", some(SHAPES, "arena and tier", "two arenas, two tiers", "a shared store", "workers read both tiers")
)
def test_any_interleaving_keeps_the_promises(shape):
    machine = type("Machine", (StackMachine,), SHAPES[shape])
    run_state_machine_as_test(machine, settings=THOROUGH)


@pytest.mark.long
@pytest.mark.parametrize("shared", [False, True])
def test_any_interleaving_keeps_the_promises_where_some_workers_read_the_tier(shared):
    shelf = type("Shelf", (SomeReadDirectly.shelf,), {"shared": shared})
    machine = type("Machine", (SomeReadDirectly,), {"shelf": shelf})
    run_state_machine_as_test(machine, settings=THOROUGH)


@pytest.mark.long
@pytest.mark.parametrize("policy", SOME_POLICIES, ids=repr)
def test_any_interleaving_keeps_the_promises_whatever_the_policy(policy):
    machine = type("Machine", (StackMachine,), {"policy": policy})
    run_state_machine_as_test(machine, settings=BRIEF)


@pytest.mark.parametrize("policy", SOME_POLICIES, ids=repr)
def test_a_policy_that_names_who_is_gone_is_found(policy, monkeypatch):
    monkeypatch.setattr(type(policy.open()), "forget", lambda self, key, *, evicted: None)
    machine = type("Machine", (StackMachine,), {"policy": policy})
    with pytest.raises(KeyError):
        run_state_machine_as_test(machine, settings=HUNT)


def evicts_what_is_pinned(monkeypatch):
    def make_room(self, slots, spared=()):
        victims = self.index.select_victims(slots - self.free, lambda key: 1)
        self._release(victims, evicted=True)
        return victims

    monkeypatch.setattr(Arena, "make_room", make_room)


def believes_every_frame(monkeypatch):
    monkeypatch.setattr(FrameCodec, "decode_verified", lambda self, key, buffer, count, slot, salt: None)


def serves_what_is_still_being_filled(monkeypatch):
    def ready_run(self, keys, start=0):
        return len(list(itertools.takewhile(self.has_slot, keys[start:])))

    def pin(self, keys, holder):
        slots = self.slots(keys)
        self._pinned.update(place for _, place in slots)
        self._pins.setdefault(holder, Counter()).update(place for _, place in slots)
        return slots

    monkeypatch.setattr(Arena, "has", Arena.has_slot)
    monkeypatch.setattr(Arena, "ready_run", ready_run)
    monkeypatch.setattr(Arena, "pin", pin)


def forgets_to_free_an_aborted_slot(monkeypatch):
    monkeypatch.setattr(Arena, "abort", lambda self, keys: [self._reserved.pop(key) for key in keys])


def forgets_a_pin(monkeypatch):
    monkeypatch.setattr(WriteThrough, "_sealed", lambda self, keys, slots, plan, outcome: self.write(keys, plan))


def renews_only_the_arena(monkeypatch):
    monkeypatch.setattr(StoreTier, "invalidate_all", lambda self, namespace: None)


def invalidates_only_what_nobody_uses(monkeypatch):
    def invalidate_all(self):
        held = self.index.resident
        self._release([key for key in held if held.place(key) not in self._pinned], evicted=False)

    monkeypatch.setattr(Arena, "invalidate_all", invalidate_all)


def reads_what_is_leaving(monkeypatch):
    monkeypatch.setattr(StoreTier, "readable", lambda self, keys, start=0: self.index.resident.run(keys, start))


def writes_beside_its_victims(monkeypatch):
    monkeypatch.setattr(FrameTable, "fits", lambda self, nbytes: True)


def never_writes_down(monkeypatch):
    monkeypatch.setattr(WriteThrough, "begin", lambda self, keys, checksums, plan, **options: None)


def never_promotes(monkeypatch):
    monkeypatch.setattr(Promotions, "start", lambda self: self.forget_requests())


def evicts_what_somebody_looked_up(monkeypatch):
    def pin(self, keys, holder):
        return self.slots(keys)

    monkeypatch.setattr(Arena, "pin", pin)
    monkeypatch.setattr(Arena, "unpin", lambda self, slots, holder: None)


def keeps_what_was_never_written(monkeypatch):
    remove = CacheIndex.remove
    monkeypatch.setattr(
        CacheIndex, "remove", lambda self, keys, *, evicted=False: remove(self, keys, evicted=True) if evicted else []
    )


def gives_away_what_is_held(monkeypatch):
    hold = DirectReads.lease

    def unnoticed(self, keys, holder):
        extents = hold(self, keys, holder)
        for key in keys[: len(extents)]:
            self._table.in_use.pop(key, None)
        return extents

    monkeypatch.setattr(DirectReads, "lease", unnoticed)


def believes_what_was_read(monkeypatch):
    monkeypatch.setattr(OwnShard, "examine", lambda *_: FrameRead(ReadStatus.VERIFIED))


MUTANTS = [
    evicts_what_is_pinned,
    believes_every_frame,
    serves_what_is_still_being_filled,
    forgets_to_free_an_aborted_slot,
    forgets_a_pin,
    renews_only_the_arena,
    invalidates_only_what_nobody_uses,
    reads_what_is_leaving,
    writes_beside_its_victims,
    never_writes_down,
    never_promotes,
    evicts_what_somebody_looked_up,
    keeps_what_was_never_written,
]


@pytest.mark.parametrize("plant", MUTANTS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises((AssertionError, ContractError, KeyError)):  # not the TypeError of a plant that does not fit
        run_state_machine_as_test(StackMachine, settings=HUNT)


@pytest.mark.parametrize("plant", [gives_away_what_is_held, believes_what_was_read], ids=lambda plant: plant.__name__)
def test_a_planted_bug_of_what_lands_is_found(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(type("Machine", (StackMachine,), {"shelf": Slab}), settings=HUNT)


@pytest.mark.more
def test_a_frame_that_is_read_in_two_ways_at_once_is_found(monkeypatch):
    monkeypatch.setattr(StoreTier, "readable", StoreTier.leasable)
    with pytest.raises((AssertionError, ContractError)):
        run_state_machine_as_test(SomeReadDirectly, settings=HUNT)


def test_shelves_are_what_they_claim():
    assert SharedShelf.shared and not Shelf.shared
