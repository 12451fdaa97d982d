"""A progress bar for long computations."""

from __future__ import annotations

import sys
import time
from typing import TextIO

_WIDTH = 30
_EVERY = 0.1  # seconds


class Bar:
    """A line on a terminal, erased when the work is done; nothing if ``stream`` (stderr) is not a terminal.

    ``total`` is the expected number of calls of `tick`.
    """

    def __init__(self, total: int, stream: TextIO | None = None):
        self._stream = stream or sys.stderr
        self._shown = self._stream.isatty()
        self._total = total
        self._done = 0
        self._drawn = 0.0
        self.label = ""  #: what is being done

    def tick(self) -> None:
        """One step of the work is done."""
        self._done += 1
        if self._shown and time.monotonic() - self._drawn > _EVERY:
            self._drawn = time.monotonic()
            share = min(1.0, self._done / self._total)
            full = int(share * _WIDTH)
            self._stream.write(f"\r\033[K{'━' * full}{'┄' * (_WIDTH - full)} {share:4.0%}  {self.label}")
            self._stream.flush()

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: object) -> None:
        if self._shown:
            self._stream.write("\r\033[K")
            self._stream.flush()
