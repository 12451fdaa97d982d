"""What routers are told of the tiers: vLLM's own events, as a subscriber gets them over ZMQ."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import tiny_hybrids
import zmq
from conftest import BLOCK, CHUNK, cpu, cpu_and_disk, prompt
from device_engine.scheduling import HostRequest, Scheduling
from vllm import SamplingParams
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, maybe_convert_block_hash
from vllm.v1.request import Request

import kvtier_disk.plugin
from kvtier_core.config.load import load_config
from kvtier_core.config.model import StackConfig
from kvtier_core.config.registry import Registry
from kvtier_core.engine.messages import WorkerProgress
from kvtier_core.engine.scheduler_side import SchedulerSide
from kvtier_core.engine.step import StepResult
from kvtier_core.layouts import ChunkLayout
from kvtier_core.stack.outcomes import Whereabouts
from kvtier_core.testing.samples import make_group
from kvtier_core.types import ChunkKey, Event, EventKind
from kvtier_core.vllm import kv_events

ASKED = prompt(160, 10 * CHUNK + 3)
OTHER = prompt(161, 10 * CHUNK + 3)
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
        self.held = defaultdict(set)  # hashes of blocks by medium, as the events say

    def join(self, engine) -> None:
        """Ask small things until something is heard: a publisher drops what it sends before it knows of a subscriber.

        The engine keeps prefixes itself, and tells of that too.
        """
        for seed in range(100):
            engine.ask(prompt(1000 + seed, BLOCK + 1), tokens=1)
            self.listen(0.2)
            if self.events:
                return self.events.clear()
        raise AssertionError("nothing is published")

    def listen(self, seconds: float = 1.0) -> None:
        """Take everything that comes until it is quiet for so long."""
        while self._socket.poll(1000 * seconds):
            _topic, _number, payload = self._socket.recv_multipart()
            for event in self._decoder.decode(payload).events:
                self.events.append(event)
                self.follow(event)

    def follow(self, event) -> None:
        if isinstance(event, AllBlocksCleared):
            return self.held.clear()  # of every medium, as the index of llm-d does
        held = self.held[event.medium]
        if isinstance(event, BlockStored):
            if event.medium != "GPU":
                assert not held.issuperset(event.block_hashes), "told twice"
            held.update(event.block_hashes)
        elif isinstance(event, BlockRemoved):
            assert held.issuperset(event.block_hashes), "never told"
            held.difference_update(event.block_hashes)

    def stored(self, medium: str) -> list[BlockStored]:
        return [event for event in self.events if isinstance(event, BlockStored) and event.medium == medium]

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()


@pytest.fixture
def router():
    subscribed = Router()
    yield subscribed
    subscribed.close()


def hashes_of(events: Sequence[BlockStored]) -> list[int]:
    return [each for event in events for each in event.block_hashes]


def settle(served, router) -> None:
    """Let everything arrive in the tiers and at the router: events leave with a step."""
    served.settle()
    served.ask(prompt(162, BLOCK), tokens=1)
    router.listen()


def contents(side: SchedulerSide, *prompts: Sequence[int]) -> dict[str, set[int]]:
    """The hashes that vLLM gives the blocks of these prompts, by the media of the tiers that hold them."""
    held = {"CPU": set(), "STORAGE": set()}
    for asked in prompts:
        hashes = block_hashes(asked)
        for number, chunk in enumerate(side._where(asked)["chunks"]):
            for tier in chunk["tiers"]:
                first = number * CHUNK // BLOCK
                held["STORAGE" if tier == "disk" else "CPU"].update(hashes[first : first + CHUNK // BLOCK])
    return held


def block_hashes(asked: Sequence[int]) -> list[int]:
    return [maybe_convert_block_hash(each) for each in requested("hashed", asked).block_hashes]


def requested(request_id: str, asked: Sequence[int]) -> Request:
    """A request as vLLM's scheduler has it."""
    init_none_hash(sha256)  # as each engine does
    hasher = get_request_block_hasher(BLOCK, sha256)
    return Request(request_id, list(asked), SamplingParams(max_tokens=1), None, block_hasher=hasher)


def opened(*tiers: dict[str, Any]) -> StackConfig:
    values = {"version": 1, "chunk_tokens": CHUNK, "load": "always", "load_wait": "60s", "tiers": list(tiers)}
    return load_config(values, Registry.of(kvtier_disk.plugin))


def pool() -> BlockPool:
    """The smallest of vLLM's."""
    return BlockPool(1, enable_caching=True, hash_block_size=BLOCK)


