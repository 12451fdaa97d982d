"""Frames of an arena that other threads read without a pin, and a tier of peers in a stack."""

from __future__ import annotations

import contextlib
import random
import threading

import pytest
from nodes import open_node
from patience import HANG, wait_until
from servers.ports import free_port

from kvtier_core.builtin.heap import Heap, HeapConfig
from kvtier_core.builtin.packed import PackedConfig
from kvtier_core.config.model import ArenaTierConfig, StackConfig, StoreTierConfig
from kvtier_core.config.open import open_stack
from kvtier_core.errors import ConfigError
from kvtier_core.frames.format import verify
from kvtier_core.frames.identity import RAW
from kvtier_core.interfaces import OpenContext
from kvtier_core.policies.lru import LruConfig
from kvtier_core.stack.arena import Arena
from kvtier_core.stack.index.cache_index import CacheIndex
from kvtier_core.stack.manager import StorageManager
from kvtier_core.types import FRAME_HEADER_NBYTES, EventKind, Nbytes
from kvtier_core.work.io_pool import IOPool
from kvtier_peers.config import PeersConfig
from kvtier_testing.samples import make_context, make_keys, make_layout

LAYOUT = make_layout((16 << 10,), blocks=16)
CONTEXT = make_context(layout=LAYOUT)
SLOTS = 6
KEYS = make_keys(24)
PAYLOADS = {key: random.Random(key).randbytes(LAYOUT.payload_nbytes) for key in KEYS}


@pytest.fixture
def hot():
    arena = Arena(
        "heap",
        0,
        Heap(make_context(layout=LAYOUT, capacity=SLOTS * LAYOUT.frame_nbytes)),
        CacheIndex(LruConfig().open()),
    )
    arena.sealed = {}
    return arena


@pytest.fixture
def manager(hot):
    """A stack of that arena alone."""
    manager = StorageManager([hot], namespace=CONTEXT.namespace, layout=LAYOUT, pool=IOPool("seal"))
    yield manager
    manager.close()


def store(manager, *keys):
    """Each as a prompt of its own, unless it is there."""
    for key in keys:
        slots = manager.reserve([key], "engine")
        for slot in slots.values():
            view = manager.arenas[0].memory.view(slot.index)
            view[FRAME_HEADER_NBYTES:][: LAYOUT.payload_nbytes] = PAYLOADS[key]
        if slots:
            manager.commit("engine")
            manager.drain(HANG)


def is_whole(key, frame):
    error = verify(frame, CONTEXT.namespace, key, codec=RAW, payload_nbytes=LAYOUT.payload_nbytes)
    return error is None and frame[FRAME_HEADER_NBYTES:][: LAYOUT.payload_nbytes] == PAYLOADS[key]


def test_sealed_frames_are_shown_until_they_are_evicted(manager, hot):
    store(manager, *KEYS[:SLOTS])
    assert list(hot.sealed) == KEYS[:SLOTS]
    assert all(is_whole(key, frame) for key, frame in hot.sealed.items())
    store(manager, KEYS[SLOTS])
    assert list(hot.sealed) == KEYS[1 : SLOTS + 1]


def test_invalidated_frames_are_hidden_even_while_in_use(manager, hot):
    store(manager, KEYS[0])
    assert manager.lookup(KEYS[:1], "request").slots
    manager.invalidate_all(CONTEXT.namespace.renewed())
    assert not hot.sealed


def test_frames_from_a_lossy_codec_are_not_shown(hot):
    hot.reserve(KEYS[:2])
    hot.commit(KEYS[:1], [None])
    hot.commit(KEYS[1:2], [None], exact=False)
    hot.show(KEYS[:2], LAYOUT)
    assert list(hot.sealed) == KEYS[:1]


def test_frames_that_are_read_while_their_slots_are_used_again_are_whole_or_missing(manager, hot):
    owner = open_node(hot.sealed, CONTEXT)
    reader = open_node(None, CONTEXT, peers=[owner.address])
    drawn_from, ends, read, missing = random.Random(0), threading.Event(), 0, 0

    def churn():
        while not ends.is_set():
            store(manager, drawn_from.choice(KEYS))

    store(manager, *KEYS[:SLOTS])
    wait_until(lambda: any(reader.contains(KEYS)))
    thread = threading.Thread(target=churn)
    thread.start()
    try:
        into = [memoryview(bytearray(LAYOUT.frame_nbytes)) for _ in KEYS]
        while read < 1000 or missing < 100:
            reader.contains(KEYS)
            for key, view, nbytes in zip(KEYS, into, reader.read(KEYS, into), strict=True):
                read, missing = read + bool(nbytes), missing + (not nbytes)
                assert not nbytes or is_whole(key, view[:nbytes])
    finally:
        ends.set()
        thread.join()
        reader.close()
        owner.close()


# -- in a stack --------------------------------------------------------------------------------------


def stack_of(*peers, **settings):
    """A stack with a tier of peers, and where that listens."""
    listen = f"127.0.0.1:{free_port()}"
    tiers = (
        ArenaTierConfig("heap", HeapConfig(), Nbytes(SLOTS * LAYOUT.frame_nbytes)),
        StoreTierConfig("peers", PeersConfig(listen=listen, peers=peers), **settings),
    )
    return StackConfig(tiers=tiers, chunk_tokens=LAYOUT.tokens), listen


@pytest.fixture
def opened():
    """Opens stacks that are closed when the test ends."""
    with contextlib.ExitStack() as closing:

        def opened(config):
            stack = open_stack(config, OpenContext(CONTEXT.namespace, LAYOUT))
            closing.callback(stack.close)
            return stack

        yield opened


def test_a_stack_reads_what_a_peer_holds_and_writes_nothing_to_it(opened):
    config, listen = stack_of()
    first, second = opened(config), opened(stack_of(listen)[0])
    store(first, *KEYS[:2])
    assert not [event for event in first.drain(HANG) if event.kind is EventKind.REJECTED]
    wait_until(lambda: any(second.tiers[0].backend.contains(KEYS[:1])))
    second.prefetch(KEYS[:1])
    wait_until(lambda: second.step() is None or second.arenas[0].has(KEYS[0]))
    assert second.arenas[0].view(KEYS[0])[FRAME_HEADER_NBYTES:][: LAYOUT.payload_nbytes] == PAYLOADS[KEYS[0]]
    assert list(second.arenas[0].sealed) == KEYS[:1], "who has read a chunk shows it, too"


@pytest.mark.parametrize("settings", [{"serializer": PackedConfig()}], ids=["serializer"])
def test_a_tier_of_peers_has_no_codec_of_its_own(settings):
    with pytest.raises(ConfigError, match="frames in peers' memory support neither a serializer nor a keyed seal"):
        open_stack(stack_of(**settings)[0], OpenContext(CONTEXT.namespace, LAYOUT))
