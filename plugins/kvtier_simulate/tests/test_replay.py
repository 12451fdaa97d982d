"""A replay is the serving code without its bytes: a plain model of the rules, and real memory, say the same."""

from __future__ import annotations

import itertools
import json
import random

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_core.builtin.heap import HeapConfig
from kvtier_core.config.model import ArenaTierConfig
from kvtier_core.config.open import Runtime, open_stack
from kvtier_core.config.registry import Registry
from kvtier_core.interfaces import EvictionConfig, OpenContext
from kvtier_core.policies.lru import Lru, LruConfig
from kvtier_core.types import KEY_NBYTES, Namespace, Nbytes
from kvtier_policies.fifo import FifoConfig
from kvtier_simulate.costs import Costs, Speed
from kvtier_simulate.dry_run import Clock
from kvtier_simulate.replay import Tally, replay, serve
from kvtier_simulate.stacks import all_policies, read_policies, stack_of
from kvtier_simulate.study import Study, layout_of
from kvtier_simulate.traces import Prompt, Trace, read_trace

TOKENS = 16
LAYOUT = layout_of(TOKENS, 1024)
FRAME = LAYOUT.frame_nbytes
COSTS = Costs({"cpu": Speed(20.0), "disk": Speed(3.0)}, 8000.0, LAYOUT.payload_nbytes)


def trace_of(prompts, partial=0):
    """Chunks are named by the beginnings of words; the last one of a prompt lacks ``partial`` tokens."""

    def key(text):
        return text.encode().ljust(KEY_NBYTES, b"\0")

    paths = [tuple(key(prompt[: i + 1]) for i in range(len(prompt))) for prompt in prompts]
    return Trace(
        "words", TOKENS, tuple(Prompt(float(at), len(path) * TOKENS - partial, path) for at, path in enumerate(paths))
    )


def traffic(seed, prompts=400):
    """Talks that go on, and beginnings that many share."""
    rng = random.Random(seed)
    talks = ["".join(rng.choices("ab", k=2)) for _ in range(20)]
    for _ in range(prompts):
        user = rng.randrange(len(talks))
        talks[user] += "".join(rng.choices("abcdefgh", k=rng.randrange(1, 5)))
        yield talks[user]
        if len(talks[user]) > 12:
            talks[user] = "".join(rng.choices("ab", k=2))


def stack(*chunks, policy=LruConfig):
    capacities = [Nbytes(count * FRAME) for count in chunks]
    return stack_of(capacities, [policy() for _ in chunks], TOKENS)


def run(trace, config):
    return replay(trace, config, COSTS, LAYOUT)


def lru_by_hand(trace, capacity):
    """Hits of each prompt under the rules, told once more: leaves go first, the oldest of them before all."""
    used: dict[bytes, int] = {}
    clock = itertools.count()
    for prompt in trace.prompts:
        hits = next((i for i, key in enumerate(prompt.path) if key not in used), len(prompt.path))
        yield hits
        for key in reversed(prompt.path):
            if key in used:
                used[key] = next(clock)
        absent = [key for key in prompt.path if key not in used]
        while len(used) + len(absent) > capacity:
            leaves = [k for k in used if k not in prompt.path and not any(_under(other, k) for other in used)]
            if not leaves:
                break
            del used[min(leaves, key=used.__getitem__)]
        for key in reversed(absent[: capacity - len(used)]):
            used[key] = next(clock)


def _under(key, other):
    return key != other and key.rstrip(b"\0").startswith(other.rstrip(b"\0"))


