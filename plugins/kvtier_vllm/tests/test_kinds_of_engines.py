"""Engines that do something else than generate text, or schedule and sample otherwise: served right, or not at all."""

from __future__ import annotations

import pytest
import torch
from real_engines import cpu, cpu_and_disk, hit, miss, prompt
from sizes import some
from test_serving import NOISE
from transformers import BertConfig, BertModel
from vllm.v1.sample.logits_processor import LogitsProcessor

ASKED = prompt(210, 530)


@pytest.fixture
def pooling(with_words):
    """Options of an engine that pools: it needs a tokenizer, for the texts that it may be asked to compare."""
    return {**with_words, "runner": "pooling", "convert": "embed"}


def embedding(engine, asked=ASKED):
    (output,) = engine.llm.embed([{"prompt_token_ids": asked}], use_tqdm=False)
    return torch.tensor(output.outputs.embedding)


def test_an_engine_that_embeds_is_served(engine, pooling):
    """The last token's hidden state depends on the KV of all others."""
    with engine(**pooling) as plain:
        truth, other = embedding(plain), embedding(plain, [ASKED[0] + 1, *ASKED[1:]])
    assert (truth - other).abs().max() > 0.01
    with engine(cpu(), **pooling) as served:
        cold = embedding(served)
        warm = embedding(served)
        assert served.outcomes() == [miss(530), hit(530, cpu=512)]
        served.assert_at_rest()
    assert (cold - truth).abs().max() == 0
    assert (warm - truth).abs().max() < NOISE


@pytest.mark.more
def test_a_model_of_transformers_is_served_and_counts_with_its_package(engine, said):
    options = {"model_impl": "transformers"}
    with engine(**options) as plain:
        truth = plain.ask(ASKED)[0]
    with engine(cpu(), **options) as served:
        cold, warm = (served.ask(ASKED)[0] for _ in range(2))
        assert dict(served.connector.side.namespace.facts)["packages in the model"].startswith("transformers ")
        served.assert_at_rest()
    assert (cold.cached, warm.cached, cold.differs(truth)) == (0, 512, 0)
    assert warm.differs(truth) < NOISE


def test_embeddings_of_every_token_read_no_cache(engine, pooling):
    def every(engine):
        (output,) = engine.llm.encode([{"prompt_token_ids": ASKED}], pooling_task="token_embed", use_tqdm=False)
        return output.outputs.data

    options = {**pooling, "pooler_config": {"task": "token_embed"}}
    with engine(**options) as plain:
        truth = every(plain)
    with engine(cpu(), **options) as served:
        answers = [every(served) for _ in range(2)]
        assert served.outcomes() == [miss(530, "it asked not to read cached prefixes")] * 2
        served.assert_at_rest()
    assert len(truth) == 530
    assert all((answer - truth).abs().max() == 0 for answer in answers)


@pytest.mark.parametrize("encodes", some([False, True]))
def test_an_engine_whose_prefixes_vllm_does_not_reuse_is_passed_by(engine, said, pooling, tmp_path, encodes):
    """A mean over all tokens needs each of them computed; in an encoder each depends on those behind it."""
    if encodes:
        model = BertModel(BertConfig(vocab_size=2048, hidden_size=64, num_hidden_layers=2, num_attention_heads=2))
        model.save_pretrained(tmp_path)
        options = {**pooling, "model": tmp_path, "max_model_len": 512, "convert": "auto"}
    else:
        options = {**pooling, "pooler_config": {"seq_pooling_type": "MEAN"}}
    reason = "vLLM itself does not reuse the prefixes of this model"
    asked = ASKED[:500]
    with engine(**options) as plain:
        truth = embedding(plain, asked)
    with engine(cpu(), **options) as passed:
        assert said()[-1] == f"kvtier: this engine is not served: {reason}"
        answers = [embedding(passed, asked) for _ in range(2)]
        lines = said()
        assert len(lines) == 2 and all(line.endswith(f": 500 tokens: 0 from kvtier ({reason})") for line in lines)
    assert all((answer - truth).abs().max() == 0 for answer in answers)


class Forbidding(LogitsProcessor):
    """Forbids what the first tokens of the vocabulary are; a setting of the engine, for every request."""

    def __init__(self, vllm_config, device, is_pin_memory):
        pass

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        pass

    def apply(self, logits):
        logits[:, :1000] = -torch.inf
        return logits


def test_logits_processors_of_the_engine_share_kv_with_engines_without_them(engine, tmp_path):
    with engine(logits_processors=[Forbidding]) as plain:
        truth = plain.ask(ASKED)[0]
    assert min(truth.tokens) >= 1000
    with engine(cpu_and_disk(tmp_path)) as unrestricted:
        assert unrestricted.ask(ASKED)[0].tokens != truth.tokens
    with engine(cpu_and_disk(tmp_path), logits_processors=[Forbidding]) as served:
        warm = served.ask(ASKED)[0]
        served.assert_at_rest()
    assert warm.cached == 512
    assert warm.differs(truth) < NOISE


def test_a_preempted_request_finds_its_kv_again(engine):
    """What is urgent preempts what is not, in the middle of a chunk; what was computed for it is found again."""
    from vllm import SamplingParams

    asked = [prompt(220 + i, 200) for i in range(4)]
    with engine() as plain:
        truth = plain.ask(*asked, tokens=70)
    # 4 requests grow from 200 to 270 tokens, 7 to 9 blocks each, and there are 31.
    options = {"num_gpu_blocks_override": 32, "max_num_seqs": 4, "max_model_len": 512, "scheduling_policy": "priority"}
    with engine(cpu(), **options) as served:
        sampling = SamplingParams(temperature=0, max_tokens=70, detokenize=False, ignore_eos=True)
        prompts = [{"prompt_token_ids": each} for each in asked]
        outputs = served.llm.generate(prompts, sampling, priority=[3, 2, 1, 0], use_tqdm=False)
        preempted = [outcome for outcome in served.outcomes() if outcome.loaded == 192 and outcome.tokens >= 200]
        assert preempted, "nobody was preempted, or nobody resumed"
        served.assert_at_rest()
    assert [tuple(output.outputs[0].token_ids) for output in outputs] == [answer.tokens for answer in truth]
