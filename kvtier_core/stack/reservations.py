"""Which holder fills which slots, and which tiers its chunks are then written to."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from kvtier_core.errors import ContractError
from kvtier_core.stack.admission import AdmissionPlan
from kvtier_core.types import ChunkKey


@attrs.frozen
class _Reservation:
    since: float
    parents: dict[ChunkKey, ChunkKey | None] = attrs.field(factory=dict)
    plan: AdmissionPlan = attrs.field(factory=AdmissionPlan)


class Reservations:
    """Reserved chunks by holder: with the parent of each, and the tiers below that admitted it."""

    def __init__(self) -> None:
        self._by_holder: dict[str, _Reservation] = {}

    def add(self, holder: str, parents: Mapping[ChunkKey, ChunkKey | None], plan: AdmissionPlan, now: float) -> None:
        """``parents`` names the reserved chunks; the part of ``plan`` that concerns them is kept with them."""
        if parents:
            reservation = self._by_holder.setdefault(holder, _Reservation(now))
            reservation.parents.update(parents)
            reservation.plan.add(plan, list(parents))

    def take(self, holder: str) -> tuple[dict[ChunkKey, ChunkKey | None], AdmissionPlan, float]:
        """All that a holder has reserved, with its plan, and since when. Raises ContractError if there is nothing."""
        if holder not in self._by_holder:
            raise ContractError(f"{holder} has reserved nothing")
        reservation = self._by_holder.pop(holder)
        return reservation.parents, reservation.plan, reservation.since

    def drop(self, holder: str) -> list[ChunkKey]:
        """Forget what a holder has reserved; returns the chunks."""
        reservation = self._by_holder.pop(holder, None)
        return list(reservation.parents) if reservation else []
