"""Models with several KV groups, or with windows alone, as real engines serve them.

The oracle is the engine's own prefix hit of the same length, to the last bit.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import tiny_hybrids
from real_engines import Engine, cpu, cpu_and_disk, prompt
from sizes import some
from test_serving import NOISE, forget

from kvtier_core.errors import BackendError
from kvtier_core.interfaces import NO_BLOCK
from kvtier_core.transfer.host_mover import HostMover

ONE_BLOCK = {"max_num_batched_tokens": 96, "max_num_seqs": 4}
#: As the CPU build of vLLM can compute them, see tiny_hybrids.
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "qwen3_next": {"dtype": "bfloat16"},
    "granite": ONE_BLOCK,
    "falcon_h1": ONE_BLOCK,
}
STATES = ("qwen3_next", "granite", "falcon_h1")


@attrs.frozen
class Hybrid:
    kind: str
    folder: Path

    @property
    def options(self) -> dict[str, Any]:
        return {"model": self.folder, "enable_prefix_caching": True, **OPTIONS.get(self.kind, {})}

    @property
    def noise(self) -> float:
        """How far log-probabilities may be apart where a prompt is cut elsewhere. bfloat16 gives other words then."""
        return float("inf") if self.options.get("dtype") == "bfloat16" else NOISE


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """``made(kind)`` is a model, made once."""

    @functools.cache
    def made(kind: str) -> Hybrid:
        folder = tmp_path_factory.mktemp(kind)
        tiny_hybrids.make(kind, folder)
        return Hybrid(kind, folder)

    return made


@pytest.fixture(scope="module", params=some(tiny_hybrids.KINDS, "gemma3", "granite"))
def hybrid(request, made) -> Hybrid:
    return made(request.param)


@pytest.fixture(scope="module", params=some(tiny_hybrids.KINDS, "gemma3", "granite"))
def any_hybrid(request, made) -> Hybrid:
    return made(request.param)


@pytest.fixture
def float32(hybrid) -> Hybrid:
    """With bfloat16, a prompt that is cut elsewhere is rounded to other words."""
    if hybrid.noise > NOISE:
        pytest.skip("a prompt that is cut elsewhere gives other words in bfloat16")
    return hybrid


#: 768 tokens are whole chunks for every model here, and end within a chunk of local attention.
LENGTH = 790


def chunk_of(served: Engine) -> int:
    return served.connector.side._layout.tokens


def auto(**settings: Any) -> dict[str, Any]:
    return cpu(chunk_tokens="auto", **settings)


def auto_and_disk(path: Path, capacity: str = "64MiB", **settings: Any) -> dict[str, Any]:
    return cpu_and_disk(path, capacity, chunk_tokens="auto", **settings)


def differs(answers: list[Any], others: list[Any]) -> float:
    return max(answer.differs(other) for answer, other in zip(answers, others, strict=True))


def test_a_hit_is_the_engines_own_from_memory_and_from_disk(engine, any_hybrid, tmp_path):
    asked = prompt(60, LENGTH)
    with engine(auto_and_disk(tmp_path), **any_hybrid.options) as first:
        first.ask(asked)
        (own,) = first.own_hits(asked)
        forget(first)
        warm = first.ask(asked)[0]
        first.assert_at_rest()
    with engine(auto_and_disk(tmp_path), **any_hybrid.options) as second:
        again = second.ask(asked)[0]
        second.assert_at_rest()
    assert own.cached == warm.cached == again.cached == 768
    assert warm.differs(own) == again.differs(own) == 0


def test_every_answer_depends_on_what_any_group_keeps(engine, hybrid, monkeypatch):
    """A load that leaves out the pages of one group shows, whichever it is: so a test would see what one lacks."""
    asked, left_out, load = prompt(60, LENGTH), [], HostMover.load

    def leave_out(self, job, slots, pages, after=None):
        kept = [
            [[NO_BLOCK] * len(blocks) if number in left_out else blocks for number, blocks in enumerate(chunk)]
            for chunk in pages
        ]
        load(self, job, slots, kept if job > 0 else pages, after)

    monkeypatch.setattr(HostMover, "load", leave_out)
    with engine(auto(), **hybrid.options) as served:
        served.ask(asked)
        (own,) = served.own_hits(asked)
        for group in range(len(served.connector.side._layout.groups)):
            left_out[:] = [group]
            forget(served)
            wrong = served.ask(asked)[0]
            assert wrong.cached == own.cached
            assert wrong.differs(own) > NOISE


def test_every_token_counts(engine, float32):
    """Behind the windows, too: what full attention and states keep of the beginning reaches the answer."""
    asked = prompt(60, 1050)
    reach = 600 if float32.kind == "mistral" else 1047  # windows alone
    other = [*asked]
    other[-reach] += 1
    with engine(**float32.options) as plain:
        assert plain.ask(asked)[0].differs(plain.ask(other)[0]) > NOISE


def test_the_next_turn_of_a_conversation(engine, hybrid):
    """Each turn ends a little behind a chunk, so that the engine's own hits are as long."""
    with engine(auto(), **hybrid.options) as served:
        chunk = chunk_of(served)
        turns = [prompt(1, 2 * chunk + 5)]
        for chunks in (3, 5, 6):
            turns.append(prompt(chunks, chunks * chunk + 5, turns[-1]))
        warm = []
        for turn in turns:
            forget(served)
            warm += served.ask(turn)
        served.assert_at_rest()
    with engine(**hybrid.options) as plain:
        own = [plain.ask(turn)[0] for turn in turns]
    assert (
        [answer.cached for answer in warm] == [answer.cached for answer in own] == [0, 2 * chunk, 3 * chunk, 5 * chunk]
    )
    assert differs(warm, own) == 0


