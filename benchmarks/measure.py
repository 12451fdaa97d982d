"""Interleaved rounds of all cases, and their statistics. Only ratios within one run are meaningful."""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import attrs

T = TypeVar("T")

GIB = 1 << 30
#: In the environment of the short form, also of its processes.
SHORT_FORM = "KVTIER_BENCHMARKS_SHORT"


def sized(full: T, short: T) -> T:
    """``full``, or ``short`` in the short form, which shows that everything runs and measures nothing."""
    return short if SHORT_FORM in os.environ else full


def progress(line: str) -> None:
    """Print a line of progress on stderr: stdout is for the tables."""
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """A folder below this one, on its disk, for as long as it is needed."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="benchmark-") as name:
        place = Path(name)
        (place / ".gitignore").write_text("*\n")  # the folder may lie in a git checkout
        yield place


@attrs.frozen
class Case:
    name: str
    work: Callable[[], object]
    before: Callable[[], object] = lambda: None  #: not timed


@attrs.frozen
class Spread:
    """The results of several rounds."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def __str__(self) -> str:
        digits = 2 if self.median >= 0.1 else 3
        return f"{self.median:.{digits}f} ({min(self.values):.{digits}f} to {max(self.values):.{digits}f})"


@attrs.frozen
class Times:
    """Seconds of each case in each round."""

    seconds: dict[str, list[float]]

    def median(self, case: str) -> float:
        return statistics.median(self.seconds[case])

    def ratio(self, case: str, to: str) -> Spread:
        """How many times as long as ``to`` it took, round by round."""
        pairs = zip(self.seconds[case], self.seconds[to], strict=True)
        return Spread(tuple(mine / its for mine, its in pairs))


def interleaved(cases: Sequence[Case], rounds: int, repeats: int = 1) -> Times:
    """Each round the best of ``repeats``. The order turns, so that no case always follows the same one; one more
    round warms up.
    """
    seconds: dict[str, list[float]] = {case.name: [] for case in cases}
    for number in range(-1, rounds):
        for case in turned(cases, number):
            best = min(_seconds(case) for _ in range(repeats))
            if number >= 0:
                seconds[case.name].append(best)
    return Times(seconds)


def _seconds(case: Case) -> float:
    case.before()
    begin = time.perf_counter()
    case.work()
    return time.perf_counter() - begin


def turned(items: Sequence, by: int) -> list:
    by %= len(items)
    return [*items[by:], *items[:by]]


@attrs.frozen
class Table:
    """Numbers may stay numbers: they are rounded in the text."""

    title: str
    says: str  #: what was moved, what is compared to what
    header: Sequence[str]
    rows: Iterable[Sequence[object]]

    def __str__(self) -> str:
        lines = [_line(self.header), _line(["---"] + ["---:"] * (len(self.header) - 1)), *map(_line, self.rows)]
        return "\n".join([f"## {self.title}", "", self.says, "", *lines])


def _line(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
