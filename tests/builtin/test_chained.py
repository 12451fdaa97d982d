"""Keys that are the same on every machine, and differ in whatever the KV depends on."""

from __future__ import annotations

import array
import os
import subprocess
import sys
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_core.builtin.chained import ChainedConfig
from kvtier_core.errors import ContractError
from kvtier_core.types import Namespace

NAMESPACE = Namespace.of({"model": "golden", "block": 16})
TOKENS = list(range(9))

#: From hashlib by hand, after the formulas in the module. They change only with the format version.
GOLDEN = [
    "b86b7b1062784b343fdf4dfe019ffc64f61c8fb5b2fbdc2c7be92a8499cc26ea",
    "51eaf6146b766afa0c83db81db1813ea3e39c26e787b2a5247ed31a08ff55fc9",
]
GOLDEN_SALTED = [
    "d0bbdbc9fbbeb69bd379642582d2447e172cd0806b76b1ab6a4dcf48e8ad58d6",
    "449eea91e5e59b1060f3c8e17140c7cbd615a94737c700ff7807f9177b658795",
]


def database(namespace=NAMESPACE, chunk_tokens=4):
    return ChainedConfig().open(namespace, chunk_tokens)


def keys(tokens=TOKENS, **given):
    return database().keys(tokens, **given)


def test_golden_vectors():
    assert [key.hex() for key in keys()] == GOLDEN
    assert [key.hex() for key in keys(salt=b"tenant", extra={1: b"image"})] == GOLDEN_SALTED


def test_a_chunk_is_named_when_it_is_full():
    assert len(keys(range(3))) == 0
    assert len(keys(range(4))) == 1
    assert len(keys(range(11))) == 2


def test_a_key_depends_on_all_that_the_kv_depends_on():
    first, second = keys()
    others = [
        keys([8, *TOKENS[1:]]),
        keys(salt=b"s"),
        keys(extra={0: b"e"}),
        database(Namespace.of({"model": "other"})).keys(TOKENS),
    ]
    for other in others:
        assert first != other[0]
        assert second != other[1], "a later key does not carry what went before"
    assert keys(extra={1: b"e"})[0] == first
    assert keys(extra={1: b"e"})[1] != second
    assert len({first, second, *(key for other in others for key in other)}) == 10


def test_chunks_of_another_length_share_no_key():
    assert not set(database(chunk_tokens=2).keys([0] * 8)) & set(database(chunk_tokens=4).keys([0] * 8))


def test_extra_does_not_run_into_tokens_or_salt():
    assert keys(salt=b"ab", extra={0: b"c"}) != keys(salt=b"a", extra={0: b"bc"})
    assert keys(TOKENS[:4], extra={0: b"\4\0\0\0"}) != keys(TOKENS[:5])


def test_the_kind_of_sequence_does_not_matter():
    assert keys(tuple(TOKENS)) == keys(array.array("q", TOKENS)) == keys(range(9)) == keys()


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(0, 12))
def test_known_keys_are_taken_over(tokens, known):
    whole = keys(tokens, extra={2: b"e"})
    assert keys(tokens, known=whole[:known], extra={2: b"e"}) == whole


def test_known_keys_are_not_computed_again():
    marker = b"k" * 32
    assert keys(known=[marker])[0] == marker
    assert keys(TOKENS[:3], known=[marker]) == []


def test_a_prefix_has_the_keys_of_the_whole():
    assert keys(TOKENS[:5]) == keys()[:1]


@pytest.mark.parametrize("token", [-1, 2**32, 1.5])
def test_invalid_tokens(token):
    with pytest.raises(ContractError, match="^token ids must be 32-bit whole numbers: "):
        keys([0, 1, 2, token])


def test_two_processes_with_two_hash_seeds_agree():
    source = textwrap.dedent("""
        from kvtier_core.builtin.chained import ChainedConfig
        from kvtier_core.types import Namespace
        database = ChainedConfig().open(Namespace.of({"block": 16, "model": "golden"}), 4)
        print(*(key.hex() for key in database.keys(range(9))))
    """)
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", source],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.split() == GOLDEN
