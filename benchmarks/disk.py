"""Frames to files and back, against the same files written and read by bare system calls."""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs

from benchmarks.bare import RawFiles, RawPlaces, RingFiles, must
from benchmarks.measure import GIB, Case, Table, Times, interleaved, progress, scratch, sized
from kvtier_core.encoding.codec import FrameCodec
from kvtier_core.frames.format import seal
from kvtier_core.interfaces import Backend, OpenContext
from kvtier_core.policies.lru import LruConfig
from kvtier_core.stack.index.cache_index import CacheIndex
from kvtier_core.stack.store_tier.tier import StoreTier
from kvtier_core.stack.store_tier.writes import FrameWrite
from kvtier_core.storekit.files import ring_works
from kvtier_core.types import FRAME_HEADER_NBYTES, KEY_NBYTES, ChunkKey, Namespace, Nbytes
from kvtier_core.work.io_pool import IOPool
from kvtier_disk.config import DiskConfig
from kvtier_gds.config import GdsConfig
from kvtier_testing.samples import make_layout

ROUNDS = sized(7, 1)
WIDTHS = (1, 2, 4)  # threads of a tier
THREADS = 4  # as it has by default
TOTAL = sized(256 << 20, 8 << 20)
FRAMES = sized((32 << 20, 1 << 20), (4 << 20, 1 << 20))
GROUP = 4 << 20  # bytes a call, as a tier groups them
RAW = "raw files"
PLACES = "one preallocated raw file"
RING = "bare io_uring loop"
BACKEND = "kvtier_disk"
SHARED = "kvtier_disk, shared"
SLABS = "kvtier_gds, bounce"
TRUSTING = "Tier over kvtier_disk, no frame sealed or checked"
TIER = "Tier over kvtier_disk"

Call = Callable[[Sequence[ChunkKey], Sequence[memoryview]], object]


def tables(folder: Path) -> Iterator[Table]:
    for frame_nbytes in FRAMES:
        progress(f"disk: frames of {Nbytes(frame_nbytes)}, {ROUNDS} rounds of {Nbytes(TOTAL)} each way")
        with scratch(folder) as place, contextlib.closing(_Bench(place, frame_nbytes)) as bench:
            yield _against_files(bench, frame_nbytes)
            yield _against_one_thread(bench, frame_nbytes)


def _against_files(bench: _Bench, frame_nbytes: int) -> Table:
    direct = bench.backend.facts()["direct"]
    writes = interleaved(bench.writes(), ROUNDS)
    reads = interleaved(bench.reads(), ROUNDS)
    return Table(
        title=f"Disk: frames of {Nbytes(frame_nbytes)}",
        says=f"{Nbytes(TOTAL)} in new files of one frame each, {THREADS} threads, `direct: {direct}`. Raw is `open` "
        "with O_DIRECT, one `pwritev` or `preadv` from or to aligned memory, `close`; no fsync anywhere. "
        f"{_of_the_ring()} kvtier_disk writes under a temporary name and renames; with `shared: true` it opens the "
        "folder anew at each call, as one on a network file system. kvtier_gds has one preallocated file, as the raw "
        "row of that name, whose blocks were written before in all rounds but the first. The tier adds index and "
        "threads. Its last row also seals each frame, on one thread as the manager does, and verifies every byte of "
        "each read: the difference to the row above it is the cost of verification. Ratios are of speeds in the same "
        f"round: median (min to max) of {ROUNDS}.",
        header=("", "write GiB/s", "of raw", "of io_uring", "read GiB/s", "of raw", "of io_uring"),
        rows=[(case, *_cells(writes, case, RAW, RING), *_cells(reads, case, RAW, RING)) for case in writes.seconds],
    )


def _of_the_ring() -> str:
    if not ring_works():
        return "There is no io_uring here, and so no loop to compare with."
    return (
        "The bare loop is one thread with all files in one io_uring, opened with O_DIRECT beforehand and emptied "
        "before they are written: no index, no name, no checksum."
    )


