"""Names a chunk by a SHA-256 over its tokens and the key of the chunk before it."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import ClassVar

import attrs

from kvtier_core.errors import ContractError
from kvtier_core.hookspecs import hookimpl
from kvtier_core.interfaces import TokenDatabase, TokenDatabaseConfig
from kvtier_core.types import ChunkKey, Namespace


@attrs.frozen
class ExampleTokenDatabaseConfig(TokenDatabaseConfig):
    type: ClassVar[str] = "example-token-database"  # what users write in YAML; further fields would be further keys

    def open(self, namespace: Namespace, chunk_tokens: int) -> TokenDatabase:
        return ExampleTokenDatabase(namespace, chunk_tokens)


class ExampleTokenDatabase(TokenDatabase):
    def __init__(self, namespace: Namespace, chunk_tokens: int) -> None:
        self._root = namespace.digest + struct.pack("<Q", chunk_tokens)
        self._chunk = struct.Struct(f"<{chunk_tokens}I")
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
        for number in range(len(keys), len(tokens) // self._chunk_tokens):
            # Every key is 32 bytes, and so is the root: no two inputs are the same bytes.
            parent = keys[-1] if keys else hashlib.sha256(b"root" + self._root + salt).digest()
            begin = number * self._chunk_tokens
            try:
                packed = self._chunk.pack(*tokens[begin : begin + self._chunk_tokens])
            except struct.error as error:
                raise ContractError(f"token ids must be 32-bit whole numbers: {error}") from error
            keys.append(ChunkKey(hashlib.sha256(parent + packed + (extra or {}).get(number, b"")).digest()))
        return keys


@hookimpl
def kvtier_token_databases() -> list[type[TokenDatabaseConfig]]:
    return [ExampleTokenDatabaseConfig]
