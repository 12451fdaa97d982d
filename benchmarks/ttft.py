"""Time to first token of prompts that were seen before, and what it cost to remember them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.engines import BLOCK, Answer, Engine, Recipe, engines, example, kvtier, none, prefix_cache, prompt
from benchmarks.measure import Spread, Table, progress, scratch, turned

PROMPTS = 12
TOKENS = 3500
WARMING = 3  # prompts that are not counted
CONTROL = "no connector"


def tables(folder: Path) -> Iterator[Table]:
    with scratch(folder) as place:
        yield _table(place)


def _table(place: Path) -> Table:
    with engines(_recipes(place), place) as started:
        for number in range(WARMING):
            for _ in range(2):
                _pass(started, [prompt(f"warming {number}", TOKENS)])
        prompts = [prompt(number, TOKENS) for number in range(PROMPTS)]
        progress(f"ttft: {PROMPTS} prompts of {TOKENS} tokens, for the first time")
        cold = _pass(started, prompts)
        progress("ttft: and again")
        warm = _pass(started, prompts)
    return Table(
        title="Time to first token",
        says=f"{PROMPTS} prompts of {TOKENS} random tokens, each put to every engine before the next, and all of it "
        f"twice. Blocks of {BLOCK} tokens; the model of `examples/tiny_llama.py` in bfloat16; one thread computes. An "
        "engine is a process of its own, scheduler and worker in one thread of it. vLLM's own prefix cache is off but "
        "where it is named: it copies nothing, so no hit is faster. TTFT is the wall time of `generate` with one token "
        "to answer; the ratio is to the first engine with the same prompt in the same pass: median (min to max) of "
        f"{PROMPTS}. *Reused* are tokens of a prompt in the second pass. *Settling* is how long stores of the first "
        "went on after the answer; nobody waits for that.",
        header=("", "first ms", "of control", "again ms", "of control", "reused", "settling ms"),
        rows=[_row(engine.name, cold, warm) for engine in started],
    )


def _recipes(place: Path) -> list[Recipe]:
    memory = {"type": "cpu", "capacity": "512MiB"}
    small = {"type": "cpu", "capacity": "16MiB"}  # two prompts: the second pass finds nothing there
    disk = {"type": "disk", "path": str(place / "disk"), "capacity": "4GiB", "min_free": "0B"}
    return [
        none(CONTROL),
        none("no connector, once more"),
        prefix_cache(),
        example(place / "example"),
        kvtier("kvtier, cpu", BLOCK, memory),
        kvtier("kvtier, cpu, chunks of 256", 256, memory),
        kvtier("kvtier, hits from disk", BLOCK, small, disk),
    ]


def _pass(started: Sequence[Engine], prompts: Sequence[Sequence[int]]) -> dict[str, list[Answer]]:
    """Each prompt to each engine, before the next prompt."""
    answers: dict[str, list[Answer]] = {engine.name: [] for engine in started}
    for number, asked in enumerate(prompts):
        for engine in turned(started, number):
            answers[engine.name].append(engine.ask([asked], 1))
    return answers


def _row(name: str, cold: dict[str, list[Answer]], warm: dict[str, list[Answer]]) -> list[object]:
    cells: list[object] = [name]
    for answers in (cold, warm):
        mine, control = answers[name], answers[CONTROL]
        ratio = Spread(tuple(a.seconds / c.seconds for a, c in zip(mine, control, strict=True)))
        cells += [f"{statistics.median(a.seconds for a in mine) * 1e3:.1f}", "1" if name == CONTROL else ratio]
    reused = statistics.median(a.cached for a in warm[name])
    settling = statistics.median(a.settling for a in cold[name])
    return [*cells, f"{reused:.0f}", f"{settling * 1e3:.0f}"]
