"""Serializers for tests, and a stack with tiers that use them."""

from __future__ import annotations

from typing import ClassVar

import attrs
from machine import LAYOUT, NAMESPACE, Shelf, Slots, open_codec, payload
from manual_pool import ManualPool
from patience import HANG

from kvtier_core.interfaces import OpenContext, Serializer, SerializerConfig
from kvtier_core.policies.lru import LruConfig
from kvtier_core.stack.arena import Arena
from kvtier_core.stack.index.cache_index import CacheIndex
from kvtier_core.stack.manager import StorageManager
from kvtier_core.stack.store_tier.tier import StoreTier
from kvtier_core.types import FRAME_ALIGNMENT, Nbytes

CONTEXT = OpenContext(NAMESPACE, LAYOUT, Nbytes(1 << 20))


class Xor(Serializer):
    """Decodes anything, so whoever uses another mask gets wrong KV and no error."""

    def __init__(self, mask):
        self.table = bytes(byte ^ mask for byte in range(256))

    def bound(self, layout):
        return layout.payload_nbytes

    def encode(self, payload, into):
        into[: len(payload)] = bytes(payload).translate(self.table)
        return len(payload)

    def decode(self, encoded, into):
        return self.encode(encoded, into)


@attrs.frozen
class XorConfig(SerializerConfig):
    type: ClassVar[str] = "xor"
    lossless: ClassVar[bool] = True
    mask: int = 1

    def open(self, ctx):
        return Xor(self.mask)


class UpperBits(Xor):
    """Lossy: the lower four bits of each byte are gone."""

    def __init__(self, mask=0xF0):
        self.table = bytes(byte & mask for byte in range(256))


@attrs.frozen
class LossyConfig(SerializerConfig):
    type: ClassVar[str] = "upper"
    lossless: ClassVar[bool] = False

    def open(self, ctx):
        return UpperBits()


def make_tier(config, backend, *, name="tier", frames=100, clock=lambda: 0.0):
    """A store tier of so many frames, whose work waits for the test."""
    codec = open_codec(config, CONTEXT)
    return StoreTier(
        name,
        backend,
        pool=ManualPool(),
        index=CacheIndex(LruConfig().open()),
        codec=codec,
        capacity=frames * codec.max_frame_nbytes,
        inflight=1 << 20,
        clock=clock,
    )


class Stack:
    """An arena over store tiers, driven to rest after each call."""

    def __init__(self, *tiers, slots=8):
        self.memory = Slots(slots)
        self.arena = Arena("arena", 0, self.memory, CacheIndex(LruConfig().open()))
        self.tiers = tiers
        self.manager = StorageManager([self.arena, *tiers], namespace=NAMESPACE, layout=LAYOUT, pool=ManualPool())

    def store(self, keys):
        """As an engine that computed these chunks."""
        slots = self.manager.reserve(keys, "store")
        for key, slot in slots.items():
            self.view(slot)[:] = payload(key, 0)
        if slots:
            self.manager.commit("store")
        return self.settle()

    def load(self, keys):
        """The payloads that an engine gets, and what was reported on the way."""
        self.manager.on_request(keys)
        self.manager.lookup(keys, "load")
        events = self.settle()
        payloads = [bytes(self.view(slot)) for slot in self.manager.lookup(keys, "load").slots]
        self.manager.release("load")
        return payloads, events + self.settle()

    def exact(self, keys):
        """How many of the leading chunks are said to be as an engine computed them."""
        found = self.manager.lookup(keys, "look")
        self.manager.release("look")
        return found.exact

    def settle(self):
        return [(event.kind.value, event.tier, list(event.keys)) for event in self.manager.drain(timeout=HANG)]

    def view(self, slot):
        return self.memory.view(slot.index)[FRAME_ALIGNMENT : FRAME_ALIGNMENT + LAYOUT.payload_nbytes]


class KeptShelf(Shelf):
    """Finds its frames again when it is opened again."""

    def __init__(self, frames=()):
        super().__init__()
        self.frames.update(frames)

    def scan(self):
        return iter([(key, len(found)) for key, found in self.frames.items()])
