"""Speculative decoding: what was rejected is never stored, and a draft model finds its own KV again.

The oracle is the engine itself, with its own prefix cache or with none. What a draft model proposes depends on the KV
of its layers at every position, so that proposals are compared as well as answers.
"""

from __future__ import annotations

import types

import attrs
import pytest
import tiny_drafts
import tiny_hybrids
from chunk_files import chunk_files
from real_engines import BLOCK, cpu, cpu_and_disk, hit, prompt
from sizes import some
from test_serving import NOISE, forget
from vllm.config import SpeculativeConfig
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from kvtier_vllm import speculation

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


@pytest.mark.parametrize("method", speculation._WITH_KV)
@pytest.mark.parametrize("drafts", [1, 3, 8])
def test_a_draft_model_runs_when_vllm_says_so(method, drafts):
    """For the longest sequence of a step, of any length: vLLM's own predicate, called as its model runner does."""
    speculative = types.SimpleNamespace(
        method=method,
        num_speculative_tokens=drafts,
        draft_model_config=types.SimpleNamespace(max_model_len=64),
        draft_load_config=None,
        use_eagle=lambda: method != "draft_model",
        use_dflash=lambda: SpeculativeConfig.use_dflash(speculative),
    )
    runner = types.SimpleNamespace(
        speculative_config=speculative, num_spec_tokens=drafts, effective_drafter_max_model_len=64
    )
    draft = speculation.draft_model(
        types.SimpleNamespace(speculative_config=speculative, load_config=None, num_prefill_lookahead_tokens=1)
    )
    for longest in range(80):
        step = types.SimpleNamespace(max_seq_len=longest)
        assert draft.computes(longest) == GPUModelRunner._input_fits_in_drafter(runner, step), longest


@attrs.define
class Drafts:
    """What an engine drafts from now on, and how much of it is accepted."""

    proposed: list[list[list[int]]] = attrs.field(factory=list)  #: in each step, for each request
    drafted: int = 0
    accepted: int = 0

    @classmethod
    def of(cls, served) -> Drafts:
        drafts, scheduler = cls(), served.scheduler
        update, count = scheduler.update_draft_token_ids, scheduler.make_spec_decoding_stats

        def updated(told):
            drafts.proposed.append([list(tokens) for tokens in told.draft_token_ids])
            update(told)

        def counted(*args, num_draft_tokens, num_accepted_tokens, **more):
            drafts.drafted += num_draft_tokens
            drafts.accepted += num_accepted_tokens
            return count(*args, num_draft_tokens=num_draft_tokens, num_accepted_tokens=num_accepted_tokens, **more)

        scheduler.update_draft_token_ids, scheduler.make_spec_decoding_stats = updated, counted
        return drafts

    def take(self) -> list[list[list[int]]]:
        """What was proposed since the last call."""
        proposed, self.proposed = self.proposed, []
        return proposed


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """``folder(make)`` is a model made by a function of `tiny_drafts`."""
    made = {}

    def find(make):
        if make not in made:
            made[make] = tmp_path_factory.mktemp(make.__name__)
            make(made[make])
        return made[make]

    return find


@pytest.fixture
def drafting(folder):
    """``drafting(method)`` are the options of an engine that drafts so."""

    def options(method):
        if method == "ngram":
            return {"model": folder(tiny_drafts.make_target), "speculative_config": dict(NGRAM)}
        if method == "mtp":
            return {
                "model": folder(tiny_drafts.make_mtp),
                "speculative_config": {"method": method, "num_speculative_tokens": 1},
            }
        make = {"eagle": tiny_drafts.make_eagle, "eagle3": tiny_drafts.make_eagle3, "draft_model": make_another}[method]
        speculative = {"method": method, "model": str(folder(make)), "num_speculative_tokens": 3}
        return {"model": folder(tiny_drafts.make_target), "speculative_config": speculative}

    return options


def make_another(folder):
    tiny_drafts.make_target(folder, seed=4)


# -- what was rejected -----------------------------------------------------------------------------------


@pytest.mark.more
@pytest.mark.filterwarnings("ignore:\\s*Encountered the use of a type that is scheduled for deprecation")  # numba's
def test_a_rejected_draft_never_reaches_a_store(engine, drafting, tmp_path):
    """An engine that drafts nothing finds the chunks that were generated, and nothing else was stored."""
    asked, stack = prompt(1, 70), cpu_and_disk(tmp_path, chunk_tokens=BLOCK, save_decode=True)
    stack["tiers"][1]["eviction"] = "lru"  # it learns nothing, so that there are frames of chunks and no others
    plain = {"model": drafting("ngram")["model"]}
    with engine(**plain) as served:
        (answer,) = served.ask(asked, tokens=200)
        again = [*asked, *answer.tokens]
        (truth,) = served.ask(again)
    with engine(stack, **drafting("ngram")) as served:
        drafts = Drafts.of(served)
        assert served.ask(asked, tokens=200)[0].differs(answer) < NOISE
        served.assert_at_rest()
    assert drafts.accepted > 20 < drafts.drafted - drafts.accepted
    assert len(chunk_files(tmp_path)) == (len(again) - 1) // BLOCK
    with engine(stack, **plain) as served:
        (warm,) = served.ask(again)
        assert served.outcomes() == [hit(270, disk=256)]
    assert warm.differs(truth) < NOISE


