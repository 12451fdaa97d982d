"""Frames to files and back, against the same files written and read with nothing around the system calls."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.measure import GIB, Case, Table, Times, interleaved, progress, scratch
from kvtier_core import frame
from kvtier_core.builtin.lru import LruConfig
from kvtier_core.door import Door
from kvtier_core.interfaces import Backend, OpenContext
from kvtier_core.residents import Residents
from kvtier_core.tier import Offer, Tier
from kvtier_core.types import KEY_NBYTES, PAGE_NBYTES, ChunkKey, ChunkLayout, Namespace, Nbytes
from kvtier_core.workers import IOPool
from kvtier_disk.config import DiskConfig

ROUNDS = 7
THREADS = 4  # as a tier has by default
TOTAL = 256 << 20
GROUP = 4 << 20  # bytes a call, as a tier groups them
RAW = "raw files"
BACKEND = "kvtier_disk"
TRUSTING = "Tier over kvtier_disk, no frame sealed or checked"
TIER = "Tier over kvtier_disk"

Call = Callable[[Sequence[ChunkKey], Sequence[memoryview]], object]


def tables(folder: Path) -> Iterator[Table]:
    for frame_nbytes in (32 << 20, 1 << 20):
        progress(f"disk: frames of {Nbytes(frame_nbytes)}, {ROUNDS} rounds of {Nbytes(TOTAL)} each way")
        with scratch(folder) as place:
            yield _table(place, frame_nbytes)


def _table(place: Path, frame_nbytes: int) -> Table:
    with contextlib.closing(_Bench(place, frame_nbytes)) as bench:
        direct = bench.backend.facts()["direct"]
        writes = interleaved(bench.writes(), ROUNDS)
        reads = interleaved(bench.reads(), ROUNDS)
    return Table(
        title=f"Disk: frames of {Nbytes(frame_nbytes)}",
        says=f"{Nbytes(TOTAL)} in new files of one frame each, {THREADS} threads, `direct: {direct}`. Raw is `open` "
        "with O_DIRECT, one `pwritev` or `preadv` from or to aligned memory, `close`; no fsync anywhere. kvtier_disk "
        "writes under a temporary name and renames; the tier adds index and threads. Its last row also seals each "
        "frame, on one thread as the manager does, and verifies every byte of each read: what that row is below the "
        "one above it is the share of verification. The ratio is speed to raw in the same round: median (min to max) "
        f"of {ROUNDS}.",
        header=("", "write GiB/s", "of raw", "read GiB/s", "of raw"),
        rows=[(case, *_cells(writes, case), *_cells(reads, case)) for case in (RAW, BACKEND, TRUSTING, TIER)],
    )


def _cells(times: Times, case: str) -> tuple[str, object]:
    return f"{TOTAL / times.median(case) / GIB:.2f}", "1" if case == RAW else times.ratio(RAW, case)


class _Bench:
    def __init__(self, place: Path, frame_nbytes: int):
        self.namespace = namespace = Namespace.of({"benchmark": "disk"})
        self.layout = layout = ChunkLayout((frame_nbytes - PAGE_NBYTES,), 1)
        self.keys = [ChunkKey(os.urandom(KEY_NBYTES)) for _ in range(TOTAL // frame_nbytes)]
        self.frames, self.landings = _views(frame_nbytes), _views(frame_nbytes)
        for key, view in zip(self.keys, self.frames, strict=True):
            view[:] = os.urandom(1 << 16) * (frame_nbytes >> 16)
            frame.seal(view, namespace, key, layout.payload_nbytes)
        self.door = Door(namespace, layout, None)
        context = OpenContext(namespace, layout, "benchmark", Nbytes(2 * TOTAL))
        self.raw = _RawFiles(place / "raw")
        self.backend = _open(place / "backend", context)
        self.tier = Tier(
            "disk",
            _open(place / "tier", context),
            pool=IOPool("disk", THREADS),
            residents=Residents(LruConfig().open()),
            door=self.door,
            capacity=2 * TOTAL,
            inflight=TOTAL,
        )
        self.threads = ThreadPoolExecutor(THREADS)
        self.sealer = ThreadPoolExecutor(1)
        self.per_call = max(1, GROUP // frame_nbytes)

    def writes(self) -> list[Case]:
        return [
            Case(RAW, lambda: self.in_threads(self.raw.write, self.frames), before=lambda: self.raw.delete(self.keys)),
            Case(
                BACKEND,
                lambda: self.in_threads(self.backend.write, self.frames),
                before=lambda: self.backend.delete(self.keys),
            ),
            Case(TRUSTING, self.tier_write, before=self.tier_clear),
            Case(TIER, self.sealed_write, before=self.tier_clear),
        ]

    def reads(self) -> list[Case]:
        return [
            Case(RAW, lambda: self.in_threads(self.raw.read, self.landings)),
            Case(BACKEND, lambda: self.in_threads(self.backend.read, self.landings)),
            Case(TRUSTING, self.tier_read, before=lambda: self.guard(_OpenDoor(self.namespace, self.layout, None))),
            Case(TIER, self.tier_read, before=lambda: self.guard(self.door)),
        ]

    def in_threads(self, call: Call, views: Sequence[memoryview]) -> None:
        starts = range(0, len(self.keys), self.per_call)
        list(self.threads.map(lambda i: call(self.keys[i : i + self.per_call], views[i : i + self.per_call]), starts))

    def offers(self) -> list[Offer]:
        return [Offer(*each) for each in zip(self.keys, [None, *self.keys], self.frames, strict=False)]

    def tier_write(self) -> None:
        self.tier.write(self.offers(), lambda key: None)
        self.settle()
        _must(len(self.tier.residents) == len(self.keys))

    def sealed_write(self) -> None:
        offers = self.offers()
        groups = [offers[i : i + self.per_call] for i in range(0, len(offers), self.per_call)]
        for group in self.sealer.map(self.seal, groups):
            self.tier.write(group, lambda key: None)
        self.settle()
        _must(len(self.tier.residents) == len(self.keys))

    def seal(self, offers: Sequence[Offer]) -> Sequence[Offer]:
        for offer in offers:
            frame.seal(offer.view, self.namespace, offer.key, self.layout.payload_nbytes)
        return offers

    def guard(self, door: Door) -> None:
        self.tier._door = door

    def tier_read(self) -> None:
        arrived = []
        self.tier.read(list(zip(self.keys, self.landings, strict=True)), lambda good, bad: arrived.extend(good))
        self.settle()
        _must(len(arrived) == len(self.keys))

    def tier_clear(self) -> None:
        self.tier.renew(self.namespace)
        self.settle()

    def settle(self) -> None:
        while self.tier.pool.jobs:
            self.tier.pool.wait(1.0)
            self.tier.pool.step()
        self.tier.events.clear()

    def close(self) -> None:
        self.threads.shutdown()
        self.sealer.shutdown()
        self.backend.close()
        self.tier.close(1.0)


class _OpenDoor(Door):
    """Believes every frame."""

    def check(self, key: ChunkKey, landed: memoryview, count: int, slot: memoryview) -> None:
        return None


class _RawFiles:
    def __init__(self, folder: Path):
        folder.mkdir()
        self.folder = folder

    def write(self, keys: Sequence[ChunkKey], frames: Sequence[memoryview]) -> None:
        for key, view in zip(keys, frames, strict=True):
            fd = os.open(self.folder / key.hex(), os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
            _must(os.pwritev(fd, [view], 0) == len(view))
            os.close(fd)

    def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> None:
        for key, view in zip(keys, into, strict=True):
            fd = os.open(self.folder / key.hex(), os.O_RDONLY | os.O_DIRECT)
            _must(os.preadv(fd, [view], 0) == len(view))
            os.close(fd)

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        for key in keys:
            (self.folder / key.hex()).unlink(missing_ok=True)


def _open(path: Path, context: OpenContext) -> Backend:
    return DiskConfig(path=path, direct="on", min_free=Nbytes(0)).open(context)


def _views(frame_nbytes: int) -> list[memoryview]:
    memory = memoryview(mmap.mmap(-1, TOTAL))
    memory[:] = bytes(TOTAL)  # present before anything is timed
    return [memory[at : at + frame_nbytes] for at in range(0, TOTAL, frame_nbytes)]


def _must(moved: bool) -> None:
    if not moved:
        raise RuntimeError("not everything was moved")
