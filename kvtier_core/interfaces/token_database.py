"""Names for chunks."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import ClassVar

import attrs

from kvtier_core.types import ChunkKey, Namespace


class TokenDatabase(abc.ABC):
    """Names chunks: the same tokens get the same keys in every process and on every machine.

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
        """The keys of all whole chunks of ``tokens``, each of which depends on every token before its end.

        ``tokens`` are whole numbers of 32 bits, else ContractError. ``known`` are the keys of the first chunks from an
        earlier call with the same beginning, salt and extra, which need not be computed again; the list is not changed.
        ``salt`` separates tenants and adapters: every key depends on it. ``extra[i]`` is all else that the KV of chunk
        i depends on, its images for instance: key i and all later ones depend on it.
        """


@attrs.frozen
class TokenDatabaseConfig(abc.ABC):
    """A way to name chunks and its settings."""

    type: ClassVar[str]  #: what users write in ``token_database``

    @abc.abstractmethod
    def open(self, namespace: Namespace, chunk_tokens: int) -> TokenDatabase:
        """Keys of chunks of ``chunk_tokens`` tokens. Every key depends on that and on ``namespace``."""
