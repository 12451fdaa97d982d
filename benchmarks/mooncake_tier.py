"""Frames to a Mooncake Store on this machine and back, against Mooncake's own client."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bare import must
from benchmarks.measure import GIB, Case, Table, Times, interleaved, progress, scratch, sized
from benchmarks.stores import mooncake
from kvtier_core.interfaces import Backend, OpenContext
from kvtier_core.types import FRAME_ALIGNMENT, FRAME_HEADER_NBYTES, KEY_NBYTES, ChunkKey, Namespace, Nbytes
from kvtier_mooncake.config import MooncakeConfig
from kvtier_testing.samples import make_layout

ROUNDS = sized(11, 1)
FRAME = 4 << 20
FRAMES = sized(16, 2)
KEYS = 128
LENT = sized(2 << 30, 256 << 20)  # deleted frames keep their memory for a while
BARE = "Mooncake's client"
TIER = "kvtier_mooncake"


def tables(folder: Path) -> Iterator[Table]:
    with scratch(folder) as place, mooncake(place, LENT) as master:
        if master is None:
            return
        progress(f"mooncake: {FRAMES} frames of {Nbytes(FRAME)}, {ROUNDS} rounds each way")
        bench = _Bench(master)
        writes = interleaved(bench.writes(), ROUNDS)
        reads = interleaved(bench.reads(), ROUNDS)
        existence = interleaved(bench.questions(), ROUNDS, repeats=5)
        bench.close()
    yield Table(
        title=f"Mooncake Store: frames of {Nbytes(FRAME)}",
        says=f"{FRAMES} new frames, one thread each, over TCP to the memory of another process on the same cores. Bare "
        "is `batch_put_from` and `batch_get_into` of Mooncake's client on memory that is registered with it. The tier "
        "has that client in a process of its own, and copies to its memory and back. Ratios are of speeds in the same "
        f"round: median (min to max) of {ROUNDS}. The last columns: which of {KEYS} keys are there.",
        header=("", "write GiB/s", "of bare", "read GiB/s", "of bare", "keys µs", "times bare"),
        rows=[(case, *_speeds(writes, case), *_speeds(reads, case), *_costs(existence, case)) for case in (BARE, TIER)],
    )


def _speeds(times: Times, case: str) -> Iterator[object]:
    yield f"{FRAMES * FRAME / times.median(case) / GIB:.2f}"
    yield "1" if case == BARE else times.ratio(BARE, case)


def _costs(times: Times, case: str) -> Iterator[object]:
    yield f"{times.median(case) * 1e6:.0f}"
    yield "1" if case == BARE else times.ratio(case, BARE)


class _Bench:
    def __init__(self, master: str):
        from mooncake.store import MooncakeDistributedStore

        self.client: Any = MooncakeDistributedStore()
        must(self.client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master) == 0)
        self.memory = mmap.mmap(-1, FRAMES * FRAME)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        must(self.client.register_buffer(address, FRAMES * FRAME) == 0)
        self.bare: tuple[list[str], list[int], list[int]] = (
            [f"bare{number}" for number in range(FRAMES)],
            [address + number * FRAME for number in range(FRAMES)],
            [FRAME] * FRAMES,
        )
        layout = make_layout((FRAME - FRAME_HEADER_NBYTES,), 1)
        context = OpenContext(Namespace.of({"benchmark": "mooncake"}), layout)
        self.tier: Backend = MooncakeConfig(master=master).open(context)
        self.keys = [ChunkKey(os.urandom(KEY_NBYTES)) for _ in range(FRAMES)]
        self.memory[:] = os.urandom(1 << 16) * (FRAMES * FRAME >> 16)
        self.frames = [memoryview(bytearray(self.memory[:FRAME])) for _ in self.keys]
        self.buffers = [memoryview(bytearray(FRAME)) for _ in self.keys]
        self.many = [ChunkKey(os.urandom(KEY_NBYTES)) for _ in range(KEYS)]

    def writes(self) -> list[Case]:
        return [
            Case(BARE, lambda: must(self.client.batch_put_from(*self.bare) == [0] * FRAMES), before=self._empty),
            Case(TIER, lambda: must(self.tier.write(self.keys, self.frames) is None), before=self._empty),
        ]

    def reads(self) -> list[Case]:
        self._empty()
        must(self.client.batch_put_from(*self.bare) == [0] * FRAMES)
        must(self.tier.write(self.keys, self.frames) is None)
        return [
            Case(BARE, lambda: must(self.client.batch_get_into(*self.bare) == [FRAME] * FRAMES)),
            Case(TIER, lambda: self._arrived(self.tier.read(self.keys, self.buffers)), before=self._wipe),
        ]

    def questions(self) -> list[Case]:
        names = [f"none{number}" for number in range(KEYS)]
        return [
            Case(BARE, lambda: must(self.client.batch_is_exist(names) == [0] * KEYS)),
            Case(TIER, lambda: must(not any(self.tier.contains(self.many)))),
        ]

    def _empty(self) -> None:
        self.client.batch_remove(self.bare[0], True)
        self.tier.delete(self.keys)
        time.sleep(0.1)

    def _wipe(self) -> None:
        for view in self.buffers:
            view[:FRAME_ALIGNMENT] = view[-FRAME_ALIGNMENT:] = bytes(FRAME_ALIGNMENT)

    def _arrived(self, counts: Sequence[object]) -> None:
        must(counts == [FRAME] * FRAMES)
        for view, frame in zip(self.buffers, self.frames, strict=True):
            must(view[:FRAME_ALIGNMENT] == frame[:FRAME_ALIGNMENT] and view[-8:] == frame[-8:])

    def close(self) -> None:
        self.tier.close()
        self.client.close()