@given(st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=30), st.integers(1, 9))
def test_hits_are_those_of_the_rules(prompts, capacity):
    trace = trace_of(prompts)
    tally = run(trace, stack(capacity))
    assert [tokens // TOKENS for tokens in tally.each] == list(lru_by_hand(trace, capacity))


@pytest.mark.parametrize("policy", all_policies(Registry.discover()))
def test_real_memory_would_have_had_the_same_hits(policy):
    """The same stack with a heap arena and real threads; only the time is the trace's."""
    trace = trace_of(traffic(1))
    (config,) = read_policies(policy, 1, Registry.discover())
    simulated = stack_of([Nbytes(40 * FRAME)], [config], TOKENS)
    real = attrs.evolve(simulated, tiers=(ArenaTierConfig("cpu", HeapConfig(), Nbytes(40 * FRAME), config),))
    clock = Clock()
    manager = open_stack(real, OpenContext(Namespace.of({"test": "replay"}), LAYOUT), Runtime(clock=clock))
    hits = []
    for prompt in trace.prompts:
        clock.now = prompt.at
        hits.append(len(serve(manager, prompt.path, Tally().written)) * TOKENS)
    manager.close()
    tally = run(trace, simulated)
    assert tally.each == hits
    assert 0 < sum(hits) < sum(Study(trace, LAYOUT).bound(simulated).each)


def test_chunks_that_left_memory_come_from_disk():
    trace = trace_of(["abcd", "xyzw", "abcd", "abcd"])
    tally = run(trace, stack(4, 20))
    assert tally.each == [0, 0, 4 * TOKENS, 4 * TOKENS]
    assert tally.hits == {"cpu": 4 * TOKENS, "disk": 4 * TOKENS}


def test_bytes_that_go_into_a_tier_are_counted():
    tally = run(trace_of(["abcd", "xyzw", "abcd"]), stack(4, 20))
    assert tally.written == {"cpu": 12 * LAYOUT.payload_nbytes, "disk": 8 * FRAME}


def test_a_prefill_is_reads_and_computation():
    cold, _, longer = run(trace_of(["abcd", "xyzw", "abcde"]), stack(4, 20)).seconds
    assert cold == 4 * TOKENS / 8000
    assert longer == pytest.approx(TOKENS / 8000 + 4 * LAYOUT.payload_nbytes / 3e9)


def test_a_chunk_that_must_be_named_twice_is_held_after_the_second_prompt(tmp_path):
    """Of a trace as it is read: each chunk is counted by itself."""
    lines = [
        {"timestamp": at, "input_length": 32, "hash_ids": ids}
        for at, ids in enumerate([[1, 2], [3, 4], [1, 2], [1, 2]])
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    once = stack(8)
    twice = attrs.evolve(once, tiers=(attrs.evolve(once.tiers[0], store_after=2),))
    assert run(read_trace(file, TOKENS), twice).each == [0, 0, 0, 32]


def test_a_latency_is_paid_once_a_tier_and_prompt():
    costs = attrs.evolve(COSTS, speeds={"disk": Speed(1.0, 0.5)}, chunk_nbytes=10**9)
    assert costs.seconds(0, {"disk": 2}) == 2.5
    assert costs.seconds(8000, {"disk": 0}) == 1.0


def test_a_chunk_that_a_prompt_fills_in_part_counts_as_its_tokens():
    tally = run(trace_of(["ab", "ab"], partial=6), stack(9))
    assert tally.each == [0, 26]
    assert tally.hit_rate == 0.5


def test_a_prompt_that_is_larger_than_memory_keeps_its_beginning():
    assert run(trace_of(["abcdef", "abcdef"]), stack(3)).each == [0, 3 * TOKENS]


def test_p95_is_the_time_that_one_in_twenty_exceeds():
    assert Tally(seconds=[float(i) for i in range(1, 101)]).p95 == 95.0
    assert Tally(seconds=[2.0]).p95 == 2.0


def test_the_bound_of_two_tiers_has_each_chunk_once():
    """Of two chunks that come back the sooner is in memory."""
    trace = trace_of(["a", "b", "b", "a", "c", "c"])
    bound = Study(trace, LAYOUT).bound(stack(1, 1))
    assert bound.hits == {"cpu": 2 * TOKENS, "disk": TOKENS}


@pytest.mark.parametrize("policy", [LruConfig, FifoConfig])
@pytest.mark.parametrize("sizes", [(10,), (30,), (10, 30)])
def test_no_policy_exceeds_the_bound(policy, sizes):
    study = Study(trace_of(traffic(2)), LAYOUT)
    tally, bound = study.run(stack(*sizes, policy=policy)), study.bound(stack(*sizes))
    assert sum(tally.each) < sum(bound.each)
    assert bound.mean < tally.mean < study.nothing().mean


def test_time_and_hints_are_the_traces():
    seen, hints = [], {"session": "ends"}

    @attrs.frozen
    class WatchConfig(EvictionConfig):
        type = "watch"

        def open(self):
            policy = Lru()
            policy.request = lambda path, now, hints: seen.append((now, hints))
            return policy

    trace = trace_of(["a", "b", "c"])
    run(
        attrs.evolve(trace, prompts=(*trace.prompts[:2], attrs.evolve(trace.prompts[2], hints=hints))),
        stack(9, policy=WatchConfig),
    )
    assert seen == [(0.0, {}), (1.0, {}), (2.0, hints)]
