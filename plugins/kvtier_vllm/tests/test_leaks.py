"""A soak: thousands of requests through real vLLM with little room, and clients, copies and disks that give up.

Each answer that comes is compared with the truth, and at the end nothing may be held, pinned, lost or grown.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_hybrids
import tiny_llama
from faulty_backend import Fault, FaultyBackend, now_and_then
from real_engines import BLOCK, Engine, cpu_and_disk, prompt
from sizes import LONG, some
from test_serving import NOISE

from kvtier_core.engine.messages import WorkerProgress
from kvtier_core.errors import BackendError
from kvtier_core.telemetry import status_page as page
from kvtier_core.transfer.host_mover import HostMover
from kvtier_disk.config import DiskConfig

pytestmark = pytest.mark.long

REQUESTS = 1000 * LONG
TOKENS = 4  # of an answer, at most
FAMILIES = [prompt(200 + i, 96 + 32 * i) for i in range(4)]
#: Of 3 to 10 blocks but for two tokens: the answer needs another block, and may find none.
POOL = [prompt(300 + i, 94 + 32 * (i % 8), FAMILIES[i % 4][: 64 + 32 * (i % 2)]) for i in range(24)]

STACK = {"chunk_tokens": BLOCK, "load_wait": "200ms", "save_decode": True}
OPTIONS = {
    "max_num_batched_tokens": 160,
    "max_num_seqs": 5,
    "max_model_len": 512,
}

#: Blocks of a pool that is too small for what is asked at a time. With Gemma 3 four groups share it.
BLOCKS = {"llama": 20, "gemma3": 64}
#: Of the disk. With Gemma 3 a chunk is up to four frames, which shall be few enough to tell a leak by.
CAPACITY = {"llama": "1GiB", "gemma3": "6MiB"}

#: What must have happened to some request when its client went away, and what must have happened at all.
MOMENTS = {"WAITING", "waits for a tier", "WAITING_FOR_REMOTE_KVS", "RUNNING", "PREEMPTED"}


@pytest.fixture(scope="module", params=some(BLOCKS, "llama"))
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(kind, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp(kind)
    if kind == "llama":
        tiny_llama.make(folder)
    else:
        tiny_hybrids.make(kind, folder)
    return folder


@pytest.fixture(scope="module")
def truth(model) -> list[list[tuple[int, float]]]:
    """Token and log-probability of each step of each answer, without kvtier."""
    plain = Engine(model, None, max_model_len=512)
    answers = plain.ask(*POOL, tokens=TOKENS)
    plain.close()
    return [list(zip(answer.tokens, answer.logprobs, strict=True)) for answer in answers]


class Soak:
    def __init__(self, engine: Engine, truth: list[list[tuple[int, float]]], seed: int):
        self.engine = engine
        self.llm = engine.llm.llm_engine
        self.drawn = random.Random(seed)
        self.truth = truth
        self.asked: dict[str, int] = {}  # by the id of a request: which prompt
        self.seen: Counter[str] = Counter()
        self.born = 0

    def run(self, requests: int) -> None:
        end = self.born + requests
        while self.born < end or self.llm.has_unfinished_requests():
            while self.born < end and len(self.asked) < 8:
                self.ask()
            self.step()
        while self.engine.scheduler.has_requests():
            self.llm.engine_core.engine_core.step()
        assert not self.asked

    def ask(self) -> None:
        from vllm import SamplingParams

        number = self.drawn.randrange(len(POOL))
        request_id = f"{self.born}"
        self.born += 1
        self.asked[request_id] = number
        sampling = SamplingParams(
            temperature=0, max_tokens=self.drawn.randint(2, TOKENS), logprobs=1, detokenize=False, ignore_eos=True
        )
        self.llm.add_request(request_id, {"prompt_token_ids": POOL[number]}, sampling)

    def step(self) -> None:
        for output in self.llm.step():
            if output.finished:
                self.check(output)
        preempted = [name for name in self.asked if "PREEMPTED" in self.moments(name)]
        if preempted and self.drawn.random() < 0.5:
            self.abort(preempted[0])
        elif self.drawn.random() < 0.15 and self.asked:
            self.abort(self.drawn.choice(sorted(self.asked)))
        if self.drawn.random() < 0.01:
            self.engine.connector.reset_cache()
            self.seen["reset"] += 1

    def check(self, output) -> None:
        answer = output.outputs[0]
        expected = self.truth[self.asked.pop(output.request_id)][: len(answer.token_ids)]
        said = [(token, step[token].logprob) for token, step in zip(answer.token_ids, answer.logprobs, strict=True)]
        assert [token for token, _ in said] == [token for token, _ in expected]
        assert all(abs(a[1] - b[1]) < NOISE for a, b in zip(said, expected, strict=True))
        self.seen["answered"] += 1
        self.seen["tokens"] += len(output.prompt_token_ids)
        self.seen["cached"] += output.num_cached_tokens or 0

    def abort(self, request_id: str) -> None:
        for moment in self.moments(request_id):
            self.seen[moment] += 1
        del self.asked[request_id]
        self.llm.abort_request([request_id])

    def moments(self, request_id: str) -> Iterator[str]:
        scheduler = self.engine.scheduler
        for internal, request in scheduler.requests.items():
            if internal.split("-")[0] == request_id:
                yield request.status.name
                tracked = self.engine.connector.side._requests.get(internal)
                if tracked and tracked.wait.asked is not None:
                    yield "waits for a tier"


def sizes(thing: object, depth: int = 3) -> dict[str, int]:
    """How much every container holds that hangs on an object of kvtier's."""
    found = {}
    for name, value in vars(thing).items():
        if isinstance(value, dict | list | set | tuple) or hasattr(value, "__len__"):
            found[name] = len(value)
        for i, each in enumerate(value if isinstance(value, list | tuple) else [value]):
            if depth and type(each).__module__.startswith("kvtier") and hasattr(each, "__dict__"):
                found |= {f"{name}.{i}.{inner}": n for inner, n in sizes(each, depth - 1).items()}
    return found


