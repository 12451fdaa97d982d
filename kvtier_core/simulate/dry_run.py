"""A stack that decides as the one that serves, and holds no byte: its very code, opened into another world."""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Sequence
from typing import ClassVar

import attrs

from kvtier_core.config.model import ArenaTierConfig, Runtime, StackConfig, StoreTierConfig, open_stack
from kvtier_core.frames.codec import FrameCodec
from kvtier_core.frames.format import Damage
from kvtier_core.interfaces import (
    AllocatorBackend,
    ArenaConfig,
    Backend,
    BackendConfig,
    Mover,
    OpenContext,
    PagedKVCache,
)
from kvtier_core.stack.manager import StorageManager
from kvtier_core.transfer.io_pool import Outcome, Then, Work, run
from kvtier_core.types import ChunkKey, ChunkLayout, Namespace, Nbytes

#: Nothing takes any time, so nothing is ever in flight.
_NO_LIMIT = Nbytes(1 << 62)


class Clock:
    """Shows the time of the trace."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def open_weightless(config: StackConfig, layout: ChunkLayout, clock: Clock) -> StorageManager:
    """The stack of a configuration with nothing behind its tiers. Raises ConfigError."""
    tiers = tuple(_weightless(tier) for tier in config.tiers)
    return open_stack(attrs.evolve(config, tiers=tiers), _context(layout), Runtime(_pool, clock, PassthroughCodec))


def chunks_in(tier: ArenaTierConfig | StoreTierConfig, layout: ChunkLayout) -> int:
    """How many a tier has room for."""
    context = _context(layout)
    serializer = tier.serializer.open(context) if isinstance(tier, StoreTierConfig) else None
    return tier.capacity // FrameCodec(context.namespace, layout, serializer).bound


def _context(layout: ChunkLayout) -> OpenContext:
    return OpenContext(Namespace.of({"engine": "simulated"}), layout, "simulated")


def _weightless(tier: ArenaTierConfig | StoreTierConfig) -> ArenaTierConfig | StoreTierConfig:
    if isinstance(tier, ArenaTierConfig):
        return attrs.evolve(tier, config=MirageConfig())
    return attrs.evolve(tier, config=VoidConfig(), inflight=_NO_LIMIT)


@attrs.frozen
class MirageConfig(ArenaConfig):
    type: ClassVar[str] = "mirage"

    def open(self, ctx: OpenContext) -> NullArena:
        return NullArena(ctx)

    def attach(self, handle: str, table: PagedKVCache) -> Mover:
        raise NotImplementedError("no engine reaches a simulated arena")


class NullArena(AllocatorBackend):
    """Every slot is the same memory, which nobody touches and which therefore takes none."""

    handle = ""

    def __init__(self, ctx: OpenContext):
        self.slot_nbytes = ctx.layout.frame_nbytes
        self.slots = ctx.capacity // self.slot_nbytes
        self._memory = memoryview(mmap.mmap(-1, self.slot_nbytes))

    def view(self, slot: int) -> memoryview:
        return self._memory

    def close(self) -> None:
        self._memory = memoryview(b"")


@attrs.frozen
class VoidConfig(BackendConfig):
    type: ClassVar[str] = "void"

    def open(self, ctx: OpenContext) -> NullBackend:
        return NullBackend()


class NullBackend(Backend):
    """Has whatever the tier's index says it has."""

    def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        return [False] * len(keys)

    def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> Sequence[int]:
        return [len(view) for view in into]

    def write(self, keys: Sequence[ChunkKey], frames: Sequence[memoryview]) -> None:
        pass

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        pass


class PassthroughCodec(FrameCodec):
    """Frames go through unread. A serializer gets its way with their length: each is as long as it may become."""

    def encode(self, key: ChunkKey, sealed: memoryview) -> memoryview:
        return sealed[: self.bound]

    def landing(self, slot: memoryview) -> memoryview:
        return slot

    def check(self, key: ChunkKey, landed: memoryview, count: int, slot: memoryview) -> Damage | None:
        return None


class InstantPool:
    """No thread: work is done when it is submitted, and its continuation runs in `step`, as everywhere."""

    def __init__(self) -> None:
        self._done: deque[tuple[Then, Outcome]] = deque()

    @property
    def jobs(self) -> int:
        return len(self._done)

    def submit_load(self, work: Work, then: Then) -> None:
        self._done.append((then, run(work)))

    def submit_store(self, work: Work, then: Then) -> None:
        self._done.append((then, run(work)))

    def step(self) -> int:
        ran = 0
        while self._done:
            then, outcome = self._done.popleft()
            then(outcome)
            ran += 1
        return ran

    def wait(self, timeout: float) -> None:
        pass

    def longest(self) -> float:
        return 0.0

    def close(self, timeout: float) -> bool:
        self._done.clear()
        return True


class IdlePool(InstantPool):
    """Leaves its work undone: there is no frame to seal, and nothing to copy from arena to arena."""

    def submit_store(self, work: Work, then: Then) -> None:
        self._done.append((then, Outcome()))


def _pool(name: str, threads: int) -> InstantPool:
    return IdlePool() if name == "seal" else InstantPool()
