"""Names for chunks."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import ClassVar

import attrs

from kvtier_core.types import ChunkKey, Namespace


class TokenDatabase(abc.ABC):
    """Names chunks: the same tokens have the same keys in every process and on every machine.

    Called on the owner's thread.
    """

    @abc.abstractmethod
    def keys(
        self,
        tokens: Sequence[int],
        *,
        known: Sequence[ChunkKey] = (),
        salt: bytes = b"",
        extra: Mapping[int, bytes] | None = None,
    ) -> list[ChunkKey]:
        """The keys of all whole chunks of ``tokens``. Each key depends on every token up to the end of its chunk.

        ``tokens`` are integers of 32 bits, else ContractError. ``known`` holds the keys of the first chunks, from an
        earlier call with the same beginning, salt and extra, which need not be computed again. ``salt`` separates
        tenants and adapters: every key depends on it. ``extra[i]`` is everything else that the KV of chunk i depends
        on, such as its images: key i and all later ones depend on it.
        """


@attrs.frozen
class TokenDatabaseConfig(abc.ABC):
    """Names a token database and its settings, and opens it."""

    type: ClassVar[str]  #: the name in ``token_database``

    @abc.abstractmethod
    def open(self, namespace: Namespace, chunk_tokens: int) -> TokenDatabase:
        """A token database for chunks of ``chunk_tokens`` tokens. Every key depends on that and on ``namespace``."""
