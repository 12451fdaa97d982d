"""What routers are told of the tiers: vLLM's own events, as a subscriber gets them over ZMQ."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import tiny_hybrids
import zmq
from device_engine.scheduling import HostRequest, Scheduling
from other_engine import beside
from patience import HANG, wait_until
from real_engines import BLOCK, CHUNK, cpu, cpu_and_disk, prompt
from sizes import some
from test_server import of, serving
from vllm import SamplingParams
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    maybe_convert_block_hash,
    resolve_block_hashes,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request

import kvtier_disk.plugin
from kvtier_core.config.load import load_config
from kvtier_core.config.model import StackConfig
from kvtier_core.config.registry import Registry
from kvtier_core.config.server_client import server_client, server_path
from kvtier_core.engine.messages import WorkerProgress
from kvtier_core.engine.scheduler.side import SchedulerSide
from kvtier_core.engine.step import StepResult
from kvtier_core.engine.worker.side import WorkerSide
from kvtier_core.errors import BackendError
from kvtier_core.interfaces import Medium
from kvtier_core.layouts import ChunkLayout
from kvtier_core.stack.interface import Stack
from kvtier_core.stack.outcomes import Whereabouts
from kvtier_core.stack.store_tier import health
from kvtier_core.types import ChunkKey, Event, EventKind
from kvtier_testing.samples import make_context, make_group
from kvtier_vllm import kv_events

ASKED = prompt(160, 10 * CHUNK + 3)
OTHER = prompt(161, 10 * CHUNK + 3)
#: Seeds of prompts that are asked once.
UNIQUE = itertools.count(1000)
CHUNK_KEY = ChunkKey(bytes(32))
GROUP = kv_events.Group(0, BLOCK, "full_attention")
LAYOUT = ChunkLayout([make_group((128,), block_tokens=BLOCK)], CHUNK)


class Router:
    """A subscriber on a free port, to which vLLM connects."""

    def __init__(self):
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.subscribe("")
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.config = KVEventsConfig(
            enable_kv_cache_events=True, publisher="zmq", endpoint=f"tcp://127.0.0.1:{port}", topic="kv"
        )
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self.events = []
        #: Hashes of blocks by group and medium, as the events say.
        self.groups = defaultdict(lambda: defaultdict(set))

    @property
    def held(self):
        """Those of the first group, by medium."""
        return self.groups[0]

    def join(self, engine) -> None:
        """Ask small things until something is heard: a publisher drops what it sends before it knows of a subscriber.

        The engine keeps prefixes itself, and tells of that too.
        """

        def heard() -> bool:
            engine.ask(unique(engine), tokens=1)
            return self._socket.poll(200)

        wait_until(heard, "nothing is published")
        listen(engine, self)
        self.events.clear()

    def listen(self, block: int) -> None:
        """Take everything that comes until this block of any group is on the GPU."""
        while not any(block in held["GPU"] for held in self.groups.values()):
            assert self._socket.poll(1000 * HANG), "nothing more is published"
            _topic, _number, payload = self._socket.recv_multipart()
            for event in self._decoder.decode(payload).events:
                self.events.append(event)
                self.follow(event)

    def follow(self, event) -> None:
        if isinstance(event, AllBlocksCleared):
            return self.groups.clear()  # of every medium, as the index of llm-d does
        follow(self.groups[event.group_idx], event)

    def stored(self, medium: str) -> list[BlockStored]:
        return [event for event in self.events if isinstance(event, BlockStored) and event.medium == medium]

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()


def follow(view: defaultdict[str, set[int]], event: BlockStored | BlockRemoved) -> None:
    """Note in a router's view, hashes of blocks by medium, what has come or left."""
    held = view[event.medium]
    if isinstance(event, BlockStored):
        if event.medium != "GPU":
            assert held.isdisjoint(event.block_hashes), "told twice, and a router that counts keeps it for ever"
            assert len(event.token_ids) == len(event.block_hashes) * event.block_size
        held.update(event.block_hashes)
    elif isinstance(event, BlockRemoved):
        assert held.issuperset(event.block_hashes), "never told"
        held.difference_update(event.block_hashes)


@pytest.fixture
def router():
    subscribed = Router()
    yield subscribed
    subscribed.close()


def hashes_of(events: Sequence[BlockStored]) -> list[int]:
    return [each for event in events for each in event.block_hashes]


def unique(served) -> list[int]:
    """A prompt of one block that was never asked."""
    return prompt(next(UNIQUE), served.scheduler.kv_cache_config.hash_block_size + 1)


