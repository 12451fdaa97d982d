"""When a call must have ended."""

from __future__ import annotations

import time

from kvtier_core.errors import BackendError


class Deadline:
    """A moment, ``seconds`` from now."""

    def __init__(self, seconds: float):
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds until then, more than 0. Raises BackendError when it has passed."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise BackendError("the call timed out")
        return left

    def share(self, among: int) -> Deadline:
        """A deadline that leaves as much time for each of the others that have still to be served."""
        return Deadline(self.left() / among)
