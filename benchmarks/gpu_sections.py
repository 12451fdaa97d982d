"""python -m benchmarks.gpu_sections NAME: one section of the GPU check, as lines of JSON. See `gpu_report`.

What is measured is told here, and a `Device` measures it: all of this runs without a GPU, too.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from benchmarks.gpu_report import lines_of
from benchmarks.measure import Table
from kvtier_core.transfer.io_pool import run
from kvtier_core.types import Nbytes

PAGES = [2 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 512 << 10, 2 << 20]
COUNTS = [64, 256, 4096, 51200]
MOST_NBYTES = 1 << 30  #: of a job
ROUNDS = 3
DIRECTIONS = ("store", "load", "both")
LOCKED_GIB = 4
TOKEN_NBYTES = 4 << 10

Items = Iterator[Table | str]


class Copied(NamedTuple):
    """Seconds that a job took, and those of them in the call that began it."""

    whole: float
    submit: float


class Bench(Protocol):
    """Pages of one size, slots, and for each path a mover between them."""

    def memcpy(self, direction: str, nbytes: int) -> float:
        """Seconds of one pinned copy; of two at once, of half the bytes each, for ``both``."""

    def copy(self, path: str, direction: str, count: int) -> Copied:
        """A job of so many pages by this path."""


class Locking(NamedTuple):
    """What was seen while an arena was page-locked."""

    seconds: float
    launches: tuple[Sequence[float], Sequence[float]]  #: seconds of each launch before, and meanwhile
    replays: tuple[Sequence[float], Sequence[float]]  #: the same of a graph


class Tally(Protocol):
    """What the engine of tests/device_engine says in the end."""

    requests: int
    steps: int
    asked_tokens: int
    loaded_tokens: int
    failed_loads: int
    aborted: int
    preempted: int
    fenced: int


class Device(Protocol):
    """The GPU."""

    paths: Sequence[str]  #: by which pages can be copied

    def facts(self) -> dict[str, str]:
        """What it is, and what it runs with."""

    def bench(self, page_nbytes: int, count: int) -> contextlib.AbstractContextManager[Bench]:
        """For jobs of at most so many pages."""

    def locking(self, gib: int) -> Locking:
        """Attach an arena of so many GiB."""

    def tokens(self, path: str | None) -> Sequence[float]:
        """Seconds of each of many small copies to the host, while a store by this path is under way; None: alone."""


def machine(device: Device) -> Items:
    """What was checked."""
    yield Table("Machine", "What was checked.", ("what", "is"), list(device.facts().items()))


def copies(device: Device) -> Items:
    """Every path over page sizes, counts and directions, as ratios to a pinned memcpy of the same bytes."""
    for page in PAGES:
        counts = [count for count in COUNTS if count * page <= MOST_NBYTES]
        problems: list[str] = []
        with device.bench(page, counts[-1]) as bench:
            rows = [
                _copies_of(bench, device.paths, direction, page, count, problems)
                for direction in DIRECTIONS
                for count in counts
            ]
        yield Table(
            f"Copies: pages of {Nbytes(page)}",
            "Speed of each path by that of one pinned memcpy of the same bytes in the same round (for both directions "
            "at once, of two, of half the bytes each); behind it the microseconds that the call takes of the engine's "
            f"thread. Random blocks; medians of {ROUNDS} rounds.",
            ("direction", "pages", "memcpy GB/s", *(cell for path in device.paths for cell in (path, f"{path} µs"))),
            rows,
        )
        yield from problems


def _copies_of(
    bench: Bench, paths: Sequence[str], direction: str, page: int, count: int, problems: list[str]
) -> list[object]:
    nbytes = page * count
    memcpys: list[float] = []
    by_path: dict[str, list[Copied]] = {path: [] for path in paths}
    wrong: set[str] = set()
    for number in range(ROUNDS + 1):  # the first one warms up
        seconds = bench.memcpy(direction, nbytes)
        if number:
            memcpys.append(seconds)
        for path in by_path.keys() - wrong:
            outcome = run(lambda path=path: bench.copy(path, direction, count))
            if outcome.error is not None:
                wrong.add(path)
                problems.append(f"{direction} of {count} pages of {Nbytes(page)} by {path}: {outcome.error}")
            elif number:
                by_path[path].append(outcome.value)
    cells: list[object] = []
    for path, rounds in by_path.items():
        if path in wrong:
            cells += ["failed", ""]
            continue
        ratios = [memcpy / copied.whole for memcpy, copied in zip(memcpys, rounds, strict=True)]
        cells += [statistics.median(ratios), statistics.median(copied.submit for copied in rounds) * 1e6]
    return [direction, count, nbytes / statistics.median(memcpys) / 1e9, *cells]


def registration(device: Device) -> Items:
    """How long page-locking takes, and what it does to launches meanwhile."""
    seen = device.locking(LOCKED_GIB)
    rows = [
        [what, _micros(before, 50), _micros(before, 99), _micros(meanwhile, 50), _micros(meanwhile, 99), len(meanwhile)]
        for what, (before, meanwhile) in (("launch", seen.launches), ("replay of a graph", seen.replays))
    ]
    yield Table(
        "Page-locking",
        f"{seen.seconds / LOCKED_GIB:.3g} s a GiB: {LOCKED_GIB} GiB, from attaching the arena until its last slot is "
        "used. Microseconds of a call on the engine's thread, before and meanwhile.",
        ("call", "median", "p99", "median meanwhile", "p99 meanwhile", "calls meanwhile"),
        rows,
    )


def tokens(device: Device) -> Items:
    """How long the copy of a step's tokens takes while 1 GiB is stored."""
    rows: list[list[object]] = []
    problems: list[str] = []
    for path in (None, *device.paths):
        outcome = run(lambda path=path: device.tokens(path))
        if outcome.error is not None:
            problems.append(f"tokens beside a store by {path}: {outcome.error}")
            rows.append([path or "alone", "failed", "", "", ""])
        else:
            seconds = outcome.value
            rows.append([path or "alone", _micros(seconds, 50), _micros(seconds, 99), max(seconds) * 1e6, len(seconds)])
    yield Table(
        "Tokens",
        f"Microseconds of a copy of {Nbytes(TOKEN_NBYTES)} from the device on a stream of its own, while a store of "
        f"{Nbytes(MOST_NBYTES)} is under way.",
        ("store by", "median", "p99", "longest", "copies"),
        rows,
    )
    yield from problems


