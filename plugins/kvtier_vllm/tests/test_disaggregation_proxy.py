"""Prefill apart from decode over HTTP: the example's proxy, and two servers of vLLM behind it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs
import httpx
import pytest
from http_server import client_of, serving
from patience import HANG
from real_engines import BLOCK, Answer, Engine, hit, prompt
from servers.ports import free_port
from test_peer_engines import address_of, node
from test_serving import NOISE

PROXY = Path(__file__).parents[3] / "examples" / "disaggregation_proxy.py"
#: The words of all messages, one after the other.
CHAT = "{% for message in messages %}{{ message.content }} {% endfor %}"
PROMPTS = [prompt(seed, 530) for seed in range(170, 178)]
#: Each of four chunks and some tokens.
SHORT_PROMPTS = [prompt(seed, 266) for seed in range(1000, 1400)]


@pytest.fixture(scope="module")
def servers(model, with_words, tmp_path_factory):
    """Two servers: the second reads the memory of the first. Either memory has room for all prompts."""
    tmp_path = tmp_path_factory.mktemp("servers")
    options = ["--dtype", "float32", "--block-size", str(BLOCK), "--max-model-len", "2048", "--enforce-eager"]
    options += ["--kv-cache-memory-bytes", str(128 << 20), "--no-enable-prefix-caching"]
    options += ["--tokenizer", with_words["tokenizer"], "--chat-template", CHAT]
    folders = [tmp_path / name for name in ("prefill", "decode")]
    for folder in folders:
        folder.mkdir()
    first = node(capacity="512MiB")
    second = {**node(address_of(first), capacity="512MiB"), "load_wait": "20s"}
    with contextlib.ExitStack() as open_now, ThreadPoolExecutor(2) as starting:
        stacks = zip(folders, (first, second), strict=True)
        contexts = [serving(folder, model, stack, *options) for folder, stack in stacks]
        yield tuple(starting.map(open_now.enter_context, contexts))


@pytest.fixture(scope="module")
def front(servers):
    """The second server, as clients reach it: through the proxy, which knows of others that do not answer."""
    port, nobody = free_port(), f"http://127.0.0.1:{free_port()}"
    urls = [str(server.client.base_url) for server in servers]
    behind = ["--prefill", nobody, "--prefill", urls[0], "--decode", nobody, "--decode", urls[1]]
    process = subprocess.Popen([sys.executable, str(PROXY), *behind, "--port", str(port)])
    try:
        with client_of(port) as client:
            deadline = time.monotonic() + HANG
            while time.monotonic() < deadline and process.poll() is None:
                try:
                    client.get("/health")
                    break
                except httpx.TransportError:
                    time.sleep(0.1)
            yield attrs.evolve(servers[1], client=client)
    finally:
        process.terminate()
        process.wait(HANG)


@pytest.mark.more
def test_eight_prompts_at_once_are_computed_by_one_server_and_decoded_by_the_other(servers, front):
    prefiller, decoder = servers
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(front.complete, PROMPTS))
    assert decoder.outcomes() == [hit(530, peers=512)] * 8
    assert decoder.metric("vllm:external_prefix_cache_hits_total") == 8 * 512
    truths = [prefiller.complete(asked) for asked in PROMPTS]
    assert max(map(Answer.differs, answers, truths)) < NOISE

    asked = {"prompt": PROMPTS[0], "max_tokens": 4, "temperature": 0, "stream": True, "return_token_ids": True}
    with front.client.stream("POST", "/v1/completions", json=asked) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    tokens = [token for event in events for choice in json.loads(event)["choices"] for token in choice["token_ids"]]
    assert tuple(tokens) == truths[0].tokens, "a busy server may send several in one event"
    assert decoder.outcomes() == [hit(530, cpu=512)]


@pytest.mark.more
def test_a_conversation_is_computed_by_one_server_and_decoded_by_the_other(servers, front):
    _, decoder = servers
    decoder.outcomes()
    words = " ".join(f"w{token}" for token in prompt(178, 300))
    asked = {"messages": [{"role": "user", "content": words}], "max_completion_tokens": 4, "temperature": 0}
    answers = [each.post("/v1/chat/completions", json=asked) for each in (front.client, decoder.client)]
    assert [each.status_code for each in answers] == [200, 200]
    texts = [each.json()["choices"][0]["message"]["content"] for each in answers]
    assert texts[0] == texts[1] and texts[0]
    first, again = decoder.outcomes()
    assert first.tiers.keys() == {"peers"} and again.tiers.keys() == {"cpu"}


@pytest.mark.more
def test_it_is_healthy_as_long_as_a_server_decodes(servers, front):
    assert front.client.get("/health").status_code == 200


@pytest.fixture(scope="module")
def truths(model):
    """The answers of an engine without kvtier to many prompts."""
    with contextlib.closing(Engine(model, None, max_num_seqs=8)) as plain:
        return dict(zip(map(tuple, SHORT_PROMPTS), plain.ask(*SHORT_PROMPTS), strict=True))


def answered(front, truths, asked, meanwhile=lambda: None):
    """Ask for all of these at once. Returns by how much an answer differs from its truth, at most."""
    with ThreadPoolExecutor(len(asked)) as clients:
        answers = [clients.submit(front.complete, each) for each in asked]
        meanwhile()
    return max(answer.result().differs(truths[tuple(each)]) for answer, each in zip(answers, asked, strict=True))


@pytest.mark.more
def test_two_hundred_prompts_at_once(servers, front, truths):
    _, decoder = servers
    asked = SHORT_PROMPTS[:200]
    decoder.outcomes()
    assert answered(front, truths, asked) < NOISE
    assert decoder.outcomes() == [hit(266, peers=256)] * len(asked)


@pytest.mark.more
def test_a_first_server_that_is_killed_while_two_hundred_prompts_are_under_way(servers, front, truths):
    """The last test of this file, for which that server must run."""
    prefiller, decoder = servers
    asked = SHORT_PROMPTS[200:]
    decoder.outcomes()

    def kill_after_fifty():
        deadline = time.monotonic() + HANG
        while len(decoder.outcomes_so_far()) < 50:
            assert time.monotonic() < deadline, "few are answered"
            time.sleep(0.05)
        prefiller.kill()

    assert answered(front, truths, asked, kill_after_fifty) < NOISE
    assert len(decoder.outcomes()) == len(asked)
