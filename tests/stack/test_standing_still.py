"""Whatever is pinned, late or failing: no request waits for a slot that cannot become free while it waits.

An engine of a few lines chooses at random, and no time passes: a wait that only its time limit ends would never end.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence

import attrs
import pytest
from machine import Shelf
from manual_pool import ManualPool
from patience import HANG
from sizes import LONG

from kvtier_core.builtin.heap import Heap
from kvtier_core.encoding.codec import FrameCodec
from kvtier_core.layouts import ChunkLayout, KVKind, chunk_key, part_key
from kvtier_core.policies.lru import Lru
from kvtier_core.stack.arena import Arena
from kvtier_core.stack.index.cache_index import CacheIndex
from kvtier_core.stack.index.parted_index import PartedIndex
from kvtier_core.stack.manager import StorageManager
from kvtier_core.stack.outcomes import Terms
from kvtier_core.stack.store_tier.tier import StoreTier
from kvtier_core.types import ChunkKey
from kvtier_testing.samples import make_context, make_group, make_keys

CHUNK = 8
FULL = make_group((64,), block_tokens=4)
WINDOW = make_group((64,), name="window", block_tokens=4, kind=KVKind.SLIDING_WINDOW, reach=13)
LONGER = make_group((64,), name="longer window", block_tokens=4, kind=KVKind.SLIDING_WINDOW, reach=28)
STATE = make_group((64,), name="state", block_tokens=CHUNK, kind=KVKind.STATE)
MODELS = {
    "full attention": [FULL],
    "full attention and a window": [FULL, WINDOW],
    "full attention, a window and states": [FULL, WINDOW, STATE],
    "two windows": [LONGER, WINDOW],
    "a window and states": [WINDOW, STATE],
    "states": [STATE],
}
LONGEST = 12
KEYS = [chunk_key(key) for key in make_keys(32)]
#: Two prompts with a common beginning, and one that shares nothing.
PROMPTS = KEYS[:LONGEST], KEYS[:4] + KEYS[LONGEST : LONGEST + 8], KEYS[-LONGEST:]
#: Steps in which all requests end if none stands still.
STEPS = 100


class Listed(Shelf):
    """A store whose frames are found when it is opened."""

    def scan(self) -> Iterator[tuple[ChunkKey, int]]:
        return ((key, len(frame)) for key, frame in self.frames.items())


class Asked(Shelf):
    """A store that is asked for each frame."""

    shared = True


def open_stack(layout: ChunkLayout, slots: int, shelves: Sequence[Shelf]) -> StorageManager:
    """A stack in which nothing is done before the test says so."""
    context = make_context(layout=layout, capacity=slots * layout.frame_nbytes)
    index = PartedIndex if len(layout.parts) > 1 else CacheIndex
    codec = FrameCodec(context.namespace, layout)
    tiers = [
        StoreTier(
            f"store {number}",
            shelf,
            pool=ManualPool(),
            index=index(Lru()),
            codec=codec,
            capacity=1000 * codec.max_frame_nbytes,
            inflight=4 * layout.frame_nbytes,
            clock=lambda: 0.0,
        )
        for number, shelf in enumerate(shelves)
    ]
    return StorageManager(
        [Arena("cpu", 0, Heap(context), index(Lru())), *tiers],
        namespace=context.namespace,
        layout=layout,
        pool=ManualPool(),
        clock=lambda: 0.0,
    )


def parts_of(layout: ChunkLayout, path: Sequence[ChunkKey]) -> list[ChunkKey]:
    """The other parts of these chunks."""
    return [part_key(key, part.number) for key in path for part in layout.parts[1:]]


@functools.cache
def stored(model: str) -> Mapping[ChunkKey, bytes]:
    """All frames of all prompts."""
    shelf, layout = Shelf(), ChunkLayout(MODELS[model], CHUNK)
    stack = open_stack(layout, 200, [shelf])
    for path in PROMPTS:
        stack.reserve(path, "store", parts=parts_of(layout, path))
        stack.commit("store")
        stack.drain(HANG)
    return shelf.frames


@attrs.define
class Request:
    """It waits, loads what was found, and computes and stores the rest; another engine may continue it."""

    name: str
    path: Sequence[ChunkKey]
    skipped: int  #: chunks that the engine has
    handed_over: bool
    state: str = "waiting"
    until: int = 0  #: the step in which its load or its store ends
    looked: bool = False


class Engine:
    """An engine above a small arena, and stores that have some of its prompts."""

    def __init__(self, seed: int):
        self.drawn = drawn = random.Random(seed)
        self.model = drawn.choice(sorted(MODELS))
        self.layout = ChunkLayout(MODELS[self.model], CHUNK)
        self.slots = drawn.randint(max(2, len(self.layout.parts)), 12)
        self.shelves = [drawn.choice([Listed, Asked])() for _ in range(drawn.choice([1, 1, 2]))]
        lost = drawn.choice([0.0, 0.0, 0.02, 0.1])
        for key, frame in stored(self.model).items():
            if drawn.random() >= lost:
                drawn.choice(self.shelves).frames[key] = frame
        self.stack = open_stack(self.layout, self.slots, self.shelves)
        self.requests: list[Request] = []
        self.kept: dict[str, Sequence[ChunkKey]] = {}  # by holder, the oldest first
        self.numbers = itertools.count()
        self.now = 0  # the number of the step
        self.late = drawn.choice([0, 0, 1, 3, 10])  # steps within which a copy of the engine's ends

    def ask(self) -> None:
        """A request arrives."""
        path = self.drawn.choice(PROMPTS)[: self.drawn.randint(1, LONGEST)]
        skipped = self.drawn.choice([0, 0, 0, self.drawn.randrange(len(path))])
        request = Request(f"request {next(self.numbers)}", path, skipped, self.drawn.random() < 0.3)
        self.requests.append(request)
        self.stack.on_request(path)
        if self.drawn.random() < 0.3:
            self.stack.prefetch(path)

    def step(self) -> None:
        """What a scheduler does in a step."""
        self.now += 1
        self.stack.step()
        for each in self.requests:
            if each.state == "waiting" and not (each.looked and self.stack.still_pending(each.name)):
                each.looked = True
                found = self.stack.lookup(each.path[each.skipped :], each.name, Terms(skipped=each.skipped))
                if not found.pending:
                    self.goes_on(each, "loading")
            elif each.state == "loading" and self.now >= each.until:
                self.stack.release(each.name)
                self.store(each)
            elif each.state == "storing" and self.now >= each.until:
                self.stack.commit(f"store of {each.name}")
                self.keep(each)
                each.state = "ended"
        for keeper in self.kept:
            if not self.stack.still_pending(keeper):
                self.find(keeper)
        self.stack.step()

    def goes_on(self, request: Request, state: str) -> None:
        request.state, request.until = state, self.now + self.drawn.randint(0, self.late)

    def store(self, request: Request) -> None:
        promised_to = self.keep(request)
        path = request.path
        parts = parts_of(self.layout, path[-1:])
        reserved = self.stack.reserve(path, f"store of {request.name}", parts=parts, promised_to=promised_to)
        self.goes_on(request, "storing" if reserved else "ended")

    def keep(self, request: Request) -> str:
        """As much of a prompt as half of the arena holds stays there for another engine."""
        most = self.slots // 2 // len(self.layout.parts)
        if not request.handed_over or not most:
            return ""
        keeper = f"what is kept of {request.name}"
        self.kept[keeper] = request.path[:most]
        while len(set().union(*self.kept.values())) > most:
            oldest = next(iter(self.kept))
            self.stack.release(oldest)
            del self.kept[oldest]
        self.find(keeper)
        return keeper

    def find(self, keeper: str) -> None:
        self.stack.lookup(self.kept[keeper], keeper, Terms(lasting=True))

    def work(self, most: int) -> None:
        """Some of what waits on threads is done."""
        for _ in range(most):
            busy = [pool for pool in self.stack._pools() if pool.queue]
            if not busy:
                break
            pool = self.drawn.choice(busy)
            pool.run(self.drawn.randrange(len(pool.queue)))

    def do(self) -> None:
        """Anything."""
        match self.drawn.randrange(10):
            case 0 | 1:
                self.ask()
            case 2:
                waiting = [each for each in self.requests if each.state == "waiting"]
                if waiting and self.drawn.random() < 0.3:
                    aborted = self.drawn.choice(waiting)
                    aborted.state = "ended"
                    self.stack.release(aborted.name)
            case 3:
                shelf = self.drawn.choice(self.shelves)
                shelf.fails = not shelf.fails and self.drawn.random() < 0.1
            case 4 | 5 | 6:
                self.work(self.drawn.choice([1, 3, 100]))
            case _:
                self.step()

    def waits_in_vain(self) -> list[Request]:
        """The requests that have not ended when everything else has."""
        for _ in range(STEPS):
            self.work(1000)
            self.step()
            if all(each.state == "ended" for each in self.requests):
                break
        return [each for each in self.requests if each.state != "ended"]


@pytest.mark.long
@pytest.mark.parametrize("start", range(0, 400 * LONG, 50), ids="from {}".format)
def test_no_request_stands_still(start):
    for seed in range(start, start + 50):
        engine = Engine(seed)
        for _ in range(engine.drawn.choice([5, 20, 60])):
            engine.do()
        left = engine.waits_in_vain()
        assert not left, f"seed {seed}: {engine.model}, {engine.slots} slots: {left}"
        for each in engine.requests:
            assert not engine.stack.holds(each.name).looked_up
