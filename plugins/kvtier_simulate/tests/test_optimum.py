"""The bound is what the best of all plans would have had, and no plan of ours or anybody's has more."""

from __future__ import annotations

import functools
import itertools

from hypothesis import given
from hypothesis import strategies as st

from kvtier_simulate.optimum import Optimum
from kvtier_simulate.traces import Prompt, Trace

#: Words over two letters: each prompt is a path in a tree, named by its prefixes.
words = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=6)


def trace_of(prompts):
    """The chunk of a prompt's i-th letter is its beginning up to there."""
    paths = [tuple(prompt[: i + 1] for i in range(len(prompt))) for prompt in prompts]
    return Trace("tiny", 1, tuple(Prompt(float(at), len(path), path) for at, path in enumerate(paths)))


def by_trying(prompts, capacity):
    """The most hits of whatever could be kept after each prompt; only a held beginning is a hit."""
    paths = [prompt.path for prompt in trace_of(prompts).prompts]

    @functools.cache
    def most(number, held):
        if number == len(paths):
            return 0
        path = paths[number]
        hits = next((i for i, key in enumerate(path) if key not in held), len(path))
        at_hand = sorted(held | set(path))
        sizes = range(min(capacity, len(at_hand)) + 1)
        keeps = (frozenset(keep) for size in sizes for keep in itertools.combinations(at_hand, size))
        return hits + max(most(number + 1, keep) for keep in keeps)

    return most(0, frozenset())


@given(words, st.integers(1, 3))
def test_the_optimum_is_what_trying_everything_finds(prompts, capacity):
    assert sum(Optimum(trace_of(prompts)).hits(capacity)) == by_trying(prompts, capacity)


@given(words, st.integers(1, 8))
def test_a_larger_tier_holds_what_a_smaller_one_does(prompts, capacity):
    optimum = Optimum(trace_of(prompts))
    assert all(small <= large for small, large in zip(optimum.hits(capacity), optimum.hits(capacity + 1), strict=True))


def test_a_path_that_comes_back_as_a_whole_is_kept_from_its_beginning():
    optimum = Optimum(trace_of(["aaaa", "b", "aaaa"]))
    assert [optimum.hits(capacity) for capacity in (1, 3, 9)] == [[0, 0, 1], [0, 0, 3], [0, 0, 4]]


def test_chunks_that_never_return_take_no_room():
    assert Optimum(trace_of(["a", "bbbb", "a"])).hits(1) == [0, 0, 1]


def test_of_two_the_one_that_comes_back_sooner_is_kept():
    assert Optimum(trace_of(["a", "b", "b", "a"])).hits(1) == [0, 0, 1, 0]
