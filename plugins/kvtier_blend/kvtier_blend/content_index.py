"""Finds chunks of earlier prompts by their tokens, at any place of a new prompt.

The keys of chunks depend on all tokens before them, so they find nothing after another beginning. This index names a
chunk by its own tokens and the salt alone. It is in memory, holds no KV, and knows nothing about what tiers have now.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from kvtier_core.types import ChunkKey

_U64 = 1 << 64


@attrs.frozen
class KnownChunk:
    """A chunk of an earlier prompt."""

    name: int  #: in the index
    digest: bytes  #: of its salt and tokens
    path: Sequence[ChunkKey]  #: of the earlier prompt, root first; other chunks of it share the list
    number: int  #: of this chunk in the path

    @property
    def key(self) -> ChunkKey:
        return self.path[self.number]


@attrs.frozen
class Moved:
    """A known chunk, and its place in another prompt."""

    at: int  #: of its first token
    known: KnownChunk


class ContentIndex:
    """The chunks that were stored or loaded last, by salt and tokens.

    Every window of a prompt is compared by a polynomial hash that rolls along, and what that finds by a digest. The
    base of the polynomial is random: nobody can prepare tokens with the hash of others.
    """

    def __init__(self, chunk_tokens: int, most: int = 65_536):
        """It keeps ``most`` chunks, of about 200 bytes each."""
        self._chunk_tokens = chunk_tokens
        self._most = most
        self._base = secrets.randbits(64) | 1  # odd, so that it has an inverse
        self._powers = np.ones(1, dtype=np.uint64)
        self._inverses = np.ones(1, dtype=np.uint64)
        self._known: dict[int, KnownChunk] = {}  # by the hash of salt and tokens, the one that was used last at the end

    def __len__(self) -> int:
        return len(self._known)

    def learn(self, salt: bytes, tokens: Sequence[int], path: Sequence[ChunkKey], first: int) -> None:
        """These ``tokens`` are whole chunks of a prompt with this path, from chunk number ``first`` on.

        The chunk that begins a prompt is not learnt: attention treats the first tokens of all in a way of their own.
        """
        for number in range(max(first, 1), first + len(tokens) // self._chunk_tokens):
            begin = (number - first) * self._chunk_tokens
            chunk = np.array(tokens[begin : begin + self._chunk_tokens], dtype=np.uint64)
            (name,) = self._hashes(salt, chunk).tolist()
            known = self._known.pop(name, None)
            digest = _digest(salt, chunk)
            if known is None or known.digest != digest or known.key != path[number]:
                known = KnownChunk(name, digest, path, number)
            self._known[name] = known
        while len(self._known) > self._most:
            del self._known[next(iter(self._known))]

    def find(self, salt: bytes, tokens: Sequence[int], begin: int) -> list[Moved]:
        """The chunks whose tokens follow the first ``begin`` tokens, in order; none overlap."""
        if not self._known or len(tokens) - begin < self._chunk_tokens:
            return []
        rest = np.array(tokens[begin:], dtype=np.uint64)
        names = self._hashes(salt, rest).tolist()
        found: list[Moved] = []
        free = 0
        for at in [place for place, name in enumerate(names) if name in self._known]:
            known = self._known[names[at]]
            if at >= free and known.digest == _digest(salt, rest[at : at + self._chunk_tokens]):
                found.append(Moved(begin + at, known))
                free = at + self._chunk_tokens
        return found

    def forget(self, lost: KnownChunk) -> None:
        """No tier can supply this chunk."""
        if self._known.get(lost.name) is lost:
            del self._known[lost.name]

    def clear(self) -> None:
        """Forget everything: the keys have changed."""
        self._known.clear()

    def _hashes(self, salt: bytes, tokens: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """The hash of each window of a chunk's length modulo 2^64: the sum of token i times base^i, plus the salt's."""
        self._extend(len(tokens))
        sums = np.zeros(len(tokens) + 1, dtype=np.uint64)
        np.cumsum((tokens + np.uint64(1)) * self._powers[: len(tokens)], out=sums[1:])
        windows = sums[self._chunk_tokens :] - sums[: -self._chunk_tokens]
        of_salt = int.from_bytes(hashlib.blake2b(salt, digest_size=8).digest())
        return windows * self._inverses[: len(windows)] + np.uint64(of_salt)

    def _extend(self, count: int) -> None:
        """Have the powers of the base, and of its inverse, up to ``count``."""
        if count > len(self._powers):
            count = max(count, 2 * len(self._powers))
            self._powers = _powers(self._base, count)
            self._inverses = _powers(pow(self._base, -1, _U64), count)


def _powers(base: int, count: int) -> NDArray[np.uint64]:
    steps = np.full(count, base, dtype=np.uint64)
    steps[0] = 1
    return np.cumprod(steps)


def _digest(salt: bytes, tokens: NDArray[np.uint64]) -> bytes:
    told = hashlib.blake2b(len(salt).to_bytes(8) + salt, digest_size=32)
    told.update(tokens.tobytes())
    return told.digest()