def must_be_at_rest(soak: Soak) -> tuple[dict[str, int], int]:
    """Nothing is held. What every container holds, and how many chunks the tiers keep or could keep in free slots."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    soak.engine.assert_at_rest()
    side, worker = soak.engine.connector.side, get_kv_transfer_group().side
    assert side is not None and not side._self_test.failure
    assert not side._loads._planned and not side.manager.pins_by_holder() and not side.manager.jobs
    assert not (worker._jobs or worker._begun or worker._failed or worker._ended)
    assert worker._report == WorkerProgress()
    for arena in side.manager.arenas:
        assert arena.free + len(arena.index) == arena.memory.slots and not arena.reserved
        assert arena.index.resident.used == len(arena.index) * arena.memory.slot_nbytes
    held = {f"scheduler.{name}": n for name, n in sizes(side).items() if not name.endswith("backend.0.calls")}
    held |= {f"worker.{name}": n for name, n in sizes(worker).items()}
    places = sum(len(level.index) for level in side.manager._levels)
    return held, places + sum(arena.free for arena in side.manager.arenas)


def late(monkeypatch, drawn: random.Random) -> None:
    """Copies whose end is told some steps later."""
    finished = HostMover.finished

    def finish_later(self):
        of_the_selftest = any(ended.job < 0 for ended in self._results)
        return [] if not of_the_selftest and drawn.random() < 0.3 else finished(self)

    monkeypatch.setattr(HostMover, "finished", finish_later)


def failing(monkeypatch, drawn: random.Random) -> None:
    """Copies that cannot be made."""
    for name in ("load", "store"):
        copy = getattr(HostMover, name)

        def attempt(self, job, *args, copy=copy):
            if job > 0 and drawn.random() < 0.05:
                raise BackendError("told to fail")
            copy(self, job, *args)

        monkeypatch.setattr(HostMover, name, attempt)


def giving_up(monkeypatch, drawn: random.Random) -> None:
    """A disk that fails, loses, damages and dawdles."""
    faults = [Fault(error=BackendError("told to fail")), Fault(drop=True), Fault(damage=True), Fault(delay=0.02)]
    opened = DiskConfig.open
    plan = now_and_then(drawn.randrange(1000), 0.1, *faults)
    monkeypatch.setattr(DiskConfig, "open", lambda self, ctx: FaultyBackend(opened(self, ctx), plan))


@pytest.mark.parametrize("troubles", some([[late, failing, giving_up], [late]]), ids=["all", "late"])
def test_engines_leak_nothing(engine, kind, truth, tmp_path, monkeypatch, troubles):
    drawn = random.Random(len(troubles))
    for trouble in troubles:
        trouble(monkeypatch, drawn)
    monkeypatch.setattr(page, "_REMEMBERED", 8)  # requests; else more than there are here
    stack = cpu_and_disk(tmp_path, "3MiB", **STACK)
    stack["tiers"][1]["capacity"] = CAPACITY[kind]
    with engine(stack, **OPTIONS, num_gpu_blocks_override=BLOCKS[kind]) as served:
        soak = Soak(served, truth, seed=len(troubles))
        soak.run(REQUESTS // 2)
        half_way, _ = must_be_at_rest(soak)
        soak.run(REQUESTS // 2)
        end, places = must_be_at_rest(soak)
    assert soak.seen.keys() >= MOMENTS, soak.seen
    assert soak.seen["reset"] and soak.seen["answered"] > REQUESTS // 3, soak.seen
    assert soak.seen["cached"] > soak.seen["tokens"] / 10, soak.seen
    assert places < REQUESTS // 3, "too many to tell a leak by"
    assert not {name: n for name, n in end.items() if n > max(half_way.get(name, 0), places)}
