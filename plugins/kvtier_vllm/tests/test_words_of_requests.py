"""Clients say how much of a request may be loaded and stored. Tiers hold what may be stored, and nothing else."""

from __future__ import annotations

import ast
import inspect
import itertools
import random
from collections import Counter

import pytest
from outsiders import TEXTS
from real_engines import CHUNK, Engine, cpu, cpu_and_disk, prompt
from servers.redis import one_server
from sizes import LONG
from test_serving import NOISE

from kvtier_core.config.model import RequestsConfig, SaltConfig
from kvtier_core.interfaces import Medium
from kvtier_core.types import EnvSecret
from kvtier_vllm.requests.hints import UnreadWords, hints_of
from kvtier_vllm.requests.words import WORDS, Words


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({}, Words()),
        ({"kvtier.store": "no"}, Words(most_stored=0)),
        ({"kvtier.store": "memory"}, Words(memory_only=True)),
        ({"kvtier.store": "all", "kvtier.load": "all"}, Words()),
        ({"kvtier.load": "no"}, Words(most_loaded=0)),
        ({"kvtier.load": "memory"}, Words(media=frozenset())),
        ({"max_load_tokens": 64, "max_offload_tokens": 128}, Words(64, most_stored=128)),
        ({"max_offload_tokens": 128, "kvtier.store": "no"}, Words(most_stored=0)),
        ({"max_offload_tokens": 128, "kvtier.store": "memory"}, Words(most_stored=128, memory_only=True)),
        ({"max_offload_tokens": 0}, Words(most_stored=0)),
        ({"max_load_tokens": 1 << 80}, Words()),
        ({"kv_load_tiers": []}, Words(media=frozenset())),
        ({"kv_load_tiers": [{"medium": "storage"}], "kvtier.load": "memory"}, Words(media=frozenset())),
        ({"lmcache.skip_save": True}, Words(most_stored=0)),
        ({"lmcache.skip_save": "yes", "kvtier.store": "all"}, Words(most_stored=0)),
        ({"lmcache.skip_save": False}, Words()),
        ({"lmcache.max_offload_tokens": 128}, Words(most_stored=128)),
        (None, Words()),
        (["kvtier.store"], Words()),
    ],
)
def test_words_are_limits(said, words):
    assert Words.of(said, RequestsConfig()) == words


@pytest.mark.parametrize(
    ("said", "default", "words"),
    [
        ({}, "no", Words(0, most_stored=0)),
        ({"kvtier.store": "all", "kvtier.load": "all"}, "no", Words()),
        ({"kvtier.store": "memory", "kvtier.load": "memory"}, "no", Words(media=frozenset(), memory_only=True)),
        ({"max_offload_tokens": 64, "max_load_tokens": 64}, "no", Words(64, most_stored=64)),
        ({"kvtier.store": "yes", "kvtier.load": "yes"}, "no", Words(0, most_stored=0)),
        ({}, "memory", Words(media=frozenset(), memory_only=True)),
        ({"kvtier.store": "all", "kvtier.load": "all"}, "memory", Words()),
        ({"max_offload_tokens": 64, "max_load_tokens": 64}, "memory", Words(64, frozenset(), 64, True)),
        ({"lmcache.skip_save": False}, "no", Words(0, most_stored=0)),
        ({"kvtier.load": "yes"}, "memory", Words(media=frozenset(), memory_only=True)),
    ],
)
def test_an_operators_default_counts_until_a_request_says_otherwise(said, default, words):
    assert Words.of(said, RequestsConfig(default, default)) == words


PLACES = [
    {key: value for key, value in {"medium": medium, "locality": locality}.items() if value != ""}
    for medium in ("", "CPU", "storage", None, "tape", 3, ["CPU"])
    for locality in ("", "LOCAL", "remote", None, "near")
]


@pytest.mark.parametrize("number", range(3))
def test_tiers_are_chosen_as_vllm_chooses_its_own(number):
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import _parse_tier_filter
    from vllm.v1.kv_offload.base import Locality
    from vllm.v1.kv_offload.base import Medium as TheirMedium

    places = {
        Medium.HOST: (TheirMedium.CPU, Locality.LOCAL),
        Medium.DISK: (TheirMedium.STORAGE, Locality.LOCAL),
        Medium.UNSPECIFIED: (None, None),
    }
    for entries in itertools.permutations([*PLACES, "CPU", None], number):
        allowed = {medium for medium, place in places.items() if _parse_tier_filter(list(entries)).allows(*place)}
        assert Words.of({"kv_load_tiers": list(entries)}, RequestsConfig()).media == allowed, entries


@pytest.mark.parametrize("wrong", [None, True, False, 0.5, -1, [], {}, "NO", "maybe", b"no", *TEXTS.values()])
def test_a_word_that_cannot_be_read_stores_nothing_and_is_logged_once(wrong, caplog):
    caplog.set_level("INFO", "kvtier")
    for word in sorted({*WORDS} - {"lmcache.skip_save"}):  # LMCache takes any value of that
        if word == "kv_load_tiers" and (wrong is None or wrong == []):
            continue  # vLLM's word for no choice, and for none of them
        said, unread = {word: wrong}, UnreadWords()
        caplog.clear()
        nothing = Words(most_stored=0) if "store" in word or "offload" in word else Words()
        assert Words.of(said, RequestsConfig()) == nothing
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
    """What a request says."""
    return rng.choice(
        [
            {},
            {"kvtier.store": "no"},
            {"kvtier.store": "no", "kvtier.load": "no"},
            {"kvtier.store": "memory"},
            {"kvtier.store": "memory", "max_offload_tokens": rng.randrange(300)},
            {"kvtier.load": rng.choice(["no", "memory"])},
            {"kv_load_tiers": [{"medium": "CPU"}]},
            {"kvtier.store": rng.choice(["never", None, False])},
            {"max_offload_tokens": rng.randrange(300), "max_load_tokens": rng.randrange(300)},
            {"max_load_tokens": "many", "kvtier.keep": "?"},
        ]
    )


