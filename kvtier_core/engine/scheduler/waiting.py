"""How long requests wait for tiers below the arenas, and the seconds that this cost and saved.

The engine's own steps tell how fast it computes prompts.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence

import attrs

from kvtier_core.config.model import StackConfig
from kvtier_core.engine.scheduler.requests import Asked, RequestState
from kvtier_core.stack.outcomes import LoadLimit, Lookup
from kvtier_core.types import Event, EventKind

#: Why an event of waiting has none of computing that was avoided beside it.
NOT_KNOWN = "how long computing takes is not known yet"

#: A step that computes fewer tokens of prompts says nothing of their speed: it takes as long for one as for fifty.
_PROMPT_TOKENS = 64
#: Tokens after which what is measured counts for two thirds of the estimate, and what was before for one third.
_MEMORY_TOKENS = 4096
#: The part that a step which only decodes has in the estimate of what decoding takes.
_NEWEST_DECODING = 1 / 8


@attrs.frozen
class _Step:
    prompt: int  #: tokens of prompts
    decoded: int  #: other tokens
    planned: float


class PrefillSpeed:
    """Tokens of prompts a second, so that its inverse is what one more of them costs. ``now`` is of any clock.

    A step may decode beside a prompt. The time for that is not the prompt's: it is estimated from steps that only
    decode, less for fewer tokens, and is at least the share that the decoded tokens have of all that the step computes.

    Steps end in the order in which they were planned. With asynchronous scheduling one is planned before the last has
    ended; it begins when that ends.
    """

    def __init__(self) -> None:
        self.rate: float | None = None  #: tokens a second; None before the first prompt was computed
        self._planned: deque[_Step] = deque()
        self._last_end = float("-inf")
        self._decoding: tuple[float, float] | None = None  # mean tokens and seconds of a step that only decodes

    def planned(self, prompt: int, decoded: int, now: float) -> None:
        """A step is about to begin that computes so many tokens of prompts, and decodes so many others."""
        self._planned.append(_Step(prompt, decoded, now))

    def ended(self, now: float) -> None:
        """The oldest step that was planned has ended."""
        if not self._planned:
            return
        step = self._planned.popleft()
        seconds = now - max(step.planned, self._last_end)
        self._last_end = now
        if step.decoded and not step.prompt:
            newest, mean = (step.decoded, seconds), self._decoding or (step.decoded, seconds)
            self._decoding = tuple(old + (new - old) * _NEWEST_DECODING for old, new in zip(mean, newest, strict=True))
        elif step.prompt >= _PROMPT_TOKENS:
            self._measured(step.prompt, seconds - self._decoding_in(step, seconds))

    def seconds(self, tokens: int) -> float | None:
        """The time in which the engine would compute so many tokens; None if that is not known."""
        return None if self.rate is None else tokens / self.rate

    def _decoding_in(self, step: _Step, seconds: float) -> float:
        """How many of a step's seconds its decoded tokens take."""
        tokens, alone = self._decoding or (1.0, 0.0)
        return max(alone * min(1.0, step.decoded / tokens), seconds * step.decoded / (step.prompt + step.decoded))

    def _measured(self, tokens: int, seconds: float) -> None:
        """The estimate is a geometric mean, so that one step that stalls hardly counts."""
        if seconds > 0:
            newest = 1 - math.exp(-tokens / _MEMORY_TOKENS)
            rate = tokens / seconds
            self.rate = rate if self.rate is None else self.rate ** (1 - newest) * rate**newest


