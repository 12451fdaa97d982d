"""The composition root: from a StackConfig to an open StorageManager."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator

import attrs

from kvtier_core.config.model import ArenaTierConfig, StackConfig, StoreTierConfig
from kvtier_core.config.yaml_nodes import ProblemCollector
from kvtier_core.errors import BackendError, ConfigError, Problem
from kvtier_core.frames.codec import FrameCodec
from kvtier_core.interfaces import MAX_POLICY_STATE_NBYTES, AllocatorBackend, Backend, OpenContext
from kvtier_core.stack.arena import Arena
from kvtier_core.stack.index.cache_index import CacheIndex
from kvtier_core.stack.manager import StorageManager
from kvtier_core.stack.store_tier.tier import StoreTier
from kvtier_core.transfer.io_pool import IOPool, Pool
from kvtier_core.types import FRAME_ALIGNMENT, Nbytes


@attrs.frozen
class Runtime:
    """What a stack has around it: threads, time, and what frames go through. The simulator has its own."""

    pool: Callable[[str, int], Pool] = IOPool
    clock: Callable[[], float] = time.monotonic
    codec: type[FrameCodec] = FrameCodec


_HERE = Runtime()


@attrs.frozen
class _Opened:
    """A tier whose plugins are open."""

    tier: ArenaTierConfig | StoreTierConfig
    store: AllocatorBackend | Backend
    index: CacheIndex
    codec: FrameCodec
    capacity: Nbytes  #: this engine's share


def open_stack(config: StackConfig, ctx: OpenContext, runtime: Runtime = _HERE) -> StorageManager:
    """All tiers open, or none: then raises ConfigError with what is wrong with each.

    Capacities are those of the node: of several engines that share the configuration each gets an equal part.
    """
    collector = ProblemCollector()
    opened: list[_Opened] = []
    levels: list[Arena | StoreTier] = []
    with contextlib.ExitStack() as closing:
        for i, tier in enumerate(config.tiers):
            with _blaming(config, i, collector):
                share = Nbytes(tier.capacity // ctx.replicas)
                opened.append(_open(tier, attrs.evolve(ctx, capacity=share), runtime, closing))
        collector.raise_if_any()  # a tier may evict from its store as it starts, so none starts before all are open
        for i, each in enumerate(opened):
            with _blaming(config, i, collector):
                levels.append(_start(each, sum(isinstance(level, Arena) for level in levels), runtime, closing))
        collector.raise_if_any()
        pool = _pool("seal", 1, runtime, closing)
        manager = StorageManager(levels, namespace=ctx.namespace, layout=ctx.layout, pool=pool, clock=runtime.clock)
        closing.pop_all()
    return manager


@contextlib.contextmanager
def _blaming(config: StackConfig, i: int, collector: ProblemCollector) -> Iterator[None]:
    """Whatever speaks against opening tier ``i`` is a problem there. Of a ConfigError, `$` is the tier."""
    path = f"$.tiers[{i}]"
    try:
        yield
    except ConfigError as error:
        collector.problems += [
            config.problem(path + each.path.removeprefix("$"), each.why, each.hint) for each in error.problems
        ]
    except (BackendError, ImportError) as error:
        collector.problems.append(config.problem(path, str(error)))


def _open(
    tier: ArenaTierConfig | StoreTierConfig, ctx: OpenContext, runtime: Runtime, closing: contextlib.ExitStack
) -> _Opened:
    serializer = tier.serializer.open(ctx) if isinstance(tier, StoreTierConfig) else None
    codec = runtime.codec(ctx.namespace, ctx.layout, serializer)
    _check_room("$.capacity", tier.capacity, "holds", codec.bound, ctx.replicas)
    if isinstance(tier, StoreTierConfig):
        _check_room("$.inflight", tier.inflight, "lets through", ctx.layout.frame_nbytes)
    index = CacheIndex(tier.eviction.open(), tier.store_after)
    longest = max(
        codec.bound, FRAME_ALIGNMENT + MAX_POLICY_STATE_NBYTES
    )  # what a policy learned is kept as a frame, too
    store = tier.config.open(attrs.evolve(ctx, max_frame_nbytes=Nbytes(longest)))
    closing.callback(_close, store)
    return _Opened(tier, store, index, codec, ctx.capacity)


def _start(opened: _Opened, arenas: int, runtime: Runtime, closing: contextlib.ExitStack) -> Arena | StoreTier:
    tier = opened.tier
    if isinstance(tier, ArenaTierConfig):
        return Arena(tier.name, arenas, opened.store, opened.index)
    return StoreTier(
        tier.name,
        opened.store,
        pool=_pool(tier.name, tier.threads, runtime, closing),
        index=opened.index,
        codec=opened.codec,
        capacity=opened.capacity,
        inflight=tier.inflight,
        clock=runtime.clock,
    )


def _check_room(path: str, room: Nbytes, verb: str, chunk_nbytes: int, replicas: int = 1) -> None:
    if room // replicas < chunk_nbytes:
        kib = -(-chunk_nbytes // 1024)
        divided = f", divided among {replicas} data parallel replicas," if replicas > 1 else ""
        why = f"{room}{divided} {verb} no chunk: one is {math.ceil(kib / 102.4) / 10:g}MiB"
        raise ConfigError([Problem("", path, why, f"write at least {kib * replicas}KiB")])


def _pool(name: str, threads: int, runtime: Runtime, closing: contextlib.ExitStack) -> Pool:
    pool = runtime.pool(name, threads)
    closing.callback(pool.close, 1.0)
    return pool


def _close(store: AllocatorBackend | Backend) -> None:
    with contextlib.suppress(BackendError):
        store.close()
