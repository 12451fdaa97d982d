"""Hides the keys of chunks from a store: a key is a digest of tokens that could confirm a guess of a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from kvtier_core.interfaces import Backend
from kvtier_core.relays.relay import Relay
from kvtier_core.types import ChunkKey

if TYPE_CHECKING:  # its library is needed only for a tier with a key
    from kvtier_core.encoding.keyed_seal import KeyedSeal

#: Number of names that are turned into keys together.
_BATCH = 1024


class SealedNames(Relay):
    """Passes all calls to ``inner``, with the keyed seal's names in place of keys."""

    def __init__(self, inner: Backend, keyed_seal: KeyedSeal):
        super().__init__(inner)
        self._keyed_seal = keyed_seal

    def names(self, keys: Sequence[ChunkKey]) -> Sequence[ChunkKey]:
        return self._keyed_seal.names(keys)

    def scan(self) -> Iterator[tuple[ChunkKey, int]]:
        found = super().scan()
        while batch := list(islice(found, _BATCH)):
            keys = self._keyed_seal.keys([name for name, _ in batch])
            yield from zip(keys, [nbytes for _, nbytes in batch], strict=True)
