"""What kvtier costs where it brings nothing: prompts without a hit, and the first seconds of a store that hangs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from benchmarks.engines import BLOCK, Recipe, engines, idle, kvtier, none, prompt
from benchmarks.measure import Spread, Table, progress, scratch, sized, turned
from benchmarks.models import RANDOM, TRAINED, Model, ModelUnavailable
from benchmarks.stores import RedisPlaces, redis

CONTROL, AGAIN = "no connector", "no connector, once more"
OUTPUT = 2  # tokens: a request does not end with its first


@attrs.frozen
class Workload:
    """A model, and how many prompts of which lengths it is asked."""

    title: str
    model: Model
    lengths: tuple[int, ...]
    starts: int  #: of all engines: where its memory lies makes one faster than another by a tenth
    rounds: int  #: in each
    warming: int  #: further rounds, which are not counted


WORKLOADS = (
    Workload("Time to first token without a hit", RANDOM, (40, 700, 1500), *sized((5, 15, 3), (1, 1, 0))),
    Workload("Time to first token without a hit, trained model", TRAINED, (40, 700), *sized((3, 4, 1), (1, 1, 0))),
)

HUNG_TOKENS = 700
TRIALS = sized(3, 1)  # each with engines of its own
SECONDS = sized(13.0, 0.0)  # for which the store hangs: its calls time out after 5, and hang after 10
PAUSE = 0.3  # from a prompt to the next, from the tenth on


def tables(folder: Path) -> Iterator[Table]:
    for workload in WORKLOADS:
        with scratch(folder) as place:
            yield _without_hits(workload, place)
    with scratch(folder) as place, redis(place) as server:
        if server is not None:
            yield _hung(place, server)


# -- prompts without a hit -------------------------------------------------------------------------------


def _without_hits(workload: Workload, place: Path) -> Table:
    header = ("", "ms", "of control")
    try:
        checkpoint = workload.model.checkpoint(place)
    except ModelUnavailable as error:
        return Table(workload.title, f"Not measured: {workload.model.name} is not available: {error}.", header, [])
    took: dict[tuple[int, str], list[list[float]]] = {}  # by length and engine: in each start the seconds of each round
    for start in range(workload.starts):
        progress(f"misses: start {start + 1} of {workload.starts}")
        with scratch(place) as disk, engines(_all(disk), checkpoint) as started:
            for tokens in workload.lengths:
                for engine in started:
                    took.setdefault((tokens, engine.name), []).append([])
                for number in range(-workload.warming, workload.rounds):
                    asked = prompt(f"{tokens} {number}", tokens)
                    for engine in turned(started, start + number):
                        seconds = engine.ask([asked], OUTPUT).first
                        if number >= 0:
                            took[tokens, engine.name][-1].append(seconds)
    return Table(
        workload.title,
        f"{workload.rounds} prompts of each length, none of them seen before, each put to every engine before the "
        f"next, {OUTPUT} tokens to answer; all of it in {workload.starts} starts of all engines, because where its "
        f"memory lies makes one faster than another. Blocks and chunks of {BLOCK} tokens; {workload.model.name} in "
        "bfloat16; otherwise as for the time to first token. The ratio is to the first engine with the same prompt, "
        "the median of each start: median (min to max) of these.",
        header,
        [
            (f"{tokens} tokens, {name}", *_beside(starts, took[tokens, CONTROL]))
            for (tokens, name), starts in took.items()
        ],
    )


def _all(place: Path) -> list[Recipe]:
    memory = {"type": "cpu", "capacity": "256MiB"}
    disk = {"type": "disk", "path": str(place / "disk"), "capacity": "1GiB", "min_free": "0B"}
    tiers = [kvtier("kvtier, cpu", BLOCK, memory), kvtier("kvtier, cpu and disk", BLOCK, memory, disk)]
    return [none(CONTROL), none(AGAIN), idle(), *tiers]


def _beside(starts: Sequence[Sequence[float]], control: Sequence[Sequence[float]]) -> tuple[str, object]:
    """Milliseconds, and the ratio to the control."""
    ratios = [
        statistics.median(mine / its for mine, its in zip(*both, strict=True))
        for both in zip(starts, control, strict=True)
    ]
    seconds = statistics.median(each for start in starts for each in start)
    return f"{seconds * 1e3:.1f}", "1" if starts is control else Spread(tuple(ratios))


def _middle(values: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(values)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


# -- a store that hangs ----------------------------------------------------------------------------------


@attrs.define
class _Hung:
    """Ratios of times to first token to that of the first engine, while the store hangs."""

    first: list[float] = attrs.field(factory=list)
    second: list[float] = attrs.field(factory=list)
    rest: list[float] = attrs.field(factory=list)

    def row(self, name: str) -> tuple[str, Spread, Spread, str]:
        return (name, Spread(tuple(self.first)), Spread(tuple(self.second)), _middle(self.rest))


def _hung(place: Path, server: RedisPlaces) -> Table:
    checkpoint = RANDOM.checkpoint(place)
    known = [prompt(f"known {number}", HUNG_TOKENS) for number in range(12)]
    found: dict[str, _Hung] = {}
    for trial in range(TRIALS):
        progress(f"misses: a store that hangs, trial {trial + 1} of {TRIALS}")
        recipes = _recipes(server, trial)
        with engines(recipes, checkpoint) as started:
            for number in range(5):  # without kvtier, for whose speed that would be known from then on
                for engine in started[:2]:
                    engine.ask([prompt(f"warming {number}", HUNG_TOKENS)], 1)
            for asked in [*known, *known]:  # so that all but the last lie in the store alone, and have been read
                started[-1].ask([asked], OUTPUT)
            with server.stopped():
                began, number = time.monotonic(), 0
                while number < 4 or time.monotonic() - began < SECONDS:
                    asked = known[number % (len(known) - 1)]
                    control, *others = (engine.ask([asked], OUTPUT, settle=False).first for engine in started)
                    for engine, seconds in zip(started[1:], others, strict=True):
                        hung = found.setdefault(engine.name, _Hung())
                        (hung.first, hung.second, hung.rest)[min(number, 2)].append(seconds / control)
                    number += 1
                    time.sleep(PAUSE if number > 10 else 0)
    return Table(
        title="A store that hangs",
        says=f"Prompts of {HUNG_TOKENS} tokens, one after the other, for {SECONDS:.0f} seconds in which a redis-server "
        f"is stopped; {TRIALS} trials, each with new engines. One engine has never asked it for anything, and does not "
        "know yet how fast it computes, so that its first request may wait `load_wait`, 2 s; another has stored all of "
        "these prompts there. The ratio is to the first engine, with the same prompt: of the first and the second "
        "request median (min to max), of all later ones median (the middle half).",
        header=("", "first request", "second", "later ones"),
        rows=[hung.row(name) for name, hung in found.items()],
    )


def _recipes(server: RedisPlaces, trial: int) -> list[Recipe]:
    memory = {"type": "cpu", "capacity": "4MiB"}  # two prompts
    tier = {"type": "redis", "url": f"redis://127.0.0.1:{server.port}", "prefix": f"trial{trial}"}
    return [
        none(CONTROL),
        none(AGAIN),
        kvtier("kvtier, cpu and redis, which has never answered", BLOCK, memory, tier),
        kvtier("kvtier, cpu and redis, which has served", BLOCK, memory, tier),
    ]
