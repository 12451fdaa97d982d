"""How long requests wait for tiers below the arenas, and the seconds that this cost and saved.

The engine's own steps show how fast it computes prompts. What a step computes keeps all its requests waiting, so a load
saves the time of computing for its own request and for each that the engine serves meanwhile.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence

import attrs

from kvtier_core.config.model import StackConfig
from kvtier_core.engine.scheduler.requests import Asked, RequestState
from kvtier_core.stack.outcomes import Arriving, Declined, LoadLimit, Lookup, TooSmall
from kvtier_core.types import Event, EventKind

#: The reason why an event of waiting comes without one of avoided computing.
NOT_KNOWN = "the time of computing is not known yet"

#: A step that computes fewer prompt tokens does not show their speed: it takes as long for one as for fifty.
_PROMPT_TOKENS = 64
#: After this number of tokens, their measurements have two thirds of the weight in the estimate, earlier ones a third.
_MEMORY_TOKENS = 4096
#: Steps with this many times the tokens of others show what each more costs.
_APART = 4
#: The weight of a step that only decodes in the estimate of the time for decoding.
_NEWEST_DECODING = 1 / 8


@attrs.frozen
class _Step:
    prompt: int  #: tokens of prompts
    decoded: int  #: other tokens
    planned: float


@attrs.define
class Steps:
    """What steps of one size have shown."""

    tokens: float  #: of prompts in a step, the mean
    rate: float  #: of these tokens per second, the geometric mean: one step that stalls hardly counts
    count: int = 0


class PrefillSpeed:
    """How long prompt tokens take. ``now`` is the time of any clock.

    A step takes some time however few tokens it computes. Steps are therefore told apart by size, to within a factor of
    two: else the short remainders of hits would make the tokens of whole prompts seem dear.

    A step may decode beside a prompt. The time for that is not the prompt's: it is estimated from steps that only
    decode, less for fewer tokens, and is at least the share of the decoded tokens in all tokens of the step.

    Steps end in the order in which they were planned. With asynchronous scheduling a step is planned before the
    previous one has ended, and begins when that ends.
    """

    def __init__(self) -> None:
        self._steps: dict[int, Steps] = {}  # by the number of bits of their tokens
        self._planned: deque[_Step] = deque()
        self._last_end = float("-inf")
        self._decoding: tuple[float, float] | None = None  # mean tokens and seconds of a step that only decodes

    def planned(self, prompt: int, decoded: int, now: float) -> None:
        """A step is about to begin that computes ``prompt`` tokens of prompts, and decodes ``decoded`` others."""
        self._planned.append(_Step(prompt, decoded, now))

    def ended(self, now: float) -> None:
        """The oldest step that was planned has ended."""
        if not self._planned:
            return
        step = self._planned.popleft()
        seconds = now - max(step.planned, self._last_end)
        self._last_end = now
        if step.decoded and not step.prompt:
            tokens, mean = self._decoding or (step.decoded, seconds)
            tokens += (step.decoded - tokens) * _NEWEST_DECODING
            self._decoding = tokens, mean + (seconds - mean) * _NEWEST_DECODING
        elif step.prompt >= _PROMPT_TOKENS:
            self._measured(step.prompt, seconds - self._decoding_in(step, seconds))

    def seconds(self, tokens: int) -> float | None:
        """What computing so many tokens more would take; None before a prompt was computed.

        These are whole steps, and tokens in a step that the engine makes all the same.
        """
        if not self._steps:
            return None
        short, long = self._steps[min(self._steps)], self._steps[max(self._steps)]
        step = long.tokens / long.rate
        each = step / long.tokens
        if long.tokens >= _APART * short.tokens:
            each = min(each, max(0.0, step - short.tokens / short.rate) / (long.tokens - short.tokens))
        whole, rest = divmod(tokens, long.tokens)
        return whole * step + rest * each

    def _decoding_in(self, step: _Step, seconds: float) -> float:
        """How many of a step's seconds its decoded tokens take."""
        tokens, alone = self._decoding or (1.0, 0.0)
        return max(alone * min(1.0, step.decoded / tokens), seconds * step.decoded / (step.prompt + step.decoded))

    def _measured(self, tokens: int, seconds: float) -> None:
        if seconds > 0:
            steps = self._steps.setdefault(tokens.bit_length(), Steps(tokens, tokens / seconds))
            steps.count += 1
            # The first one may have compiled something.
            newest = 1 - math.exp(-tokens / _MEMORY_TOKENS) if steps.count > 2 else 1.0
            steps.tokens += (tokens - steps.tokens) * newest
            steps.rate = steps.rate ** (1 - newest) * (tokens / seconds) ** newest


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
        chunk_seconds = self.speed.seconds(self._chunk_tokens)
        if self._always or chunk_seconds is None:
            return None
        return LoadLimit(chunk_seconds, self._load_wait - sum(state.wait.seconds.values()))

    def step_planned(self, requests: int, prompt: int, decoded: int) -> None:
        """The engine asks about no more requests in this step, which computes ``prompt`` and ``decoded`` tokens.

        ``requests`` is the number of requests that it serves.
        """
        self._served = requests
        self.speed.planned(prompt, decoded, self._clock())
        self._last_step.until = self._clock()
        self._last_step, self._this_step = self._this_step, Asked()

    def step_ended(self) -> Sequence[Event]:
        """The oldest step that was planned has ended. Returns events for loads before the speed was known."""
        self.speed.ended(self._clock())
        if self.speed.seconds(0) is None:
            return ()
        unpriced, self._unpriced = self._unpriced, Counter()
        return [Event(EventKind.AVOIDED, tier, seconds=self.speed.seconds(n) or 0.0) for tier, n in unpriced.items()]

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
            longest = min(longest, wait.most_chunks * limit.chunk_seconds)
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
        computing, request, waiting = self.speed.seconds(total), state.name, self._served + 1
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
        if state.wait.total and (seconds := self.speed.seconds(tokens)):
            parts.append(f"; waited {state.wait.total:.3f} s, computing takes {seconds:.3f} s")
        if isinstance(state.match.left, Declined | TooSmall):
            parts.append(f"; {state.match.left}")
        return "".join(parts)


def _wasted(state: RequestState) -> list[Event]:
    """The waits of a request for tiers from which it loads nothing."""
    waits, state.wait.seconds = state.wait.seconds, {}
    return [
        Event(EventKind.WAITED, tier, seconds=seconds, request=state.name)
        for tier, seconds in waits.items()
        if tier and seconds
    ]