def listen(served, router) -> None:
    """Let everything that was told so far arrive: events leave with a step."""
    asked = unique(served)
    served.ask(asked, tokens=1)
    router.listen(block_hashes(asked, len(asked) - 1)[0])


def settle(served, router) -> None:
    """Let everything arrive in the tiers and at the router. A server's answers about one step come with the next."""
    for _ in range(2):
        served.settle()
        listen(served, router)


def contents(side: SchedulerSide, *prompts: Sequence[int]) -> dict[str, set[int]]:
    """The hashes that vLLM gives the blocks of these prompts, by the media of the tiers that hold them."""
    held = {"CPU": set(), "STORAGE": set()}
    for asked in prompts:
        hashes = block_hashes(asked)
        for number, place in enumerate(side.manager.whereabouts(side._name(asked, "")[0])):
            for tier in place.tiers:
                first = number * CHUNK // BLOCK
                held["STORAGE" if tier == "disk" else "CPU"].update(hashes[first : first + CHUNK // BLOCK])
    return held


def block_hashes(asked: Sequence[int], block: int = BLOCK) -> list[int]:
    return [maybe_convert_block_hash(each) for each in requested("hashed", asked, block).block_hashes]


def requested(request_id: str, asked: Sequence[int], block: int = BLOCK) -> Request:
    """A request as vLLM's scheduler has it."""
    init_none_hash(sha256)  # as each engine does
    hasher = get_request_block_hasher(block, sha256)
    return Request(request_id, list(asked), SamplingParams(max_tokens=1), None, block_hasher=hasher)


def opened(*tiers: dict[str, Any], load_wait: str = "60s") -> StackConfig:
    values = {"version": 1, "chunk_tokens": CHUNK, "load": "always", "load_wait": load_wait, "tiers": list(tiers)}
    return load_config(values, Registry.of(kvtier_disk.plugin))


def pool() -> BlockPool:
    """The smallest of vLLM's."""
    return BlockPool(1, enable_caching=True, hash_block_size=BLOCK)


class Answers:
    """A stack of one arena that nothing has come to yet, and what it was asked, with the answers that are due."""

    media, handles, shared, gaps = {"heap": Medium.UNSPECIFIED}, {"heap": ""}, (), 0

    def __init__(self):
        self.due = []

    def ask_whereabouts(self, path, then):
        self.due.append((path, then))


class Uncopied(Scheduling):
    """An engine's scheduler and its events. What it stores and loads has arrived with the step, and is not copied."""

    def __init__(self, config: StackConfig, manager: Stack | None = None, *, blocks: int, budget: int):
        super().__init__(config, LAYOUT, range(blocks), budget, ranks=1, manager=manager)
        self.pool = pool()
        self.told = kv_events.KVEvents(self.manager, CHUNK, BLOCK, [GROUP], self.pool)
        self.side.events.listeners.append(self.told.observe)
        self.side.path_listeners.append(lambda request_id, *path: self.told.name(self._of_vllm[request_id], *path))
        self._of_vllm: dict[str, Request] = {}
        self._attachment: int | None = None  # whose self-test has passed

    def arrive(self, request_id: str, asked: Sequence[int]) -> HostRequest:
        self._of_vllm[request_id] = requested(request_id, asked)
        request = self.submit(request_id, asked)
        self.side.arrived(request.view())
        return request

    def _work(self, plan, scheduled) -> None:
        self.told.keep(self.side.storing)
        for each in scheduled:
            self._requests[each.request_id].computed = each.end
        loaded = {request_id for request_id, _ in plan.loads}
        stored, tested = Counter(job for job, _ in plan.stores), Counter()
        if plan.layout is not None and plan.attachment != self._attachment:
            self._attachment = plan.attachment
            tested[plan.attachment, ""] = 1
        self.side.progress(StepResult(loaded, progress=WorkerProgress(stored, self_tests=tested)))
        for request_id in loaded:
            self._loaded(self._requests[request_id], ok=True)

    def settle(self) -> None:
        self.side.drain(HANG)


class Traffic:
    """Random requests of an engine, which are aborted and preempted, and what a router makes of its events."""

    def __init__(self, host: Uncopied, drawn: random.Random):
        self.host, self._drawn = host, drawn
        self.view = defaultdict(set)
        self.asked: dict[str, Sequence[int]] = {}
        self._roots = [prompt(number, drawn.randrange(3 * CHUNK)) for number in range(4)]
        self._running: list[HostRequest] = []

    def go(self) -> None:
        """A step, perhaps with a new request or one less."""
        host, drawn = self.host, self._drawn
        if len(self._running) < 4:
            root, length = drawn.choice(self._roots), drawn.randrange(4 * CHUNK, 6 * CHUNK)
            self.ask(prompt(drawn.randrange(8), length, prefix=root))
        host.step()
        for each in list(self._running):
            if each.computed == len(each.tokens) or drawn.random() < 0.02:
                self._running.remove(each)
                host.finish(each)
            elif each.state == "running" and drawn.random() < 0.05:
                host.preempt(each)
        if drawn.random() < 0.02:
            host.pool.reset_prefix_cache()
            self.view.clear()
        self._listen()

    def ask(self, asked: Sequence[int]) -> HostRequest:
        request_id = f"request-{len(self.asked)}"
        self.asked[request_id] = asked
        self._running.append(self.host.arrive(request_id, asked))
        return self._running[-1]

    def computed(self, asked: Sequence[int]) -> None:
        """Ask, and step until all of it is computed or loaded."""
        request = self.ask(asked)
        while request.computed < len(asked):
            self.host.step()
        self._running.remove(request)
        self.host.finish(request)

    def end(self) -> None:
        """Finish all requests and ask for each prompt again, one after the other, so that all that is held is named."""
        self.finish()
        for asked in {tuple(each): each for each in self.asked.values()}.values():
            self.computed(asked)
            self.finish()

    def finish(self) -> None:
        while self._running:
            self.host.finish(self._running.pop())
        for _ in range(2):  # a server's answers about one step come with the next
            self.host.settle()
            self.host.step()
        self._listen()

    def _listen(self) -> None:
        for event in self.host.told.take():
            follow(self.view, event)

    def assert_known(self) -> None:
        held = contents(self.host.side, *self.asked.values())
        assert {medium: self.view[medium] for medium in held} == held


@pytest.mark.more
def test_a_router_learns_what_lower_tiers_hold_in_the_words_of_vllm(engine, router, tmp_path):
    told = {"kv_events_config": router.config, "enable_prefix_caching": True}
    with engine(cpu_and_disk(tmp_path, capacity="4MiB"), **told) as served:
        router.join(served)
        served.ask(ASKED, tokens=1)
        settle(served, router)
        on_gpu = router.stored("GPU")
        for medium in ("CPU", "STORAGE"):
            events = router.stored(medium)
            assert hashes_of(events) == hashes_of(on_gpu)[: 10 * CHUNK // BLOCK], "as vLLM names its own blocks"
            assert [token for event in events for token in event.token_ids] == ASKED[: 10 * CHUNK]
            parents = [event.parent_block_hash for event in events]
            assert parents == [None, *(event.block_hashes[-1] for event in events[:-1])]
            assert {(event.block_size, event.group_idx, event.locality) for event in events} == {(BLOCK, 0, "LOCAL")}
        first = set(hashes_of(router.stored("CPU")))

        served.ask(OTHER, tokens=1)  # needs their room in memory
        settle(served, router)
        held_chunks = {usage.tier: usage.chunks for usage in served.manager.usage()}
        assert not router.held["CPU"] >= first
        assert len(router.held["CPU"]) == held_chunks["cpu"] * CHUNK // BLOCK
        assert router.held["STORAGE"] >= first
        assert len(router.held["STORAGE"]) == held_chunks["disk"] * CHUNK // BLOCK

        served.llm.reset_prefix_cache(reset_connector=True)
        listen(served, router)
        assert not router.held["CPU"] and not router.held["STORAGE"]


@pytest.mark.parametrize("role", ["kv_both", "kv_consumer"])
def test_after_a_restart_a_chunk_is_reported_when_it_is_loaded(engine, router, tmp_path, role):
    with engine(cpu_and_disk(tmp_path)) as first:
        first.ask(ASKED)
    told = {"kv_events_config": router.config, "enable_prefix_caching": True}
    with engine(cpu_and_disk(tmp_path), kv_role=role, **told) as second:
        router.join(second)
        assert second.ask(ASKED)[0].cached == 10 * CHUNK
        listen(second, router)
        assert len(router.held["STORAGE"]) == len(router.held["CPU"]) == 10 * CHUNK // BLOCK


@pytest.mark.parametrize("preempts", [False, True], ids=["idle", "preempts"])
def test_after_a_reset_of_vllms_own_cache_all_that_tiers_hold_is_told_again(engine, router, tmp_path, preempts):
    told = {"kv_events_config": router.config, "enable_prefix_caching": True}
    with engine(cpu_and_disk(tmp_path, capacity="4MiB"), **told) as served:
        router.join(served)
        served.ask(ASKED, tokens=1)
        served.settle()
        served.ask(OTHER, tokens=1)  # needs their room in memory
        settle(served, router)
        held = contents(served.connector.side, ASKED, OTHER)
        assert {medium: router.held[medium] for medium in held} == held and held["CPU"] < held["STORAGE"]

        router.events.clear()
        assert served.llm.reset_prefix_cache(reset_running_requests=preempts)
        assert served.ask(ASKED, tokens=1)[0].cached == 10 * CHUNK, "the tiers keep what they hold"
        settle(served, router)
        held = contents(served.connector.side, ASKED, OTHER)
        assert {medium: router.held[medium] for medium in held} == held
        assert sum(isinstance(event, AllBlocksCleared) for event in router.events) == 1


def test_a_reset_that_vllm_refuses_clears_nothing_and_tells_nothing(engine, router):
    with engine(cpu(), kv_events_config=router.config, enable_prefix_caching=True) as served:
        router.join(served)
        served.ask(ASKED, tokens=1)
        settle(served, router)
        router.events.clear()
        core = served.llm.llm_engine
        core.add_request("runs", {"prompt_token_ids": prompt(165, BLOCK)}, SamplingParams(max_tokens=4))
        core.step()
        assert not served.llm.reset_prefix_cache()
        settle(served, router)
        assert {event.medium for event in router.events} <= {"GPU"}
        assert router.held["CPU"] == contents(served.connector.side, ASKED)["CPU"]


def test_a_reset_of_all_caches_tells_again_what_is_kept(engine, router, tmp_path):
    told = {"kv_events_config": router.config, "enable_prefix_caching": True}
    with engine(cpu_and_disk(tmp_path, on_reset="keep"), **told) as served:
        router.join(served)
        served.ask(ASKED, tokens=1)
        settle(served, router)
        assert served.llm.reset_prefix_cache(reset_connector=True)
        settle(served, router)
        held = contents(served.connector.side, ASKED)
        assert len(held["CPU"]) == len(held["STORAGE"]) == 10 * CHUNK // BLOCK
        assert {medium: router.held[medium] for medium in held} == held


def test_requests_name_chunks_when_they_store_them_and_not_while_they_wait(engine, router, tmp_path, monkeypatch):
    named, name = [], kv_events.KVEvents.name

    def noted(self, request, keys, first) -> None:
        named.extend(keys)
        name(self, request, keys, first)

    monkeypatch.setattr(kv_events.KVEvents, "name", noted)
    prompts = [prompt(200 + number, 10 * CHUNK + 3) for number in range(6)]
    told = {"kv_events_config": router.config, "enable_prefix_caching": True, "max_num_seqs": 1}
    with engine(cpu_and_disk(tmp_path), **told) as served:
        router.join(served)
        named.clear()
        for number, asked in enumerate(prompts):
            once = SamplingParams(max_tokens=1)
            served.llm.llm_engine.add_request(f"queued-{number}", {"prompt_token_ids": asked}, once)
        assert not named
        settle(served, router)
        held = contents(served.connector.side, *prompts)
        assert len(held["CPU"]) == len(held["STORAGE"]) == 60 * CHUNK // BLOCK
        assert {medium: router.held[medium] for medium in held} == held
        assert len(named) == 60, "each once"
        assert not served.connector._kv_events._named, "nothing is remembered of what is not held"


def test_a_queue_of_any_length_is_told_whole():
    """Twenty prompts of a thousand chunks each wait at once."""
    prompts = {f"queued-{number}": prompt(number, 1000 * CHUNK) for number in range(20)}
    host = Uncopied(opened({"type": "heap", "capacity": "1GiB"}), blocks=20 * 1000 * CHUNK // BLOCK, budget=100 * CHUNK)
    waiting = [host.arrive(*each) for each in prompts.items()]
    assert not host.told._named
    while any(each.computed < len(each.tokens) for each in waiting):
        host.step()
    for each in waiting:
        host.finish(each)
    host.settle()
    assert host.manager.usage()[0].chunks == len(host.told._published) == 20_000
    assert {*hashes_of(host.told.take())} == {each for asked in prompts.values() for each in block_hashes(asked)}
    host.side.close()


@pytest.mark.parametrize("seed", some(range(3)))
def test_whatever_requests_and_resets_there_were_a_router_knows_what_tiers_hold(tmp_path, monkeypatch, seed):
    monkeypatch.setattr(kv_events, "_AGAIN", 3)
    room = {"capacity": f"{12 * LAYOUT.frame_nbytes}B"}, {"capacity": f"{30 * LAYOUT.frame_nbytes}B"}
    disk = {"type": "disk", "path": str(tmp_path / "disk"), "min_free": "0B", **room[1]}
    traffic = Traffic(
        Uncopied(opened({"type": "heap", **room[0]}, disk), blocks=100, budget=CHUNK), random.Random(seed)
    )
    for _ in range(600):
        traffic.go()
    traffic.end()
    traffic.assert_known()
    traffic.host.side.close()


@pytest.mark.more
def test_whatever_two_engines_did_the_router_of_each_knows_what_their_server_holds(tmp_path):
    """At the end each asks for all its prompts again: it has no name for a chunk that left and the other one stored."""
    room = f"{{type: disk, path: {tmp_path}/disk, capacity: {30 * LAYOUT.frame_nbytes}B, min_free: 0B}}"
    config = load_config(of(tmp_path), Registry.of(kvtier_disk.plugin))
    with serving(tmp_path, room, capacity=f"{12 * LAYOUT.frame_nbytes}B"), contextlib.ExitStack() as opened:
        both = []
        for seed in range(2):
            facts = {"model": "tiny", "engine": f"engine {seed}", "namespace": make_context().namespace}
            stack = server_client().open_stack(server_path(config), **facts, layout=LAYOUT, recomputes=True)
            both.append(Traffic(Uncopied(config, stack, blocks=100, budget=CHUNK), random.Random(seed)))
            opened.callback(both[-1].host.side.close)
        for _ in range(300):
            for each in both:
                each.go()
        for each in both:
            each.end()
            each.assert_known()


def test_after_a_reset_a_parent_is_told_before_its_children():
    """Routers that keep a tree know no place for a block without its parent."""
    blocks, keys = pool(), [ChunkKey(bytes([number]) * 32) for number in range(3)]
    told = kv_events.KVEvents(Answers(), CHUNK, BLOCK, [GROUP], blocks)
    told.name(requested("parent", prompt(1, 3 * CHUNK)), keys, 0)
    told.observe([Event(EventKind.STORED, "heap", tuple(keys))])
    told.observe([Event(EventKind.CORRUPT, "heap", (keys[0],))])
    told.observe([Event(EventKind.STORED, "heap", (keys[0],))])
    assert blocks.reset_prefix_cache()
    assert hashes_of(told.take()) == block_hashes(prompt(1, 3 * CHUNK))


def test_a_reset_is_told_in_parts(monkeypatch):
    """No step waits for all of it, and many resets leave little more than one in a subscriber's buffer."""
    monkeypatch.setattr(kv_events, "_AGAIN", 2)
    asked, keys = prompt(1, 6 * CHUNK), [ChunkKey(bytes([number]) * 32) for number in range(6)]
    blocks = pool()
    told = kv_events.KVEvents(Answers(), CHUNK, BLOCK, [GROUP], blocks)
    told.name(requested("asked", asked), keys, 0)
    told.observe([Event(EventKind.STORED, "heap", tuple(keys[:5]))])
    told.take()
    hashes = block_hashes(asked)
    of = [hashes[at * CHUNK // BLOCK : (at + 1) * CHUNK // BLOCK] for at in range(6)]
    for _ in range(30):
        assert blocks.reset_prefix_cache()
        assert hashes_of(told.take()) == [*of[0], *of[1]]
    for kind, key in (
        (EventKind.STORED, keys[5]),
        (EventKind.EVICTED, keys[4]),
        (EventKind.EVICTED, keys[3]),
        (EventKind.STORED, keys[3]),
    ):
        told.observe([Event(kind, "heap", (key,))])
    rest = [told.take() for _ in range(3)]
    assert all(isinstance(event, BlockStored) for part in rest for event in part), "what had left was not known"
    assert [hashes_of(part) for part in rest] == [[*of[2], *of[5]], of[3], []]


def test_a_block_that_two_chunks_begin_with_is_held_until_neither_is(router):
    asked = prompt(1, CHUNK)
    other = prompt(2, CHUNK, prefix=asked[:BLOCK])
    keys = ChunkKey(bytes(32)), ChunkKey(bytes([1]) * 32)
    told = kv_events.KVEvents(Answers(), CHUNK, BLOCK, [GROUP], pool())
    told.name(requested("asked", asked), keys[:1], 0)
    told.name(requested("other", other), keys[1:], 0)
    for kind, key, held in (
        (EventKind.STORED, keys[0], [asked]),
        (EventKind.STORED, keys[1], [asked, other]),
        (EventKind.EVICTED, keys[0], [other]),
        (EventKind.EVICTED, keys[1], []),
    ):
        told.observe([Event(kind, "heap", (key,))])
        for event in told.take():
            router.follow(event)
        assert router.held["CPU"] == {each for prompt in held for each in block_hashes(prompt)}


def one_chunk():
    """A chunk that a request has named, and the blocks that it begins with, as a router knows them."""
    asked, stack = prompt(1, CHUNK), Answers()
    told = kv_events.KVEvents(stack, CHUNK, BLOCK, [GROUP], pool())
    told.name(requested("asked", asked), [CHUNK_KEY], 0)
    return told, stack, set(block_hashes(asked))


def heard(told, router) -> set[int]:
    for event in told.take():
        router.follow(event)
    return router.held["CPU"]


def test_a_chunk_is_told_when_a_server_has_said_where_it_is(router):
    told, stack, blocks = one_chunk()
    told.keep(())  # it is loaded, or was stored before
    assert not heard(told, router)
    ((path, then),) = stack.due
    then([Whereabouts(("heap",), held=("heap",))] * len(path))
    assert heard(told, router) == blocks
    told.observe([Event(EventKind.EVICTED, "heap", (CHUNK_KEY,))])
    assert not heard(told, router)


def test_a_chunk_is_told_when_its_store_ends_before_the_server_tells_of_it(router):
    told, stack, blocks = one_chunk()
    told.keep([CHUNK_KEY])
    assert not stack.due
    told.keep(())
    ((_, then),) = stack.due
    told.observe([Event(EventKind.STORED, "heap", (CHUNK_KEY,))])
    assert not heard(told, router)
    then([Whereabouts(("heap",), held=("heap",))])
    assert heard(told, router) == blocks


def test_a_chunk_that_arrives_after_its_request_gave_up_is_told(router):
    told, stack, blocks = one_chunk()
    told.keep(())
    ((_, then),) = stack.due
    then([Whereabouts((), "on its way into heap", arrives=True)])
    told.keep(())
    assert len(stack.due) == 1, "a step asks for nothing that waits"
    told.observe([Event(EventKind.READ, "a shared store", (CHUNK_KEY,))])
    assert not heard(told, router)
    told.observe([Event(EventKind.PROMOTED, "heap", (CHUNK_KEY,))])
    assert heard(told, router) == blocks


@pytest.mark.parametrize("kind", [EventKind.IO_ERROR, EventKind.MISSING, EventKind.CORRUPT])
def test_the_request_of_a_chunk_that_does_not_arrive_is_forgotten(router, kind):
    told, stack, _ = one_chunk()
    told.keep(())
    ((_, then),) = stack.due
    then([Whereabouts((), "on its way into heap", arrives=True)])
    told.observe([Event(kind, "a shared store", (CHUNK_KEY,))])
    assert not told._arriving


@pytest.mark.parametrize("trouble", ["hangs", "fails"])
def test_what_a_disk_in_trouble_holds_is_told(tmp_path, monkeypatch, trouble):
    """A read that ends after its request has given up, and a breaker that is open while the request computes."""
    disk = {"type": "disk", "path": str(tmp_path), "capacity": "64MiB", "min_free": "0B"}
    config = opened({"type": "heap", "capacity": "64MiB"}, disk, load_wait="1ms")
    first = Traffic(Uncopied(config, blocks=100, budget=CHUNK), random.Random(0))
    others = [prompt(seed, 2 * CHUNK) for seed in range(8)]
    for each in (ASKED, *others):
        first.computed(each)
    first.finish()
    first.host.side.close()
    monkeypatch.setattr(health, "_FIRST_PAUSE", HANG)
    second = Traffic(Uncopied(config, blocks=100, budget=CHUNK), random.Random(0))
    (store,) = second.host.manager.tiers
    goes_on, read = threading.Event(), store.backend.read

    def in_trouble(*arguments):
        if trouble == "fails" and not goes_on.is_set():
            raise BackendError("it fails")
        assert goes_on.wait(HANG)
        return read(*arguments)

    monkeypatch.setattr(store.backend, "read", in_trouble)
    if trouble == "fails":
        for other in others:
            second.computed(other)
            second.finish()  # a request does not wait for its read to fail
        assert not store.can_read
    second.computed(ASKED)
    goes_on.set()
    second.finish()
    assert second.view["STORAGE"] >= set(block_hashes(ASKED)[: 10 * CHUNK // BLOCK])
    second.host.side.close()


def test_an_answer_about_what_was_forgotten_meanwhile_tells_nothing(router):
    told, stack, _ = one_chunk()
    told.keep(())
    told.clear()
    ((path, then),) = stack.due
    then([Whereabouts(("heap",), held=("heap",))] * len(path))
    assert not heard(told, router)


def test_when_events_were_lost_nothing_is_held_any_more(router):
    told, stack, blocks = one_chunk()
    told.observe([Event(EventKind.STORED, "heap", (CHUNK_KEY,))])
    assert heard(told, router) == blocks
    stack.gaps += 1
    assert not heard(told, router)


def test_routers_learn_what_a_server_holds_whichever_engine_stored_it_or_had_it_leave(
    engine, router, fork_server, model, tmp_path
):
    """Memory for two prompts, which the other engine fills, and a disk. The server is then killed."""
    disk = f"{{type: disk, path: {tmp_path}/disk, capacity: 64MiB, min_free: 0B}}"
    asked = [prompt(seed, 530) for seed in (170, 171, 172, 173)]
    told = {"kv_events_config": router.config, "enable_prefix_caching": True}
    with (
        serving(tmp_path, disk, capacity="6MiB") as server,
        beside(fork_server, model, of(tmp_path)) as other,
        engine(of(tmp_path), **told) as served,
    ):
        router.join(served)
        other.ask(asked[0])
        assert served.ask(asked[0], tokens=1)[0].cached == 512
        served.ask(asked[1], tokens=1)
        settle(served, router)
        held = contents(served.connector.side, *asked)
        assert {medium: router.held[medium] for medium in held} == held
        assert len(held["CPU"]) == len(held["STORAGE"]) == 2 * 512 // BLOCK

        for each in asked[2:]:
            other.ask(each)
        settle(served, router)
        held = contents(served.connector.side, *asked[:2])
        assert {medium: router.held[medium] for medium in held} == held
        assert len(held["CPU"]) < len(held["STORAGE"])

        server.kill()
        server.wait()
        settle(served, router)
        assert not router.held["CPU"] and not router.held["STORAGE"]


def test_chunks_of_an_answer_are_told(engine, router):
    told = {"kv_events_config": router.config, "enable_prefix_caching": True}
    with engine(cpu(save_decode=True), **told) as served:
        router.join(served)
        (answer,) = served.ask(ASKED, tokens=2 * CHUNK)
        settle(served, router)
        held = contents(served.connector.side, [*ASKED, *answer.tokens])
        assert len(held["CPU"]) == 12 * CHUNK // BLOCK
        assert router.held["CPU"] == held["CPU"]


def test_what_a_tier_kept_over_a_restart_is_told_when_a_request_computes_it(engine, router, tmp_path):
    with engine(cpu_and_disk(tmp_path)) as first:
        first.ask(ASKED)
    told = {"kv_events_config": router.config, "enable_prefix_caching": True}
    with engine(cpu_and_disk(tmp_path), **told) as second:
        router.join(second)
        alone = SamplingParams(max_tokens=1, detokenize=False, prompt_logprobs=1)  # vLLM computes all of it
        second.llm.generate([{"prompt_token_ids": ASKED}], alone, use_tqdm=False)
        settle(second, router)
        held = contents(second.connector.side, ASKED)
        assert len(held["STORAGE"]) == 10 * CHUNK // BLOCK
        assert {medium: router.held[medium] for medium in held} == held


def test_a_salt_is_told_as_vllm_tells_it(engine, router):
    with engine(cpu(), kv_events_config=router.config, enable_prefix_caching=True) as served:
        router.join(served)
        served.ask(ASKED, tokens=1, salt="tenant")
        settle(served, router)
        (on_gpu, *_), (in_memory, *_) = router.stored("GPU"), router.stored("CPU")
        assert in_memory.extra_keys == on_gpu.extra_keys[: CHUNK // BLOCK]
        assert ("tenant",) in in_memory.extra_keys


def test_no_events_are_collected_without_a_consumer(engine):
    with engine(cpu()) as served:
        served.ask(ASKED)
        assert served.connector._kv_events is None
        assert list(served.connector.take_events()) == []


def test_events_of_lost_chunks_are_retracted(engine, router, monkeypatch):
    with engine(cpu(), kv_events_config=router.config, enable_prefix_caching=True) as served:
        router.join(served)
        served.ask(ASKED, tokens=1)
        settle(served, router)
        assert len(router.held["CPU"]) == 10 * CHUNK // BLOCK
        monkeypatch.setattr(SchedulerSide, "match", lambda self, *args, **options: 1 / 0)
        served.ask(prompt(163, BLOCK), tokens=1)
        assert served.connector.side is None, "kvtier has failed"
        listen(served, router)
        assert not router.held["CPU"]


def test_an_engine_that_no_longer_loads_holds_nothing_for_a_router(engine, router, monkeypatch):
    with engine(cpu(), kv_events_config=router.config, enable_prefix_caching=True) as served:
        router.join(served)
        served.ask(ASKED, tokens=1)
        settle(served, router)
        assert len(router.held["CPU"]) == 10 * CHUNK // BLOCK
        monkeypatch.setattr(WorkerSide, "store", lambda self, plan: 1 / 0)
        served.ask(OTHER, tokens=1)
        settle(served, router)
        assert served.connector.side.loads_nothing == "rank 0 failed; see its log"
        assert not router.held["CPU"]
        assert served.llm.reset_prefix_cache()
        served.ask(ASKED, tokens=1)
        settle(served, router)
        assert not router.held["CPU"]


def test_an_engine_that_only_stores_tells_routers_of_no_tier_and_the_log_says_so(engine, router, said):
    told = {"kv_events_config": router.config, "enable_prefix_caching": True, "kv_role": "kv_producer"}
    with engine(cpu(), **told) as served:
        why = "this engine is configured to store only"
        assert f"kvtier: vLLM's KV events do not cover these tiers: {why}" in said()
        router.join(served)
        served.ask(ASKED, tokens=1)
        settle(served, router)
        assert served.manager.usage()[0].chunks == 10
        assert {event.medium for event in router.events} == {"GPU"}


def test_of_a_hybrid_model_the_groups_that_keep_every_token_are_told(engine, router, tmp_path):
    tiny_hybrids.make("gpt_oss", tmp_path)
    told = {"kv_events_config": router.config, "enable_prefix_caching": True}
    with engine(cpu(chunk_tokens="auto"), model=tmp_path, **told) as served:
        router.join(served)
        served.ask(ASKED, tokens=1)
        settle(served, router)
        specs = [group.kv_cache_spec for group in served.scheduler.kv_cache_config.kv_cache_groups]
        whole = {number for number, spec in enumerate(specs) if type(spec) is FullAttentionSpec}
        assert 0 < len(whole) < len(specs)
        on_gpu, in_memory = router.stored("GPU"), router.stored("CPU")
        assert {event.group_idx for event in in_memory} == whole
        chunks = len(ASKED) // served.connector.side.chunk_tokens
        for group in whole:
            blocks = chunks * served.connector.side.chunk_tokens // specs[group].block_size
            named = hashes_of([event for event in on_gpu if event.group_idx == group])[:blocks]
            assert router.groups[group]["CPU"] == {*named} and len(named) == blocks > 0
        kinds = {event.group_idx: event.kv_cache_spec_kind for event in on_gpu}
        assert {event.kv_cache_spec_kind for event in in_memory} == {kinds[group] for group in whole}

        assert served.llm.reset_prefix_cache(reset_connector=True)
        listen(served, router)
        assert not any(held["CPU"] for held in router.groups.values())


def test_a_model_that_keeps_no_whole_prompt_is_not_told_and_the_log_says_so(engine, router, tmp_path, said):
    tiny_hybrids.make("mistral", tmp_path)
    with engine(cpu(), kv_events_config=router.config, enable_prefix_caching=True, model=tmp_path) as served:
        why = "no group of layers keeps every token and has hashes of its blocks"
        assert f"kvtier: vLLM's KV events do not cover these tiers: {why}" in said()
        router.join(served)
        served.ask(ASKED, tokens=1)
        settle(served, router)
        assert {event.medium for event in router.events} == {"GPU"}


def test_groups_with_longer_blocks_have_the_hashes_of_vllm(router):
    """As vLLM's pool names the blocks of each group."""
    asked, keys = requested("asked", prompt(1, 3 * CHUNK)), [ChunkKey(bytes([number]) * 32) for number in range(3)]
    groups = kv_events.Group(1, BLOCK, "full_attention"), kv_events.Group(2, CHUNK, "full_attention")
    told = kv_events.KVEvents(Answers(), CHUNK, BLOCK, groups, pool())
    told.name(asked, keys, 0)
    told.observe([Event(EventKind.STORED, "heap", tuple(keys))])
    events = told.take()
    for group in groups:
        size = group.block_tokens
        hashes = resolve_block_hashes(asked.block_hashes, BLOCK, size)
        own = [event for event in events if event.group_idx == group.number]
        assert hashes_of(own) == [maybe_convert_block_hash(each) for each in hashes]
        assert [each for event in own for each in event.token_ids] == list(asked.all_token_ids)
        assert {(event.block_size, len(event.extra_keys)) for event in own} == {(size, CHUNK // size)}
    told.observe([Event(EventKind.EVICTED, "heap", (keys[2],))])
    for event in (*events, *told.take()):
        router.follow(event)
    assert [len(router.groups[number]["CPU"]) for number in (1, 2)] == [4, 2]
