"""How fast the engine computes prompts: a running estimate from its own steps."""

from __future__ import annotations

import math
from collections import deque

import attrs

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