def test_the_third_prompt_that_begins_alike_hits(engine, hybrid):
    """Where prompts part, a boundary is stored by the second one on its way, with the states if there are any."""
    with engine(auto(), **hybrid.options) as served:
        chunk = chunk_of(served)
        shared = prompt(0, 2 * chunk + 5)
        asked = [prompt(1 + i, 5 * chunk + 5, shared) for i in range(4)]
        warm = []
        for each in asked:
            forget(served)
            warm += served.ask(each)
        served.assert_at_rest()
    with engine(**hybrid.options) as plain:
        truth = [plain.ask(each)[0] for each in asked]
    assert differs(warm, truth) <= hybrid.noise
    assert [answer.cached for answer in warm[2:]] == [2 * chunk] * 2


def test_several_requests_in_a_batch(engine, float32):
    asked = [prompt(70 + i, 700 + 40 * i) for i in range(4)]
    with engine(auto(), **float32.options) as served:
        cold = served.ask(*asked)
        own = served.own_hits(*asked)
        forget(served)
        warm = served.ask(*asked)
        served.assert_at_rest()
        chunk = chunk_of(served)
    assert [answer.cached for answer in warm] == [(len(each) - 1) // chunk * chunk for each in asked]
    assert all(a.cached >= b.cached > 0 for a, b in zip(own, warm, strict=True))
    assert differs(warm, cold) < NOISE


def test_a_load_that_fails_is_computed(engine, hybrid, monkeypatch):
    asked, load = prompt(71, 1050), HostMover.load

    def fail(self, job, slots, pages, after=None):
        if job > 0:
            raise BackendError("told to fail")
        load(self, job, slots, pages, after)

    with engine(auto(), **hybrid.options) as served:
        cold = served.ask(asked)[0]
        (own,) = served.own_hits(asked)
        with monkeypatch.context() as patch:
            patch.setattr(HostMover, "load", fail)
            forget(served)
            again = served.ask(asked)[0]
            served.assert_at_rest()
        forget(served)
        warm = served.ask(asked)[0]
        served.assert_at_rest()
    assert (again.cached, again.differs(cold)) == (0, 0)
    assert (warm.cached, warm.differs(own)) == (own.cached, 0)


def test_another_salt_does_not_hit(engine, hybrid):
    asked = prompt(72, 1050)
    with engine(auto(), **hybrid.options) as served:
        cached = []
        for salt in (None, "alice", "bob", "alice", None):
            forget(served)
            cached.append(served.ask(asked, salt=salt)[0].cached)
        hit = 1050 // chunk_of(served) * chunk_of(served)
    assert cached == [0, 0, 0, hit, hit]


def test_without_the_engines_prefix_cache(engine, hybrid, said):
    """vLLM keeps no states then, and the engine says that it is not served."""
    asked = prompt(73, 1050)
    options = hybrid.options | {"enable_prefix_caching": False}
    with engine(**options) as plain:
        truth = plain.ask(asked)[0]
    with engine(auto(), **options) as served:
        cold, warm = served.ask(asked)[0], served.ask(asked)[0]
        if hybrid.kind in STATES:
            assert any("vLLM keeps no recurrent states of prefixes" in line for line in said())
        else:
            served.assert_at_rest()
    assert cold.differs(truth) == 0
    assert warm.cached == (0 if hybrid.kind in STATES else 1024)
    assert warm.differs(truth) < NOISE


@pytest.mark.more
def test_preempted_requests_continue(engine, float32):
    from vllm import SamplingParams

    asked = [prompt(80 + i, 600) for i in range(3)]
    sampling = SamplingParams(temperature=0, max_tokens=60, detokenize=False, ignore_eos=True)
    with engine(**float32.options) as plain:
        truth = [list(answer.tokens) for answer in plain.ask(*asked, tokens=60)]
    with engine(auto(save_decode=True), **float32.options) as served:
        llm, answers = served.llm.llm_engine, {}
        for number, each in enumerate(asked):
            llm.add_request(f"{number}", {"prompt_token_ids": each}, sampling)
        for step in range(100):
            if step == 40:
                served.outcomes()
                assert llm.reset_prefix_cache(reset_running_requests=True)
            answers |= {output.request_id: list(output.outputs[0].token_ids) for output in llm.step()}
        while llm.has_unfinished_requests():
            answers |= {output.request_id: list(output.outputs[0].token_ids) for output in llm.step()}
        resumed = [outcome.loaded for outcome in served.outcomes()]
        served.assert_at_rest()
    assert [answers[f"{number}"] for number in range(3)] == truth
    assert any(resumed)


def test_little_room_and_much_traffic(engine, float32, tmp_path):
    """Prompts of a few families in random batches, with an arena for a few boundaries and a disk for some more."""
    drawn = random.Random(1)
    families = [prompt(90 + i, 200 + 150 * i) for i in range(3)]
    pool = [prompt(100 + i, 560 + 45 * i, families[i % 3]) for i in range(9)]
    with engine(**float32.options) as plain:
        truth = [plain.ask(each, tokens=2)[0] for each in pool]
    stack = auto_and_disk(tmp_path, "5MiB", save_decode=True)
    stack["tiers"][1]["capacity"] = "10MiB"
    cached = 0
    with engine(stack, **float32.options, num_gpu_blocks_override=400) as served:
        for _ in range(10):
            numbers = [drawn.randrange(len(pool)) for _ in range(drawn.randint(1, 4))]
            if drawn.random() < 0.7:
                forget(served)
            answers = served.ask(*(pool[number] for number in numbers), tokens=2)
            assert differs(answers, [truth[number] for number in numbers]) < NOISE
            cached += sum(answer.cached for answer in answers)
        served.assert_at_rest()
    assert cached > 3000
