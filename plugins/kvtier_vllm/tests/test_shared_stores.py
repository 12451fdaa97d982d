"""Engines that share a store, on real vLLM: what one stored the other loads, and what is not theirs never meets."""

from __future__ import annotations

from pathlib import Path

import pytest
from real_engines import CHUNK, Engine, Outcome, cpu, hit, prompt, told_by_engines
from servers.mooncake import one_master
from servers.redis import one_server
from sizes import some
from test_serving import NOISE

HITS = 512
ASKED = prompt(160, 530)


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with one_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def server(running):
    running.ask("FLUSHALL")
    return running


@pytest.fixture(scope="module")
def master(tmp_path_factory):
    """A Mooncake master, and a client that lends it memory."""
    with one_master(tmp_path_factory.mktemp("mooncake")) as master, master.owner(256 << 20):
        yield master


@pytest.fixture(params=some(["redis", "disk", "mooncake"]))
def shared(request, tmp_path):
    """``shared(**settings)`` is a stack over memory and a store that all engines of a test share."""
    if request.param == "redis":
        tier = {"type": "redis", "url": request.getfixturevalue("server").url}
    elif request.param == "mooncake":
        master = request.getfixturevalue("master")
        tier = {"type": "mooncake", "master": master.address, "prefix": tmp_path.name}
    else:
        tier = {"type": "disk", "shared": True, "path": str(tmp_path / "shared"), "min_free": "0B"}

    def stack(capacity="64MiB", **settings):
        made = cpu(capacity)
        made["tiers"].append({**tier, **settings})
        return made

    stack.tier = request.param
    return stack


@pytest.fixture(scope="module")
def truth(model):
    """What vLLM says without kvtier."""
    plain = Engine(model, None)
    (answer,) = plain.ask(ASKED)
    plain.close()
    return answer


def store(engine, stack, **options):
    """One engine's life, in which it stores a prompt."""
    with engine(stack, **options) as first:
        (answer,) = first.ask(ASKED)
        first.settle()
    return answer


def ask_again(model: str, stack: dict) -> list:
    """In another process: an engine that never saw the prompt."""
    engine = Engine(Path(model), stack)
    (answer,) = engine.ask(ASKED)
    told = told_by_engines()
    engine.llm.llm_engine.engine_core.shutdown()
    return [answer.tokens, answer.logprobs, answer.cached, told]


@pytest.mark.more
def test_two_living_engines_find_what_the_other_stored(engine, model, fork_server, shared, truth):
    with engine(shared()) as ours:
        ours.ask(ASKED)
        ours.settle()
        environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        arguments = {"model": str(model), "stack": shared()}
        (tokens, logprobs, cached, [[told]]), _ = fork_server.run(
            "test_shared_stores:ask_again", environment, **arguments
        )
        assert (cached, Outcome.of(told)) == (HITS, hit(530, **{shared.tier: HITS}))
        assert tuple(tokens) == truth.tokens
        assert max(abs(a - b) for a, b in zip(logprobs, truth.logprobs, strict=True)) < NOISE
        ours.assert_at_rest()


def test_a_hit_is_bit_equal_to_the_engines_own_prefix_hit(engine, shared):
    store(engine, shared())
    with engine(shared(), enable_prefix_caching=True) as second:
        (loaded,) = second.ask(ASKED)
        assert second.outcomes()[-1] == hit(530, **{shared.tier: HITS})
        (own,) = second.own_hits(ASKED)
        assert (loaded.tokens, loaded.logprobs) == (own.tokens, own.logprobs)


def test_frames_that_another_engine_stores_meanwhile_are_found(engine, shared):
    """That it was not there a moment ago is forgotten after a second."""
    with engine(shared()) as ours:
        ours.ask(ASKED[:200])
        ours.settle()
    with engine(shared()) as theirs:
        theirs.ask(ASKED)
        assert theirs.outcomes()[-1] == hit(530, **{shared.tier: 3 * CHUNK})


def test_other_weights_salts_layouts_and_codecs_never_meet(engine, shared, tmp_path):
    import tiny_llama

    other = tmp_path / "other"
    tiny_llama.make(other, seed=1)
    store(engine, shared())
    for what, options, settings, asks in (
        ("weights", {"model": other}, {}, {}),
        ("salt", {}, {}, {"salt": "theirs"}),
        ("layout", {"block_size": 64}, {}, {}),
        ("seal", {}, {"seal_key": "env:KVTIER_TEST_KEY"}, {}),
    ):
        with engine(shared(**settings), **options) as theirs:
            (answer,) = theirs.ask(ASKED, **asks)
            assert answer.cached == 0, f"another {what} found it"
    with engine(shared()) as ours:
        assert ours.ask(ASKED)[0].cached == HITS, "and took nothing away"


@pytest.fixture(autouse=True)
def _seal_key(monkeypatch):
    monkeypatch.setenv("KVTIER_TEST_KEY", "a secret of more than thirty-two characters")


def test_a_tenants_frames_need_his_salt(engine, shared):
    """With the same key: an encrypted frame cannot be read without the salt of its request."""
    sealed = {"seal_key": "env:KVTIER_TEST_KEY", "encrypt": True}
    with engine(shared(**sealed)) as first:
        first.ask(ASKED, salt="tenant")
        first.settle()
    with engine(shared(**sealed)) as second:
        assert second.ask(ASKED)[0].cached == 0
        assert second.ask(ASKED, salt="another")[0].cached == 0
        assert second.ask(ASKED, salt="tenant")[0].cached == HITS
