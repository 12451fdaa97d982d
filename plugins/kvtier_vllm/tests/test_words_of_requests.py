"""Clients say how much of a request may be loaded and stored. Tiers hold what may be stored, and nothing else."""

from __future__ import annotations

import ast
import inspect
import random
import sys
from collections import Counter

import pytest
from outsiders import TEXTS
from real_engines import CHUNK, Engine, cpu, cpu_and_disk, prompt
from sizes import LONG
from test_serving import NOISE

from kvtier_vllm.requests.hints import UnreadWords, hints_of
from kvtier_vllm.requests.words import WORDS, most_loaded, most_stored

ALL = sys.maxsize


@pytest.mark.parametrize(
    ("said", "loaded", "stored"),
    [
        ({}, ALL, ALL),
        ({"kvtier.store": "no"}, ALL, 0),
        ({"kvtier.store": "all", "kvtier.load": "all"}, ALL, ALL),
        ({"kvtier.load": "no"}, 0, ALL),
        ({"max_load_tokens": 64, "max_offload_tokens": 128}, 64, 128),
        ({"max_offload_tokens": 128, "kvtier.store": "no"}, ALL, 0),
        ({"max_offload_tokens": 0}, ALL, 0),
        ({"max_load_tokens": 1 << 80}, ALL, ALL),
        (None, ALL, ALL),
        (["kvtier.store"], ALL, ALL),
    ],
    ids=repr,
)
def test_words_are_limits(said, loaded, stored):
    assert (most_loaded(said), most_stored(said)) == (loaded, stored)


@pytest.mark.parametrize(
    ("said", "limit"),
    [
        ({}, 0),
        ({"kvtier.store": "all", "kvtier.load": "all"}, ALL),
        ({"max_offload_tokens": 64, "max_load_tokens": 64}, 64),
        ({"kvtier.store": "yes", "kvtier.load": "yes"}, 0),
    ],
)
def test_where_requests_are_not_stored_or_loaded_by_default_their_own_word_counts(said, limit):
    assert (most_loaded(said, "no"), most_stored(said, "no")) == (limit, limit)


@pytest.mark.parametrize("wrong", [None, True, False, 0.5, -1, [], {}, "NO", "maybe", b"no", *TEXTS.values()])
def test_a_word_that_cannot_be_read_stores_nothing_and_is_logged_once(wrong, caplog):
    caplog.set_level("INFO", "kvtier")
    for word in WORDS:
        said, unread = {word: wrong}, UnreadWords()
        caplog.clear()
        assert most_loaded(said) == ALL
        assert most_stored(said) == (0 if word in ("kvtier.store", "max_offload_tokens") else ALL)
        unread.look(said, {})
        unread.look(said, {})
        (line,) = caplog.messages
        assert line.startswith(f"kvtier: {word} in kv_transfer_params: expected ")


def test_a_word_that_can_be_read_is_neither_logged_nor_a_hint(caplog):
    from vllm import SamplingParams
    from vllm.v1.request import Request

    caplog.set_level("INFO", "kvtier")
    said = {"kvtier.store": "no", "kvtier.load": "all", "max_load_tokens": 1, "max_offload_tokens": 0}
    UnreadWords().look(said, {})
    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": said})
    assert not caplog.messages and hints_of(Request("1", [1, 2], sampling, None)) == {}


#: Words of vLLM's own connectors that mean nothing to kvtier.
NOT_MEANT = {
    "kv_load_tiers": "which of vLLM's tiers are asked",
    "remote_prefiller": "of vLLM's own peers",
    "remote_decoder": "of vLLM's own peers",
    "remote_kv_source": "of vLLM's own peers",
    "remote_host": "of vLLM's own peers",
    "remote_port": "of vLLM's own peers",
}


def test_every_word_of_vllms_own_offloading_is_known():
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler
    from vllm.v1.kv_offload.tiering.p2p import manager

    words = set()
    for module in (scheduler, manager):
        for call in ast.walk(ast.parse(inspect.getsource(module))):
            match call:
                case ast.Call(ast.Attribute(ast.Name(name), "get"), [ast.Constant(word), *_]) if "params" in name:
                    words.add(word)
                case ast.Call(ast.Attribute(ast.Name(name), "get"), [ast.Name(word), *_]) if "params" in name:
                    words.add(getattr(module, word))
    assert {"max_load_tokens", "max_offload_tokens"} <= words
    assert words <= NOT_MEANT.keys() | set(WORDS)


# -- real engines under random traffic -----------------------------------------------------------------


def drawn_words(rng):
    """What a request says, how many of its tokens may be stored, and how many loaded."""
    said = rng.choice(
        [
            {},
            {"kvtier.store": "no"},
            {"kvtier.store": "no", "kvtier.load": "no"},
            {"kvtier.load": "no"},
            {"kvtier.store": rng.choice(["never", None, False])},
            {"max_offload_tokens": rng.randrange(300), "max_load_tokens": rng.randrange(300)},
            {"max_load_tokens": "many", "kvtier.keep": "?"},
        ]
    )
    return said, most_stored(said), most_loaded(said)


def keys_of(engine, tokens):
    """The keys of the whole chunks of a prompt."""
    return [bytes.fromhex(chunk["key"]) for chunk in engine.connector.side._where(tokens)["chunks"]]


def held(engine):
    """The keys of all chunks that some tier holds."""
    manager = engine.manager
    return {bytes(key) for level in (*manager.arenas, *manager.tiers) for key in level.index.resident}


def test_tiers_hold_what_may_be_stored_and_nothing_else(model, tmp_path):
    rng = random.Random(0)
    heads = [prompt(each, 4 * CHUNK) for each in range(4)]
    traffic = []
    for number in range(100 * LONG):
        asked = prompt(100 + number, rng.randrange(CHUNK, 6 * CHUNK), rng.choice(heads)[: rng.randrange(4 * CHUNK)])
        traffic.append((asked, *drawn_words(rng)))
    plain = Engine(model, None)
    truth = [plain.ask(asked)[0] for asked, *_ in traffic]
    plain.close()
    engine, kinds = Engine(model, cpu_and_disk(tmp_path, save_decode=True)), Counter()
    may_be_held, named = set(), set()
    engine.connector.side.events.listeners.append(
        lambda events: named.update(bytes(key) for event in events for key in event.keys)
    )
    for (asked, said, stored, loaded), right in zip(traffic, truth, strict=True):
        (answer,) = engine.ask(asked, parameters=said)
        engine.settle()
        whole = [*asked, *answer.tokens[:-1]]
        path = keys_of(engine, whole)
        others = sum(key in may_be_held for key in path)
        may_be_held.update(path[: min(stored, len(whole)) // CHUNK])
        assert answer.differs(right) < NOISE, said
        assert answer.cached <= min(loaded, others * CHUNK)
        assert held(engine) == may_be_held, said
        kinds["loaded"] += answer.cached > 0
        kinds["withheld"] += len(path) > stored // CHUNK
    assert named <= may_be_held
    assert min(kinds["loaded"], kinds["withheld"]) > len(traffic) // 10, kinds
    engine.assert_at_rest()
    engine.close()


def test_an_operator_decides_for_requests_that_say_nothing(engine):
    asked = prompt(1, 2 * CHUNK + 3)
    with engine(cpu(requests={"store": "no", "load": "no"})) as served:
        served.ask(asked)
        served.ask(asked, parameters={"kvtier.store": "all"})
        assert served.ask(asked)[0].cached == 0
        assert served.ask(asked, parameters={"kvtier.load": "all"})[0].cached == 2 * CHUNK
        assert held(served) == {*keys_of(served, asked)}
        served.assert_at_rest()
