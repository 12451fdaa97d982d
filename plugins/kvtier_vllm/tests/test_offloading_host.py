"""kvtier's tiers in vLLM's own offloading, in real engines. Only the copies of a worker are not vLLM's: on_the_cpu."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import time
from pathlib import Path

import numpy as np
import pytest
from chunk_files import sizes
from disks import tmpfs
from faulty_backend import hanging
from patience import HANG, wait_until
from real_engines import BLOCK, Answer, Engine, prompt
from servers.redis import one_server
from sizes import some
from test_kv_events import Router, listen, requested
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.kv_offload.base import make_offload_key

from kvtier_core.errors import ConfigError
from kvtier_disk.backend import DiskBackend
from kvtier_hosts.model_pages import ModelPages, Page
from kvtier_hosts.pages import PageStore

ASKED = prompt(180, 530)
CHUNKS = 8  # of two blocks
HIT = CHUNKS * 2 * BLOCK


def disk(path, **settings):
    return {"type": "disk", "path": str(path), "capacity": "1GiB", "min_free": "0B", **settings}


def stack(tier, **settings):
    return {"version": 1, "load_wait": "20s", **settings, "tiers": [{"type": "cpu", "capacity": "64MiB"}, tier]}


class Offloading:
    """An engine with vLLM's OffloadingConnector, opened up for looking inside."""

    def __init__(self, engine):
        self._engine = engine
        self.manager = engine.scheduler.connector.connector_scheduler.manager
        (self.tier,) = self.manager.secondary_tiers

    def ask(self, tokens=ASKED, **options) -> Answer:
        (answer,) = self._engine.ask(tokens, **options)
        return answer

    def begin(self) -> None:
        """Compute a prompt, and do not yet store it."""
        from vllm import SamplingParams

        asked = {"prompt_token_ids": ASKED}
        parameters = SamplingParams(temperature=0, max_tokens=4, detokenize=False, ignore_eos=True)
        self._engine.llm.llm_engine.add_request("0", asked, parameters)
        self._engine.llm.llm_engine.step()

    def settle(self) -> None:
        """Until vLLM has stored all that it means to, and the tiers below have it."""
        deadline = time.monotonic() + HANG
        while self._engine.scheduler.has_requests() or self.manager.has_pending_work():
            assert time.monotonic() < deadline
            self._engine.llm.llm_engine.step()
            time.sleep(0.001)

    def call_workers(self) -> None:
        """For something that kvtier does not know."""
        self._engine.llm.collective_rpc(lambda worker: None)

    def reset(self) -> None:
        """As before new weights: vLLM forgets its own caches, and tells its connector."""
        assert self._engine.llm.llm_engine.reset_prefix_cache(reset_connector=True)


def over(tier):
    """Options of an engine that offloads to its CPU memory, and from there to this stack, or to a tier of vLLM's."""
    from vllm.config import KVTransferConfig

    example = json.loads((Path(__file__).parents[3] / "examples/hosts/vllm.json").read_text())
    extra = example["kv_connector_extra_config"]
    tiers = [tier if "type" in tier else {**each, "config": tier} for each in extra["secondary_tiers"]]
    extra |= {"cpu_bytes_to_use": 16 << 20, "blocks_per_chunk": 2, "secondary_tiers": tiers}
    extra |= {"spec_name": "TieringOnTheCPU", "spec_module_path": "on_the_cpu"}
    return {"kv_transfer_config": KVTransferConfig(**example)}


@pytest.fixture
def offloading(engine):
    """``offloading(stack)`` is a context with an engine that has this stack below its CPU memory."""

    @contextlib.contextmanager
    def start(config, **options):
        with engine(None, **over(config), **options) as opened:
            yield Offloading(opened)

    return start


@pytest.fixture(scope="module")
def truth(model):
    """What vLLM says without any offloading."""
    plain = Engine(model, None)
    (answer,) = plain.ask(ASKED)
    plain.close()
    return answer


def store(offloading, config, **options) -> None:
    """One engine's life, in which it stores a prompt."""
    with offloading(config, **options) as first:
        assert first.ask().cached == 0
        first.settle()


def frames(path):
    """The files that are long enough for a chunk."""
    return [file for file, nbytes in sizes(path).items() if nbytes > 64 << 10]


def same(answer: Answer, truth: Answer) -> bool:
    return answer.differs(truth) < 1e-4


def test_after_a_restart_the_answer_comes_from_our_disk(offloading, tmp_path, truth):
    store(offloading, stack(disk(tmp_path / "kv")))
    with offloading(stack(disk(tmp_path / "kv"))) as second:
        answer = second.ask()
        assert answer.cached == HIT
        assert same(answer, truth)
        assert second.ask(prompt(181, 530)).cached == 0


