"""How long requests wait for tiers below the arenas, and what that saves."""

from __future__ import annotations

from collections.abc import Callable

from kvtier_core.config.model import StackConfig
from kvtier_core.engine.scheduler.prefill_speed import PrefillSpeed
from kvtier_core.engine.scheduler.requests import RequestState
from kvtier_core.engine.scheduler.savings import Savings
from kvtier_core.stack.interface import LoadLimit, Lookup


class Waiting:
    """``load_wait`` bounds every wait. With ``load: auto`` so does the time that computing would take."""

    def __init__(self, config: StackConfig, clock: Callable[[], float]):
        """``config`` says how many tokens a chunk has; ``clock`` returns seconds."""
        self.speed = PrefillSpeed()
        self.savings = Savings()
        self._chunk_tokens = config.chunk_tokens
        self._load_wait = config.load_wait
        self._always = config.load == "always"
        self._clock = clock

    def limit(self, state: RequestState) -> LoadLimit | None:
        """What loads for this request may cost; None: whatever they do."""
        chunk_seconds = self.speed.seconds(self._chunk_tokens)
        if self._always or chunk_seconds is None:
            return None
        return LoadLimit(chunk_seconds, self._load_wait - self._waited(state))

    def allows(self, state: RequestState, found: Lookup) -> bool:
        """May the engine be asked to wait for what is on its way? Notes since when, and for which tier, it waits."""
        if state.waiting_since is None:
            state.waiting_since = self._clock()
        state.awaited = found.awaited or state.awaited
        state.awaited_chunks = max(state.awaited_chunks, found.pending)
        longest = self._load_wait
        if found.pending and (limit := self.limit(state)):
            longest = min(longest, state.awaited_chunks * limit.chunk_seconds)
        return self._waited(state) < longest

    def end(self, state: RequestState, tokens: int) -> None:
        """The engine no longer waits: the request is admitted, and loads so many tokens."""
        state.waited, state.load_begun = self._waited(state), self._clock()
        if not tokens and state.awaited:
            self.savings.waited_in_vain(state.view.request_id, state.awaited, state.waited)
        if state.declined:
            self.savings.declined(
                state.view.request_id, state.declined.tier, state.declined.chunks * self._chunk_tokens
            )
        state.waiting_since, state.awaited, state.awaited_chunks = None, "", 0

    def loaded(self, state: RequestState) -> None:
        """The load of a request has ended well."""
        waited = state.waited + self._clock() - state.load_begun
        computing = self.speed.seconds(state.sources.total())
        self.savings.loaded(state.view.request_id, state.sources, computing, waited)

    def explain(self, state: RequestState, tokens: int) -> str:
        """For the log line of a request that loads so many tokens: what it waited, and what it left in a tier."""
        parts = []
        if state.waited and (seconds := self.speed.seconds(tokens)):
            parts.append(f"; waited {state.waited:.3f} s, computing takes {seconds:.3f} s")
        if state.declined:
            parts.append(f"; {state.declined}")
        return "".join(parts)

    def _waited(self, state: RequestState) -> float:
        """Seconds since the engine was first asked to wait for this request."""
        return 0.0 if state.waiting_since is None else self._clock() - state.waiting_since
