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
    """Decides in which order a tier evicts its chunks, and whether a new chunk is worth another's room.

    Called on the owner's thread. It sees keys, not bytes, and no pins: the tier passes over a victim that is in use.
    ``now`` is in seconds and never decreases. Its memory is bounded, also that for keys it no longer holds. The same
    calls give the same answers in every process.
    """

    #: Does the tier keep a chunk while it holds one that continues it? Without the first the second is useless.
    leaf_first: ClassVar[bool] = True

    @abc.abstractmethod
    def request(self, path: Sequence[ChunkKey], now: float, hints: Mapping[str, str]) -> None:
        """A prompt has arrived. ``path`` are its chunks, the first one first, held or not.

        Comes once a request, before any chunk of the path is admitted. ``hints`` are the client's remarks about it.
        """

    @abc.abstractmethod
    def admit(self, key: ChunkKey, nbytes: int) -> None:
        """The tier holds this chunk from now on. Of one path, later chunks are admitted before earlier ones."""

    def prefers(self, newcomer: ChunkKey, victim: ChunkKey) -> bool:
        """Whether ``newcomer``, a chunk not held, is worth the room of ``victim``, a held one.

        Asked before anything is copied. Changes nothing.
        """
        return True

    @abc.abstractmethod
    def forget(self, key: ChunkKey, *, evicted: bool) -> None:
        """The tier no longer holds this chunk. ``evicted``: for lack of room, so that the policy may remember it."""

    @abc.abstractmethod
    def victims(self) -> Iterator[ChunkKey]:
        """Held keys, each at most once, the one to evict first first. Changes nothing; `forget` names the evicted keys.

        Called anew for each eviction, which takes the first few keys alone. The policy is not called while the iterator
        is in use. The work is not quadratic in the number of keys.
        """

    def save(self) -> bytes:
        """The learned state that outlives a restart; by default none.

        Always of the same length, at most `MAX_POLICY_STATE_NBYTES`.
        """
        return b""

    def restore(self, saved: bytes) -> None:
        """Take up what `save` returned in another process. Called at most once, before the first request or admission.

        ``saved`` may be anything: a state that cannot be understood is ignored.
        """


@runtime_checkable
class SupportsSparing(Protocol):
    """A policy that need not name again and again what its tier keeps for the sake of a child.

    For orders in which parents come before their children: without this each eviction walks past all of them.
    """

    @abc.abstractmethod
    def spare(self, key: ChunkKey) -> None:
        """A victim was passed over because the tier holds a child of it. `victims` leaves it out until `unspare`.

        Requests go on to name it, and it may be forgotten.
        """

    @abc.abstractmethod
    def unspare(self, key: ChunkKey) -> None:
        """The last child of a spared chunk has left. Its own turn had come before: it is first in line."""


@attrs.frozen
class EvictionConfig(abc.ABC):
    """An eviction policy and its settings."""

    type: ClassVar[str]  #: what users write in ``tiers[].eviction``
    aliases: ClassVar[tuple[str, ...]] = ()  #: other names for it

    @abc.abstractmethod
    def open(self) -> EvictionPolicy:
        """A policy that holds nothing, for one tier."""