def engines(serve: Mapping[str, Callable[[], Tally]]) -> Items:
    """The engine of tests/device_engine from end to end, by kind; whatever it raises is a problem."""
    rows: list[list[object]] = []
    problems: list[str] = []
    for kind, work in serve.items():
        begin = time.perf_counter()
        outcome = run(work)
        seconds = time.perf_counter() - begin
        if outcome.error is not None:
            problems.append(f"{kind}: {type(outcome.error).__name__}: {outcome.error}")
            rows.append([kind, "failed", "", "", "", "", "", "", seconds])
            continue
        tally = outcome.value
        share = tally.loaded_tokens / tally.asked_tokens
        counts = [tally.requests, tally.steps, share, tally.fenced, tally.preempted, tally.aborted, tally.failed_loads]
        rows.append([kind, *counts, seconds])
        if not tally.loaded_tokens:
            problems.append(f"{kind}: nothing was loaded")
    yield Table(
        "Engine",
        "Two processes and more, with the real scheduler side, worker side and arena. The forward, in a CUDA graph, "
        "compares every token that it reads; no token was wrong where a row has figures. Tokens loaded are by those "
        "of all prompts; a request that is preempted may load them again. Seconds with the start of the processes.",
        ("engine", "requests", "steps", "tokens loaded", "fences", "preempted", "aborted", "failed loads", "s"),
        rows,
    )
    yield from problems


def planted(serve: Mapping[str, Callable[[], Tally]]) -> Items:
    """The same with a bug each, which the engine must notice."""
    rows = []
    for bug, work in serve.items():
        error = run(work).error
        rows.append([bug, "not noticed" if error is None else f"{type(error).__name__}: {str(error).splitlines()[0]}"])
    yield Table(
        "Planted bugs",
        "On a real device it is a matter of time whether an order that nobody keeps is broken; each of these and all "
        "others are noticed on a simulated one, tests/engine/test_device_engine.py.",
        ("bug", "what came of it"),
        rows,
    )


def _micros(seconds: Sequence[float], percent: int) -> float:
    """A percentile, in microseconds."""
    ordered = sorted(seconds)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] * 1e6


OF_DEVICE: dict[str, Callable[[Device], Items]] = {
    "machine": machine,
    "copies": copies,
    "registration": registration,
    "tokens": tokens,
}


def _items(name: str) -> Items:
    if name in OF_DEVICE:
        from benchmarks.gpu_device import Gpu

        return OF_DEVICE[name](Gpu())
    if name == "forward":
        from benchmarks import gpu_copies

        return gpu_copies.tables()
    from device_engine import engine, on_gpu

    setups, section = (on_gpu.KINDS, engines) if name == "engine" else (on_gpu.PLANTED, planted)
    return section({kind: functools.partial(engine.run, setup, on_gpu.REQUESTS) for kind, setup in setups.items()})


if __name__ == "__main__":
    for line in lines_of(_items(sys.argv[1])):
        print(line, flush=True)
