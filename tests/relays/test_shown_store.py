"""Frames of a private store that peers read between the calls of its tier."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import attrs
import pytest
from faulty_backend import FINE, Fault, FaultyBackend, always
from nodes import open_node
from patience import HANG, wait_until
from servers.ports import free_port
from test_shown_frames import CONTEXT, KEYS, LAYOUT, PAYLOADS, SLOTS, is_whole, store

from kvtier_core.builtin.heap import HeapConfig
from kvtier_core.builtin.packed import PackedConfig
from kvtier_core.config.model import ArenaTierConfig, StackConfig, StoreTierConfig
from kvtier_core.config.open import open_stack
from kvtier_core.encoding.codec import FrameCodec
from kvtier_core.errors import BackendError
from kvtier_core.frames.format import seal
from kvtier_core.interfaces import Backend, OpenContext, SupportsListing
from kvtier_core.relays import shown_store
from kvtier_core.relays.shown_store import ShownStore
from kvtier_core.types import FRAME_HEADER_NBYTES, Nbytes
from kvtier_disk.config import DiskConfig
from kvtier_peers.config import PeersConfig
from kvtier_testing import BackendLaws
from kvtier_testing.samples import make_namespace


def frame_of(key, namespace=CONTEXT.namespace):
    frame = memoryview(bytearray(LAYOUT.frame_nbytes))
    frame[FRAME_HEADER_NBYTES:][: LAYOUT.payload_nbytes] = PAYLOADS[key]
    seal(frame, namespace, key, LAYOUT.payload_nbytes)
    return bytes(frame)


FRAMES = {key: frame_of(key) for key in KEYS}


@attrs.frozen
class ShownDiskConfig(DiskConfig):
    """A disk as it is in a stack with a tier of peers."""

    def open(self, ctx):
        return ShownStore(super().open(ctx), FrameCodec(ctx.namespace, ctx.layout))


class TestLaws(BackendLaws):
    persistent = True

    def config(self, folder):
        return ShownDiskConfig(path=folder / "kv", direct="off", min_free=Nbytes(0))


class Frames(Backend, SupportsListing):
    """Frames in memory. Fails if two calls name a key at the same time."""

    def __init__(self, frames=()):
        self.frames = dict(frames)
        self.named = Counter()

    @contextlib.contextmanager
    def _naming(self, keys):
        self.named.update(keys)
        assert all(self.named[key] == 1 for key in keys), "two calls name the same key"
        time.sleep(random.uniform(0, 0.001))
        yield
        self.named.subtract(keys)

    def contains(self, keys):
        return [key in self.frames for key in keys]

    def read(self, keys, into):
        with self._naming(keys):
            for key, view in zip(keys, into, strict=True):
                frame = self.frames.get(key, b"")
                view[: len(frame)] = frame
            return [len(self.frames.get(key, b"")) for key in keys]

    def write(self, keys, frames):
        with self._naming(keys):
            self.frames.update(zip(keys, map(bytes, frames), strict=True))

    def delete(self, keys):
        with self._naming(keys):
            for key in keys:
                self.frames.pop(key, None)

    def scan(self):
        return iter([(key, len(frame)) for key, frame in self.frames.items()])


def shown(inner):
    store = ShownStore(inner, FrameCodec(CONTEXT.namespace, LAYOUT))
    list(store.scan())
    return store


def read(store, key):
    with store.frame(key) as frame:
        return None if frame is None else bytes(frame)


def keys_of(store):
    return set(store.changes(0).come)


def test_peers_read_what_the_tier_has_written_until_it_deletes_it():
    store = shown(Frames({KEYS[0]: FRAMES[KEYS[0]]}))
    assert read(store, KEYS[0]) == FRAMES[KEYS[0]], "which an earlier process has written"
    assert read(store, KEYS[1]) is None
    store.write(KEYS[1:3], [FRAMES[key] for key in KEYS[1:3]])
    assert keys_of(store) == set(KEYS[:3]) and read(store, KEYS[1]) == FRAMES[KEYS[1]]
    store.delete(KEYS[:1])
    store.quarantine(KEYS[1:2])
    assert keys_of(store) == {KEYS[2]}
    assert [read(store, key) for key in KEYS[:2]] == [None, None]
    store.close()
    assert read(store, KEYS[2]) is None


def test_no_two_calls_name_the_same_key_and_peers_get_whole_frames_or_none():
    inner = Frames()
    store, ends, found = shown(inner), threading.Event(), Counter()

    def peers():
        draw = random.Random(threading.get_ident())
        while not ends.is_set():
            key = draw.choice(KEYS[:6])
            frame = read(store, key)
            assert frame in (None, FRAMES[key])
            found[frame is not None] += 1
            time.sleep(0.001)  # threads that only spin would leave the tier no turn

    def tier(keys):
        draw, into = random.Random(keys[0]), [memoryview(bytearray(LAYOUT.frame_nbytes)) for _ in keys]
        for _ in range(300):
            call = draw.randrange(3)
            if call == 0:
                store.write(keys, [FRAMES[key] for key in keys])
            elif call == 1:
                store.delete(draw.sample(keys, 1))
            else:
                store.read(keys, into)

    with ThreadPoolExecutor(8) as threads:
        reading = [threads.submit(peers) for _ in range(6)]
        try:
            for each in [threads.submit(tier, KEYS[at : at + 3]) for at in (0, 3)]:
                each.result()
        finally:
            ends.set()
        for each in reading:
            each.result()
    assert found[True] and found[False], found


def test_frames_that_are_sent_slowly_keep_no_other_from_reading():
    """A turn at the store ends when the frame is read."""
    store = shown(Frames(FRAMES))
    with contextlib.ExitStack() as slow:
        for key in KEYS[:9]:
            assert slow.enter_context(store.frame(key)) == FRAMES[key]
        assert read(store, KEYS[9]) == FRAMES[KEYS[9]]


def test_the_memory_for_frames_that_are_sent_is_bounded(monkeypatch):
    """Who sends slowly keeps a buffer; when there is none, others get nothing rather than wait for long."""
    monkeypatch.setattr(shown_store, "_TURN", 0.05)
    monkeypatch.setattr(shown_store, "_SENDING_NBYTES", 0)
    store = shown(Frames(FRAMES))
    with contextlib.ExitStack() as slow:
        for key in KEYS[: shown_store._SENDING]:
            assert slow.enter_context(store.frame(key)) == FRAMES[key]
        assert read(store, KEYS[9]) is None
    assert read(store, KEYS[9]) == FRAMES[KEYS[9]]


def test_a_reader_whose_turn_does_not_come_has_a_miss_and_keeps_its_peer(monkeypatch):
    """By default it would leave a peer alone that is silent for half a second."""
    monkeypatch.setattr(shown_store, "_SENDING_NBYTES", 0)
    store = shown(Frames(FRAMES))
    with contextlib.ExitStack() as closing:
        owner = open_node(None, attrs.evolve(CONTEXT, stored=[store]))
        closing.callback(owner.close)
        reader = open_node(None, CONTEXT, peers=[owner.address], patience=attrs.fields(PeersConfig).patience.default)
        closing.callback(reader.close)
        wait_until(lambda: all(reader.contains(KEYS)))
        for key in KEYS[: shown_store._SENDING]:
            closing.enter_context(store.frame(key))
        into = [memoryview(bytearray(LAYOUT.frame_nbytes))]
        assert list(reader.read(KEYS[9:10], into)) == [0]
        assert all(reader.contains(KEYS))


def damaged(frame):
    return frame[:-9] + bytes([frame[-9] ^ 1]) + frame[-8:]


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(damaged(FRAMES[KEYS[0]]), id="damaged"),
        pytest.param(FRAMES[KEYS[0]][: LAYOUT.frame_nbytes // 2], id="cut"),
        pytest.param(FRAMES[KEYS[1]], id="of another key"),
        pytest.param(frame_of(KEYS[0], make_namespace("another")), id="of another namespace"),
        pytest.param(b"", id="gone"),
    ],
)
def test_what_is_not_whole_is_not_sent_and_not_announced_any_more(frame):
    store = shown(Frames({KEYS[0]: frame, KEYS[1]: FRAMES[KEYS[1]]}))
    assert keys_of(store) == set(KEYS[:2])
    assert read(store, KEYS[0]) is None
    assert keys_of(store) == {KEYS[1]}


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(Fault(unreadable=BackendError("a bad sector")), id="unreadable"),
        pytest.param(Fault(surplus=LAYOUT.frame_nbytes), id="longer than its view"),
        pytest.param(Fault(damage=True), id="damaged on the way"),
    ],
)
def test_a_frame_that_cannot_be_read_is_a_miss(fault):
    store = shown(FaultyBackend(Frames(FRAMES), always(fault, "read")))
    assert read(store, KEYS[0]) is None and KEYS[0] not in keys_of(store)


@pytest.mark.parametrize("error", [BackendError("the disk is gone"), ValueError("a bug"), SystemExit()], ids=repr)
def test_a_store_that_fails_is_left_alone_for_a_while(error, monkeypatch):
    monkeypatch.setattr(shown_store, "_REST", 0.2)
    inner = FaultyBackend(Frames(FRAMES), always(Fault(error=error), "read"))
    store = shown(inner)
    assert [read(store, key) for key in KEYS] == [None] * len(KEYS)
    assert inner.calls.count("read") == 1 and keys_of(store) == set(KEYS), "they may be whole"
    inner.plan = always(FINE)
    wait_until(lambda: read(store, KEYS[0]) == FRAMES[KEYS[0]])


def test_a_write_that_fails_shows_nothing():
    store = shown(FaultyBackend(Frames({KEYS[0]: FRAMES[KEYS[0]]}), always(Fault(error=BackendError("full")), "write")))
    with pytest.raises(BackendError):
        store.write(KEYS[:2], [FRAMES[key] for key in KEYS[:2]])
    assert not keys_of(store), "and not the frame before it, which may be gone"


def test_a_store_closes_when_no_peer_reads_any_more():
    goes_on = threading.Event()
    inner = FaultyBackend(Frames(FRAMES), always(Fault(until=goes_on), "read"))
    store = shown(inner)
    with ThreadPoolExecutor(2) as threads:
        reading = threads.submit(read, store, KEYS[0])
        wait_until(lambda: "read" in inner.calls)
        closing = threads.submit(store.close)
        time.sleep(0.05)
        assert "close" not in inner.calls and not closing.done()
        goes_on.set()
        closing.result()
        assert reading.result() == FRAMES[KEYS[0]] and inner.calls[-1] == "close"


def test_changes_lead_from_what_was_known_to_what_is_there(monkeypatch):
    monkeypatch.setattr(shown_store, "_REMEMBERED", 16)
    draw, store = random.Random(0), shown(Frames())
    known = {number: (0, set()) for number in range(4)}
    complete = 0
    for _ in range(400):
        keys = draw.sample(KEYS, draw.randint(1, 4))
        store.write(keys, [FRAMES[key] for key in keys]) if draw.random() < 0.5 else store.delete(keys)
        number = draw.randrange(len(known))
        position, there = known[number]
        changes = store.changes(position)
        assert not set(changes.come) & set(changes.gone)
        if changes.is_complete:
            complete += 1
            there = set()
        assert there >= set(changes.gone) and not there & set(changes.come)
        known[number] = changes.position, (there - set(changes.gone)) | set(changes.come)
        assert known[number][1] == set(store._inner.frames)
    assert 4 < complete < 200


# -- in a stack --------------------------------------------------------------------------------------


@pytest.fixture
def opened(tmp_path):
    """Opens stacks with a disk, which are closed when the test ends."""
    with contextlib.ExitStack() as closing:

        def opened(*peers, first="peers", **settings):
            listen = f"127.0.0.1:{free_port()}"
            disk = DiskConfig(path=tmp_path / listen, min_free=Nbytes(0), **settings.pop("disk", {}))
            tiers = [
                StoreTierConfig("peers", PeersConfig(listen=listen, peers=peers)),
                StoreTierConfig("disk", disk, Nbytes(64 * LAYOUT.frame_nbytes), **settings),
            ]
            arena = ArenaTierConfig("heap", HeapConfig(), Nbytes(SLOTS * LAYOUT.frame_nbytes))
            config = StackConfig(tiers=(arena, *tiers[:: 1 if first == "peers" else -1]), chunk_tokens=LAYOUT.tokens)
            stack = open_stack(config, OpenContext(CONTEXT.namespace, LAYOUT))
            closing.callback(stack.close)
            return stack, listen

        yield opened


def tier_of(stack, name):
    return next(tier for tier in stack.tiers if tier.name == name)


def peers_of(stack):
    return tier_of(stack, "peers").backend


@pytest.mark.parametrize("first", ["peers", "disk"])
def test_a_stack_reads_what_only_the_disk_of_another_has(opened, first):
    one, listen = opened(first=first)
    store(one, *KEYS)
    one.drain(HANG)
    on_disk = [key for key in KEYS if key not in one.arenas[0].sealed]
    assert len(on_disk) == len(KEYS) - SLOTS
    two, _ = opened(listen)
    wait_until(lambda: all(peers_of(two).contains(KEYS)))
    into = [memoryview(bytearray(LAYOUT.frame_nbytes)) for _ in KEYS]
    assert list(peers_of(two).read(KEYS, into)) == [LAYOUT.frame_nbytes] * len(KEYS)
    assert all(is_whole(key, view) for key, view in zip(KEYS, into, strict=True))
    two.prefetch(on_disk[:1])
    wait_until(lambda: two.step() is None or two.arenas[0].has(on_disk[0]))
    tier_of(one, "disk").erase(on_disk[:1])
    one.drain(HANG)
    wait_until(lambda: not any(peers_of(two).contains(on_disk[:1])))


@pytest.mark.parametrize(
    "settings", [{"serializer": PackedConfig()}, {"disk": {"shared": True}}], ids=["encoded", "shared"]
)
def test_only_private_stores_of_frames_as_they_are_in_slots_are_shown(opened, settings):
    one, listen = opened(**settings)
    store(one, *KEYS)
    one.drain(HANG)
    two, _ = opened(listen)
    in_memory = [key in one.arenas[0].sealed for key in KEYS]
    wait_until(lambda: list(peers_of(two).contains(KEYS)) == in_memory)
    assert sum(in_memory) == SLOTS
