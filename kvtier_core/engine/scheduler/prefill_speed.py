"""How fast the engine computes prompts, as its own steps show."""

from __future__ import annotations

import math
import operator
from collections import deque

import attrs

#: A step that computes fewer prompt tokens does not show their speed: it takes as long for one as for thirty.
_PROMPT_TOKENS = 32
#: After this number of tokens, their measurements have two thirds of the weight in the estimate, earlier ones a third.
_MEMORY_TOKENS = 4096
#: The weight of a step that only decodes in the estimate of the time for decoding.
_NEWEST_DECODING = 1 / 8


def pairs(begin: int, end: int) -> float:
    """How many pairs of tokens attention compares to compute the tokens of a prompt from ``begin`` to ``end``."""
    return (end - begin) * (begin + end) / 2


@attrs.frozen
class Computed:
    """What a step computes."""

    prompt: int  #: tokens of prompts
    pairs: float  #: that attention compares for them
    decoded: int  #: other tokens


@attrs.define
class Steps:
    """What steps of one size have shown."""

    tokens: float  #: of prompts in a step, the mean
    pairs: float  #: of a step, the mean
    rate: float  #: of the tokens per second, the geometric mean: one step that stalls hardly counts
    count: int = 0


class PrefillSpeed:
    """How long prompt tokens take. ``now`` is the time of any clock.

    A step takes some time however few tokens it computes, some for each token, and some for each pair of tokens that
    attention compares. Steps are told apart by size, to within a factor of two, and each size counts once: else the
    short remainders of hits would hide what whole prompts have shown.

    A step may decode beside a prompt. The time for that is not the prompt's: it is estimated from steps that only
    decode, less for fewer tokens, and is at least the share of the decoded tokens in all tokens of the step.

    Steps end in the order in which they were planned. With asynchronous scheduling a step is planned before the
    previous one has ended, and begins when that ends.
    """

    def __init__(self) -> None:
        self._steps: dict[int, Steps] = {}  # by the number of bits of their tokens
        self._costs = [0.0, 0.0, 0.0]  # seconds of a token, of a step, and of a pair
        self._planned: deque[tuple[Computed, float]] = deque()
        self._last_end = float("-inf")
        self._decoding: tuple[float, float] | None = None  # mean tokens and seconds of a step that only decodes

    def planned(self, step: Computed, now: float) -> None:
        """A step is about to begin."""
        self._planned.append((step, now))

    def ended(self, now: float) -> None:
        """The oldest step that was planned has ended."""
        if not self._planned:
            return
        step, planned = self._planned.popleft()
        seconds = now - max(planned, self._last_end)
        self._last_end = now
        if step.decoded and not step.prompt:
            tokens, mean = self._decoding or (step.decoded, seconds)
            tokens += (step.decoded - tokens) * _NEWEST_DECODING
            self._decoding = tokens, mean + (seconds - mean) * _NEWEST_DECODING
        elif step.prompt >= _PROMPT_TOKENS:
            self._measured(step, seconds - self._decoding_in(step, seconds))

    def seconds(self, begin: int, end: int, prompt: int) -> float | None:
        """The time to compute the tokens from ``begin`` to ``end`` of a prompt of ``prompt`` tokens; None if unknown.

        A prompt that takes several steps takes fewer without these tokens.
        """
        if not self._steps:
            return None
        (token, step, pair), longest = self._costs, self._steps[max(self._steps)].tokens
        steps = (end - begin) / longest if prompt > longest else 0.0
        return (end - begin) * token + steps * step + pairs(begin, end) * pair

    def _decoding_in(self, step: Computed, seconds: float) -> float:
        """How many of a step's seconds its decoded tokens take."""
        tokens, alone = self._decoding or (1.0, 0.0)
        return max(alone * min(1.0, step.decoded / tokens), seconds * step.decoded / (step.prompt + step.decoded))

    def _measured(self, step: Computed, seconds: float) -> None:
        if seconds > 0:
            rate = step.prompt / seconds
            steps = self._steps.setdefault(step.prompt.bit_length(), Steps(step.prompt, step.pairs, rate))
            steps.count += 1
            # The first one may have compiled something.
            newest = 1 - math.exp(-step.prompt / _MEMORY_TOKENS) if steps.count > 2 else 1.0
            steps.tokens += (step.prompt - steps.tokens) * newest
            steps.pairs += (step.pairs - steps.pairs) * newest
            steps.rate = steps.rate ** (1 - newest) * rate**newest
            self._learn()

    def _learn(self) -> None:
        """A round of coordinate descent for the least squares of relative errors, in which no cost is negative."""
        seen = self._steps.values()
        rows = [[number * each.rate / each.tokens for number in (each.tokens, 1.0, each.pairs)] for each in seen]
        for i, cost in enumerate(self._costs):
            left = (row[i] * (1 + cost * row[i] - sum(map(operator.mul, self._costs, row))) for row in rows)
            self._costs[i] = max(0.0, sum(left) / sum(row[i] ** 2 for row in rows))
