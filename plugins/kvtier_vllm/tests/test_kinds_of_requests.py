"""Requests of every kind. What is computed for one kind may be loaded for another, and answers stay what they were."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import pytest
from real_engines import Engine, cpu, hit, miss, prompt
from test_serving import NOISE

# vLLM passes xgrammar an argument that it no longer wants; as an error that would end the request.
pytestmark = pytest.mark.filterwarnings("ignore:max_rollback_tokens is deprecated:DeprecationWarning")

PROMPT = 530
HIT = 512


@attrs.frozen
class Sample:
    """One answer to a prompt."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    stopped_by: int | str | None

    def differs(self, other: Sample) -> float:
        """The largest difference of log-probabilities; infinite if anything else differs."""
        if (self.tokens, self.stopped_by) != (other.tokens, other.stopped_by):
            return math.inf
        return max(abs(a - b) for a, b in zip(self.logprobs, other.logprobs, strict=True))


@attrs.frozen
class Kind:
    """Sampling parameters; ``structured`` are those of `StructuredOutputsParams`."""

    options: Mapping[str, Any]
    structured: Mapping[str, Any] = {}
    samples: int = 1
    tokens: int = 8


KINDS = {
    "one token": Kind({"max_tokens": 1}, tokens=1),
    "several samples": Kind({"n": 3, "temperature": 1.0, "seed": 7}, samples=3),
    "many log-probabilities": Kind({"logprobs": 20}),
    "penalties": Kind({"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.5}),
    "biased": Kind({"logit_bias": {17: 30.0}, "allowed_token_ids": [17, 18, 19, 20]}),
    "a least length": Kind({"min_tokens": 8, "ignore_eos": False, "stop_token_ids": [17]}),
    "narrow sampling": Kind({"temperature": 0.8, "seed": 5, "top_k": 5, "top_p": 0.9, "min_p": 0.01}),
    "structured, by choice": Kind({"ignore_eos": False}, {"choice": ["w12", "w345"]}, tokens=2),
    "structured, by regular expression": Kind({"ignore_eos": False}, {"regex": "(w1[0-9]){3}"}, tokens=4),
    "structured, by grammar": Kind({"ignore_eos": False}, {"grammar": 'root ::= "w77" ("w8" | "w9")'}, tokens=3),
}


def sample(engine: Engine, asked: Sequence[int], kind: Kind, **more: Any) -> tuple[list[Sample], int]:
    """The answers of an engine, and how many tokens of the prompt it had cached."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    structured = {"structured_outputs": StructuredOutputsParams(**kind.structured)} if kind.structured else {}
    defaults = {"temperature": 0, "max_tokens": kind.tokens, "logprobs": 1, "ignore_eos": True}
    sampling = SamplingParams(**{**defaults, **kind.options, **structured})
    (output,) = engine.llm.generate([{"prompt_token_ids": list(asked)}], sampling, use_tqdm=False, **more)
    return [
        Sample(
            tuple(each.token_ids),
            tuple(step[token].logprob for token, step in zip(each.token_ids, each.logprobs, strict=True)),
            each.stop_reason,
        )
        for each in output.outputs
    ], output.num_cached_tokens


@pytest.fixture(scope="module")
def truth(model, with_words) -> Mapping[str, list[Sample]]:
    """What an engine without kvtier answers to each kind, computed from scratch."""
    plain = Engine(model, None, **with_words)
    answers = {name: sample(plain, prompt(200, PROMPT), kind)[0] for name, kind in KINDS.items()}
    plain.close()
    return answers


@pytest.fixture(scope="module")
def served(model, truth, with_words):
    """One engine for all kinds, after the one without kvtier has ended."""
    engine = Engine(model, cpu(save_decode=True), **with_words)
    yield engine
    engine.close()


@pytest.mark.parametrize("name", KINDS)
def test_a_hit_of_every_kind_is_answered_as_without_kvtier(served, truth, name):
    kind, asked = KINDS[name], prompt(200, PROMPT)
    assert served.connector.reset_cache()
    served.outcomes()
    cold, _ = sample(served, asked, kind)
    assert served.outcomes()[0] == miss(PROMPT)
    warm, cached = sample(served, asked, kind)
    assert served.outcomes() == [hit(PROMPT, cpu=HIT)] * kind.samples
    served.assert_at_rest()
    assert cached == HIT
    assert len(truth[name]) == kind.samples
    for answers in (cold, warm):
        assert max(a.differs(t) for a, t in zip(answers, truth[name], strict=True)) < NOISE


@pytest.mark.parametrize("by", ["token", "word"])
@pytest.mark.parametrize("length, kept", [(6, 512), (7, 576)])
def test_a_stop_in_the_middle_of_a_chunk(served, by, length, kept):
    """Generated tokens are kept as far as they fill chunks. The KV of the last one is never computed."""
    asked = prompt(203, 570)
    (whole,), _ = sample(served, asked, Kind({}, tokens=10))
    last = whole.tokens[length - 1]
    assert whole.tokens.index(last) == length - 1
    assert served.connector.reset_cache()
    condition = {"stop_token_ids": [last]} if by == "token" else {"stop": [f"w{last}"]}
    (stopped,), _ = sample(served, asked, Kind({"ignore_eos": False, **condition}, tokens=10))
    assert stopped.tokens == whole.tokens[:length]
    (again,), cached = sample(served, [*asked, *stopped.tokens], Kind({}, tokens=10 - length))
    assert cached == kept
    assert again.tokens == whole.tokens[length:]
    served.assert_at_rest()


def test_log_probabilities_of_the_prompt_are_computed_and_their_kv_is_kept(served, model):
    """vLLM has them only for tokens that it computes: such a request reads no cache."""
    asked = prompt(201, PROMPT)
    served.outcomes()
    first, second = of_prompt(served, asked), of_prompt(served, asked)
    assert served.outcomes() == [miss(PROMPT, "it asked not to read cached prefixes")] * 2
    assert len(first) == PROMPT - 1
    assert max(abs(a - b) for a, b in zip(first, second, strict=True)) == 0
    warm, cached = sample(served, asked, Kind({}))
    assert cached == HIT
    served.assert_at_rest()
    fresh, _ = sample(served, asked, Kind({"skip_reading_prefix_cache": True}))
    assert warm[0].differs(fresh[0]) < NOISE


def of_prompt(engine, asked):
    """The log-probability of each token of the prompt but the first."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (output,) = engine.llm.generate([{"prompt_token_ids": asked}], sampling, use_tqdm=False)
    return [given[token].logprob for token, given in zip(asked[1:], output.prompt_logprobs[1:], strict=True)]


def test_every_beam_finds_the_prompt(served):
    """Each beam is a request of one more token, in every round: all of them find the prompt."""
    from vllm.sampling_params import BeamSearchParams

    asked, search = {"prompt_token_ids": prompt(202, PROMPT)}, BeamSearchParams(beam_width=3, max_tokens=4)
    assert served.connector.reset_cache()
    served.outcomes()
    cold, warm = (served.llm.beam_search([asked], search)[0].sequences for _ in range(2))
    found = served.outcomes()
    assert len(found) == 2 * (1 + 3 * 3)
    assert [outcome for outcome in found if outcome.loaded != HIT] == [miss(PROMPT)]
    assert [beam.tokens for beam in warm] == [beam.tokens for beam in cold]
    assert max(abs(a.cum_logprob - b.cum_logprob) for a, b in zip(cold, warm, strict=True)) < NOISE
    served.assert_at_rest()
