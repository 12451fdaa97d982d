"""python -m benchmarks.gpu_serving_sections NAME FOLDER: one section of `benchmarks.gpu_serving`, as lines of JSON."""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs

from benchmarks.engines import Answer, Engine, Recipe
from benchmarks.gpu_report import lines_of
from benchmarks.gpu_serving_engines import SMALL, Place, on_gpu
from benchmarks.measure import Spread, Table, turned
from benchmarks.models import TRAINED, ModelUnavailable

Items = Iterator[Table | str]

#: Tokens of a prompt that are no whole block: its own hit and kvtier's compute the same tokens.
_REST = 8
#: Tokens of answers that are compared.
_COMPARED = 8
#: Seconds within which what was computed is stored. An engine of several processes does not say when that is.
_STORED = 60.0


# -- a prompt, asked again and again ---------------------------------------------------------------------


def prompt(place: Place, name: object, tokens: int) -> list[int]:
    vocabulary = range(10, place.scale.shape["vocab_size"])
    return random.Random(f"{name} {tokens}").choices(vocabulary, k=tokens + _REST)


@attrs.frozen
class Found:
    """A prompt in an engine that had computed it, then found it in its own cache, and then only in its connector."""

    tokens: int  #: that can be found
    own: Answer  #: compared with the others
    hit: Answer
    differs: float  #: largest difference of log-probabilities between the hit's answer and the own hit's
    control: float  #: and between two own hits

    @property
    def problems(self) -> list[str]:
        problems = []
        if self.hit.cached < self.tokens:
            problems.append(f"{self.hit.cached} of {self.tokens} tokens were found")
        if self.differs > self.control:
            problems.append(
                f"log-probabilities of a hit differ by {self.differs:.3g}, of own hits by {self.control:.3g}"
            )
        return problems


def find(engine: Engine, asked: Sequence[int], forget: Callable[[Engine], None] = Engine.reset) -> Found:
    """What became of a prompt that the engine has in its own cache, until it was made to ``forget`` that."""
    own, again = _answer(engine, asked), _answer(engine, asked)
    forget(engine)
    hit = engine.ask([asked], 1)
    forget(engine)
    loaded = _answer(engine, asked)
    return Found(len(asked) - _REST, own, hit, _difference(own, loaded), _difference(own, again))


def _answer(engine: Engine, asked: Sequence[int]) -> Answer:
    return engine.ask([asked], _COMPARED, logprobs=True)


def _difference(one: Answer, other: Answer) -> float:
    """Up to the first token that differs."""
    largest = 0.0
    for (token, logprob), (its_token, its_logprob) in zip(one.tokens, other.tokens, strict=True):
        largest = max(largest, abs(logprob - its_logprob))
        if token != its_token:
            break
    return largest


def _ratio(mine: Sequence[Answer], its: Sequence[Answer], more: float = 0.0) -> Spread:
    """Of the times to the first token. ``more`` seconds are added to those of ``its``."""
    return Spread(tuple(a.first / (b.first + more) for a, b in zip(mine, its, strict=True)))


def _ms(answers: Sequence[Answer]) -> float:
    return statistics.median(answer.first for answer in answers) * 1e3


# -- sections --------------------------------------------------------------------------------------------


def smoke(place: Place) -> Items:
    """A small model, without CUDA graphs."""
    small = Place(place.folder, SMALL)
    yield from _found_again("Smoke", small, small.kvtier("kvtier", enforce_eager=True))


