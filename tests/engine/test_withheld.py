"""What a request asks not to store leaves no chunk, no event with its key, and nothing in a policy or a recording."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter

import pytest
from fake_host import CHUNK, LAYOUT, prompt
from patience import HANG
from test_accounting import Ledger
from test_scheduler_side import host, said, stack, stored  # noqa: F401 - fixtures

from kvtier_core.stack.index.cache_index import CacheIndex
from kvtier_core.types import EventKind
from kvtier_simulate.recording import RecordingConfig
from kvtier_simulate.traces import read_trace
from kvtier_testing.samples import make_context

HEAD = prompt(1, 3 * CHUNK)
ASKED = prompt(2, 6 * CHUNK + 3, HEAD)


@pytest.fixture
def named(monkeypatch):
    """The paths that policies hear of, once for each tier."""
    named = []
    request = CacheIndex.request

    def hears(self, path, now, hints):
        named.append(list(path))
        request(self, path, now, hints)

    monkeypatch.setattr(CacheIndex, "request", hears)
    return named


def keys_of(engine, tokens):
    """The keys of the chunks of a prompt."""
    return engine.side._name(tokens, "")[0]


def told_keys(ledger):
    return {bytes(key) for event in ledger.events for key in event.keys}


def test_nothing_of_a_request_is_stored_and_nobody_hears_of_it(host, named, said):  # noqa: F811
    engine = host(settings={"save_decode": True})
    ledger, told = Ledger(engine), []
    engine.side.path_listeners.append(lambda request, path, first: told.append(path))
    request = engine.submit("1", ASKED, most_stored=0)
    while request.computed < len(ASKED):
        engine.step()
    for token in range(2 * CHUNK):  # generated ones are the request's, too
        engine.generate(request, token)
        engine.step()
    engine.finish(request)
    engine.assert_at_rest()
    assert [usage.chunks for usage in engine.manager.usage()] == [0, 0]
    assert not told_keys(ledger) and not told and not any(named)
    (line,) = said()
    assert line.endswith("(not stored; it asked to store nothing)")
    withheld = Counter({event.tier: event.tokens for event in ledger.events if event.kind is EventKind.WITHHELD})
    assert withheld == {"heap": len(ASKED) + 2 * CHUNK}
    assert engine.ask("2", ASKED) == 0


def test_what_others_have_stored_is_loaded_and_counts_as_used(host, named, said):  # noqa: F811
    engine = host()
    engine.ask("others", HEAD)
    path = keys_of(engine, ASKED)
    named.clear()
    said()
    assert engine.ask("1", ASKED, most_stored=0) == len(HEAD)
    assert stored(engine) == 3, "what it shares with others stays"
    assert named == [path[:3]] * 2
    assert said() == ["kvtier: 1: 51 tokens: 24 from kvtier (heap 24; it asked to store nothing), 27 computed"]


def test_what_the_engine_has_may_be_the_requests_own(host, named):  # noqa: F811
    """Its own cache may hold chunks that were withheld before: only those count that the stack has."""
    engine = host()
    state = engine.side.track(engine.submit("1", ASKED, most_stored=0).view())
    assert engine.side.match(state.view, 2 * CHUNK) == 0
    engine.side.admitted(state.view, [[0] * 20], 0)
    assert named == [[], []]


def test_only_the_first_tokens_are_stored(host, named, said):  # noqa: F811
    engine, most = host(), 4 * CHUNK + 5
    path = keys_of(engine, ASKED)
    assert engine.ask("1", ASKED, most_stored=most) == 0
    assert stored(engine) == 4 and named == [path[:4]] * 2
    assert said()[0].endswith(f"(not stored; it asked to store {most} tokens)")
    assert engine.ask("2", ASKED) == 4 * CHUNK
    assert stored(engine) == 6


def test_a_request_is_stored_in_memory_only(host, named, said):  # noqa: F811
    engine = host()
    engine.ask("others", HEAD)
    path = keys_of(engine, ASKED)
    named.clear()
    said()
    for number in range(2):
        assert engine.ask(f"{number}", ASKED, memory_only=True) == (3, 6)[number] * CHUNK
    assert [usage.chunks for usage in engine.manager.usage()] == [6, 3]
    assert named == [path, path[:3]] * 2, "the disk hears of what it has"
    first, second = said()
    assert first.endswith("24 from kvtier (heap 24; it asked to be stored in memory only), 27 computed")
    assert second.endswith("48 from kvtier (heap 48; it asked to be stored in memory only), 3 computed")
    engine.ask("all", ASKED)
    engine.side.drain(HANG)
    assert [usage.chunks for usage in engine.manager.usage()] == [6, 6]
    engine.assert_at_rest()


def test_a_request_that_stores_nothing_brings_no_chunk_of_others_to_a_disk(host):  # noqa: F811
    engine = host()
    engine.ask("memory", ASKED, memory_only=True)
    for number, most in enumerate((0, 2 * CHUNK)):
        assert engine.ask(f"{number}", ASKED, most_stored=most) == 6 * CHUNK
    engine.side.drain(HANG)
    assert [usage.chunks for usage in engine.manager.usage()] == [6, 0]


def test_a_request_that_withholds_nothing_is_named_when_it_comes(host, named):  # noqa: F811
    engine = host()
    engine.side.track(engine.submit("1", ASKED, most_stored=len(ASKED)).view())
    assert named == [keys_of(engine, ASKED)] * 2


def test_chunks_that_come_back_from_a_tier_below_are_not_the_requests_own(host, named):  # noqa: F811
    engine = host(chunks=6)
    engine.ask("others", HEAD)
    engine.ask("more", prompt(3, 6 * CHUNK))
    assert stored(engine) == 6
    assert engine.ask("1", ASKED, most_stored=0) == len(HEAD), "they are promoted"
    assert not {*keys_of(engine, ASKED)[3:]} & {key for path in named for key in path}


@pytest.mark.parametrize("most, loaded", [(0, 0), (CHUNK - 1, 0), (CHUNK, CHUNK), (2 * CHUNK + 3, 2 * CHUNK)])
def test_only_so_many_tokens_are_loaded(host, most, loaded):  # noqa: F811
    engine = host()
    engine.ask("others", HEAD)
    ledger = Ledger(engine)
    assert engine.ask("1", ASKED, most_loaded=most) == loaded
    ledger.assert_adds_up()
    assert ledger.tokens("heap") == (len(ASKED), loaded, most - loaded, len(ASKED) - most)
    assert stored(engine) == 6, "it is stored nevertheless"


def test_a_request_is_loaded_from_memory_alone(host, said):  # noqa: F811
    first = host()
    first.ask("others", ASKED)
    first.close()
    engine = host()
    engine.ask("others", HEAD)
    said()
    assert engine.ask("1", ASKED, media=(), most_stored=0) == len(HEAD)
    assert said()[0].endswith("24 from kvtier (heap 24; it asked to store nothing), 27 computed")
    assert engine.ask("2", ASKED) == 6 * CHUNK


def test_another_engine_is_told_that_nothing_is_kept(host, caplog):  # noqa: F811
    engine = host()
    request = engine.submit("1", ASKED, most_stored=0, continued_elsewhere=True)
    engine.run(request)
    assert request.kept == 0 and not engine.manager.pins_by_holder()
    assert "it asked to store nothing" in caplog.text.splitlines()[-1]
    memory = engine.submit("memory", prompt(5, 6 * CHUNK), memory_only=True, continued_elsewhere=True)
    engine.run(memory)
    assert memory.kept == 0 and not engine.manager.pins_by_holder()
    assert "it asked to be stored in memory only" in caplog.text.splitlines()[-1]
    first = engine.submit("2", ASKED, most_stored=2 * CHUNK, continued_elsewhere=True)
    engine.run(first)
    assert first.kept == 2 * CHUNK


def test_a_recording_has_nothing_of_prompts_that_are_not_stored_whole(host, tmp_path):  # noqa: F811
    """A line that had a part of its chunks could not be replayed."""
    engine = host()
    ledger = Ledger(engine)
    for number, most in enumerate((0, 2 * CHUNK, sys.maxsize)):
        engine.ask(f"{number}", ASKED, most_stored=most)
    engine.ask("memory", ASKED, memory_only=True)
    with contextlib.closing(RecordingConfig(tmp_path).open(make_context(layout=LAYOUT))) as recording:
        recording.observe(ledger.events)
    (file,) = tmp_path.glob("*.jsonl")
    assert [len(prompt.path) for prompt in read_trace(file).prompts] == [0, 0, 6, 0]
