"""Names a chunk by a digest over its tokens and the key of the chunk before it.

    root     = H(namespace digest, chunk_tokens, salt)
    key of 0 = H(root, tokens of chunk 0, extra of chunk 0)
    key of i = H(key of i - 1, tokens of chunk i, extra of chunk i)

H is BLAKE2b with 32 bytes. All parts but the last have a fixed length, so no two inputs run into one another.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import ClassVar

import attrs

from kvtier_core.errors import ContractError
from kvtier_core.interfaces import TokenDatabase, TokenDatabaseConfig
from kvtier_core.types import KEY_NBYTES, ChunkKey, Namespace


@attrs.frozen
class ChainedConfig(TokenDatabaseConfig):
    type: ClassVar[str] = "chained"

    def open(self, namespace: Namespace, chunk_tokens: int) -> Chained:
        return Chained(namespace, chunk_tokens)


class Chained(TokenDatabase):
    def __init__(self, namespace: Namespace, chunk_tokens: int):
        self._namespace = namespace
        self._chunk_tokens = chunk_tokens
        self._tokens = struct.Struct(f"<{chunk_tokens}I")  # also twice as fast as array.array, which has one byte order

    def keys(
        self,
        tokens: Sequence[int],
        *,
        known: Sequence[ChunkKey] = (),
        salt: bytes = b"",
        extra: Mapping[int, bytes] | None = None,
    ) -> list[ChunkKey]:
        chunks = len(tokens) // self._chunk_tokens
        keys = list(known[:chunks])
        parent = keys[-1] if keys else self._root(salt)
        for i in range(len(keys), chunks):
            start = i * self._chunk_tokens
            parent = self._key(parent, tokens[start : start + self._chunk_tokens], extra.get(i, b"") if extra else b"")
            keys.append(parent)
        return keys

    def _root(self, salt: bytes) -> ChunkKey:
        return _digest(self._namespace.digest + struct.pack("<Q", self._chunk_tokens) + salt, b"kvtier-root")

    def _key(self, parent: ChunkKey, tokens: Sequence[int], extra: bytes) -> ChunkKey:
        try:
            return _digest(parent + self._tokens.pack(*tokens) + extra, b"kvtier-chunk")
        except struct.error as error:
            raise ContractError(f"a token id is a whole number of 32 bits: {error}") from error


def _digest(material: bytes, person: bytes) -> ChunkKey:
    return ChunkKey(hashlib.blake2b(material, digest_size=KEY_NBYTES, person=person).digest())
