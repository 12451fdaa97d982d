"""A dry run of a stack: the code that serves, with tiers that hold no bytes, no threads, and the clock of a trace.

Every decision is therefore the one that a real stack would make; only the bytes are missing.
"""

from __future__ import annotations

import mmap
import sys
from collections import deque
from collections.abc import Sequence
from typing import ClassVar

import attrs

from kvtier_core.builtin.raw import RawConfig
from kvtier_core.config.model import ArenaTierConfig, StackConfig, StoreTierConfig
from kvtier_core.config.open import Runtime, open_stack
from kvtier_core.encoding.codec import FrameCodec
from kvtier_core.frames.format import FrameError
from kvtier_core.interfaces import (
    AllocatorBackend,
    ArenaConfig,
    Backend,
    BackendConfig,
    Mover,
    OpenContext,
    PagedKVCache,
    Serializer,
    SerializerConfig,
)
from kvtier_core.layouts import ChunkLayout, frame_nbytes
from kvtier_core.stack.manager import StorageManager
from kvtier_core.types import ChunkKey, Namespace, Nbytes
from kvtier_core.work.io_pool import Outcome, Then, Work, run

#: No call takes time, so none is ever in flight.
_NO_LIMIT = Nbytes(1 << 62)


class Clock:
    """Shows the time of the trace, in seconds: whatever `now` was last set to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def open_dry_run(
    config: StackConfig, layout: ChunkLayout, clock: Clock, most_slots: int = sys.maxsize
) -> StorageManager:
    """The stack of a configuration, with no bytes in its tiers. Raises ConfigError.

    An arena has no more than ``most_slots``, so that one that nothing can fill takes no more memory than others.
    """
    tiers = tuple(_without_bytes(tier, most_slots) for tier in config.tiers)
    context = _context(_layout_of_slots(config, layout))
    return open_stack(attrs.evolve(config, tiers=tiers), context, Runtime(_pool, clock, PassthroughCodec, serves=False))


def frame_nbytes_in(config: StackConfig, tier: ArenaTierConfig | StoreTierConfig, layout: ChunkLayout) -> int:
    """Bytes of a chunk's frame in a tier of this stack."""
    slots = _layout_of_slots(config, layout)
    if isinstance(tier, ArenaTierConfig) or isinstance(tier.serializer, RawConfig):
        return slots.frame_nbytes
    return frame_nbytes(_of_typical_length(tier.serializer).open(_context(layout)).bound(layout))


def _layout_of_slots(config: StackConfig, layout: ChunkLayout) -> ChunkLayout:
    """The layout of the arenas' slots. KV counts as if it were in bfloat16."""
    return attrs.evolve(layout, packed=all(tier.packing == "auto" for tier in config.arenas))


def _context(layout: ChunkLayout) -> OpenContext:
    return OpenContext(Namespace.of({"engine": "simulated"}), layout)


def _without_bytes(tier: ArenaTierConfig | StoreTierConfig, most_slots: int) -> ArenaTierConfig | StoreTierConfig:
    if isinstance(tier, ArenaTierConfig):
        return attrs.evolve(tier, config=NullArenaConfig(most_slots))
    serializer = tier.serializer if isinstance(tier.serializer, RawConfig) else _of_typical_length(tier.serializer)
    null = attrs.evolve(tier, config=NullBackendConfig(), serializer=serializer, inflight=_NO_LIMIT)
    return attrs.evolve(null, seal_key=None, encrypt=False)


def _of_typical_length(serializer: SerializerConfig) -> NullSerializerConfig:
    return NullSerializerConfig(serializer.typical_ratio, serializer.lossless)


@attrs.frozen
class NullArenaConfig(ArenaConfig):
    """Opens a `NullArena`."""

    type: ClassVar[str] = "null-arena"
    most_slots: int = sys.maxsize

    def open(self, ctx: OpenContext) -> NullArena:
        return NullArena(ctx, self.most_slots)

    def attach(self, handle: str, cache: PagedKVCache) -> Mover:
        raise NotImplementedError("no engine reaches a simulated arena")


class NullArena(AllocatorBackend):
    """All slots are views of the same memory, which is never touched, so it takes no space."""

    handle = ""

    def __init__(self, ctx: OpenContext, most_slots: int):
        self.slot_nbytes = ctx.slot_nbytes
        self.slots = min(ctx.capacity // self.slot_nbytes, most_slots)
        self._memory = memoryview(mmap.mmap(-1, self.slot_nbytes))

    def view(self, slot: int) -> memoryview:
        return self._memory

    def close(self) -> None:
        self._memory = memoryview(b"")


@attrs.frozen
class NullBackendConfig(BackendConfig):
    """Opens a `NullBackend`."""

    type: ClassVar[str] = "null-backend"

    def open(self, ctx: OpenContext) -> NullBackend:
        return NullBackend()


class NullBackend(Backend):
    """Stores nothing. A read succeeds, so that the tier finds whatever its index lists."""

    def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        return [False] * len(keys)

    def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> Sequence[int]:
        return [len(view) for view in into]

    def write(self, keys: Sequence[ChunkKey], frames: Sequence[memoryview]) -> None:
        pass

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        pass


@attrs.frozen
class NullSerializerConfig(SerializerConfig):
    """Replaces a codec whose frames are typically shorter by this ratio."""

    type: ClassVar[str] = "null-serializer"
    ratio: float
    lossless: bool  # type: ignore[misc] # as the codec says

    def open(self, ctx: OpenContext) -> NullSerializer:
        return NullSerializer(self.ratio)


class NullSerializer(Serializer):
    """Encodes nothing, to the typical length."""

    def __init__(self, ratio: float):
        self._ratio = ratio

    def bound(self, layout: ChunkLayout) -> int:
        return int(layout.payload_nbytes / self._ratio)

    def encode(self, payload: memoryview, into: memoryview) -> int:
        raise NotImplementedError("nothing is encoded in a simulation")

    def decode(self, encoded: memoryview, into: memoryview) -> int:
        raise NotImplementedError("nothing is decoded in a simulation")


class PassthroughCodec(FrameCodec):
    """Neither seals nor verifies. With a serializer each frame counts with its typical length."""

    def encode(self, key: ChunkKey, sealed: memoryview, salt: bytes = b"") -> memoryview:
        return sealed[: self.max_frame_nbytes]

    def written(self, frames: list[memoryview]) -> None:
        pass  # they are a slot's memory

    def read_buffer(self, slot: memoryview) -> memoryview:
        return slot

    def was_read(self, buffers: list[memoryview]) -> None:
        pass  # as in `written`

    def decode_verified(
        self, key: ChunkKey, buffer: memoryview, count: int, slot: memoryview, salt: bytes = b""
    ) -> FrameError | None:
        return None


class InstantPool:
    """A pool without threads: work is done when it is submitted, and its continuation runs in `step`, as always."""

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
    """A pool that skips its work: there is no frame to seal, and nothing to copy from arena to arena."""

    def submit_store(self, work: Work, then: Then) -> None:
        self._done.append((then, Outcome()))


def _pool(name: str, threads: int) -> InstantPool:
    return IdlePool() if name == "seal" else InstantPool()
