"""Prefill apart from decode over HTTP: the example's proxy, and two servers of vLLM behind it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from conftest import BLOCK, hit, prompt
from http_server import Server, serving
from nodes import free_port
from test_http import differs
from test_peer_engines import address_of, node
from test_serving import NOISE

PROXY = Path(__file__).parents[2] / "examples" / "disaggregation_proxy.py"
PROMPTS = [prompt(seed, 530) for seed in range(170, 178)]


@pytest.fixture
def servers(model, with_words, tmp_path):
    """Two servers: the second reads the memory of the first."""
    options = ["--dtype", "float32", "--block-size", str(BLOCK), "--max-model-len", "2048", "--enforce-eager"]
    options += ["--kv-cache-memory-bytes", str(128 << 20), "--no-enable-prefix-caching"]
    options += ["--tokenizer", with_words["tokenizer"]]
    folders = [tmp_path / name for name in ("prefill", "decode")]
    for folder in folders:
        folder.mkdir()
    first = node()
    second = {**node(address_of(first)), "load_wait": "20s"}
    with contextlib.ExitStack() as open_now, ThreadPoolExecutor(2) as starting:
        stacks = enumerate(zip(folders, (first, second), strict=True))
        contexts = [serving(folder, model, stack, *options, core=core) for core, (folder, stack) in stacks]
        yield tuple(starting.map(open_now.enter_context, contexts))


@pytest.fixture
def front(servers):
    """The proxy in front of them."""
    port = free_port()
    urls = [str(server.client.base_url).rstrip("/") for server in servers]
    process = subprocess.Popen(
        [sys.executable, str(PROXY), "--prefill", urls[0], "--decode", urls[1], "--port", str(port)]
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, trust_env=False) as client:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline and process.poll() is None:
                try:
                    client.get("/health")
                    break
                except httpx.TransportError:
                    time.sleep(0.1)
            yield Server(client, servers[1].status)
    finally:
        process.terminate()
        process.wait(20)


@pytest.mark.more
def test_eight_prompts_at_once_are_computed_by_one_server_and_decoded_by_the_other(servers, front):
    prefiller, decoder = servers
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(front.complete, PROMPTS))
    assert [each.tiers.get("peers") for each in decoder.outcomes()] == [512] * 8
    assert decoder.metric("vllm:external_prefix_cache_hits_total") == 8 * 512
    truths = [prefiller.complete(asked) for asked in PROMPTS]
    assert max(map(differs, answers, truths)) < NOISE

    asked = {"prompt": PROMPTS[0], "max_tokens": 4, "temperature": 0, "stream": True, "return_token_ids": True}
    with front.client.stream("POST", "/v1/completions", json=asked) as response:
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    tokens = [token for event in events for choice in json.loads(event)["choices"] for token in choice["token_ids"]]
    assert (len(events) > 1, tokens) == (True, truths[0].tokens)
    assert decoder.outcomes() == [hit(530, cpu=512)]
