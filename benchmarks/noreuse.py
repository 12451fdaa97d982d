"""A workload that no cache can help: what it costs to remember for nothing."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

from benchmarks.engines import BLOCK, Answer, Engine, Recipe, engines, kvtier, none, prompt
from benchmarks.measure import Spread, Table, progress, scratch, turned

ROUNDS = 11
PROMPTS = 8
TOKENS = 1000
OUTPUT = 16
CONTROL = "no connector"


def tables(folder: Path) -> Iterator[Table]:
    with scratch(folder) as place:
        yield _table(place)


def _table(place: Path) -> Table:
    answers: dict[str, list[Answer]] = {}
    with engines(_recipes(place), place) as started:
        for number in range(-1, ROUNDS):  # one more to warm up
            progress(f"noreuse: round {number + 1} of {ROUNDS}")
            for engine, answer in _round(started, number):
                if number >= 0:
                    answers.setdefault(engine.name, []).append(answer)
    return Table(
        title="No reuse",
        says=f"{PROMPTS} prompts of {TOKENS} tokens at once, {OUTPUT} output tokens each, never the same prompt twice; "
        "otherwise as for the time to first token. Tokens are those of prompts and answers. The ratio is time to "
        f"that of the first engine in the same round: median (min to max) of {ROUNDS}. *Settling* is how long stores "
        "went on after the last answer; the next engine waited for that.",
        header=("", "tokens/s", "time, of control", "settling ms"),
        rows=[_row(engine.name, answers) for engine in started],
    )


def _recipes(place: Path) -> list[Recipe]:
    memory = {"type": "cpu", "capacity": "64MiB"}  # four rounds: then each store evicts
    disk = {"type": "disk", "path": str(place / "disk"), "capacity": "128MiB", "min_free": "0B"}
    return [
        none(CONTROL),
        none("no connector, once more"),
        kvtier("kvtier, cpu", BLOCK, memory),
        kvtier("kvtier, cpu and disk", BLOCK, memory, disk),
    ]


def _round(started: list[Engine], number: int) -> Iterator[tuple[Engine, Answer]]:
    prompts = [prompt(f"round {number} prompt {i}", TOKENS) for i in range(PROMPTS)]
    for engine in turned(started, number):
        yield engine, engine.ask(prompts, OUTPUT)


def _row(name: str, answers: dict[str, list[Answer]]) -> list[object]:
    mine, control = answers[name], answers[CONTROL]
    ratio = Spread(tuple(a.seconds / c.seconds for a, c in zip(mine, control, strict=True)))
    speed = PROMPTS * (TOKENS + OUTPUT) / statistics.median(a.seconds for a in mine)
    settling = statistics.median(a.settling for a in mine)
    return [name, f"{speed:.0f}", "1" if name == CONTROL else ratio, f"{settling * 1e3:.0f}"]
