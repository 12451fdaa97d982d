"""The laws of a token database. Subclass `TokenDatabaseLaws` and name a config."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, TypeVar

import pytest

from kvtier_core.interfaces import TokenDatabase, TokenDatabaseConfig
from kvtier_core.types import KEY_NBYTES, ChunkKey
from kvtier_testing.laws.base import Laws, in_new_process
from kvtier_testing.samples import make_namespace

_CHUNKS = 6
_TOKEN_BITS = 31  # a token id is a whole number from 0 to 2^31 - 1
_LONG = bytes(range(100))  # of a salt, and of an item that a chunk depends on

T = TypeVar("T")


class TokenDatabaseLaws(Laws[TokenDatabaseConfig]):
    """Subclass, and implement `config`.

    Two chunks may have one key only if the engine would compute the same KV for both. So whatever the KV depends on
    enters the key: every token before, the salt, the items, the namespace, and how many tokens a chunk has.
    """

    contract = "kvtier_core.interfaces.token_database"
    chunk_tokens: ClassVar[int] = 16

    def open(self, folder: Path, model: str = "tiny", chunk_tokens: int | None = None) -> TokenDatabase:
        """The database under test, for the namespace of a model."""
        return self.config(folder).open(make_namespace(model), chunk_tokens or self.chunk_tokens)

    def tokens(self, seed: int = 0) -> list[int]:
        """Six chunks and a part of one, of the whole range that a token id may have."""
        rng = random.Random(seed)
        count = _CHUNKS * self.chunk_tokens + self.chunk_tokens // 2
        return [rng.randrange(1 << _TOKEN_BITS) for _ in range(count)]

    def test_one_key_of_32_bytes_per_full_chunk(self, tmp_path: Path) -> None:
        """Each whole chunk has one key of 32 bytes, and tokens beyond the last have none.

        Otherwise KV that is not there yet would be promised, or a chunk would never be found again.
        """
        database = self.open(tmp_path)
        for count in range(2 * self.chunk_tokens + 2):
            found, expected = len(database.keys(self.tokens()[:count])), count // self.chunk_tokens
            assert found == expected, f"{count} tokens are {expected} full chunks; keys() returned {found} keys"
        keys = database.keys(self.tokens())
        assert len(set(keys)) == _CHUNKS, f"{_CHUNKS} chunks have {len(set(keys))} distinct keys"
        kinds = {(type(key).__name__, len(key)) for key in keys}
        assert kinds == {("bytes", KEY_NBYTES)}, f"a key is {KEY_NBYTES} bytes; keys() returned {sorted(kinds)}"

    def test_deterministic(self, tmp_path: Path) -> None:
        """The same tokens have the same keys, in any instance and whatever was asked before.

        Otherwise an engine would not find what it stored a moment ago.
        """
        database = self.open(tmp_path)
        keys = database.keys(self.tokens())
        database.keys(self.tokens(seed=1))
        assert database.keys(self.tokens()) == keys, "the same tokens have other keys after a call for other tokens"
        assert database.keys(tuple(self.tokens())) == keys, "the same tokens, as a tuple, have other keys"
        assert self.open(tmp_path).keys(self.tokens()) == keys, "a second instance has other keys for the same tokens"

    def test_arguments_stay_as_they_are(self, tmp_path: Path) -> None:
        """The caller keeps using its lists, and may change a result without affecting later ones.

        Otherwise keys of one request would appear in the path of another: its KV would be served for other tokens.
        """
        database, tokens, extra = self.open(tmp_path), self.tokens(), {1: b"cat"}
        keys = list(database.keys(tokens, extra=extra))
        known = keys[:2]
        result = database.keys(tokens, known=known, extra=extra)
        assert known == keys[:2], f"keys() changed the list `known`: it had 2 keys and now has {len(known)}"
        assert tokens == self.tokens(), "keys() changed the list of tokens"
        assert extra == {1: b"cat"}, f"keys() changed `extra`: it is {extra} now"
        assert database.keys(tokens, known=tuple(known), extra=extra) == keys, "`known` may be a tuple too"
        result.clear()
        assert database.keys(tokens, extra=extra) == keys, "a caller changed a returned list, and later results with it"

    def test_a_prefix_has_the_prefix_of_the_keys(self, tmp_path: Path) -> None:
        """Prompts with a common beginning have the same keys for its chunks.

        Otherwise prompts would share nothing, and only the very same prompt would ever be a hit.
        """
        database = self.open(tmp_path)
        keys = database.keys(self.tokens())
        for count in range(0, len(self.tokens()), 5):
            assert database.keys(self.tokens()[:count]) == keys[: count // self.chunk_tokens], (
                f"the first {count} tokens alone have other keys than as the beginning of a longer prompt"
            )

    def test_a_token_changes_its_key_and_all_that_follow(self, tmp_path: Path) -> None:
        """A key depends on all tokens before it, as KV does.

        Otherwise the KV of one prompt would be served for another that differs in an earlier token. Nothing can find
        that: the frame is the right one for its key.
        """
        database = self.open(tmp_path)
        keys = database.keys(self.tokens())
        for place in range(_CHUNKS * self.chunk_tokens):
            others = self.tokens()
            others[place] ^= 1
            _must_part(keys, database.keys(others), place // self.chunk_tokens, f"token {place} is another one")

    def test_every_bit_of_a_token_counts(self, tmp_path: Path) -> None:
        """Every bit of a token counts: a vocabulary has more than 65 536 tokens.

        Otherwise two prompts that differ in one token would share their KV: wrong answers that nothing can find.
        """
        database = self.open(tmp_path)
        keys = database.keys(self.tokens())
        for bit in range(_TOKEN_BITS):
            others = self.tokens()
            others[0] ^= 1 << bit
            _must_part(keys, database.keys(others), 0, f"two token ids differ in bit {bit} alone")

    def test_swapped_tokens_are_other_tokens(self, tmp_path: Path) -> None:
        """The order of tokens counts.

        Otherwise prompts with the same words in another order would share their KV: wrong answers that nothing can
        find.
        """
        database = self.open(tmp_path)
        others = self.tokens()
        others[0], others[1] = others[1], others[0]
        _must_part(database.keys(self.tokens()), database.keys(others), 0, "two tokens changed places")

    def test_chunk_sizes_share_nothing(self, tmp_path: Path) -> None:
        """A chunk of another size has another key, even if it ends at the same token.

        Otherwise frames of the old size would be read for the new one after a change of `chunk_tokens`, and count as
        damaged.
        """
        runs = {}
        for size in (self.chunk_tokens, self.chunk_tokens // 2, 2 * self.chunk_tokens):
            runs[size] = self.open(tmp_path, chunk_tokens=size).keys(self.tokens())
            expected = len(self.tokens()) // size
            assert len(runs[size]) == expected, (
                f"{len(self.tokens())} tokens are {expected} full chunks of {size}; keys() returned {len(runs[size])}"
            )
        _must_share_nothing(runs, "chunk_tokens is")

    def test_salts_share_nothing(self, tmp_path: Path) -> None:
        """Every byte of a salt counts, and so does its length.

        Otherwise one tenant's prompt would be served from another's cache, and the time it takes would tell what others
        ask.
        """
        database = self.open(tmp_path)
        salts = [b"", b"a", b"b", b"ab", b"\0", b"a\0", _LONG, _LONG + b"\0", *_changed(_LONG)]
        _must_share_nothing({salt: database.keys(self.tokens(), salt=salt) for salt in salts}, "the salt is")

    def test_namespaces_share_nothing(self, tmp_path: Path) -> None:
        """Another namespace has other keys for the same tokens.

        Otherwise the KV of one model would be looked up for another.
        """
        models = ("ours", "theirs")
        runs = {model: self.open(tmp_path, model).keys(self.tokens()) for model in models}
        _must_share_nothing(runs, "the namespace is that of model")

    def test_extra_changes_its_chunk_and_all_that_follow(self, tmp_path: Path) -> None:
        """The `extra` of a chunk counts for it and for all that follow.

        Otherwise prompts with different images in one place would share their KV: an answer would describe another
        prompt's image.
        """
        database = self.open(tmp_path)
        cat = {2: b"cat"}
        for ours, theirs, parting in [
            ({}, cat, 2),
            (cat, {2: b"dog"}, 2),
            (cat, {3: b"cat"}, 2),
            (cat, {2: b"cat", 4: b"dog"}, 4),
            ({2: b"cat", 4: b"dog"}, {2: b"cat", 4: b"cat"}, 4),
            *(({1: _LONG}, {1: other}, 1) for other in [*_changed(_LONG), _LONG[:-1], _LONG + b"\0"]),
        ]:
            first, second = (database.keys(self.tokens(), extra=extra) for extra in (ours, theirs))
            _must_part(first, second, parting, f"extra is {ours} in one call and {theirs} in another")

    def test_salt_and_extra_are_not_confused(self, tmp_path: Path) -> None:
        """The same bytes as salt and as `extra` make different keys.

        Otherwise a client who chooses its salt could reach the KV of another client's images.
        """
        database = self.open(tmp_path)
        salted, extra = database.keys(self.tokens(), salt=b"cat"), database.keys(self.tokens(), extra={0: b"cat"})
        _must_part(salted, extra, 0, "the same bytes are the salt in one call and extra[0] in another")

    @pytest.mark.parametrize("extra", [None, {0: b"cat", 4: b"dog"}])
    def test_known_keys_change_nothing(self, tmp_path: Path, extra: Mapping[int, bytes] | None) -> None:
        """With `known` keys the result is the same as without.

        Otherwise a prompt that grows, as every chat does, would lose its path at each turn.
        """
        database = self.open(tmp_path)
        keys = database.keys(self.tokens(), salt=b"salt", extra=extra)
        for count in range(_CHUNKS + 1):
            assert database.keys(self.tokens(), known=keys[:count], salt=b"salt", extra=extra) == keys, (
                f"the result is another one when the first {count} keys are handed in as `known`"
            )

    def test_every_process_has_the_same_keys(self, tmp_path: Path) -> None:
        """Keys are the same with any PYTHONHASHSEED: an engine must find what another one stored.

        Otherwise every lookup would be a miss after a restart, and in a fleet.
        """
        here = keys_of(self.config(tmp_path), self.chunk_tokens, self.tokens())
        for seed in (1, 2):
            there = in_new_process(keys_of, self.config(tmp_path), self.chunk_tokens, self.tokens(), hash_seed=seed)
            assert there == here, f"a new process, with PYTHONHASHSEED={seed}, has other keys for the same tokens"


def keys_of(config: TokenDatabaseConfig, chunk_tokens: int, tokens: Sequence[int]) -> list[ChunkKey]:
    """The keys that the config makes, with all that may enter them."""
    return config.open(make_namespace(), chunk_tokens).keys(tokens, salt=b"salt", extra={1: b"cat", 3: b"dog"})


def _changed(text: bytes) -> list[bytes]:
    """The same bytes but for one, each of them once."""
    return [text[:i] + bytes([text[i] ^ 0x80]) + text[i + 1 :] for i in range(len(text))]


def _must_part(ours: Sequence[ChunkKey], theirs: Sequence[ChunkKey], chunk: int, why: str) -> None:
    """Two runs must be equal before this chunk, and share no key from it on."""
    found = next((i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), len(ours))
    assert found == chunk, f"{why}: keys must differ from chunk {chunk} on, and they differ from chunk {found} on"
    assert not set(ours[chunk:]) & set(theirs[chunk:]), f"{why}: after chunk {chunk} the two runs share a key again"


def _must_share_nothing(runs: Mapping[T, Sequence[ChunkKey]], what: str) -> None:
    """No key may be in two runs."""
    owner: dict[ChunkKey, T] = {}
    for name, keys in runs.items():
        for key in keys:
            other = owner.setdefault(key, name)
            assert other == name, f"one key in two calls: {what} {other!r} in one and {name!r} in the other"
