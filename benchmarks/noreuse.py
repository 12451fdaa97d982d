"""A workload without any reuse: the cost of caching in vain."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

import attrs

from benchmarks.engines import BLOCK, Answer, Engine, Recipe, engines, kvtier, none, prompt
from benchmarks.measure import Spread, Table, progress, scratch, sized, turned
from benchmarks.models import RANDOM, TRAINED, Model, ModelUnavailable

TOKENS = sized(1000, 300)
OUTPUT = 16
CONTROL = "no connector"
HEADER = ("", "tokens/s", "time, of control", "settling ms")


@attrs.frozen
class Workload:
    """A model, how much it is asked, and tiers that hold so little of it that stores evict."""

    title: str
    model: Model
    rounds: int
    prompts: int  #: in each round, at once
    memory: str  #: capacity for the chunks of four rounds
    disk: str  #: capacity for those of eight


WORKLOADS = (
    Workload("No reuse", RANDOM, *sized((11, 8), (1, 2)), memory="64MiB", disk="128MiB"),
    Workload("No reuse, trained model", TRAINED, *sized((7, 4), (1, 2)), memory="320MiB", disk="640MiB"),
)


def tables(folder: Path) -> Iterator[Table]:
    """Measures the random model and the trained one, whose prefill has a realistic cost."""
    for workload in WORKLOADS:
        with scratch(folder) as place:
            yield _table(workload, place)


def _table(workload: Workload, place: Path) -> Table:
    try:
        checkpoint = workload.model.checkpoint(place)
    except ModelUnavailable as error:
        return Table(workload.title, f"Not measured: {workload.model.name} is not available: {error}.", HEADER, [])
    answers: dict[str, list[Answer]] = {}
    with engines(_recipes(workload, place), checkpoint) as started:
        for number in range(-1, workload.rounds):  # one more to warm up
            progress(f"noreuse: round {number + 1} of {workload.rounds}")
            for engine, answer in _round(workload, started, number):
                if number >= 0:
                    answers.setdefault(engine.name, []).append(answer)
    rows = [_row(workload, engine.name, answers) for engine in started]
    return Table(workload.title, _says(workload), HEADER, rows)


def _says(workload: Workload) -> str:
    return (
        f"{workload.prompts} prompts of {TOKENS} tokens at once, {OUTPUT} output tokens each, never the same prompt "
        f"twice; {workload.model.name} in bfloat16; otherwise as for the time to first token. Tokens are those of "
        "prompts and answers. The ratio is time to that of the first engine in the same round: median (min to max) of "
        f"{workload.rounds}. *Settling* is how long stores went on after the last answer; the next engine waited for "
        "that."
    )


def _recipes(workload: Workload, place: Path) -> list[Recipe]:
    memory = {"type": "cpu", "capacity": workload.memory}
    disk = {"type": "disk", "path": str(place / "disk"), "capacity": workload.disk, "min_free": "0B"}
    return [
        none(CONTROL),
        none("no connector, once more"),
        kvtier("kvtier, cpu", BLOCK, memory),
        kvtier("kvtier, cpu, `packing: auto`", BLOCK, memory | {"packing": "auto"}),
        kvtier("kvtier, cpu and disk", BLOCK, memory, disk),
    ]


def _round(workload: Workload, started: list[Engine], number: int) -> Iterator[tuple[Engine, Answer]]:
    prompts = [prompt(f"round {number} prompt {i}", TOKENS) for i in range(workload.prompts)]
    for engine in turned(started, number):
        yield engine, engine.ask(prompts, OUTPUT)


def _row(workload: Workload, name: str, answers: dict[str, list[Answer]]) -> list[object]:
    mine, control = answers[name], answers[CONTROL]
    ratio = Spread(tuple(a.seconds / c.seconds for a, c in zip(mine, control, strict=True)))
    speed = workload.prompts * (TOKENS + OUTPUT) / statistics.median(a.seconds for a in mine)
    settling = statistics.median(a.settling for a in mine)
    return [name, f"{speed:.0f}", "1" if name == CONTROL else ratio, f"{settling * 1e3:.0f}"]