class Uncopied(Scheduling):
    """An engine's scheduler and its events. What it stores and loads has arrived with the step, and is not copied."""

    def __init__(self, *tiers: dict[str, Any], blocks: int, budget: int):
        config, self.pool = opened(*tiers), pool()
        super().__init__(config, LAYOUT, range(blocks), budget, ranks=1)
        self.told = kv_events.KVEvents(config, CHUNK, BLOCK, self.pool, self.manager.whereabouts)
        self.side.events.listeners.append(self.told.observe)
        self.side.path_listeners.append(lambda request_id, *path: self.told.name(self._of_vllm[request_id], *path))
        self._of_vllm: dict[str, Request] = {}
        self._tested = Counter({(self.manager.attachment, ""): 1})

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
        stored = Counter(job for job, _ in plan.stores)
        self.side.progress(StepResult(loaded, progress=WorkerProgress(stored, self_tests=self._tested)))
        self._tested = Counter()
        for request_id in loaded:
            self._loaded(self._requests[request_id], ok=True)

    def settle(self) -> None:
        self.side.drain(20.0)


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
        served.ask(prompt(164, BLOCK), tokens=1)
        router.listen()
        assert not router.held["CPU"] and not router.held["STORAGE"]


@pytest.mark.parametrize("role", ["kv_both", "kv_consumer"])
def test_after_a_restart_a_chunk_is_reported_when_it_is_loaded(engine, router, tmp_path, role):
    with engine(cpu_and_disk(tmp_path)) as first:
        first.ask(ASKED)
    told = {"kv_events_config": router.config, "enable_prefix_caching": True}
    with engine(cpu_and_disk(tmp_path), kv_role=role, **told) as second:
        router.join(second)
        assert second.ask(ASKED)[0].cached == 10 * CHUNK
        router.listen()
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
    host = Uncopied({"type": "heap", "capacity": "1GiB"}, blocks=20 * 1000 * CHUNK // BLOCK, budget=100 * CHUNK)
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


@pytest.mark.parametrize("seed", range(3))
def test_whatever_requests_and_resets_there_were_a_router_knows_what_tiers_hold(router, tmp_path, seed):
    drawn = random.Random(seed)
    room = {"capacity": f"{12 * LAYOUT.frame_nbytes}B"}, {"capacity": f"{30 * LAYOUT.frame_nbytes}B"}
    disk = {"type": "disk", "path": str(tmp_path / "disk"), "min_free": "0B", **room[1]}
    host = Uncopied({"type": "heap", **room[0]}, disk, blocks=100, budget=CHUNK)
    roots = [prompt(number, drawn.randrange(3 * CHUNK)) for number in range(4)]
    asked, running = {}, []
    for number in range(600):
        if len(running) < 4:
            new = prompt(drawn.randrange(8), drawn.randrange(4 * CHUNK, 6 * CHUNK), prefix=drawn.choice(roots))
            asked[f"request-{number}"] = new
            running.append(host.arrive(f"request-{number}", new))
        host.step()
        for each in list(running):
            if each.computed == len(each.tokens) or drawn.random() < 0.02:
                running.remove(each)
                host.finish(each)
            elif each.state == "running" and drawn.random() < 0.05:
                host.preempt(each)
        if drawn.random() < 0.02:
            host.pool.reset_prefix_cache()
            router.held.clear()
        for event in host.told.take():
            router.follow(event)
    for each in running:
        host.finish(each)
    host.settle()
    for event in host.told.take():
        router.follow(event)
    assert {medium: router.held[medium] for medium in ("CPU", "STORAGE")} == contents(host.side, *asked.values())
    host.side.close()


def test_after_a_reset_a_parent_is_told_before_its_children():
    """Routers that keep a tree know no place for a block without its parent."""
    blocks, keys = pool(), [ChunkKey(bytes([number]) * 32) for number in range(3)]
    told = kv_events.KVEvents(
        opened({"type": "heap", "capacity": "1MiB"}), CHUNK, BLOCK, blocks, lambda path: [Whereabouts(())] * len(path)
    )
    told.name(requested("parent", prompt(1, 3 * CHUNK)), keys, 0)
    told.observe([Event(EventKind.STORED, "heap", tuple(keys))])
    told.observe([Event(EventKind.CORRUPT, "heap", (keys[0],))])
    told.observe([Event(EventKind.STORED, "heap", (keys[0],))])
    assert blocks.reset_prefix_cache()
    assert hashes_of(told.take()) == block_hashes(prompt(1, 3 * CHUNK))


def test_a_block_that_two_chunks_begin_with_is_held_until_neither_is(router):
    asked = prompt(1, CHUNK)
    other = prompt(2, CHUNK, prefix=asked[:BLOCK])
    keys = ChunkKey(bytes(32)), ChunkKey(bytes([1]) * 32)
    told = kv_events.KVEvents(
        opened({"type": "heap", "capacity": "1MiB"}), CHUNK, BLOCK, pool(), lambda path: [Whereabouts(())] * len(path)
    )
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
        served.ask(prompt(164, BLOCK), tokens=1)
        router.listen()
        assert not router.held["CPU"]


def test_a_hybrid_models_tiers_are_not_told_and_the_log_says_why(engine, router, tmp_path, said):
    tiny_hybrids.make("gemma3", tmp_path)
    with engine(
        cpu(chunk_tokens="auto"), kv_events_config=router.config, enable_prefix_caching=True, model=tmp_path
    ) as served:
        assert any(line.startswith("kvtier: vLLM's KV events do not cover these tiers: ") for line in said())
        router.join(served)
        served.ask(ASKED, tokens=1)
        settle(served, router)
        assert {event.medium for event in router.events} == {"GPU"}