def _against_one_thread(bench: _Bench, frame_nbytes: int) -> Table:
    writes = interleaved(bench.each(bench.sealed_write, before=bench.clear), ROUNDS)
    reads = interleaved(bench.each(bench.read, before=bench.verify), ROUNDS)
    alone = _threads(WIDTHS[0])
    return Table(
        title=f"Disk: threads, frames of {Nbytes(frame_nbytes)}",
        says="The last row of the table above, with other numbers of `threads`; each tier has a folder of its own. "
        f"Ratios are of speeds in the same round: median (min to max) of {ROUNDS}.",
        header=("", "write GiB/s", "of one thread", "read GiB/s", "of one thread"),
        rows=[(case, *_cells(writes, case, alone), *_cells(reads, case, alone)) for case in writes.seconds],
    )


def _threads(width: int) -> str:
    return f"{width} threads" if width > 1 else "1 thread"


def _cells(times: Times, case: str, *others: str) -> Iterator[object]:
    yield f"{TOTAL / times.median(case) / GIB:.2f}"
    for other in others:
        yield "-" if other not in times.seconds else "1" if case == other else times.ratio(other, case)


class _Bench:
    def __init__(self, place: Path, frame_nbytes: int):
        self.namespace = namespace = Namespace.of({"benchmark": "disk"})
        self.layout = layout = make_layout((frame_nbytes - FRAME_HEADER_NBYTES,), 1)
        self.keys = [ChunkKey(os.urandom(KEY_NBYTES)) for _ in range(TOTAL // frame_nbytes)]
        self.frames, self.buffers = _views(frame_nbytes), _views(frame_nbytes)
        for key, view in zip(self.keys, self.frames, strict=True):
            view[:] = os.urandom(1 << 16) * (frame_nbytes >> 16)
            seal(view, namespace, key, layout.payload_nbytes)
        self.codec = FrameCodec(namespace, layout)
        context = OpenContext(namespace, layout, Nbytes(2 * TOTAL))
        self.raw = RawFiles(place / "raw")
        self.places = RawPlaces(place / "places", self.keys, frame_nbytes)
        self.ring = RingFiles(place / "ring", len(self.keys))
        self.backend = _open(place / "backend", context)
        self.slabs = GdsConfig(paths=(place / "slabs",), direct="on").open(context)
        self.shared = _open(place / "shared", attrs.evolve(context, capacity=Nbytes(0)), shared=True)
        self.tiers = {width: self._tier(_open(place / f"tier{width}", context), width) for width in WIDTHS}
        self.tier = self.tiers[THREADS]
        self.threads = ThreadPoolExecutor(THREADS)
        self.sealer = ThreadPoolExecutor(1)
        self.per_call = max(1, GROUP // frame_nbytes)

    def _tier(self, backend: Backend, threads: int) -> StoreTier:
        return StoreTier(
            "disk",
            backend,
            pool=IOPool("disk", threads),
            index=CacheIndex(LruConfig().open()),
            codec=self.codec,
            capacity=2 * TOTAL,
            inflight=TOTAL,
        )

    def writes(self) -> list[Case]:
        return [
            Case(RAW, lambda: self.in_threads(self.raw.write, self.frames), before=lambda: self.raw.delete(self.keys)),
            Case(PLACES, lambda: self.in_threads(self.places.write, self.frames)),
            *self.if_there_is_a_ring(Case(RING, lambda: self.ring.write(self.frames), before=self.ring.empty)),
            Case(
                BACKEND,
                lambda: self.in_threads(self.backend.write, self.frames),
                before=lambda: self.backend.delete(self.keys),
            ),
            Case(
                SHARED,
                lambda: self.in_threads(self.shared.write, self.frames),
                before=lambda: self.shared.delete(self.keys),
            ),
            Case(
                SLABS,
                lambda: self.in_threads(self.slabs.write, self.frames),
                before=lambda: self.slabs.delete(self.keys),
            ),
            Case(TRUSTING, lambda: self.write(self.tier), before=lambda: self.clear(self.tier)),
            Case(TIER, lambda: self.sealed_write(self.tier), before=lambda: self.clear(self.tier)),
        ]

    def reads(self) -> list[Case]:
        return [
            Case(RAW, lambda: self.in_threads(self.raw.read, self.buffers)),
            Case(PLACES, lambda: self.in_threads(self.places.read, self.buffers)),
            *self.if_there_is_a_ring(Case(RING, lambda: self.ring.read(self.buffers))),
            Case(BACKEND, lambda: self.in_threads(self.backend.read, self.buffers)),
            Case(SHARED, lambda: self.in_threads(self.shared.read, self.buffers)),
            Case(SLABS, lambda: self.in_threads(self.slabs.read, self.buffers)),
            Case(TRUSTING, lambda: self.read(self.tier), before=lambda: self.trust(self.tier)),
            Case(TIER, lambda: self.read(self.tier), before=lambda: self.verify(self.tier)),
        ]

    def each(self, work: Callable[[StoreTier], None], before: Callable[[StoreTier], None]) -> list[Case]:
        """The same with each number of threads."""
        partial = functools.partial
        return [Case(_threads(width), partial(work, tier), partial(before, tier)) for width, tier in self.tiers.items()]

    def if_there_is_a_ring(self, case: Case) -> list[Case]:
        return [case] if ring_works() else []

    def in_threads(self, call: Call, views: Sequence[memoryview]) -> None:
        starts = range(0, len(self.keys), self.per_call)
        list(self.threads.map(lambda i: call(self.keys[i : i + self.per_call], views[i : i + self.per_call]), starts))

    def offers(self) -> list[FrameWrite]:
        return [FrameWrite(*each) for each in zip(self.keys, [None, *self.keys], self.frames, strict=False)]

    def write(self, tier: StoreTier) -> None:
        tier.write(self.offers(), lambda key: None)
        self.settle(tier)
        must(len(tier.index) == len(self.keys))

    def sealed_write(self, tier: StoreTier) -> None:
        offers = self.offers()
        groups = [offers[i : i + self.per_call] for i in range(0, len(offers), self.per_call)]
        for group in self.sealer.map(self.seal, groups):
            tier.write(group, lambda key: None)
        self.settle(tier)
        must(len(tier.index) == len(self.keys))

    def seal(self, offers: Sequence[FrameWrite]) -> Sequence[FrameWrite]:
        for offer in offers:
            seal(offer.view, self.namespace, offer.key, self.layout.payload_nbytes)
        return offers

    def trust(self, tier: StoreTier) -> None:
        tier._codec = _PassthroughCodec(self.namespace, self.layout, None)

    def verify(self, tier: StoreTier) -> None:
        tier._codec = self.codec

    def read(self, tier: StoreTier) -> None:
        arrived: list[object] = []
        tier.read(list(zip(self.keys, self.buffers, strict=True)), lambda good, bad: arrived.extend(good))
        self.settle(tier)
        must(len(arrived) == len(self.keys))

    def clear(self, tier: StoreTier) -> None:
        tier.invalidate_all(self.namespace)
        self.settle(tier)

    def settle(self, tier: StoreTier) -> None:
        while tier.pool.jobs:
            tier.pool.wait(1.0)
            tier.pool.step()
        tier.events.clear()

    def close(self) -> None:
        self.threads.shutdown()
        self.sealer.shutdown()
        self.ring.close()
        self.places.close()
        self.backend.close()
        self.shared.close()
        self.slabs.close()
        for tier in self.tiers.values():
            tier.close(1.0)


class _PassthroughCodec(FrameCodec):
    """Accepts every frame without verifying it."""

    def decode_verified(
        self, key: ChunkKey, buffer: memoryview, count: int, slot: memoryview, salt: bytes = b""
    ) -> None:
        return None


def _open(path: Path, context: OpenContext, *, shared: bool = False) -> Backend:
    return DiskConfig(path=path, direct="on", min_free=Nbytes(0), shared=shared).open(context)


def _views(frame_nbytes: int) -> list[memoryview]:
    memory = memoryview(mmap.mmap(-1, TOTAL))
    memory[:] = bytes(TOTAL)  # allocated before anything is timed
    return [memory[at : at + frame_nbytes] for at in range(0, TOTAL, frame_nbytes)]
