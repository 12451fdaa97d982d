"""Names for chunks."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import ClassVar

import attrs

from kvtier_core.types import ChunkKey, Namespace


class TokenDatabase(abc.ABC):
    """Names chunks. The same tokens get the same keys in every process and on every machine."""

    @abc.abstractmethod
    def keys(
        self,
        tokens: Sequence[int],
        *,
        known: Sequence[ChunkKey] = (),
        salt: bytes = b"",
        extra: Mapping[int, bytes] | None = None,
    ) -> list[ChunkKey]:
        """One key per full chunk of ``tokens``, chained over the prefix.

        ``known`` are the keys of the leading chunks from an earlier call with the same salt and extra;
        they are not computed again. ``salt`` separates tenants and adapters; it enters the first key.
        ``extra[i]`` is what else the KV of chunk i depends on: its multimodal items, for instance.
        """


@attrs.frozen
class TokenDatabaseConfig(abc.ABC):
    type: ClassVar[str]

    @abc.abstractmethod
    def open(self, namespace: Namespace, chunk_tokens: int) -> TokenDatabase: ...