def flip(file: Path) -> None:
    """A bit of the exponent of a number."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2 + 3] ^= 0x40
    file.write_bytes(content)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


@pytest.mark.parametrize("harm", some([flip, truncate]))
def test_a_damaged_file_is_computed_again(offloading, tmp_path, truth, harm):
    store(offloading, stack(disk(tmp_path / "kv")))
    harm(frames(tmp_path)[0])
    with offloading(stack(disk(tmp_path / "kv"))) as second:
        answer = second.ask()
        assert answer.cached < HIT
        assert same(answer, truth)


def test_other_weights_in_the_same_folder_find_nothing(offloading, tmp_path):
    import tiny_llama

    model = tmp_path / "model"
    tiny_llama.make(model, seed=0)
    store(offloading, stack(disk(tmp_path / "kv")), model=model)
    tiny_llama.make(model, seed=1)
    with offloading(stack(disk(tmp_path / "kv")), model=model) as second:
        assert second.ask().cached == 0


@pytest.mark.more
def test_the_fs_tier_of_vllm_serves_a_flipped_byte_and_kv_of_other_weights(offloading, tmp_path):
    import tiny_llama

    model = tmp_path / "model"
    tiny_llama.make(model, seed=0)
    theirs = {"type": "fs", "root_dir": str(tmp_path / "fs")}
    with offloading(theirs, model=model) as first:
        right = first.ask()
        first.settle()

    def again() -> Answer:
        with offloading(theirs, model=model) as engine:
            return engine.ask()

    answer = again()
    assert answer.cached == HIT
    assert same(answer, right)
    files = list((tmp_path / "fs").rglob("*.bin"))
    assert len(files) == CHUNKS
    for each in files:
        flip(each)
    answer = again()
    assert answer.cached == HIT
    assert not same(answer, right)
    tiny_llama.make(model, seed=1)
    assert again().cached == HIT
    for each in files:
        truncate(each)
    assert again().cached == 0


def test_another_host_over_the_same_folder_finds_nothing(offloading, model, tmp_path, monkeypatch):
    """Under the same keys, with the same weights. In vLLM's namespace all are found."""
    opened, stored = [], []

    class Watched(PageStore):
        def __init__(self, *arguments, **options):
            opened.append(arguments)
            super().__init__(*arguments, **options)

        def put(self, keys, pages):
            stored.extend(keys)
            return super().put(keys, pages)

    monkeypatch.setattr("kvtier_vllm.offloading.PageStore", Watched)
    store(offloading, stack(disk(tmp_path / "kv", shared=True)))
    ((config, namespace, nbytes),) = opened
    ours = PageStore(config, namespace, nbytes)
    lmcache = ModelPages(config, "a name", model, {"host": "LMCache"})
    opens: queue.SimpleQueue[PageStore | None] = queue.SimpleQueue()
    lmcache.when_open(Page("bytes", nbytes), opens.put)
    try:
        theirs = opens.get(timeout=HANG)
        assert len(stored) >= CHUNKS
        assert [found(each, stored) for each in (ours, theirs)] == [set(stored), set()]
    finally:
        lmcache.close()
        ours.close()


def found(pages: PageStore, keys: list[bytes]) -> set[bytes]:
    ticket, results = pages.contains(keys), []
    wait_until(lambda: results.extend(pages.poll()) or results, "it does not answer")
    assert [result.ticket for result in results] == [ticket]
    return set(results[0].keys)


def test_after_a_reset_nothing_is_found_nor_what_follows_after_a_restart(offloading, tmp_path, truth):
    """vLLM resets its connector for new weights, and a tier cannot know whether they come."""
    with offloading(stack(disk(tmp_path / "kv"))) as first:
        first.ask()
        first.settle()
        first.reset()
        assert first.ask().cached == 0
        first.settle()
        assert same(first.ask(), truth)
    with offloading(stack(disk(tmp_path / "kv"))) as second:
        assert second.ask().cached == 0


def test_calls_of_the_workers_may_have_changed_the_weights(offloading, tmp_path):
    store(offloading, stack(disk(tmp_path / "kv")))
    with offloading(stack(disk(tmp_path / "kv"))) as second:
        second.call_workers()
        assert second.ask().cached == 0


def test_requests_that_began_before_new_weights_are_not_stored(offloading, tmp_path, monkeypatch):
    written, write = [], DiskBackend.write
    monkeypatch.setattr(
        DiskBackend, "write", lambda disk, keys, *more: (written.extend(keys), write(disk, keys, *more))[1]
    )
    with offloading(stack(disk(tmp_path / "kv"))) as first:
        first.begin()
        first.call_workers()
        first.settle()
        first.ask(prompt(182, 530))
        first.settle()
    assert CHUNKS <= len(written) < 2 * CHUNKS, "the chunks of the second, and perhaps the state of a policy"


def test_an_engine_whose_weights_never_change_keeps_what_it_has(offloading, tmp_path):
    with offloading(stack(disk(tmp_path / "kv"), on_reset="keep")) as first:
        first.ask()
        first.settle()
        first.reset()
        assert first.ask().cached == HIT


@pytest.mark.parametrize("number", [-2, 1 << 20])
def test_a_chunk_outside_the_memory_of_vllm_is_a_failed_job(offloading, tmp_path, number):
    """As it is in vLLM's own tiers."""
    from vllm.v1.kv_offload.base import ReqContext
    from vllm.v1.kv_offload.tiering.base import TransferJob

    with offloading(stack(disk(tmp_path / "kv"))) as first:
        request = ReqContext("a request")
        first.tier.on_new_request(request)
        for submit in (first.tier.submit_store, first.tier.submit_load):
            submit(TransferJob(7, [b"a key"], np.array([number]), False, request))
            assert [(job.job_id, job.success) for job in first.tier.get_finished_jobs()] == [(7, False)]
        assert first.ask().cached == 0


