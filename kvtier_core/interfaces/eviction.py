"""An eviction policy."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import attrs

from kvtier_core.types import ChunkKey

#: Of what an `EvictionPolicy` saves.
MAX_POLICY_STATE_NBYTES = 64 << 10


class EvictionPolicy(abc.ABC):
    """An opinion about order: no bytes, no pins, no lock; time is handed in, in seconds that never run backwards."""

    #: The tier then passes over a chunk whose child in the prefix tree is still held.
    leaf_first: ClassVar[bool] = True

    @abc.abstractmethod
    def request(self, path: Sequence[ChunkKey], now: float, hints: Mapping[str, str]) -> None:
        """One prompt's chunks, root first, held or not. It comes before the path's newcomers are admitted."""

    @abc.abstractmethod
    def admit(self, key: ChunkKey, nbytes: int) -> None:
        """Take in a newcomer. Of one path, leaves come before roots."""

    def prefers(self, newcomer: ChunkKey, victim: ChunkKey) -> bool:
        """Is this newcomer worth the room of a held key? Asked before anything is copied; changes nothing."""
        return True

    @abc.abstractmethod
    def forget(self, key: ChunkKey, *, evicted: bool) -> None:
        """The key is gone; ``evicted`` may leave a ghost. Ghosts are bounded."""

    @abc.abstractmethod
    def victims(self) -> Iterator[ChunkKey]:
        """Each held key at most once, best victim first; forgets none."""

    def save(self) -> bytes:
        """What was learned and may outlive a restart.

        Always of one length, `MAX_POLICY_STATE_NBYTES` at most; nothing by default.
        """
        return b""

    def restore(self, saved: bytes) -> None:
        """What `save` returned once, or anything else: then nothing is learned from it. Comes first of all calls."""


@attrs.frozen
class EvictionConfig(abc.ABC):
    type: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()  #: other names by which a user may choose it

    @abc.abstractmethod
    def open(self) -> EvictionPolicy: ...
