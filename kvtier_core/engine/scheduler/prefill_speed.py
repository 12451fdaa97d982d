"""How fast the engine computes prompts: a running estimate from its own steps."""

from __future__ import annotations

import math
from collections import deque

#: A step that computes fewer tokens is one of decoding: it takes as long for one token as for fifty.
_PROMPT_TOKENS = 64
#: Tokens after which what is measured counts for two thirds of the estimate, and what was before for one third.
_MEMORY_TOKENS = 4096


class PrefillSpeed:
    """Tokens a second over steps that compute prompts. ``now`` is in seconds, of any clock.

    Steps end in the order in which they were planned. With asynchronous scheduling one is planned before the last has
    ended; it begins when that ends.
    """

    def __init__(self) -> None:
        self.rate: float | None = None  #: tokens a second; None before the first prompt was computed
        self._planned: deque[tuple[int, float]] = deque()  # tokens, and when it was planned
        self._last_end = float("-inf")

    def planned(self, tokens: int, now: float) -> None:
        """A step that computes so many tokens is about to begin."""
        self._planned.append((tokens, now))

    def ended(self, now: float) -> None:
        """The oldest step that was planned has ended."""
        if not self._planned:
            return
        tokens, begun = self._planned.popleft()
        seconds = now - max(begun, self._last_end)
        self._last_end = now
        if tokens >= _PROMPT_TOKENS and seconds > 0:
            newest = 1 - math.exp(-tokens / _MEMORY_TOKENS)
            rate = tokens / seconds
            self.rate = rate if self.rate is None else self.rate ** (1 - newest) * rate**newest

    def seconds(self, tokens: int) -> float | None:
        """The time in which the engine would compute so many tokens; None if that is not known."""
        return None if self.rate is None else tokens / self.rate
