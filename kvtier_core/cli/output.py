"""The output of a command: lines for people or, with ``--json``, one value for programs. Colour only on a terminal."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

import attrs

from kvtier_core.errors import BackendError, ConfigError, KvtierError

#: Exit codes of a command: success; problems found; it cannot run.
FINE, PROBLEMS, USAGE = 0, 1, 2

#: The terminal's code for each meaning.
_COLOURS = {"good": "32", "bad": "31", "warning": "33", "dim": "2"}


@attrs.define
class Output:
    """The findings of one run of a command."""

    as_json: bool = False
    stream: TextIO = attrs.field(factory=lambda: sys.stdout)
    value: Any = None  #: of JSON's types; printed by `finish`

    def say(self, *lines: str) -> None:
        """Print lines for people."""
        if not self.as_json:
            for line in lines:
                print(line, file=self.stream)

    def warn(self, line: str) -> None:
        """Print a line about the run itself."""
        print(line, file=sys.stderr)

    def fail(self, error: KvtierError) -> None:
        """Print all problems."""
        if not self.as_json:
            self.warn(str(error))
        elif isinstance(error, ConfigError):
            self.value = {"problems": [attrs.asdict(problem) for problem in error.problems]}
        else:
            self.value = {"problems": [{"why": str(error)}]}

    def paint(self, text: str, meaning: str) -> str:
        """The text in the colour of its meaning: ``good``, ``bad``, ``warning`` or ``dim``."""
        return f"\33[{_COLOURS[meaning]}m{text}\33[0m" if meaning and _has_colours() else text

    def finish(self) -> None:
        """Print the value for programs, unless it was printed line by line."""
        if self.as_json and self.value is not None:
            print(json.dumps(self.value, indent=1), file=self.stream)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> Iterator[str]:
    """The lines of a table whose first ``left`` columns are aligned to the left."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        cells = [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def agreed(question: str) -> bool:
    """Does the user agree? Raises BackendError if there is no terminal to ask at."""
    if not sys.stdin.isatty():
        raise BackendError("not a terminal; pass --yes to confirm")
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _has_colours() -> bool:
    """See no-color.org."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
