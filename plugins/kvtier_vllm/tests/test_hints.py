"""What a client or an orchestrator says of a request reaches the policies of every tier, and nothing else does."""

from __future__ import annotations

import pytest
from outsiders import TEXTS, assert_tame
from real_engines import cpu_and_disk, prompt

from kvtier_core.stack.index.cache_index import CacheIndex
from kvtier_vllm.requests.hints import UnreadWords


@pytest.fixture
def heard(monkeypatch):
    """The hints of each request, once for each tier."""
    heard = []
    request = CacheIndex.request
    monkeypatch.setattr(
        CacheIndex,
        "request",
        lambda self, path, now, hints: (heard.append(dict(hints)), request(self, path, now, hints)),
    )
    return heard


def ask(engine, said):
    from vllm import SamplingParams

    extra = {"kv_transfer_params": said} if said is not None else {}
    sampling = SamplingParams(temperature=0, max_tokens=1, detokenize=False, extra_args=extra)
    (answer,) = engine.llm.generate([{"prompt_token_ids": prompt(1, 100)}], sampling, use_tqdm=False)
    assert answer.outputs[0].token_ids


@pytest.mark.more
def test_hints_reach_every_tier(engine, heard, tmp_path):
    with engine(cpu_and_disk(tmp_path)) as served:
        ask(served, None)
        assert heard == [{}, {}]
        heard.clear()
        ask(served, {"kvtier.turn": "tool", "kvtier.session": "ends", "do_remote_prefill": False})
        assert heard == [{"turn": "tool", "session": "ends"}] * 2
        served.assert_at_rest()


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"turn": "tool"},
        {"kvtier.turn": 1},
        {"kvtier.turn": ["tool"]},
        {"kvtier.turn": "x" * 256},
        {"kvtier.turn": "a line\nforged"},
        {"kvtier.turn\33[2J": "tool"},
        {f"kvtier.{number}": "x" for number in range(17)},
        {"kvtier.kv.retain@1.0": "[{}]"},
        {1: "one"},
        "kvtier.turn",
        ["kvtier.turn"],
        None,
    ],
    ids=repr,
)
def test_invalid_hints_do_not_reach_policies(said):
    from vllm import SamplingParams
    from vllm.v1.request import Request

    from kvtier_vllm.requests.hints import hints_of

    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": said})
    assert hints_of(Request("1", [1, 2], sampling, None)) == {}


def test_a_word_that_no_policy_of_ours_reads_is_logged_once(caplog):
    caplog.set_level("INFO", "kvtier")
    words = UnreadWords()
    for _ in range(2):
        for said in (
            {"kvtier.session": "ends"},
            {"kvtier.pause": "600"},
            {"kvtier.sesion": "ends"},
            {"kvtier.session": 1},
            {"other": 1},
            None,
        ):
            words.look(said, hinted(None, said))
    typo, malformed = caplog.messages
    assert "kvtier.sesion in kv_transfer_params: a hint for other policies than kvtier's own; kvtier reads " in typo
    assert "kvtier.load, kvtier.store, kvtier.session, kvtier.pause" in typo
    assert "kvtier.session in kv_transfer_params: malformed" in malformed


def test_what_clients_have_logged_is_bounded_and_forges_no_line(caplog):
    caplog.set_level("INFO", "kvtier")
    words = UnreadWords()
    for text in (*TEXTS.values(), *map(str, range(100))):
        words.look({f"kvtier.{text}": text}, {})
    assert len(caplog.messages) == 16
    assert_tame(*caplog.messages)


def test_the_words_of_a_request_are_looked_at(engine, tmp_path, monkeypatch):
    looked = []
    monkeypatch.setattr(UnreadWords, "look", lambda self, *of: looked.append(of))
    with engine(cpu_and_disk(tmp_path)) as served:
        ask(served, {"kvtier.sesion": "ends"})
    assert looked == [({"kvtier.sesion": "ends"}, {"sesion": "ends"})]


