"""The laws of a token database. Subclass `TokenDatabaseLaws` and name a config."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from kvtier_core.interfaces import TokenDatabase, TokenDatabaseConfig
from kvtier_core.testing.laws import Laws, in_new_process
from kvtier_core.testing.samples import make_namespace
from kvtier_core.types import KEY_NBYTES, ChunkKey

_CHUNKS = 6


class TokenDatabaseLaws(Laws):
    """Subclass, and implement `config`."""

    chunk_tokens: ClassVar[int] = 16

    def config(self, folder: Path) -> TokenDatabaseConfig:
        return super().config(folder)

    def open(self, folder: Path, model: str = "tiny") -> TokenDatabase:
        return self.config(folder).open(make_namespace(model), self.chunk_tokens)

    def tokens(self, seed: int = 0) -> list[int]:
        """Six chunks and a part of one, of the whole range that a token id may have."""
        rng = random.Random(seed)
        return [rng.randrange(1 << 31) for _ in range(_CHUNKS * self.chunk_tokens + self.chunk_tokens // 2)]

    def test_one_key_of_32_bytes_per_full_chunk(self, tmp_path: Path):
        database = self.open(tmp_path)
        for count in range(2 * self.chunk_tokens + 2):
            assert len(database.keys(self.tokens()[:count])) == count // self.chunk_tokens
        keys = database.keys(self.tokens())
        assert len(set(keys)) == _CHUNKS
        assert {(type(key), len(key)) for key in keys} == {(bytes, KEY_NBYTES)}

    def test_deterministic(self, tmp_path: Path):
        database = self.open(tmp_path)
        keys = database.keys(self.tokens())
        database.keys(self.tokens(seed=1))
        assert database.keys(self.tokens()) == keys
        assert database.keys(tuple(self.tokens())) == keys
        assert self.open(tmp_path).keys(self.tokens()) == keys

    def test_a_prefix_has_the_prefix_of_the_keys(self, tmp_path: Path):
        database = self.open(tmp_path)
        keys = database.keys(self.tokens())
        for count in range(0, len(self.tokens()), 5):
            assert database.keys(self.tokens()[:count]) == keys[: count // self.chunk_tokens]

    def test_a_token_changes_its_key_and_all_that_follow(self, tmp_path: Path):
        database = self.open(tmp_path)
        keys = database.keys(self.tokens())
        for place in range(_CHUNKS * self.chunk_tokens):
            others = self.tokens()
            others[place] ^= 1
            assert parting(keys, database.keys(others)) == place // self.chunk_tokens

    def test_swapped_tokens_are_other_tokens(self, tmp_path: Path):
        database = self.open(tmp_path)
        others = self.tokens()
        others[0], others[1] = others[1], others[0]
        assert parting(database.keys(self.tokens()), database.keys(others)) == 0

    def test_salts_share_nothing(self, tmp_path: Path):
        database = self.open(tmp_path)
        runs = [database.keys(self.tokens(), salt=salt) for salt in (b"", b"a", b"b", b"ab", b"\0", b"a\0")]
        assert len({key for run in runs for key in run}) == len(runs) * _CHUNKS

    def test_namespaces_share_nothing(self, tmp_path: Path):
        ours, theirs = (self.open(tmp_path, model).keys(self.tokens()) for model in ("ours", "theirs"))
        assert not set(ours) & set(theirs)

    def test_extra_changes_its_chunk_and_all_that_follow(self, tmp_path: Path):
        database = self.open(tmp_path)
        runs = [database.keys(self.tokens(), extra=extra) for extra in (None, {2: b"cat"}, {2: b"dog"}, {3: b"cat"})]
        assert [parting(runs[0], run) for run in runs[1:]] == [2, 2, 3]
        assert parting(runs[1], runs[2]) == 2
        assert parting(runs[1], runs[3]) == 2

    def test_salt_and_extra_are_not_confused(self, tmp_path: Path):
        database = self.open(tmp_path)
        salted = database.keys(self.tokens(), salt=b"cat")
        assert parting(salted, database.keys(self.tokens(), extra={0: b"cat"})) == 0

    @pytest.mark.parametrize("extra", [None, {0: b"cat", 4: b"dog"}])
    def test_known_keys_change_nothing(self, tmp_path: Path, extra: Mapping[int, bytes] | None):
        database = self.open(tmp_path)
        keys = database.keys(self.tokens(), salt=b"salt", extra=extra)
        for count in range(_CHUNKS + 1):
            assert database.keys(self.tokens(), known=keys[:count], salt=b"salt", extra=extra) == keys

    def test_every_process_has_the_same_keys(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        here = keys_of(self.config(tmp_path), self.chunk_tokens, self.tokens())
        for seed in ("1", "2"):
            monkeypatch.setenv("PYTHONHASHSEED", seed)
            assert in_new_process(keys_of, self.config(tmp_path), self.chunk_tokens, self.tokens()) == here


def parting(ours: Sequence[ChunkKey], theirs: Sequence[ChunkKey]) -> int:
    """Where two runs of keys part; after that they must share nothing."""
    common = next((i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), len(ours))
    assert not set(ours[common:]) & set(theirs[common:]), "runs that have parted share a key"
    return common


def keys_of(config: TokenDatabaseConfig, chunk_tokens: int, tokens: Sequence[int]) -> list[ChunkKey]:
    """The keys that the config makes, with all that may enter them."""
    return config.open(make_namespace(), chunk_tokens).keys(tokens, salt=b"salt", extra={1: b"cat", 3: b"dog"})
