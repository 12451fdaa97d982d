"""How fast a store tier is, as it is configured: for the report of `kvtier conform`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import attrs

from kvtier_core.config.model import StoreTierConfig
from kvtier_core.interfaces import Backend
from kvtier_core.testing.live import own_namespace
from kvtier_core.testing.samples import make_frame, make_keys, make_layout
from kvtier_core.types import ChunkKey

FRAME_NBYTES = 1 << 20  #: that of `chunk_tokens: auto`
_FRAMES, _ROUNDS = 32, 3
_GB = 1e9


@attrs.frozen
class Throughput:
    """Medians of a few rounds, with the threads that the tier has."""

    write: float  #: GB/s
    read: float  #: GB/s; of what was just written, so a store may still have it in memory
    contains: float  #: milliseconds for a key that is not there


def measure(tier: StoreTierConfig) -> Throughput:
    """Write, read and ask. Raises BackendError."""
    keys = make_keys(_FRAMES)
    frames = [make_frame(key, FRAME_NBYTES) for key in keys]
    into = [memoryview(bytearray(FRAME_NBYTES)) for _ in keys]
    with own_namespace(tier) as (config, ctx), ThreadPoolExecutor(tier.threads) as threads:
        backend = config.open(attrs.evolve(ctx, layout=make_layout([FRAME_NBYTES // 4 - 1024], blocks=4)))
        try:

            def each(call: Callable[[Sequence[ChunkKey], Sequence[memoryview]], object], views: list) -> float:
                begin = time.perf_counter()
                for done in [threads.submit(call, [key], [view]) for key, view in zip(keys, views, strict=True)]:
                    done.result()
                return _FRAMES * FRAME_NBYTES / (time.perf_counter() - begin) / _GB

            rounds = [
                (each(backend.write, frames), each(backend.read, into), _milliseconds(backend)) for _ in range(_ROUNDS)
            ]
        finally:
            backend.close()
    return Throughput(*map(statistics.median, zip(*rounds, strict=True)))


def _milliseconds(backend: Backend) -> float:
    begin = time.perf_counter()
    backend.contains([ChunkKey(bytes(32))])
    return (time.perf_counter() - begin) * 1e3