# -- vLLM's kv_hints -----------------------------------------------------------------------------------


def envelope(*actions):
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    return KvHintsEnvelope("0.1", "a message", [KvHintAction(str(i), *action) for i, action in enumerate(actions)])


def hinted(kv_hints, said=None):
    """The hints of a request that has these."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    from kvtier_vllm.requests.hints import hints_of

    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": said or {}})
    return hints_of(Request("1", [1, 2], sampling, None, kv_hints=kv_hints))


RETAIN = {"directives": [{"start": 0, "end": 64, "priority": 80}]}


def test_an_orchestrators_actions_reach_every_tier_and_change_no_answer(engine, heard, tmp_path):
    """Over the way that an orchestrator has: it embeds the engine."""
    from vllm import SamplingParams

    with engine(cpu_and_disk(tmp_path)) as served:
        (cold,) = served.ask(prompt(1, 100), tokens=1)
        heard.clear()
        said = envelope(("kv.retain", "1.0", RETAIN), ("kv.evict", "0.1", {}), ("kv.retain", "1.0", {"scope": "b"}))
        sampling = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        llm = served.llm.llm_engine
        llm.add_request("hinted", {"prompt_token_ids": prompt(1, 100)}, sampling, kv_hints=said)
        outputs = []
        while llm.has_unfinished_requests():
            outputs += llm.step()
        told = {
            "kv.retain@1.0": '[{"directives": [{"end": 64, "priority": 80, "start": 0}]},{"scope": "b"}]',
            "kv.evict@0.1": "[{}]",
        }
        assert heard == [told] * 2
        assert tuple(outputs[-1].outputs[0].token_ids) == cold.tokens
        assert outputs[-1].num_cached_tokens == 64  # although it asked for the eviction of all
        served.assert_at_rest()


def test_a_client_does_not_speak_for_the_orchestrator():
    assert hinted(None, {"kvtier.turn": "tool", "kvtier.kv.retain@1.0": "[]"}) == {"turn": "tool"}
    both = hinted(envelope(("kv.retain", "1.0", {})), {"kvtier.turn": "tool", "kvtier.kv.retain@1.0": "[]"})
    assert both == {"turn": "tool", "kv.retain@1.0": "[{}]"}


def deep():
    inside: dict = {}
    for _ in range(100_000):
        inside = {"a": inside}
    return inside


@pytest.mark.parametrize(
    "actions",
    [
        [],
        [("kv.retain", "1.0", {"at": object()})],
        [("kv.retain", "1.0", {"at": float("nan")})],
        [("kv.retain", "1.0", {"blocks": "x" * 4096})],
        [("kv.retain", "1.0", deep())],
        [("kv.retain", 1, {})],
        [("kv.retain", "1.0\n", {})],
        [("kv.retain", "1.0", None)],
        [("kv.retain", "1.0", {}), ("kv.retain", "1.0", {"at": object()})],
        [("kv.retain", str(number), {}) for number in range(17)],
    ],
    ids=[
        "none",
        "an object",
        "no number",
        "too long",
        "too deep",
        "no version",
        "two lines",
        "no payload",
        "one of two",
        "too many",
    ],
)
def test_invalid_actions_do_not_reach_policies(actions):
    assert hinted(envelope(*actions)) == {}


@pytest.mark.parametrize("thing", ["kv_hints", 1, [], {"actions": [{}]}], ids=repr)
def test_invalid_envelopes_do_not_reach_policies(thing):
    assert hinted(thing) == {}


def test_a_request_of_a_vllm_without_kv_hints():
    from vllm import SamplingParams
    from vllm.v1.request import Request

    from kvtier_vllm.requests.hints import hints_of

    request = Request("1", [1, 2], SamplingParams(extra_args={"kv_transfer_params": {"kvtier.turn": "x"}}), None)
    del request.kv_hints
    assert hints_of(request) == {"turn": "x"}
