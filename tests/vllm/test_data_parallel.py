"""`--data-parallel-size 2`: two engines of one configuration, each with a part of the node for itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from conftest import cpu_and_disk, prompt
from test_serving import NOISE

#: Each life asks either replica for a prompt of its own, twice, and is stopped as by `--shutdown-timeout 20`.
#: What takes longest is imported once: lives and replicas are forked from here.
SCRIPT = """
import asyncio, importlib, json, os, sys
from chaos import _HEAVY
from conftest import prompt
for module in (*_HEAVY, "vllm.v1.engine.async_llm"):
    importlib.import_module(module)
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

async def ask(engine, rank, turn):
    sampling = SamplingParams(temperature=0, max_tokens=4, logprobs=1, detokenize=False, ignore_eos=True)
    asked = {"prompt_token_ids": prompt(80 + rank, 530)}
    async for output in engine.generate(asked, sampling, f"{rank}-{turn}", data_parallel_rank=rank):
        pass
    (answer,) = output.outputs
    logprobs = [step[token].logprob for token, step in zip(answer.token_ids, answer.logprobs)]
    return list(answer.token_ids), logprobs, output.num_cached_tokens

async def live(model, stack):
    transfer = KVTransferConfig(
        kv_connector="KVTierConnector", kv_role="kv_both", kv_load_failure_policy="recompute",
        kv_connector_extra_config=stack,
    )
    config = AsyncEngineArgs(
        model=model, dtype="float32", enforce_eager=True, skip_tokenizer_init=True, max_model_len=2048,
        block_size=32, enable_prefix_caching=False, seed=0, kv_transfer_config=transfer, data_parallel_size=2,
    ).create_engine_config()
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # the CPU platform has just asked for another
    engine = AsyncLLM.from_vllm_config(config)
    said = [await ask(engine, rank, turn) for turn in (0, 1) for rank in (0, 1)]
    engine.shutdown(timeout=20)
    print("RESULT", json.dumps(said), flush=True)

for _ in range(2):
    if not os.fork():
        asyncio.run(live(*json.loads(sys.argv[1])))
        os._exit(0)
    os.wait()
"""


def two_lives(model, stack):
    """For each of them the answers of its replicas, and what was logged."""
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)]),
    }
    command = [sys.executable, "-c", SCRIPT, json.dumps([str(model), stack])]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    lives = process.stdout.split("RESULT ")
    assert len(lives) == 3, process.stdout[-5000:] + process.stderr[-3000:]
    answers = [json.loads(each.splitlines()[0]) for each in lives[1:]]
    return answers, lives[:2]


def largest_difference(answers, truth):
    """Of log-probabilities; the tokens must be equal."""
    assert [tokens for tokens, *_ in answers] == [list(answer.tokens) for answer in truth]
    return max(
        abs(a - b)
        for (_, logprobs, _), answer in zip(answers, truth, strict=True)
        for a, b in zip(logprobs, answer.logprobs, strict=True)
    )


def test_two_replicas_share_nothing_and_come_back_warm(engine, model, tmp_path):
    stack = cpu_and_disk(tmp_path)
    stack["tiers"][1]["eviction"] = "lru"  # it learns nothing, so that there are frames of chunks and no others
    asked = [prompt(80 + rank, 530) for rank in (0, 1)]
    with engine() as plain:
        truth = [plain.ask(each)[0] for each in asked] * 2
    (cold, warm), logs = two_lives(model, stack)

    assert [cached for *_, cached in cold] == [0, 0, 512, 512]
    assert [cached for *_, cached in warm] == [512, 512, 512, 512]
    for answers in (cold, warm):
        assert largest_difference(answers, truth) < NOISE
    for log in logs:
        for replica in (0, 1):
            assert f"data parallel: replica {replica} of 2; capacities are divided by 2" in log
        assert log.count("disk: 512MiB, ") == log.count("cpu: 32760KiB, ") == 2
    assert [log.count("hit 512 of 530 tokens: disk 512") for log in logs] == [0, 2]
    assert logs[0].count("in all: disk: written 8") == 2  # given time to stop, an engine tells what it did
    kept = [sorted((tmp_path / f"replica-{replica}").rglob("*.kv")) for replica in (0, 1)]
    assert [len(files) for files in kept] == [8, 8]
    assert not {file.name for file in kept[0]} & {file.name for file in kept[1]}

    with engine(stack) as alone:  # the folder itself is another engine's, and what lies in it is left alone
        assert alone.ask(asked[0])[0].cached == 0
        alone.settle()
    assert sorted(tmp_path.glob("replica-*/**/*.kv")) == sorted(kept[0] + kept[1])
    assert len(list(tmp_path.rglob("*.kv"))) == 24
