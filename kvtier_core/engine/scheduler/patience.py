"""How long a request waits for tiers below the arenas: no longer than computing takes what it waits for."""

from __future__ import annotations

from collections.abc import Callable

from kvtier_core.config.model import StackConfig
from kvtier_core.engine.scheduler.prefill_speed import PrefillSpeed
from kvtier_core.engine.scheduler.requests import RequestState
from kvtier_core.stack.interface import LoadLimit, Lookup


class Patience:
    """``load_wait`` bounds every wait. With ``load: auto`` so does the time that computing would take."""

    def __init__(self, config: StackConfig, speed: PrefillSpeed, clock: Callable[[], float]):
        """``config`` says how many tokens a chunk has; ``clock`` returns seconds."""
        self._speed = speed
        self._chunk_tokens = config.chunk_tokens
        self._load_wait = config.load_wait
        self._always = config.load == "always"
        self._clock = clock

    def limit(self, state: RequestState) -> LoadLimit | None:
        """What loads for this request may cost; None: whatever they do."""
        chunk_seconds = self._speed.seconds(self._chunk_tokens)
        if self._always or chunk_seconds is None:
            return None
        return LoadLimit(chunk_seconds, self._load_wait - self.waited(state))

    def waited(self, state: RequestState) -> float:
        """Seconds since the engine was first asked to wait for this request."""
        return 0.0 if state.waiting_since is None else self._clock() - state.waiting_since

    def allows(self, state: RequestState, found: Lookup) -> bool:
        """May the engine be asked to wait for what is on its way? Notes since when, and for which tier, it waits."""
        if state.waiting_since is None:
            state.waiting_since = self._clock()
        state.awaited = found.awaited or state.awaited
        state.awaited_chunks = max(state.awaited_chunks, found.pending)
        longest = self._load_wait
        if found.pending and (limit := self.limit(state)):
            longest = min(longest, state.awaited_chunks * limit.chunk_seconds)
        return self.waited(state) < longest