@pytest.mark.parametrize("method", some(["eagle", "draft_model"]))
def test_draft_kv_of_rejected_drafts_never_reaches_a_store(engine, drafting, method):
    """Behind generated tokens it proposes what it does when it reads them in a prompt; another salt finds nothing."""
    asked = prompt(2, 70)
    with engine(cpu(chunk_tokens=BLOCK, save_decode=True), **drafting(method)) as served:
        drafts = Drafts.of(served)
        (answer,) = served.ask(asked, tokens=200)
        assert 0 < drafts.accepted < drafts.drafted
        again = [*asked, *answer.tokens]
        drafts.take()
        (cold,), expected = served.ask(again, tokens=20, salt="other"), drafts.take()
        (warm,), proposed = served.ask(again, tokens=20), drafts.take()
        served.assert_at_rest()
    assert (cold.cached, warm.cached) == (0, 256)
    assert warm.differs(cold) < NOISE
    assert proposed == expected


# -- a draft model's own KV ------------------------------------------------------------------------------


@pytest.mark.parametrize("method", some(["eagle", "eagle3", "mtp", "draft_model"]))
def test_a_hit_is_bit_equal_to_the_engines_own_and_drafts_alike(engine, drafting, tmp_path, method):
    # vLLM drops the last block of its own hit if a draft layer reads the next token.
    asked = prompt(3, 530 if method == "draft_model" else 530 + BLOCK)
    options = drafting(method) | {"enable_prefix_caching": True}
    with engine(cpu_and_disk(tmp_path), **options) as first:
        first.ask(asked)
        drafts = Drafts.of(first)
        (own,) = first.own_hits(asked, tokens=30)
        expected = drafts.take()
        forget(first)
        warm = first.ask(asked, tokens=30)[0]
        assert drafts.take() == expected
        first.assert_at_rest()
    with engine(cpu_and_disk(tmp_path), **options) as second:
        drafts = Drafts.of(second)
        again = second.ask(asked, tokens=30)[0]
        assert drafts.take() == expected
        assert second.outcomes() == [hit(len(asked), disk=512)]
    assert own.cached == warm.cached == again.cached == 512
    assert warm.differs(own) == again.differs(own) == 0


@pytest.mark.parametrize(
    "kind, method, own_hit",
    some(
        [("gemma3", "ngram", 800), ("mistral", "eagle", 768), ("gpt_oss", "eagle3", 768), ("llama4", "eagle3", 768)],
        ("mistral", "eagle", 768),
    ),
)
@pytest.mark.filterwarnings("ignore:\\s*Encountered the use of a type that is scheduled for deprecation")  # numba's
def test_drafts_beside_windows_and_local_attention(engine, tmp_path, kind, method, own_hit):
    """The draft layer has full attention, and shares the group of such layers or has one of its own."""
    tiny_hybrids.make(kind, tmp_path / "model")
    options = {"model": tmp_path / "model", "enable_prefix_caching": True}
    asked = prompt(10, 820)
    with engine(**options) as plain:
        truth = plain.ask(asked, tokens=30)[0]
    speculative = dict(NGRAM)
    if method != "ngram":
        {"eagle": tiny_drafts.make_eagle, "eagle3": tiny_drafts.make_eagle3}[method](tmp_path / "draft")
        speculative = {"method": method, "model": str(tmp_path / "draft"), "num_speculative_tokens": 3}
    with engine(cpu(chunk_tokens=4 * BLOCK), **options, speculative_config=speculative) as served:
        served.ask(asked)
        drafts = Drafts.of(served)
        (own,), expected = served.own_hits(asked, tokens=30), drafts.take()
        forget(served)
        warm = served.ask(asked, tokens=30)[0]
        assert drafts.take() == expected
        served.assert_at_rest()
    assert (own.cached, warm.cached) == (own_hit, 768)
    assert warm.differs(own) < NOISE > own.differs(truth)


@pytest.mark.parametrize("method", some(["eagle", "eagle3", "mtp", "draft_model"], "eagle", "draft_model"))
def test_a_block_that_the_engine_has_of_a_prompt_with_another_next_token_is_not_kept(engine, drafting, method):
    """vLLM names its blocks by the tokens up to their end, and returns the first one of a name."""
    shared, asked = prompt(4, 512), {"enable_prefix_caching": True, **drafting(method)}
    first, second = prompt(5, 600, shared), prompt(6, 600, shared)
    with engine(cpu("8MiB"), **asked) as served:
        for each in (first, second, prompt(7, 2000)):  # the last one fills the arena
            served.ask(each)
        served.outcomes()
        served.ask(second)
        forget(served)
        served.ask(second)
        own, ours = served.outcomes()
        served.assert_at_rest()
    assert (own.loaded, own.engine_had >= 512) == (0, True)
    assert ours.loaded == (576 if method == "draft_model" else 448)


@pytest.mark.parametrize("method", ["eagle", "draft_model"])
def test_prompts_that_part_at_the_end_of_a_chunk_share_it_unless_a_draft_layer_reads_the_next_token(
    engine, drafting, method
):
    shared = prompt(4, 512)
    first, second = prompt(5, 530, shared), prompt(6, 530, shared)
    with engine(cpu(), **drafting(method)) as served:
        drafts = Drafts.of(served)
        (cold,), expected = served.ask(second, tokens=30, salt="other"), drafts.take()
        served.ask(first)
        drafts.take()
        (warm,), proposed = served.ask(second, tokens=30), drafts.take()
    assert (cold.cached, warm.cached) == (0, 512 if method == "draft_model" else 448)
    assert warm.differs(cold) < NOISE
    assert proposed == expected


def test_draft_kv_that_was_not_computed_for_lack_of_room_is_not_stored(engine, drafting):
    """It does not run in a step with a request whose drafts might be too long, and then for no request of it."""
    short, long = prompt(8, 200), prompt(9, 575)
    with engine(cpu(), **drafting("eagle"), max_model_len=576, max_num_seqs=2) as served:
        served.ask(short, long, tokens=1)
        assert [answer.cached for answer in served.ask(short, tokens=1)] == [0]
        assert [answer.cached for answer in served.ask(short, tokens=1)] != [0]
        served.assert_at_rest()
