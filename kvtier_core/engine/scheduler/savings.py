"""What each tier saved: the time to compute what it supplied, less the time that requests waited for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import attrs

from kvtier_core.types import Event, EventKind

#: Why an event of waiting has none of computing that was avoided beside it.
NOT_KNOWN = "how long computing takes is not known yet"


@attrs.frozen
class TierSavings:
    """Totals of one tier. Seconds are summed over requests."""

    loaded: int = 0  #: tokens that requests loaded
    declined: int = 0  #: tokens that it had, and that were sooner computed
    avoided: float = 0.0  #: seconds of computing the loaded tokens, but for the unpriced ones
    waited: float = 0.0  #: seconds that requests waited for what the tier was to supply, and for their loads
    unpriced: int = 0  #: loaded tokens of which it is not known yet how long the engine takes to compute them

    @property
    def net(self) -> float | None:
        """Seconds saved; negative if waiting cost more than it brought. None: not known yet."""
        return None if self.unpriced else self.avoided - self.waited

    def __add__(self, other: TierSavings) -> TierSavings:
        return TierSavings(*map(sum, zip(attrs.astuple(self), attrs.astuple(other), strict=True)))

    def __str__(self) -> str:
        tokens = f"{self.loaded} tokens loaded, {self.declined} declined"
        if self.net is None:
            unknown = "how many seconds were saved is not known: this engine has computed no prompt"
            return f"{unknown}; {self.waited:.2f} s waited, {tokens}"
        return (
            f"{self.net:.2f} s saved ({self.avoided:.2f} s of computing avoided, {self.waited:.2f} s waited), {tokens}"
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

        None if that is not known yet: `speed_known` counts it later. Before the load the request had waited for tiers:
        seconds by tier, or by no name if it waited for none.
        """
        total = sum(tokens.values())
        for tier, count in tokens.items():
            share = count / total
            waited = waits.get(tier, 0.0) + load_seconds * share
            unpriced = count if compute_seconds is None else 0
            self._add(request, tier, TierSavings(count, 0, (compute_seconds or 0.0) * share, waited, unpriced))
        self.wasted_wait(request, {tier: seconds for tier, seconds in waits.items() if tier not in tokens})

    def speed_known(self, compute_seconds: Callable[[int], float]) -> None:
        """From now on the engine knows how long it takes to compute so many tokens: those that were loaded before."""
        for tier, savings in self.by_tier.items():
            if tokens := savings.unpriced:
                self._add("", tier, TierSavings(avoided=compute_seconds(tokens), unpriced=-tokens))

    def wasted_wait(self, request: str, waits: Mapping[str, float]) -> None:
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
        why = NOT_KNOWN if more.unpriced > 0 else ""
        for kind, seconds in ((EventKind.AVOIDED, more.avoided), (EventKind.WAITED, more.waited)):
            if seconds:
                self._events.append(Event(kind, tier, seconds=seconds, request=request, why=why))
