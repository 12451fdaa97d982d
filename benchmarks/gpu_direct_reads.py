"""From slabs on a drive to a GPU's pages: by workers that read them, into which memory, and through an arena."""

from __future__ import annotations

import contextlib
import json
import mmap
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks.measure import Case, Table, interleaved, progress, scratch
from kvtier_core.errors import BackendError
from kvtier_core.frames.format import verify
from kvtier_core.interfaces import PagedKVCache, PageRun
from kvtier_core.stack.batches import in_groups
from kvtier_core.storekit.files import bounce
from kvtier_core.transfer.movers import open_mover
from kvtier_core.transfer.own_shard import FrameRange, OwnShard
from kvtier_core.transfer.staged_reader import Lane, StagedReader, host_lanes
from kvtier_core.types import Nbytes, StoredFrame
from kvtier_core.work.io_pool import IOPool, Outcome
from kvtier_gds.backend import GdsBackend
from kvtier_gds.device_lane import DeviceLane
from kvtier_gds.slab import Extent
from kvtier_gds.slab_files import SlabFiles
from kvtier_testing.samples import make_context, make_frame, make_keys, make_layout

LAYERS, BLOCKS, PAGE_NBYTES = 32, 2, 16 << 10  # a chunk of 1 MiB
FRAMES = 256
ROUNDS = 5
_LONG = 60.0  # seconds
_THREADS = 4  # of a store tier, by default


def tables(folder: Path, device: str = "cuda:0", frames: int = FRAMES) -> Iterator[Table | str]:
    """With a scratch folder below this one, whose drive is read."""
    with scratch(folder) as place, contextlib.closing(_Bench(place, device, frames)) as bench:
        ways: dict[str, Callable[[], object]] = {"bounce": bench.bounce}
        absent: list[tuple[str, str]] = []
        for name, lanes in (("gds, host's memory", host_lanes), ("gds, GPU's memory", _device_lanes)):
            try:
                ways[name] = partial(bench.read_directly, bench.reader(lanes))
            except BackendError as error:
                absent.append((name, str(error)))
        contents = [bench.content(work) for work in ways.values()]
        wrong = [name for name, content in zip(ways, contents, strict=True) if not torch.equal(content, contents[0])]
        ways["raw"] = bench.read_raw
        progress("from slabs to pages")
        times = interleaved([Case(*way) for way in ways.items()], ROUNDS)
        cpu = {name: _processor(work) for name, work in ways.items()}
    gigabytes = bench.nbytes / 1e9
    rows = [
        [name, f"{gigabytes / times.median(name):.2f}", times.ratio("raw", name), cpu[name] / gigabytes]
        for name in ways
    ]
    yield Table(
        title="GPU: from slabs to pages",
        says=f"{bench.frames} frames of {Nbytes(bench.frame_nbytes)} from one drive ({bench.reads_by}). The ratio is "
        "speed to that of one call that reads the same places into the host's memory (raw), in the same round: "
        f"median (min to max) of {ROUNDS} rounds. `bounce`: through an arena.",
        header=("way", "GB/s", "to raw", "CPU s a GB"),
        rows=[*rows, *([name, "-", "-", why] for name, why in absent)],
    )
    yield from (f"{name} brings other bytes than bounce" for name in wrong)


def _processor(work: Callable[[], object]) -> float:
    """Seconds of processors that this takes."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def _device_lanes(files: SlabFiles, own: OwnShard, cache: PagedKVCache) -> list[Lane]:
    """However slow."""
    return [DeviceLane(files, own, cache, _LONG)]


class _Bench:
    """Slabs with frames in them, pages, and an arena's slots."""

    def __init__(self, folder: Path, device: str, frames: int):
        layout = make_layout((PAGE_NBYTES,) * LAYERS, BLOCKS)
        self.frame_nbytes = layout.frame_nbytes
        self.frames, self.nbytes = frames, frames * layout.frame_nbytes
        context = make_context(layout=layout, capacity=Nbytes(self.nbytes))
        self._namespace = context.namespace
        self._slabs = GdsBackend([folder / "slab"], context, mode="gds", direct="auto", io="auto")
        self._keys = make_keys(frames)
        for seed, key in enumerate(self._keys):
            self._slabs.write([key], [make_frame(key, self.frame_nbytes, seed, context.namespace)])
        located = [each for each in self._slabs.locate(self._keys) if each]
        self._pages = torch.zeros((LAYERS, frames * BLOCKS, PAGE_NBYTES), dtype=torch.uint8, device=device)
        runs = tuple(PageRun(layer.data_ptr(), PAGE_NBYTES, PAGE_NBYTES) for layer in self._pages)
        self._cache = PagedKVCache(runs, frames * BLOCKS, device, 0, layout)
        self._chunks = [[list(range(i * BLOCKS, (i + 1) * BLOCKS))] for i in range(frames)]
        self._slots = mmap.mmap(-1, self.nbytes)
        self._mover = open_mover(self._cache, self._slots, self.frame_nbytes)
        self._plain = self._files()
        self.reads_by = self._plain.facts()["read with"]
        self._into = [bounce(self.frame_nbytes) for _ in self._keys]
        self._wanted = [
            StoredFrame("gds", *each, context.namespace.digest) for each in zip(located, self._keys, strict=True)
        ]
        self._extents = [Extent.of(FrameRange(frame, 0, frame.location.nbytes)) for frame in self._wanted]
        self._pool = IOPool("bounce", _THREADS)
        self._job = 0
        self._readers: list[StagedReader] = []

    def read_raw(self) -> None:
        assert list(self._plain.read_extents(self._extents, self._into)) == [self.frame_nbytes] * self.frames

    def bounce(self) -> None:
        """As a store tier reads into an arena: groups of frames, several at a time, each verified on its thread."""
        for group in in_groups(range(self.frames), lambda _: self.frame_nbytes):
            self._pool.submit_load(partial(self._read, group), partial(self._load, group))
        while self._pool.jobs:
            self._pool.wait(_LONG)
            self._pool.step()
        self._mover.wait(range(self._job + 1))
        assert all(result.ok for result in self._mover.finished())

    def _read(self, group: Sequence[int]) -> None:
        into = [memoryview(self._slots)[i * self.frame_nbytes : (i + 1) * self.frame_nbytes] for i in group]
        assert list(self._slabs.read([self._keys[i] for i in group], into)) == [self.frame_nbytes] * len(group)
        for i, slot in zip(group, into, strict=True):
            assert verify(slot, self._namespace, self._keys[i]) is None

    def _load(self, group: Sequence[int], outcome: Outcome) -> None:
        assert outcome.error is None, outcome.error
        self._job += 1
        self._mover.load(self._job, group, [self._chunks[i] for i in group])

    def reader(self, lanes: Callable[..., Sequence[Lane]]) -> StagedReader:
        """Raises BackendError if there are no such lanes."""
        self._readers.append(StagedReader(self._files(), self._cache, _LONG, lanes))
        return self._readers[-1]

    def read_directly(self, reader: StagedReader) -> None:
        self._job += 1
        reader.load(self._job, self._wanted, self._chunks)
        reader.wait([self._job])
        assert all(each.ok for each in reader.finished())

    def _files(self) -> SlabFiles:
        return SlabFiles(json.loads(self._slabs.reader_handle())["slabs"])

    def content(self, work: Callable[[], object]) -> torch.Tensor:
        """What this brings to the pages."""
        self._pages.zero_()
        work()
        return self._pages.cpu().clone()

    def close(self) -> None:
        for reader in self._readers:
            reader.close()
        self._pool.close(_LONG)
        self._mover.close()
        self._plain.close()
        self._slabs.close()
