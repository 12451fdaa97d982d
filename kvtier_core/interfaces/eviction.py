"""An eviction policy, and the Config that opens it."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Protocol, runtime_checkable

import attrs

from kvtier_core.types import ChunkKey

#: The most bytes that `EvictionPolicy.save` may return.
MAX_POLICY_STATE_NBYTES = 64 << 10


class EvictionPolicy(abc.ABC):
    """Decides the order in which a tier evicts chunks, and whether a new chunk is worth evicting another.

    Called on the owner's thread. It sees keys, not bytes or pins: the tier passes over victims in use. ``now`` is in
    seconds and never decreases. Its memory is bounded, including that for keys it no longer holds. The same calls give
    the same answers in every process.
    """

    #: Does the tier keep a chunk while it holds one that continues it? Without the former the latter is useless.
    leaf_first: ClassVar[bool] = True

    @abc.abstractmethod
    def request(self, path: Sequence[ChunkKey], now: float, hints: Mapping[str, str]) -> None:
        """A prompt has arrived. ``path`` holds its chunks, root first, whether or not the tier holds them.

        Called once per request, before any chunk of the path is admitted. ``hints`` are the client's remarks about it.
        """

    @abc.abstractmethod
    def admit(self, key: ChunkKey, nbytes: int) -> None:
        """The tier holds this chunk from now on. Later chunks of a path are admitted before earlier ones."""

    def prefers(self, newcomer: ChunkKey, victim: ChunkKey) -> bool:
        """Is ``newcomer``, a chunk not held, worth evicting ``victim``, a held one?

        Called before anything is copied. Has no effect.
        """
        return True

    @abc.abstractmethod
    def forget(self, key: ChunkKey, *, evicted: bool) -> None:
        """The tier no longer holds this chunk. If it was ``evicted`` for lack of room, the policy may remember it."""

    @abc.abstractmethod
    def victims(self) -> Iterator[ChunkKey]:
        """Held keys in the order of eviction, each at most once. Has no effect; `forget` names the evicted keys.

        Called for each eviction, which takes only the first few keys. The policy is not called while the iterator is
        in use. The work must not be quadratic in the number of keys.
        """

    def save(self) -> bytes:
        """The learned state that outlives a restart; by default none.

        Always of the same length, at most `MAX_POLICY_STATE_NBYTES`.
        """
        return b""

    def restore(self, saved: bytes) -> None:
        """Restore a state that `save` returned in another process. Called at most once, before any other call.

        ``saved`` may be anything: ignore a state that cannot be understood.
        """


@runtime_checkable
class SupportsSparing(Protocol):
    """A policy that need not repeatedly name chunks that its tier keeps because of a child.

    For orders in which parents come before their children: otherwise each eviction walks past all of them.
    """

    @abc.abstractmethod
    def spare(self, key: ChunkKey) -> None:
        """A victim was passed over because the tier holds a child of it. `victims` omits it until `unspare`.

        Requests may still name it, and the tier may forget it.
        """

    @abc.abstractmethod
    def unspare(self, key: ChunkKey) -> None:
        """The last child of a spared chunk has left. The chunk is first in line, because its turn had come before."""


@attrs.frozen
class EvictionConfig(abc.ABC):
    """Names an eviction policy and its settings, and opens it."""

    type: ClassVar[str]  #: the name in ``tiers[].eviction``
    aliases: ClassVar[tuple[str, ...]] = ()  #: other names for it

    @abc.abstractmethod
    def open(self) -> EvictionPolicy:
        """An empty policy, for one tier."""
