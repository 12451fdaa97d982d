"""Chunks of earlier prompts are found by their tokens at any place, for the same salt alone."""

from __future__ import annotations

import random

import pytest

from kvtier_blend import content_index
from kvtier_blend.content_index import ContentIndex

CHUNK = 8
SALT = b""


def path(rng, chunks):
    return [rng.randbytes(32) for _ in range(chunks)]


def text(rng, tokens, vocabulary=50_000):
    return rng.choices(range(vocabulary), k=tokens)


@pytest.mark.parametrize("seed", range(20))
def test_every_chunk_is_found_where_its_tokens_are(seed):
    rng = random.Random(seed)
    index, prompts = ContentIndex(CHUNK), [text(rng, 10 * CHUNK) for _ in range(5)]
    paths = [path(rng, 10) for _ in prompts]
    for tokens, keys in zip(prompts, paths, strict=True):
        index.learn(SALT, tokens, keys, 0)
    asked, expected, begin = text(rng, 13), [], 5
    for _ in range(12):
        which, first = rng.randrange(5), rng.randrange(1, 9)
        chunks = rng.randrange(1, 10 - first + 1)
        for number in range(first, first + chunks):
            expected.append((len(asked), paths[which][number]))
            asked += prompts[which][number * CHUNK : (number + 1) * CHUNK]
        asked += text(rng, rng.randrange(20))
    assert [(moved.at, moved.known.key) for moved in index.find(SALT, asked, begin)] == expected
    later = expected[3][0] + 1
    assert [moved.at for moved in index.find(SALT, asked, later)] == [at for at, _ in expected if at >= later]


def test_the_chunk_that_begins_a_prompt_is_not_learnt():
    rng = random.Random(0)
    index, tokens = ContentIndex(CHUNK), text(rng, 3 * CHUNK)
    index.learn(SALT, tokens, path(rng, 3), 0)
    assert [moved.at for moved in index.find(SALT, [7, *tokens], 0)] == [1 + CHUNK, 1 + 2 * CHUNK]


def test_a_salt_finds_nothing_of_another():
    rng = random.Random(0)
    index, tokens = ContentIndex(CHUNK), text(rng, 4 * CHUNK)
    index.learn(b"alice", tokens, path(rng, 4), 0)
    assert not index.find(b"bob", tokens, 0) and not index.find(SALT, tokens, 0)
    assert len(index.find(b"alice", tokens, 0)) == 3


def test_tokens_with_the_hash_of_others_are_not_found(monkeypatch):
    """With the base 1 the hash of a window is the sum of its tokens: whoever knew the base could prepare others."""
    monkeypatch.setattr(content_index.secrets, "randbits", lambda bits: 0)
    rng = random.Random(0)
    index, tokens = ContentIndex(CHUNK), text(rng, 2 * CHUNK)
    index.learn(SALT, tokens, path(rng, 2), 0)
    chunk = tokens[CHUNK:]
    assert len(index.find(SALT, chunk, 0)) == 1
    assert not index.find(SALT, chunk[::-1], 0)


def test_the_chunks_that_were_learnt_first_are_forgotten_first():
    rng = random.Random(0)
    index, tokens = ContentIndex(CHUNK, most=4), text(rng, 6 * CHUNK)
    keys = path(rng, 6)
    index.learn(SALT, tokens[: 4 * CHUNK], keys, 0)
    index.learn(SALT, tokens[CHUNK : 2 * CHUNK], keys, 1)  # again
    index.learn(SALT, tokens[4 * CHUNK :], keys, 4)
    assert len(index) == 4
    assert [moved.known.number for moved in index.find(SALT, tokens, 0)] == [1, 3, 4, 5]


def test_what_no_tier_has_is_forgotten():
    rng = random.Random(0)
    index, tokens = ContentIndex(CHUNK), text(rng, 4 * CHUNK)
    index.learn(SALT, tokens, path(rng, 4), 0)
    index.forget(index.find(SALT, tokens, 0)[1].known)
    assert [moved.known.number for moved in index.find(SALT, tokens, 0)] == [1, 3]
    index.clear()
    assert not len(index)


def test_other_keys_replace_those_of_the_same_tokens():
    """The prompt that had them last may have been evicted, with all its chunks."""
    rng = random.Random(0)
    index, chunk = ContentIndex(CHUNK), text(rng, CHUNK)
    first, second = path(rng, 3), path(rng, 5)
    index.learn(SALT, chunk, first, 2)
    index.learn(SALT, chunk, second, 4)
    (moved,) = index.find(SALT, chunk, 0)
    assert moved.known.key == second[4]
