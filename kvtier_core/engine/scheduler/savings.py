"""What each tier saved: the time to compute what it supplied, less the time that requests waited for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs

from kvtier_core.types import Event, EventKind


@attrs.frozen
class TierSavings:
    """Totals of one tier. Seconds are summed over requests."""

    loaded: int = 0  #: tokens that requests loaded
    declined: int = 0  #: tokens that it had, and that were sooner computed
    avoided: float = 0.0  #: seconds of computing the loaded tokens, as far as the engine's speed was known
    waited: float = 0.0  #: seconds that requests waited for what the tier was to supply, and for their loads

    @property
    def net(self) -> float:
        """Seconds saved; negative if waiting cost more than it brought."""
        return self.avoided - self.waited

    def __add__(self, other: TierSavings) -> TierSavings:
        return TierSavings(*map(sum, zip(attrs.astuple(self), attrs.astuple(other), strict=True)))

    def __str__(self) -> str:
        return (
            f"{self.net:.2f} s saved ({self.avoided:.2f} s of computing avoided, {self.waited:.2f} s waited), "
            f"{self.loaded} tokens loaded, {self.declined} declined"
        )


class Savings:
    """Savings by the name of the tier."""

    def __init__(self) -> None:
        self.by_tier: dict[str, TierSavings] = {}
        self._events: list[Event] = []  # since the last `take_events`

    def loaded(
        self,
        request: str,
        tokens: Mapping[str, int],
        compute_seconds: float | None,
        load_seconds: float,
        waits: Mapping[str, float],
    ) -> None:
        """A load has ended: so many tokens of each tier, which the engine would have computed in so many seconds.

        Before the load the request had waited for tiers: seconds by tier, or by no name if it waited for none.
        """
        total = sum(tokens.values())
        for tier, count in tokens.items():
            share = count / total
            waited = waits.get(tier, 0.0) + load_seconds * share
            self._add(request, tier, TierSavings(count, 0, (compute_seconds or 0.0) * share, waited))
        self.waited_in_vain(request, {tier: seconds for tier, seconds in waits.items() if tier not in tokens})

    def waited_in_vain(self, request: str, waits: Mapping[str, float]) -> None:
        """A request waited for tiers, and then did without them."""
        for tier, seconds in waits.items():
            if tier:
                self._add(request, tier, TierSavings(waited=seconds))

    def declined(self, request: str, tier: str, tokens: int) -> None:
        """A request found tokens in a tier, and computes them."""
        self._add(request, tier, TierSavings(declined=tokens))

    def describe(self) -> Iterator[str]:
        """A line a tier."""
        return (f"{tier}: {savings}" for tier, savings in self.by_tier.items())

    def take_events(self) -> list[Event]:
        """The seconds that were added since the last call."""
        events, self._events = self._events, []
        return events

    def _add(self, request: str, tier: str, more: TierSavings) -> None:
        self.by_tier[tier] = self.by_tier.get(tier, TierSavings()) + more
        for kind, seconds in ((EventKind.AVOIDED, more.avoided), (EventKind.WAITED, more.waited)):
            if seconds:
                self._events.append(Event(kind, tier, seconds=seconds, request=request))
