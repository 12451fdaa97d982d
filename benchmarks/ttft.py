"""Time to first token of prompts that were seen before, and the cost of storing them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from benchmarks.engines import BLOCK, Answer, Engine, Recipe, engines, example, kvtier, none, prefix_cache, prompt
from benchmarks.measure import Spread, Table, progress, scratch, sized, turned
from benchmarks.models import RANDOM, TRAINED, Model, ModelUnavailable
from benchmarks.stores import shared_tiers

#: Settings of tiers on shared stores, by what they are called.
Tiers = Mapping[str, dict[str, Any]]

TOKENS = sized(3500, 300)
CONTROL = "no connector"
PACKED = {"packing": "auto"}
HEADER = ("", "first ms", "of control", "again ms", "of control", "reused", "settling ms")


def tables(folder: Path) -> Iterator[Table]:
    """Measures the random model, in many ways, and the trained one, in the most common ones."""
    for workload in (
        Workload("Time to first token", RANDOM, *sized((12, 3), (1, 0)), _all_recipes),
        Workload("Time to first token, trained model", TRAINED, *sized((6, 1), (1, 0)), _recipes),
    ):
        with scratch(folder) as place:
            yield measure(workload, place)


@attrs.frozen
class Workload:
    """A model, how many prompts it is asked, and by which engines."""

    title: str
    model: Model
    prompts: int
    warming: int  #: further prompts that are not counted
    recipes: Callable[[Path, Tiers], list[Recipe]]  #: the first is what the others are compared to
    tokens: int = TOKENS  #: of a prompt


def measure(workload: Workload, place: Path) -> Table:
    """Ask each engine every prompt twice."""
    try:
        checkpoint = workload.model.checkpoint(place)
    except ModelUnavailable as error:
        return Table(workload.title, f"Not measured: {workload.model.name} is not available: {error}.", HEADER, [])
    with shared_tiers(place) as shared, engines(workload.recipes(place, shared), checkpoint) as started:
        for number in range(workload.warming):
            for _ in range(2):
                _pass(started, [prompt(f"warming {number}", workload.tokens)])
        prompts = [prompt(number, workload.tokens) for number in range(workload.prompts)]
        progress(f"ttft: {workload.prompts} prompts of {workload.tokens} tokens, for the first time")
        cold = _pass(started, prompts)
        progress("ttft: and again")
        warm = _pass(started, prompts)
    rows = [_row(engine.name, started[0].name, cold, warm) for engine in started]
    return Table(workload.title, _says(workload), HEADER, rows)


def _says(workload: Workload) -> str:
    return (
        f"{workload.prompts} prompts of {workload.tokens} random tokens, each put to every engine before the next, and "
        f"all of it twice. Blocks of {BLOCK} tokens; {workload.model.name} in bfloat16; one thread computes. An engine "
        "is a process of its own, scheduler and worker in one thread of it. vLLM's own prefix cache is off but where "
        "it is named: it copies nothing, so no hit is faster. TTFT is the wall time of `generate` with one token to "
        "answer; the ratio is to the first engine with the same prompt in the same pass: median (min to max) of "
        f"{workload.prompts}. *Reused* are tokens of a prompt in the second pass. *Settling* is how long stores of the "
        "first pass continued after the answer; no request waits for that."
    )


def _all_recipes(place: Path, shared: Tiers) -> list[Recipe]:
    memory = {"type": "cpu", "capacity": "512MiB"}
    small = {"type": "cpu", "capacity": "16MiB"}  # two prompts: the second pass finds nothing there
    return [
        none(CONTROL),
        none("no connector, once more"),
        prefix_cache(),
        example(place / "example"),
        kvtier("kvtier, cpu", BLOCK, memory),
        kvtier("kvtier, cpu, chunks of 256", 256, memory),
        kvtier("kvtier, hits from disk", BLOCK, small, disk(place)),
    ]


def _recipes(place: Path, shared: Tiers) -> list[Recipe]:
    memory = {"type": "cpu", "capacity": "1GiB"}  # 77 MiB a prompt
    small = {"type": "cpu", "capacity": "176MiB"}  # two prompts, as above
    return [
        none(CONTROL),
        none("no connector, once more"),
        prefix_cache(),
        kvtier("kvtier, cpu", BLOCK, memory),
        kvtier("kvtier, cpu, `packing: auto`", BLOCK, memory | PACKED),
        kvtier("kvtier, hits from disk", BLOCK, small, disk(place)),
        kvtier("kvtier, hits from disk, `packing: auto`", BLOCK, small | PACKED, disk(place / "packed")),
        *(kvtier(f"kvtier, hits from {name}", BLOCK, small, tier) for name, tier in shared.items()),
    ]


def disk(place: Path) -> dict[str, str]:
    """The settings of a tier of one engine."""
    return {"type": "disk", "path": str(place / "disk"), "capacity": "4GiB", "min_free": "0B"}


def _pass(started: Sequence[Engine], prompts: Sequence[Sequence[int]]) -> dict[str, list[Answer]]:
    """Each prompt to each engine, before the next prompt."""
    answers: dict[str, list[Answer]] = {engine.name: [] for engine in started}
    for number, asked in enumerate(prompts):
        for engine in turned(started, number):
            answers[engine.name].append(engine.ask([asked], 1))
    return answers


def _row(name: str, control: str, cold: dict[str, list[Answer]], warm: dict[str, list[Answer]]) -> list[object]:
    cells: list[object] = [name]
    for answers in (cold, warm):
        mine, its = answers[name], answers[control]
        ratio = Spread(tuple(a.seconds / c.seconds for a, c in zip(mine, its, strict=True)))
        cells += [f"{statistics.median(a.seconds for a in mine) * 1e3:.1f}", "1" if name == control else ratio]
    reused = statistics.median(a.cached for a in warm[name])
    settling = statistics.median(a.settling for a in cold[name])
    return [*cells, f"{reused:.0f}", f"{settling * 1e3:.0f}"]