def first_token(place: Place) -> Items:
    """Prompts computed, found by the engine, found in memory; then prompts that are never asked again."""
    copy = _copy_seconds_a_byte()
    with place.engines(Recipe("without kvtier"), place.kvtier("kvtier", place.disk())) as (plain, served):
        rows, answers, control = [], {}, 0.0
        for tokens in place.scale.tokens:
            asked: dict[str, list[Answer]] = {}
            found = []
            for number in range(-1, place.scale.rounds_of(tokens)):  # one more to warm up
                each = prompt(place, number, tokens)
                for engine in turned((plain, served), number):
                    for way in ("computed", "own hit"):
                        asked.setdefault(f"{way} {engine.name}", []).append(engine.ask([each], 1))
                found.append(find(served, each))
                answers[f"{number} {tokens}"] = found[-1].own.tokens
                control = max(control, found[-1].control)
                yield from (f"{tokens} tokens, round {number}: {problem}" for problem in found[-1].problems)
            rows.append(_times(place, tokens, {name: each[1:] for name, each in asked.items()}, found[1:], copy))
        yield Table(_FIRST, _FIRST_SAYS, _FIRST_HEADER, rows)
        yield from _no_reuse(place, plain, served)
        served.drain()
    place.answers.write_text(json.dumps([control, answers]))


_FIRST = "Time to first token"
_FIRST_SAYS = (
    "Two engines side by side, with kvtier (`cpu` and `disk`) and without, both with vLLM's prefix cache; each prompt "
    "to both before the next. A *hit* is found in kvtier's memory when that cache has been emptied. *Own and copy* is "
    "the time of the own hit and of one copy of the hit's bytes from page-locked memory. Log-probabilities are those "
    "of eight tokens after a hit and after an own hit, and in brackets after two own hits. Ratios: median (min to max)."
)
_FIRST_HEADER = (
    "tokens",
    "MiB",
    "computed ms",
    "computed with kvtier, of that",
    "own hit ms",
    "own hit with kvtier, of that",
    "hit ms",
    "hit, of own hit",
    "hit, of own and copy",
    "log-probabilities differ by",
)


def _times(
    place: Place, tokens: int, asked: Mapping[str, Sequence[Answer]], found: Sequence[Found], copy: float
) -> list[object]:
    nbytes = tokens * place.scale.token_nbytes
    hits, own = [each.hit for each in found], asked["own hit kvtier"]
    return [
        tokens,
        nbytes >> 20,
        _ms(asked["computed without kvtier"]),
        _ratio(asked["computed kvtier"], asked["computed without kvtier"]),
        _ms(asked["own hit without kvtier"]),
        _ratio(own, asked["own hit without kvtier"]),
        _ms(hits),
        _ratio(hits, own),
        _ratio(hits, own, nbytes * copy),
        f"{max(each.differs for each in found):.3g} ({max(each.control for each in found):.3g})",
    ]


def _copy_seconds_a_byte() -> float:
    """Of one copy to the device, from page-locked memory; without a GPU, within memory."""
    import torch

    host = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=on_gpu())
    device = torch.empty_like(host, device="cuda" if on_gpu() else "cpu")
    seconds = []
    for _ in range(9):
        begin = time.perf_counter()
        device.copy_(host, non_blocking=True)
        if on_gpu():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds) / host.nbytes


def _no_reuse(place: Place, plain: Engine, served: Engine) -> Items:
    prompts, tokens, output = place.scale.batch
    seconds: dict[str, list[float]] = {}
    for number in range(-1, place.scale.rounds):
        batch = [prompt(place, f"no reuse {number} {each}", tokens) for each in range(prompts)]
        for name, engine in turned((("without", plain), ("kvtier", served), ("control", plain)), number):
            if name == "control":
                batch = [prompt(place, f"control {number} {each}", tokens) for each in range(prompts)]
            seconds.setdefault(name, []).append(engine.ask(batch, output).seconds)
    rows = []
    for name in ("kvtier", "control"):
        pairs = list(zip(seconds[name], seconds["without"], strict=True))[1:]
        rows.append([name, Spread(tuple(mine / its for mine, its in pairs))])
    yield Table(
        "No reuse",
        f"{prompts} prompts of {tokens} tokens at once, {output} tokens each in answer, never asked again: time with "
        "kvtier to that without, and, as a control, of other prompts without to that without. Median (min to max).",
        ("", "time"),
        rows,
    )


