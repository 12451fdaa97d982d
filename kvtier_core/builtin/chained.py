"""Names a chunk by a digest over its tokens and the key of the chunk before it.

    root     = H(namespace digest, chunk_tokens, salt)
    key of 0 = H(root, tokens of chunk 0, extra of chunk 0)
    key of i = H(key of i - 1, tokens of chunk i, extra of chunk i)

H is BLAKE2b with 32 bytes. All parts but the last have a fixed length, so no two inputs give the same bytes.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import ClassVar

import attrs

from kvtier_core.errors import ContractError
from kvtier_core.interfaces import TokenDatabase, TokenDatabaseConfig
from kvtier_core.native import choose
from kvtier_core.types import KEY_NBYTES, ChunkKey, Namespace

#: BLAKE2b's personalization strings: they separate the two uses of the digest.
_ROOT, _CHUNK = "kvtier-root", "kvtier-chunk"


@attrs.frozen
class ChainedConfig(TokenDatabaseConfig):
    """The default token database."""

    type: ClassVar[str] = "chained"

    def open(self, namespace: Namespace, chunk_tokens: int) -> Chained:
        return Chained(namespace, chunk_tokens)


class Chained(TokenDatabase):
    """Keys that are digests chained over the prefix."""

    def __init__(self, namespace: Namespace, chunk_tokens: int):
        self._namespace = namespace
        self._chunk_tokens = chunk_tokens

    def keys(
        self,
        tokens: Sequence[int],
        *,
        known: Sequence[ChunkKey] = (),
        salt: bytes = b"",
        extra: Mapping[int, bytes] | None = None,
    ) -> list[ChunkKey]:
        keys = list(known[: len(tokens) // self._chunk_tokens])
        return keys + self._chain(keys[-1] if keys else self._root(salt), tokens, len(keys), dict(extra or {}))

    def continued(self, parent: ChunkKey | None, tokens: Sequence[int], *, salt: bytes = b"") -> list[ChunkKey]:
        """The keys of all whole chunks of ``tokens``, which follow the chunk ``parent``, or begin a prompt (None)."""
        return self._chain(parent or self._root(salt), tokens, 0, {})

    def _chain(self, parent: ChunkKey, tokens: Sequence[int], first: int, extra: dict[int, bytes]) -> list[ChunkKey]:
        try:
            return chain(parent, tokens, self._chunk_tokens, first, extra, _CHUNK)
        except (struct.error, ValueError) as error:
            raise ContractError(f"token ids must be 32-bit whole numbers: {error}") from error

    def _root(self, salt: bytes) -> ChunkKey:
        return _digest(self._namespace.digest + struct.pack("<Q", self._chunk_tokens) + salt, _ROOT)


def plain_chain(
    parent: ChunkKey, tokens: Sequence[int], chunk_tokens: int, first: int, extra: Mapping[int, bytes], person: str
) -> list[ChunkKey]:
    """The keys of the full chunks from number ``first`` on.

    ``parent`` is the key before the first, ``extra`` holds further bytes by chunk number, and ``person`` is BLAKE2b's
    personalization.
    """
    packed = struct.Struct(f"<{chunk_tokens}I")  # twice as fast as array.array, and little-endian everywhere
    keys = []
    for chunk in range(first, len(tokens) // chunk_tokens):
        begin = chunk * chunk_tokens
        material = parent + packed.pack(*tokens[begin : begin + chunk_tokens]) + extra.get(chunk, b"")
        parent = _digest(material, person)
        keys.append(parent)
    return keys


def _digest(material: bytes, person: str) -> ChunkKey:
    return ChunkKey(hashlib.blake2b(material, digest_size=KEY_NBYTES, person=person.encode()).digest())


chain = choose("chain", plain_chain)
