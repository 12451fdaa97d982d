"""How long requests wait for tiers below the arenas, and the seconds that this cost and saved.

The engine's own steps show how fast it computes prompts. What a step computes keeps all its requests waiting, so a load
saves the time of computing for its own request and for each that the engine serves meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from kvtier_core.config.model import StackConfig
from kvtier_core.engine.scheduler.prefill_speed import Computed, PrefillSpeed
from kvtier_core.engine.scheduler.requests import Asked, RequestState
from kvtier_core.stack.outcomes import Arriving, Declined, LoadLimit, Lookup, TooSmall
from kvtier_core.types import Event, EventKind

#: The reason why an event of waiting comes without one of avoided computing.
NOT_KNOWN = "the time of computing is not known yet"


class Waiting:
    """``load_wait`` bounds every wait. With ``load: auto`` so does the time that computing would take.

    A request waits for a tier from the moment when the engine is told to wait until it asks again. The wait ends
    earlier with a step in which it does not ask: then the request is in the engine's own queue.
    """

    def __init__(self, config: StackConfig, chunk_tokens: int, clock: Callable[[], float]):
        """``clock`` returns seconds."""
        self.speed = PrefillSpeed()
        self._unpriced: Counter[str] = Counter()  # tokens loaded before the speed was known, by tier, for each request
        self._served = 0  # requests in the step that was planned last
        self._chunk_tokens = chunk_tokens
        self._load_wait = config.load_wait
        self._always = config.load == "always"
        self._clock = clock
        self._last_step, self._this_step = Asked(), Asked()

    def limit(self, state: RequestState) -> LoadLimit | None:
        """The limit on the cost of loads for this request; None if there is none."""
        chunk, begins = self._chunk_tokens, (state.match.computed, state.match.computed + self._chunk_tokens)
        first, second = (self.speed.seconds(begin, begin + chunk, state.view.tokens) for begin in begins)
        if self._always or first is None or second is None:
            return None
        return LoadLimit(first, self._load_wait - sum(state.wait.seconds.values()), growth=second - first)

    def step_planned(self, requests: int, step: Computed) -> None:
        """The engine asks about no more requests in this step. ``requests`` is the number that it serves."""
        self._served = requests
        self.speed.planned(step, self._clock())
        self._last_step.until = self._clock()
        self._last_step, self._this_step = self._this_step, Asked()

    def step_ended(self) -> Sequence[Event]:
        """The oldest step that was planned has ended. Returns events for loads before the speed was known."""
        self.speed.ended(self._clock())
        token = self.speed.seconds(0, 1, 1)
        if token is None:
            return ()
        unpriced, self._unpriced = self._unpriced, Counter()
        return [Event(EventKind.AVOIDED, tier, seconds=tokens * token) for tier, tokens in unpriced.items()]

    def asked(self, state: RequestState) -> None:
        """The engine asks about a request. If it was told to wait, that wait has ended for now."""
        wait = state.wait
        if wait.asked is not None:
            seconds = min(self._clock(), wait.asked.until) - wait.since
            wait.seconds[wait.tier] = wait.seconds.get(wait.tier, 0.0) + seconds
        wait.asked = None

    def allows(self, state: RequestState, found: Lookup) -> bool:
        """May the engine be told to wait for arriving chunks? Notes the start of the wait, and the tier.

        The time in which a store was silent counts as the request's own, so that no request waits for it twice.
        """
        wait, arriving = state.wait, found.arriving or Arriving(0)
        wait.most_chunks = max(wait.most_chunks, arriving.chunks)
        longest: float = self._load_wait
        if arriving.chunks and (limit := self.limit(state)):
            longest = min(longest, limit.computing(wait.most_chunks))
        left = longest - max(sum(wait.seconds.values()), arriving.silence)
        if left <= 0:
            return False
        wait.asked, wait.since, wait.tier = self._this_step, self._clock(), arriving.tier
        wait.until = wait.since + left
        return True

    def goes_on(self, state: RequestState) -> bool:
        """The engine asks about a request about which nothing new is known. May it still be told to wait?"""
        if state.wait.asked is not self._last_step and state.wait.asked is not self._this_step:
            return False
        if self._clock() >= state.wait.until:
            return False
        state.wait.asked = self._this_step
        return True

    def end(self, state: RequestState, tokens: int) -> Sequence[Event]:
        """The request is admitted, and loads ``tokens`` tokens. Returns its waits if it loads none."""
        state.wait.total, state.load.begun = sum(state.wait.seconds.values()), self._clock()
        state.wait.asked, state.wait.most_chunks = None, 0
        return () if tokens else _wasted(state)

    def loaded(self, state: RequestState) -> Sequence[Event]:
        """The load of a request has ended well. Returns events with the seconds waited for each tier, and saved."""
        loading, total, told = self._clock() - state.load.begun, state.load.sources.total(), []
        computing, request, waiting = self._computing(state, total), state.name, self._served + 1
        for tier, tokens in state.load.sources.items():
            waited = state.wait.seconds.pop(tier, 0.0) + loading * tokens / total
            if computing is None:
                self._unpriced[tier] += tokens * waiting
                told += [Event(EventKind.WAITED, tier, seconds=waited, tokens=tokens, why=NOT_KNOWN, request=request)]
            else:
                avoided = waiting * computing * tokens / total
                told += [Event(EventKind.AVOIDED, tier, seconds=avoided, request=request)]
                told += [Event(EventKind.WAITED, tier, seconds=waited, request=request)]
        return told + _wasted(state)

    def explain(self, state: RequestState, tokens: int) -> str:
        """For the log line of a request that loads ``tokens`` tokens: its wait, and what it left in a tier."""
        parts = []
        if state.wait.total and (seconds := self._computing(state, tokens)):
            parts.append(f"; waited {state.wait.total:.3f} s, computing takes {seconds:.3f} s")
        if isinstance(state.match.left, Declined | TooSmall):
            parts.append(f"; {state.match.left}")
        return "".join(parts)

    def _computing(self, state: RequestState, tokens: int) -> float | None:
        """The seconds to compute ``tokens`` tokens after those that the engine has; None if unknown."""
        return self.speed.seconds(state.match.computed, state.match.computed + tokens, state.view.tokens)


def _wasted(state: RequestState) -> list[Event]:
    """The waits of a request for tiers from which it loads nothing."""
    waits, state.wait.seconds = state.wait.seconds, {}
    return [
        Event(EventKind.WAITED, tier, seconds=seconds, request=state.name)
        for tier, seconds in waits.items()
        if tier and seconds
    ]