def offloading(place: Place) -> Items:
    """Hits in kvtier's memory beside those of vLLM's own connector."""
    rows = []
    with place.engines(place.kvtier("kvtier"), place.offloading()) as (served, other):
        for tokens in place.scale.tokens:
            hits: dict[str, list[Answer]] = {served.name: [], other.name: []}
            for number in range(-1, place.scale.rounds_of(tokens)):
                each = prompt(place, f"offloading {number}", tokens)
                for engine in turned((served, other), number):
                    engine.ask([each], 1)
                    hits[engine.name].append(find(engine, each).hit)
            mine, its = (hits[engine.name][1:] for engine in (served, other))
            found = [statistics.median(hit.cached for hit in each) for each in (mine, its)]
            rows.append([tokens, _ms(mine), _ms(its), _ratio(mine, its), *found])
            if found[0] < tokens:
                yield f"{found[0]} of {tokens} tokens were found"
    yield Table(
        "Beside vLLM's OffloadingConnector",
        "Time to first token of a prompt that is found in memory, when the engine's own cache has been emptied; two "
        "engines side by side, each prompt to both before the next. Ratio: median (min to max).",
        ("tokens", "kvtier ms", "OffloadingConnector ms", "kvtier, of that", "found by kvtier", "by the other"),
        rows,
    )


def disk(place: Place) -> Items:
    """A new process finds on the disk what the engine of `first_token` stored."""
    control, said = json.loads(place.answers.read_text())
    answers = {name: Answer(0, 0, 0, 0, tokens) for name, tokens in said.items()}
    rows = []
    recipe = place.kvtier("kvtier", place.disk(), enable_prefix_caching=False)
    with place.engines(recipe) as (again,):
        again.ask([prompt(place, "what the first request pays for", place.scale.tokens[0])], 1)
        for tokens in place.scale.tokens:
            loads: list[tuple[Answer, Answer]] = []
            largest = 0.0
            for number in range(place.scale.rounds_of(tokens)):
                each = prompt(place, number, tokens)
                loads.append((again.ask([each], 1), again.ask([each], 1)))
                largest = max(largest, _difference(_answer(again, each), answers[f"{number} {tokens}"]))
            from_disk, from_memory = zip(*loads, strict=True)
            found = min(answer.cached for answer in from_disk)
            rows.append([tokens, _ms(from_disk), _ms(from_memory), _ratio(from_disk, from_memory), found, largest])
            if found < tokens:
                yield f"{found} of {tokens} tokens were found on the disk"
            if largest > control:
                yield f"log-probabilities differ by {largest:.3g} from those of the process that stored them"
    yield Table(
        "From disk in a new process",
        "An engine without a prefix cache is asked what another process has stored, then the same again. "
        "Log-probabilities are compared with those of that process's own hits.",
        ("tokens", "from disk ms", "from memory ms", "ratio", "tokens found", "log-probabilities differ by"),
        rows,
    )


def packing(place: Place) -> Items:
    """KV that is packed on its way into memory."""
    yield from _found_again("Packed", place, place.kvtier("kvtier", packing="auto"))


def eager(place: Place) -> Items:
    """Neither compiled nor in CUDA graphs."""
    yield from _found_again("Eager", place, place.kvtier("kvtier", enforce_eager=True))