class Waiting:
    """``load_wait`` bounds every wait. With ``load: auto`` so does the time that computing would take.

    A request waits for a tier from the moment when the engine is told so until it asks again. The wait ends before
    that with a step in which it does not ask: then the request is in the engine's own queue.
    """

    def __init__(self, config: StackConfig, clock: Callable[[], float]):
        """``config`` says how many tokens a chunk has; ``clock`` returns seconds."""
        self.speed = PrefillSpeed()
        self._unpriced: Counter[str] = Counter()  # tokens loaded before the speed was known, by tier
        self._chunk_tokens = config.chunk_tokens
        self._load_wait = config.load_wait
        self._always = config.load == "always"
        self._clock = clock
        self._last_step, self._this_step = Asked(), Asked()

    def limit(self, state: RequestState) -> LoadLimit | None:
        """The limit on the cost of loads for this request; None if there is none."""
        chunk_seconds = self.speed.seconds(self._chunk_tokens)
        if self._always or chunk_seconds is None:
            return None
        return LoadLimit(chunk_seconds, self._load_wait - sum(state.waits.values()))

    def step_planned(self, prompt: int, decoded: int) -> None:
        """The engine asks about no more requests in this step, which computes so many tokens of prompts and others."""
        self.speed.planned(prompt, decoded, self._clock())
        self._last_step.until = self._clock()
        self._last_step, self._this_step = self._this_step, Asked()

    def step_ended(self) -> Sequence[Event]:
        """The oldest step that was planned has ended. Returns what it tells of loads before the speed was known."""
        self.speed.ended(self._clock())
        if self.speed.rate is None:
            return ()
        unpriced, self._unpriced = self._unpriced, Counter()
        return [Event(EventKind.AVOIDED, tier, seconds=self.speed.seconds(unpriced[tier])) for tier in unpriced]

    def asked(self, state: RequestState) -> None:
        """The engine asks about a request. If it was told to wait, that has ended for now."""
        if state.asked is not None:
            seconds = min(self._clock(), state.asked.until) - state.waiting_since
            state.waits[state.awaited] = state.waits.get(state.awaited, 0.0) + seconds
        state.asked = None

    def allows(self, state: RequestState, found: Lookup) -> bool:
        """May the engine be told to wait for what is on its way? Notes since when, and for which tier, it waits.

        The time in which a store was silent counts as the request's own, so that nobody waits for it twice.
        """
        state.awaited_chunks = max(state.awaited_chunks, found.pending)
        longest = self._load_wait
        if found.pending and (limit := self.limit(state)):
            longest = min(longest, state.awaited_chunks * limit.chunk_seconds)
        left = longest - max(sum(state.waits.values()), found.silence)
        if left <= 0:
            return False
        state.asked, state.waiting_since, state.awaited = self._this_step, self._clock(), found.awaited
        state.waits_until = state.waiting_since + left
        return True

    def goes_on(self, state: RequestState) -> bool:
        """The engine asks about a request of which nothing new is known. May it still be told to wait?"""
        if state.asked is not self._last_step and state.asked is not self._this_step:
            return False
        if self._clock() >= state.waits_until:
            return False
        state.asked = self._this_step
        return True

    def end(self, state: RequestState, tokens: int) -> Sequence[Event]:
        """The request is admitted, and loads so many tokens. Returns its seconds if these are none."""
        state.waited, state.load_begun = sum(state.waits.values()), self._clock()
        state.asked, state.awaited_chunks = None, 0
        return () if tokens else _wasted(state)

    def loaded(self, state: RequestState) -> Sequence[Event]:
        """The load of a request has ended well. Returns the seconds that it waited for each tier, and that it saved."""
        loading, total, told = self._clock() - state.load_begun, state.sources.total(), []
        for tier, tokens in state.sources.items():
            waited, avoided = state.waits.pop(tier, 0.0) + loading * tokens / total, self.speed.seconds(tokens)
            known = {"seconds": waited, "request": state.view.request_id}
            if avoided is None:
                self._unpriced[tier] += tokens
                told.append(Event(EventKind.WAITED, tier, tokens=tokens, why=NOT_KNOWN, **known))
            else:
                told.append(Event(EventKind.AVOIDED, tier, seconds=avoided, request=state.view.request_id))
                told.append(Event(EventKind.WAITED, tier, **known))
        return told + _wasted(state)

    def explain(self, state: RequestState, tokens: int) -> str:
        """For the log line of a request that loads so many tokens: what it waited, and what it left in a tier."""
        parts = []
        if state.waited and (seconds := self.speed.seconds(tokens)):
            parts.append(f"; waited {state.waited:.3f} s, computing takes {seconds:.3f} s")
        if state.declined:
            parts.append(f"; {state.declined}")
        if state.found.unfitting:
            parts.append(f"; {state.found.miss_reason}")
        return "".join(parts)


def _wasted(state: RequestState) -> list[Event]:
    """The waits of a request for tiers that it does without."""
    waits, state.waits = state.waits, {}
    return [
        Event(EventKind.WAITED, tier, seconds=seconds, request=state.view.request_id)
        for tier, seconds in waits.items()
        if tier and seconds
    ]
