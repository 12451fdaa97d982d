"""Decides once which tiers take a chunk: before its slot is reserved, before its promotion, or when it is named again.

The decision travels with the chunk to every write; a policy is asked once about each chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from kvtier_core.types import ChunkKey


class Level(Protocol):
    """An arena or a store tier."""

    name: str

    def would_admit(self, path: Sequence[ChunkKey]) -> Sequence[ChunkKey]:
        """The chunks of a path, root first, that this tier would admit now. Changes nothing."""
        ...


class AdmissionPlan:
    """For each of some tiers, the chunks to write to it; and the salts of those chunks whose requests have one."""

    def __init__(
        self,
        levels: Sequence[Level] = (),
        path: Sequence[ChunkKey] = (),
        salts: Mapping[ChunkKey, bytes] | None = None,
    ):
        """Ask each tier which chunks of a path it would admit."""
        self._admitted = {level: admitted for level in levels if (admitted := set(level.would_admit(path)))}
        self.keys = set().union(*self._admitted.values())  #: the chunks that at least one of the tiers will be given
        self.salts = dict(salts or {})

    def keys_for(self, level: Level, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        """Those of ``keys`` that are to be written to this tier."""
        admitted = self._admitted.get(level, ())
        return [key for key in keys if key in admitted]

    def add(self, other: AdmissionPlan, keys: Sequence[ChunkKey]) -> None:
        """Add what another plan decides about ``keys``."""
        for level, admitted in other._admitted.items():
            mine = admitted.intersection(keys)
            self._admitted.setdefault(level, set()).update(mine)
            self.keys |= mine
            self.salts.update((key, other.salts[key]) for key in mine & other.salts.keys())
