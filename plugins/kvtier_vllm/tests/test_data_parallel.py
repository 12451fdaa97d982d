"""`--data-parallel-size 2`: two engines of one configuration, each with a part of the node for itself."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
from chunk_files import chunk_files, sizes
from cpu_parallel import let_experts_exchange
from patience import HANG
from real_engines import Outcome, cpu, cpu_and_disk, hit, miss, prompt, told_by_engines
from sizes import some
from test_serving import NOISE


def live(model: str, stack: dict, asked: list, options: dict) -> list:
    """In another process: the replicas are asked in turn, and stopped as by `--shutdown-timeout 20`.

    ``asked`` are pairs of a replica and the seed of a prompt.
    """
    let_experts_exchange()
    signal.signal(signal.SIGUSR1, lambda *_: None)  # the replicas are forked, and inherit it
    return asyncio.run(_live(model, stack, asked, options))


async def _live(model: str, stack: dict, asked: list, options: dict) -> list:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    transfer = KVTransferConfig(
        kv_connector="KVTierConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=stack,
    )
    arguments = AsyncEngineArgs(
        model=model,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=2048,
        block_size=32,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=128 << 20,
        seed=0,
        kv_transfer_config=transfer,
        data_parallel_size=2,
        **options,
    )
    engine = AsyncLLM.from_vllm_config(arguments.create_engine_config())
    said = []
    try:
        for turn, (replica, seed) in enumerate(asked):
            said.append(await _ask(engine, replica, seed, f"request-{turn}"))
            for tier in stack.get("tiers", ()):
                if tier.get("shared"):
                    await _stored(Path(tier["path"]), prompts=len({seed for _, seed in asked[: turn + 1]}))
        return [said, told_by_engines()]
    finally:
        _stop(engine)


def _stop(engine) -> None:
    """Stop the replicas, and wait until they have ended.

    Python runs no handler for a signal that arrives just as its main thread goes to sleep on a lock, as an engine does
    that has answered, until another signal arrives: SIGUSR1, once a second, which has a handler that does nothing.
    """
    replicas = [os.pidfd_open(process.pid) for process in multiprocessing.active_children()]
    ended = threading.Event()

    def wake() -> None:
        while not ended.wait(1.0):
            for replica in replicas:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(replica, signal.SIGUSR1)

    with contextlib.ExitStack() as closing:
        for replica in replicas:
            closing.callback(os.close, replica)
        waking = threading.Thread(target=wake)
        closing.callback(waking.join)
        closing.callback(ended.set)
        waking.start()
        engine.shutdown(timeout=HANG)


async def _stored(folder: Path, prompts: int) -> None:
    """Wait until the chunks of so many prompts are in a folder that replicas share."""
    deadline = time.monotonic() + HANG
    while sum(path.suffix == ".kv" for path in sizes(folder)) < 8 * prompts and time.monotonic() < deadline:
        await asyncio.sleep(0.05)


async def _ask(engine, replica: int, seed: int, request: str) -> tuple:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=4, logprobs=1, detokenize=False, ignore_eos=True)
    asked = {"prompt_token_ids": prompt(seed, 530)}
    said = [each async for each in engine.generate(asked, sampling, request, data_parallel_rank=replica)]
    (answer,) = said[-1].outputs
    logprobs = [step[token].logprob for token, step in zip(answer.token_ids, answer.logprobs, strict=True)]
    return list(answer.token_ids), logprobs, said[-1].num_cached_tokens


def one_life(fork_server, model, stack, asked, **options):
    """The answers of its replicas, the outcomes of each of them, in no order, and what they logged."""
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    }
    arguments = {"model": str(model), "stack": stack, "asked": asked, "options": options}
    (answers, told), log = fork_server.run("test_data_parallel:live", environment, **arguments)
    return answers, [[Outcome.of(each) for each in of_one] for of_one in told], log


def largest_difference(answers, truth):
    """Of log-probabilities; the tokens must be equal."""
    assert [tokens for tokens, *_ in answers] == [list(answer.tokens) for answer in truth]
    return max(
        abs(a - b)
        for (_, logprobs, _), answer in zip(answers, truth, strict=True)
        for a, b in zip(logprobs, answer.logprobs, strict=True)
    )


def test_two_replicas_share_nothing_and_come_back_warm(engine, fork_server, model, tmp_path):
    stack = cpu_and_disk(tmp_path)
    stack["tiers"][1]["eviction"] = "lru"  # it learns nothing, so that there are frames of chunks and no others
    asked = [prompt(80 + rank, 530) for rank in (0, 1)]
    with engine() as plain:
        truth = [plain.ask(each)[0] for each in asked] * 2
    turns = [(0, 80), (1, 81)] * 2
    (cold, warm), outcomes, logs = zip(*(one_life(fork_server, model, stack, turns) for _ in range(2)), strict=True)

    assert [cached for *_, cached in cold] == [0, 0, 512, 512]
    assert [cached for *_, cached in warm] == [512, 512, 512, 512]
    for answers in (cold, warm):
        assert largest_difference(answers, truth) < NOISE
    for log in logs:
        for replica in (0, 1):
            assert f"data parallel: replica {replica} of 2; capacities are divided by 2" in log
        assert log.count("disk: 512MiB, ") == log.count("cpu: 32MiB, room for ") == 2
    for source, of_each in zip((miss(530), hit(530, disk=512)), outcomes, strict=True):
        assert of_each == [[source, hit(530, cpu=512)]] * 2
    # Given time to stop, an engine tells what it did.
    assert len(re.findall(r"totals: disk: (?:.*, )?written 8 ", logs[0])) == 2, logs[0][-9000:]
    kept = [chunk_files(tmp_path / f"replica-{replica}") for replica in (0, 1)]
    assert [len(files) for files in kept] == [8, 8]
    assert not {file.name for file in kept[0]} & {file.name for file in kept[1]}

    with engine(stack) as alone:  # the folder itself is another engine's, and what lies in it is left alone
        assert alone.ask(asked[0])[0].cached == 0
        alone.settle()
    assert [chunk_files(tmp_path / f"replica-{replica}") for replica in (0, 1)] == kept
    assert len(chunk_files(tmp_path)) == 24


@pytest.mark.parametrize("ranks", some([1, 2]))
def test_replicas_find_in_a_shared_store_what_another_stored(engine, fork_server, model, tmp_path, ranks):
    with engine() as plain:
        truth = [plain.ask(prompt(seed, 530))[0] for seed in (80, 81)]
    turns = [(0, 80), (1, 80), (1, 81), (0, 81)]
    answers, outcomes, _ = one_life(fork_server, model, shared(tmp_path), turns, tensor_parallel_size=ranks)
    assert [cached for *_, cached in answers] == [0, 512, 0, 512]
    assert [*outcomes[0], *outcomes[1]].count(hit(530, disk=512)) == 2
    assert largest_difference(answers, [truth[0], truth[0], truth[1], truth[1]]) < NOISE


def shared(path):
    """A stack over memory and a folder that all replicas share."""
    stack = cpu("64MiB")
    stack["tiers"].append({"type": "disk", "shared": True, "path": str(path), "min_free": "0B"})
    return stack


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    import tiny_llama

    path = tmp_path_factory.mktemp("experts")
    tiny_llama.make_experts(path)
    return path


@pytest.mark.more
@pytest.mark.parametrize(
    "options",
    some([{}, {"enable_expert_parallel": True}, {"enable_expert_parallel": True, "tensor_parallel_size": 2}]),
    ids=["each expert in parts", "some experts a rank", "some experts a rank of four"],
)
def test_replicas_of_a_model_with_experts_do_the_same(engine, fork_server, experts, tmp_path, options):
    """While one replica computes, the other one runs batches of made-up tokens with it. Nothing of those is stored."""
    with engine(model=experts) as plain:
        truth = [plain.ask(prompt(seed, 530))[0] for seed in (80, 81)]
    turns = [(0, 80), (1, 80), (1, 81), (0, 81)]
    answers, outcomes, log = one_life(fork_server, experts, shared(tmp_path), turns, **options)
    assert [cached for *_, cached in answers] == [0, 512, 0, 512]
    assert [*outcomes[0], *outcomes[1]].count(hit(530, disk=512)) == 2
    assert largest_difference(answers, [truth[0], truth[0], truth[1], truth[1]]) < NOISE
    for replica in (0, 1):
        assert f"data parallel: replica {replica} of 2; capacities are divided by 2" in log
    for told in ("totals: cpu: stored 8 ", "totals: disk: read 8 .*, written 8 "):
        assert len(re.findall(told, log)) == 2, told
    assert len(list(tmp_path.rglob("*.kv"))) == 16