def keys_of(engine, tokens):
    """The keys of the whole chunks of a prompt."""
    return engine.connector.side._name(tokens, "")[0]


@pytest.fixture
def redis(tmp_path):
    with one_server(tmp_path / "redis") as server:
        yield server


def held(levels):
    """The keys of all chunks that these levels of a stack hold."""
    return {bytes(key) for level in levels for key in level.index.resident}


def test_tiers_hold_what_may_be_stored_and_nothing_else(model, redis, tmp_path):
    rng = random.Random(0)
    heads = [prompt(each, 4 * CHUNK) for each in range(4)]
    traffic = []
    for number in range(100 * LONG):
        asked = prompt(100 + number, rng.randrange(CHUNK, 6 * CHUNK), rng.choice(heads)[: rng.randrange(4 * CHUNK)])
        traffic.append((asked, drawn_words(rng)))
    plain = Engine(model, None)
    truth = [plain.ask(asked)[0] for asked, _ in traffic]
    plain.close()
    stack, kinds = cpu_and_disk(tmp_path, save_decode=True), Counter()
    stack["tiers"].append({"type": "redis", "url": redis.url})
    engine = Engine(model, stack)
    may_be_held, may_be_written, must_be_written, named = set(), set(), set(), set()
    engine.connector.side.events.listeners.append(
        lambda events: named.update(bytes(key) for event in events for key in event.keys)
    )
    for (asked, said), right in zip(traffic, truth, strict=True):
        words = Words.of(said, RequestsConfig())
        (answer,) = engine.ask(asked, parameters=said)
        engine.settle()
        whole = [*asked, *answer.tokens[:-1]]
        path = keys_of(engine, whole)
        others = sum(key in may_be_held for key in path)
        own = path[: min(words.most_stored, len(whole)) // CHUNK]
        may_be_held.update(own)
        may_be_written.update([] if words.memory_only else own)
        must_be_written.update(path if words.most_stored > len(whole) and not words.memory_only else [])
        assert answer.differs(right) < NOISE, said
        assert answer.cached <= min(words.most_loaded, others * CHUNK)
        assert held(engine.manager.arenas) == may_be_held, said
        for tier in engine.manager.tiers:
            assert must_be_written <= held([tier]) <= may_be_written, said
        kinds["loaded"] += answer.cached > 0
        kinds["withheld"] += len(path) > len(own)
        kinds["in memory only"] += len(may_be_held - may_be_written) > 0
    assert named <= may_be_held
    assert min(kinds.values()) > len(traffic) // 10, kinds
    engine.assert_at_rest()
    engine.close()


def test_an_operator_decides_for_requests_that_say_nothing(engine):
    asked = prompt(1, 2 * CHUNK + 3)
    with engine(cpu(requests={"store": "no", "load": "no"})) as served:
        served.ask(asked)
        served.ask(asked, parameters={"kvtier.store": "all"})
        assert served.ask(asked)[0].cached == 0
        assert served.ask(asked, parameters={"kvtier.load": "all"})[0].cached == 2 * CHUNK
        assert held(served.manager.arenas) == {*keys_of(served, asked)}
        served.assert_at_rest()


def test_an_operator_decides_by_salt(engine, monkeypatch):
    monkeypatch.setenv("KVTIER_TEST_TENANT", "a tenant")
    asked, salts = prompt(1, 2 * CHUNK + 3), [{"cache_salt": "env:KVTIER_TEST_TENANT", "store": "all"}]
    with engine(cpu(requests={"store": "no", "load": "memory", "salts": salts})) as served:
        for salt in (None, "another tenant"):
            served.ask(asked, salt=salt)
            assert not held(served.manager.arenas)
        served.ask(asked, salt="a tenant", parameters={"kvtier.store": "no"})
        assert not held(served.manager.arenas)
        served.ask(asked, salt="a tenant")
        assert len(held(served.manager.arenas)) == 2
        assert [served.ask(asked, salt=salt)[0].cached for salt in ("a tenant", None)] == [2 * CHUNK, 0]
        served.assert_at_rest()


def test_the_first_salt_that_fits_counts_and_leaves_the_rest_as_it_is(monkeypatch):
    monkeypatch.setenv("KVTIER_TEST_TENANT", "a tenant")
    tenant = EnvSecret("KVTIER_TEST_TENANT")
    said = RequestsConfig("no", "memory", salts=(SaltConfig(tenant, load="no"), SaltConfig(tenant, store="all")))
    for salt, words in (("a tenant", ("no", "no")), ("another", ("no", "memory")), (None, ("no", "memory"))):
        assert (said.of(salt).store, said.of(salt).load) == words
