"""What a client says of its request reaches the policies of every tier, and nothing else does."""

from __future__ import annotations

import pytest
from conftest import cpu_and_disk, prompt

from kvtier_core.stack.index.cache_index import CacheIndex


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
        {f"kvtier.{number}": "x" for number in range(17)},
        {1: "one"},
        "kvtier.turn",
        ["kvtier.turn"],
        None,
    ],
    ids=repr,
)
def test_what_is_no_hint(said):
    from vllm import SamplingParams
    from vllm.v1.request import Request

    from kvtier_core.engine.hints import hints_of

    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": said})
    assert hints_of(Request("1", [1, 2], sampling, None)) == {}
