"""Decides once which tiers take a chunk: before its slot is reserved, before its promotion, or when it is named again.

The decision travels with the chunk to every write, so a policy is asked once about each chunk.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import attrs

from kvtier_core.errors import ContractError
from kvtier_core.stack.arena import Arena
from kvtier_core.stack.store_tier.tier import StoreTier
from kvtier_core.types import ChunkKey

#: A tier of a stack.
Level = Arena | StoreTier


class AdmissionPlan:
    """The chunks to write to each of some tiers or to show to peers, and the salts of those whose requests have one."""

    def __init__(
        self,
        levels: Sequence[Level] = (),
        path: Sequence[ChunkKey] = (),
        salts: Mapping[ChunkKey, bytes] | None = None,
        shown: Collection[ChunkKey] = (),
    ):
        """Ask each tier which chunks of a path it would admit."""
        self._admitted = {level: admitted for level in levels if (admitted := set(level.would_admit(path)))}
        self.keys = set().union(*self._admitted.values())  #: the chunks that at least one tier admits
        self.sealed = self.keys.union(shown)  #: these, and those that only peers see
        self.salts = dict(salts or {})

    def keys_for(self, level: Level, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        """The ``keys`` to write to this tier."""
        admitted = self._admitted.get(level, ())
        return [key for key in keys if key in admitted]

    def add(self, other: AdmissionPlan, keys: Sequence[ChunkKey]) -> None:
        """Add the decisions of another plan about ``keys``."""
        for level, admitted in other._admitted.items():
            mine = admitted.intersection(keys)
            self._admitted.setdefault(level, set()).update(mine)
            self.keys |= mine
            self.salts.update((key, other.salts[key]) for key in mine & other.salts.keys())
        self.sealed |= other.sealed.intersection(keys)


@attrs.frozen
class Reservation:
    """The chunks that one holder has reserved, and the tiers below that admitted them."""

    since: float
    parents: dict[ChunkKey, ChunkKey | None] = attrs.field(factory=dict)  #: of each chunk
    plan: AdmissionPlan = attrs.field(factory=AdmissionPlan)

    def add(self, parents: Mapping[ChunkKey, ChunkKey | None], plan: AdmissionPlan) -> None:
        """``parents`` maps more reserved chunks to their parents; the part of ``plan`` about these chunks is kept."""
        self.parents.update(parents)
        self.plan.add(plan, list(parents))

    def check_own(self, keys: Collection[ChunkKey]) -> None:
        """Raise ContractError unless these are different chunks of this reservation."""
        if len(set(keys)) < len(keys) or not self.parents.keys() >= set(keys):
            raise ContractError("a chunk is named twice, or this holder has not reserved it")
