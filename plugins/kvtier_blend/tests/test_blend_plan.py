"""A plan says of each token whether it moves or is computed, and fits the engine's blocks."""

from __future__ import annotations

import random

import pytest

from kvtier_blend.content_index import KnownChunk, Moved
from kvtier_blend.plan import Plan, Refused, make_plan, stretches
from kvtier_blend.settings import BlendSettings

BLOCK, CHUNK = 4, 8
SIZES = {"chunk_tokens": CHUNK, "block_tokens": BLOCK}
NOTHING = Refused("no chunk after its prefix is known")


def settings(**changed):
    return BlendSettings(accept_quality="unmeasured", **{"tail": 0.0, "link": 0, "min_tokens": 0} | changed)


def moved(at, path, number):
    return Moved(at, KnownChunk(0, b"", path, number))


@pytest.mark.parametrize("seed", range(200))
def test_each_token_moves_or_is_computed(seed):
    rng = random.Random(seed)
    start = rng.randrange(4) * BLOCK
    paths = [[bytes([which, number]) for number in range(20)] for which in range(3)]
    chunks, at = [], start
    for _ in range(rng.randrange(1, 8)):
        at += rng.randrange(2 * CHUNK) * rng.randrange(2)
        which, number = rng.randrange(3), rng.randrange(1, 15)
        for each in range(rng.randrange(1, 4)):
            chunks.append(moved(at, paths[which], number + each))
            at += CHUNK
    tokens, link = at + rng.randrange(1, CHUNK), rng.choice([0, 1, 5, 100])
    plan = make_plan(chunks, start, tokens, settings(link=link), **SIZES)
    assert isinstance(plan, Plan)
    assert plan.start == start and not plan.end % BLOCK and start < plan.end < tokens
    assert len(plan.chunks) * CHUNK <= plan.end - plan.start, "they are loaded into the blocks of the request"
    computed = {token for begin, end in plan.runs for token in range(begin, end)}
    assert len(computed) == plan.computed == sum(end - begin for begin, end in plan.runs)
    known = {token for chunk in plan.chunks for token in range(chunk.at, chunk.at + CHUNK)}
    linked = {
        token
        for stretch in stretches(plan.chunks, CHUNK)
        for token in range(stretch[0].at, min(stretch[0].at + link, stretch[-1].at + CHUNK))
    }
    span = set(range(start, plan.end))
    assert computed == (span - known) | (span & linked)
    assert list(plan.runs) == sorted(plan.runs)


def test_a_prompt_with_a_new_part_is_computed_and_stored():
    path = [b""] * 9
    chunks = [moved(0, path, 1), moved(3 * CHUNK, path, 2)]
    why = "{} tokens of it in a row are new"
    assert make_plan(chunks, 0, 5 * CHUNK, settings(), **SIZES) == Refused(why.format(2 * CHUNK), frozenset({0, 3}))
    refused = make_plan(chunks[:1], 0, 4 * CHUNK + 1, settings(), **SIZES)
    assert refused == Refused(why.format(3 * CHUNK), frozenset({0}))
    refused = make_plan([moved(CHUNK + 3, path, 1)], CHUNK, 6 * CHUNK, settings(), **SIZES)
    assert refused.known == {1}, "the next one has new tokens"
    assert isinstance(make_plan([chunks[0], moved(3 * CHUNK - 1, path, 2)], 0, 5 * CHUNK, settings(), **SIZES), Plan)


def test_the_tail_is_computed_by_the_engine():
    path = [b""] * 9
    chunks = [moved(number * CHUNK, path, number + 1) for number in range(8)]
    plan = make_plan(chunks, 0, 8 * CHUNK, settings(tail=0.5), **SIZES)
    assert plan == Plan(0, 4 * CHUNK, tuple(chunks[:4]), ())
    assert make_plan(chunks, 0, 8 * CHUNK, settings(tail=0.95), **SIZES) == NOTHING


def test_the_tail_may_begin_in_a_known_chunk():
    path = [b""] * 9
    chunks = [moved(0, path, 1), moved(2 * CHUNK + 4, path, 2)]
    plan = make_plan(chunks, 0, 4 * CHUNK, settings(tail=0.25), **SIZES)
    assert plan == Plan(0, CHUNK, tuple(chunks[:1]), ()), "up to the second one are 12 tokens, and 16 to the tail"


def test_a_prompt_of_which_little_moves_is_computed():
    path = [b""] * 9
    why = make_plan([moved(0, path, 1)], 0, CHUNK + 1, settings(min_tokens=CHUNK + 1), **SIZES)
    assert why == Refused(f"{CHUNK} of its tokens can be moved, fewer than {CHUNK + 1}")
    assert make_plan([], 0, 100, settings(), **SIZES) == NOTHING
