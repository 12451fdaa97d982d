"""What routers are told of the tiers: vLLM's own events, as a subscriber gets them over ZMQ."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
import tiny_hybrids
import zmq
from conftest import BLOCK, CHUNK, cpu, cpu_and_disk, prompt
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

from kvtier_core.engine.scheduler_side import SchedulerSide

ASKED = prompt(160, 10 * CHUNK + 3)
OTHER = prompt(161, 10 * CHUNK + 3)


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
        self.held = {}  # hashes of blocks by medium, as the events say

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
                self._follow(event)

    def _follow(self, event) -> None:
        if isinstance(event, AllBlocksCleared):
            return self.held.pop("GPU", None)
        held = self.held.setdefault(event.medium, set())
        if isinstance(event, BlockStored):
            if event.medium != "GPU":
                assert held.isdisjoint(event.block_hashes), "told twice"
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


def hashes_of(events: Sequence[BlockStored]) -> list[bytes]:
    return [each for event in events for each in event.block_hashes]


def test_a_router_learns_what_lower_tiers_hold_in_the_words_of_vllm(engine, router, tmp_path):
    told = {"kv_events_config": router.config, "enable_prefix_caching": True}
    with engine(cpu_and_disk(tmp_path, capacity="4MiB"), **told) as served:
        router.join(served)
        served.ask(ASKED, tokens=1)
        served.settle()
        served.ask(prompt(162, BLOCK), tokens=1)  # events leave with a step
        router.listen()
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
        served.settle()
        served.ask(prompt(163, BLOCK), tokens=1)
        router.listen()
        held_chunks = {usage.tier: usage.chunks for usage in served.manager.usage()}
        assert not router.held["CPU"] >= first
        assert len(router.held["CPU"]) == held_chunks["cpu"] * CHUNK // BLOCK
        assert router.held["STORAGE"] >= first
        assert len(router.held["STORAGE"]) == held_chunks["disk"] * CHUNK // BLOCK

        served.llm.reset_prefix_cache(reset_connector=True)
        served.ask(prompt(164, BLOCK), tokens=1)
        router.listen()
        assert not router.held["CPU"] and not router.held["STORAGE"]


def test_after_a_restart_a_chunk_is_reported_when_it_has_been_read(engine, router, tmp_path):
    with engine(cpu_and_disk(tmp_path)) as first:
        first.ask(ASKED)
    with engine(cpu_and_disk(tmp_path), kv_events_config=router.config, enable_prefix_caching=True) as second:
        router.join(second)
        assert second.ask(ASKED)[0].cached == 10 * CHUNK
        router.listen()
        assert len(router.held["STORAGE"]) == len(router.held["CPU"]) == 10 * CHUNK // BLOCK


def test_a_salt_is_told_as_vllm_tells_it(engine, router):
    with engine(cpu(), kv_events_config=router.config, enable_prefix_caching=True) as served:
        router.join(served)
        served.ask(ASKED, tokens=1, salt="tenant")
        served.settle()
        served.ask(prompt(162, BLOCK), tokens=1)
        router.listen()
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
        served.settle()
        served.ask(prompt(162, BLOCK), tokens=1)
        router.listen()
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
        served.settle()
        served.ask(prompt(162, BLOCK), tokens=1)
        router.listen()
        assert {event.medium for event in router.events} == {"GPU"}