@pytest.mark.more
def test_a_full_disk_costs_hits_and_nothing_else(offloading, tmp_path, truth):
    with tmpfs(tmp_path, 4 << 20) as small:
        config = stack(disk(small.folder / "kv"))
        with offloading(config) as first:
            small.fill()
            assert same(first.ask(), truth)
            first.settle()
        with offloading(config) as second:
            assert second.ask().cached == 0
        small.make_room()


@pytest.mark.parametrize("method", some(["read", "write"]))
def test_while_a_store_hangs_the_engine_goes_on(offloading, tmp_path, truth, method):
    config = stack(disk(tmp_path / "kv"), load_wait="500ms")
    if method == "read":
        store(offloading, config)
    with offloading(config) as second, hanging(DiskBackend, method):
        answer = second.ask()
        assert answer.cached == 0
        assert same(answer, truth)
        second.settle()


def ask_again(model: str, config: dict) -> list:
    """In another process: an engine that never saw the prompt."""
    engine = Engine(Path(model), None, **over(config))
    answer = Offloading(engine).ask()
    engine.llm.llm_engine.engine_core.shutdown()
    return [answer.tokens, answer.logprobs, answer.cached]


@pytest.mark.more
def test_two_living_engines_share_a_redis(offloading, model, fork_server, tmp_path, truth):
    with one_server(tmp_path) as server:
        config = stack({"type": "redis", "url": server.url})
        with offloading(config) as ours:
            ours.ask()
            ours.settle()
            environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
            arguments = {"model": str(model), "config": config}
            (tokens, logprobs, cached), _ = fork_server.run("test_offloading_host:ask_again", environment, **arguments)
        assert cached == HIT
        assert same(Answer(tuple(tokens), tuple(logprobs), cached), truth)


@pytest.mark.more
def test_salts_never_meet(offloading, tmp_path):
    with offloading(stack(disk(tmp_path / "kv"))) as first:
        first.ask(salt="ours")
        first.settle()
    with offloading(stack(disk(tmp_path / "kv"))) as second:
        assert second.ask(salt="theirs").cached == second.ask().cached == 0
        assert second.ask(salt="ours").cached == HIT


@pytest.mark.parametrize(
    ("options", "why"),
    some(
        [
            ({"enable_lora": True}, "the name of an adapter, not its content"),
            ({"enable_prompt_embeds": True}, "given as embeddings"),
            ({"prefix_caching_hash_algo": "xxhash"}, "two prompts with the same xxhash can be constructed"),
        ]
    ),
    ids=["adapters", "embeddings", "hash"],
)
def test_engines_with_features_that_keys_do_not_cover_are_refused(offloading, tmp_path, options, why):
    with pytest.raises(ConfigError, match=why), offloading(stack(disk(tmp_path / "kv")), **options):
        pass


def held(tier, *prompts) -> set[int]:
    """The hashes of the blocks of these prompts whose chunks the tiers have."""
    chunks = {}
    for each in prompts:
        hashes = requested("hashed", each).block_hashes[: 2 * CHUNKS]
        named = [maybe_convert_block_hash(block) for block in hashes]
        chunks |= {make_offload_key(hashes[i + 1], 0): named[i : i + 2] for i in range(0, len(hashes), 2)}
    tier._store.contains(list(chunks))
    (result,) = wait_until(tier._store.poll)
    return {block for key in result.keys for block in chunks[key]}


def test_routers_learn_which_chunks_the_tiers_have(engine, tmp_path):
    """Memory for four chunks, and a disk for nine; three prompts of eight."""
    below = stack(disk(tmp_path / "kv", capacity="2600KiB"))
    below["tiers"][0]["capacity"] = "1100KiB"
    options = {**over(below), "enable_prefix_caching": True}
    options["kv_transfer_config"].kv_connector_extra_config["self_describing_kv_events"] = True
    asked = [ASKED, prompt(182, 530), prompt(183, 530)]
    with (
        contextlib.closing(Router()) as router,
        engine(None, **options, kv_events_config=router.config) as opened,
    ):
        served = Offloading(opened)
        router.join(opened)

        def told() -> set[int]:
            served.settle()
            wait_until(lambda: not served.tier._store.busy)
            served.tier._store.cancel()  # its owner has ended its turn
            listen(opened, router)
            return router.held["STORAGE"]

        for each in asked:
            served.ask(each)
            assert told() == held(served.tier, *asked)
        assert 0 < len(router.held["STORAGE"]) < len(asked) * 2 * CHUNKS

        served.call_workers()  # the weights may have changed
        assert told() == set()
        asked.append(prompt(184, 530))
        served.ask(asked[-1])
        assert told() == held(served.tier, *asked) != set()
        served.reset()
        assert told() == set()
