"""Helpers of the laws of policies: histories of calls as a tier makes them, and counting the work of a policy."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any, Literal

from kvtier_core.interfaces import EvictionConfig, EvictionPolicy
from kvtier_core.types import ChunkKey
from kvtier_testing.samples import make_key, make_keys

#: All keys of the histories.
KEYS = make_keys(12)
NBYTES = 4096

#: A move (``request``, ``admit``, ``forget``, ``evict``) and the numbers of its keys, or how many are to be evicted.
Step = tuple[Literal["request"], Sequence[int]] | tuple[Literal["admit", "forget", "evict"], int]


def live(policy: EvictionPolicy, held: set[ChunkKey], step: Step, now: float) -> None:
    """One step of a history, as a tier would take it: no held key is admitted, and no other key is forgotten."""
    match step:
        case "request", which:
            policy.request([KEYS[i] for i in which], float(now), {})
        case "admit", which if KEYS[which] not in held:
            policy.admit(KEYS[which], NBYTES)
            held.add(KEYS[which])
        case "forget", which if KEYS[which] in held:
            held.remove(KEYS[which])
            policy.forget(KEYS[which], evicted=False)
        case "evict", count:
            for key in list(itertools.islice(policy.victims(), count)):
                held.remove(key)
                policy.forget(key, evicted=True)


def history(seed: int) -> list[Step]:
    """Sixty steps, chosen by a seed."""
    rng = random.Random(seed)
    return [
        rng.choice(
            (
                ("request", rng.sample(range(len(KEYS)), rng.randint(1, 6))),
                ("admit", rng.randrange(len(KEYS))),
                ("admit", rng.randrange(len(KEYS))),
                ("forget", rng.randrange(len(KEYS))),
                ("evict", rng.randint(1, 4)),
            )
        )
        for _ in range(60)
    ]


def after(policy: EvictionPolicy, seed: int) -> EvictionPolicy:
    """The policy after a history."""
    held: set[ChunkKey] = set()
    for now, step in enumerate(history(seed)):
        live(policy, held, step, now)
    return policy


def victims_after(config: EvictionConfig, seeds: Iterable[int]) -> list[list[ChunkKey]]:
    """For each history the victims after it."""
    return [list(after(config.open(), seed).victims()) for seed in seeds]


class CountingKey(bytes):
    """A key that counts how often it is hashed or compared."""

    operations = 0

    def __hash__(self) -> int:
        CountingKey.operations += 1
        return bytes.__hash__(self)

    def __eq__(self, other: object) -> bool:
        CountingKey.operations += 1
        return bytes.__eq__(self, other)

    def __lt__(self, other: bytes) -> bool:
        CountingKey.operations += 1
        return bytes.__lt__(self, other)


def full_policy(config: EvictionConfig, count: int) -> EvictionPolicy:
    """A policy that holds ``count`` keys of prompts of four chunks, every other prompt named twice."""
    policy = config.open()
    for number in range(0, count, 4):
        path = [ChunkKey(CountingKey(make_key(number + i))) for i in range(4)]
        policy.request(path, float(number), {})
        for key in reversed(path):
            policy.admit(key, NBYTES)
        if number % 8:
            policy.request(path, number + 0.5, {})
    return policy


def tell_all(policy: EvictionPolicy, count: int) -> None:
    """All victims once."""
    assert len(list(policy.victims())) == count


def replace_all(policy: EvictionPolicy, count: int) -> None:
    """As many newcomers as there are held keys, each by a request of its own, in the place of the first victim."""
    for number in range(count, 2 * count):
        newcomer = ChunkKey(CountingKey(make_key(number)))
        policy.request([newcomer], float(number), {})
        policy.forget(next(iter(policy.victims())), evicted=True)
        policy.admit(newcomer, NBYTES)


def work_of(action: Callable[[], object]) -> int:
    """How often keys are hashed and compared, and how many lines of Python run outside this file."""
    lines = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal lines
        if frame.f_code.co_filename == __file__:
            return None
        lines += event == "line"
        return trace

    before, CountingKey.operations = sys.gettrace(), 0
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return lines + CountingKey.operations