def defaults(place: Place) -> Items:
    """Compiled, and with the scheduler in a process of its own, which schedules ahead."""
    recipe = place.kvtier("kvtier", enforce_eager=False)
    recipe = attrs.evolve(recipe, environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    yield from _found_again("vLLM's defaults", place, recipe)


def sleep(place: Place) -> Items:
    """Weights and KV cache leave the GPU and come back."""
    if not on_gpu():
        yield Table("Asleep", "Not measured: on a CPU vLLM gives no memory back.", _AGAIN_HEADER, [])
        return

    def forget(engine: Engine) -> None:
        engine.sleep()
        engine.reset()

    recipe = place.kvtier("kvtier", enable_sleep_mode=True)
    yield from _found_again("Asleep", place, recipe, forget=forget)


def weights(place: Place) -> Items:
    """Other weights in a running engine: what was stored is not found any more."""
    import tiny_llama

    checkpoints = [place.folder / f"weights-{seed}" for seed in (0, 1)]
    for seed, path in enumerate(checkpoints):
        tiny_llama.make(path, seed=seed)
    asked = prompt(Place(place.folder, SMALL), "weights", SMALL.tokens[0])
    recipe = place.kvtier("kvtier", load_format="auto", max_model_len=SMALL.tokens[0] + 256)
    with place.engines(recipe, model=checkpoints[0]) as (served,):
        served.ask([asked], 1)
        found = find(served, asked)
        yield from found.problems
        served.reload(checkpoints[1])
        served.reset()
        other = _answer(served, asked)
    if other.cached:
        yield f"{other.cached} tokens of other weights were found"
    differs = _difference(found.own, other)
    if not differs:
        yield "other weights gave the same answer"
    yield Table(
        "Other weights",
        "A small model is asked, and again when its weights have been replaced in the running engine.",
        ("", "tokens found", "log-probabilities differ by"),
        [["the same weights", found.hit.cached, found.differs], ["other weights", other.cached, differs]],
    )


def trained(place: Place) -> Items:
    """A small trained model."""
    title = "Trained model"
    try:
        checkpoint = TRAINED.checkpoint(place.folder)
    except ModelUnavailable as error:
        yield Table(title, f"Not measured: {TRAINED.name} is not available: {error}.", _AGAIN_HEADER, [])
        return
    recipe = place.kvtier("kvtier", load_format="auto", max_model_len=SMALL.tokens[-1] + 256)
    yield from _found_again(title, Place(place.folder, SMALL), recipe, model=checkpoint)


_AGAIN_HEADER = ("tokens", "computed ms", "own hit ms", "hit ms", "hit, of own hit", "log-probabilities differ by")


def _found_again(
    title: str,
    place: Place,
    recipe: Recipe,
    forget: Callable[[Engine], None] = Engine.reset,
    model: Path | None = None,
) -> Items:
    """Prompts of the second length in one engine."""
    tokens = place.scale.tokens[1]
    computed, own, found = [], [], []
    with place.engines(recipe, model=model) as (served,):
        for number in range(-1, place.scale.rounds):
            asked = prompt(place, f"{title} {number}", tokens)
            computed.append(served.ask([asked], 1))
            own.append(served.ask([asked], 1))
            found.append(find(served, asked, forget))
            deadline = time.monotonic() + _STORED
            while found[-1].hit.cached < tokens and time.monotonic() < deadline:  # an engine of several processes
                found[-1] = find(served, asked, forget)
            yield from found[-1].problems
    hits = [each.hit for each in found[1:]]
    differ = [max(each.differs for each in found), max(each.control for each in found)]
    yield Table(
        title,
        "A prompt computed, found by the engine itself, and in kvtier's memory when the engine has lost it. "
        "Log-probabilities as above. Ratio: median (min to max).",
        _AGAIN_HEADER,
        [
            [
                tokens,
                _ms(computed[1:]),
                _ms(own[1:]),
                _ms(hits),
                _ratio(hits, own[1:]),
                f"{differ[0]:.3g} ({differ[1]:.3g})",
            ]
        ],
    )


SECTIONS: dict[str, Callable[[Place], Items]] = {
    "smoke": smoke,
    "first token": first_token,
    "disk": disk,
    "offloading": offloading,
    "packing": packing,
    "defaults": defaults,
    "eager": eager,
    "sleep": sleep,
    "weights": weights,
    "trained": trained,
}

if __name__ == "__main__":
    name, folder = sys.argv[1:]
    for line in lines_of(SECTIONS[name](Place(Path(folder)))):
        print(line, flush=True)
