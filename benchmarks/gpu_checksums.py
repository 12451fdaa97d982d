"""Checksums that a GPU computes: are they zlib's, how fast are they, and what do they cost a store?"""

from __future__ import annotations

import ctypes
import functools
import zlib
from collections.abc import Iterator

import torch

from benchmarks.gpu_copies import NBYTES, REPEATS, ROUNDS, Bench
from benchmarks.measure import Case, Table, interleaved, progress
from kvtier_core.transfer.cuda.autotune import decided
from kvtier_core.transfer.cuda.checksums import SumsMemory
from kvtier_core.transfer.cuda.library import Method, load
from kvtier_core.transfer.cuda.opening import HALF_NBYTES, open_mover
from kvtier_core.types import Nbytes

RANGES = [64 << 10, 1 << 20, 8 << 20, HALF_NBYTES, NBYTES]
PAGES = [8 << 10, 64 << 10, 512 << 10]


def tables() -> Iterator[Table | str]:
    wrong: list[str] = []
    yield _kernel(wrong)
    yield _stores(wrong)
    yield from wrong


def _kernel(wrong: list[str]) -> Table:
    """The kernel to a copy within the device."""
    device, stream = load().device(0), torch.cuda.current_stream()
    memory = SumsMemory(device)
    sums = memory.take(1)
    assert sums, "there is memory for them"
    content = torch.empty(NBYTES, dtype=torch.uint8, device="cuda:0").random_()
    other, here = torch.empty_like(content), content.cpu()
    rows: list[list[object]] = []
    for nbytes in RANGES:
        progress(f"checksums of {Nbytes(nbytes)}")

        def summed(nbytes: int = nbytes) -> None:
            device.checksums(content.data_ptr(), nbytes, sums, stream)
            stream.synchronize()

        def copied(nbytes: int = nbytes) -> None:
            other[:nbytes].copy_(content[:nbytes])
            stream.synchronize()

        times = interleaved([Case("copy", copied), Case("checksum", summed)], ROUNDS, REPEATS)
        summed()
        right = sums.read() == (zlib.crc32(ctypes.string_at(here.data_ptr(), nbytes)),)
        if not right:
            wrong.append(f"the checksum of {Nbytes(nbytes)} is not zlib's")
        speeds = [f"{nbytes / times.median(name) / 1e9:.0f}" for name in ("copy", "checksum")]
        rows.append([Nbytes(nbytes), *speeds, times.ratio("copy", "checksum"), "yes" if right else "no"])
    memory.close()
    return Table(
        title="GPU: checksums of its memory",
        says="One range, from call to the checksum on the host. The ratio is speed to that of a copy of the same bytes "
        f"within the device, in the same round: median (min to max) of {ROUNDS} rounds, each the best of {REPEATS}.",
        header=("bytes", "copy GB/s", "checksum GB/s", "ratio", "as zlib"),
        rows=rows,
    )


def _stores(wrong: list[str]) -> Table:
    """Staged stores with and without."""
    rows: list[list[object]] = []
    for page_nbytes in PAGES:
        progress(f"stores with checksums, pages of {Nbytes(page_nbytes)}")
        bench = Bench(page_nbytes, NBYTES)
        arena = bench.kv_cache, bench.slots, bench.kv_cache.layout.frame_nbytes
        bench.movers["without"] = open_mover(*arena, autotune=decided(Method.STAGED), checksums=False)
        cases = [Case("memcpy", functools.partial(bench.memcpy, "store"))]
        cases += [Case(name, functools.partial(bench.move, name, "store")) for name in ("without", "staged")]
        times = interleaved(cases, ROUNDS, REPEATS)
        facts = bench.movers["staged"].facts()
        where = next(fact for name, fact in facts.items() if name.startswith("checksums"))
        if where != "on the device":
            wrong.append(f"checksums of pages of {Nbytes(page_nbytes)} are computed {where}")
        ratios = [times.ratio("memcpy", name) for name in ("without", "staged")]
        rows.append([Nbytes(page_nbytes), *ratios, times.ratio("without", "staged"), where])
        bench.close()
    return Table(
        title="GPU: staged stores with checksums",
        says=f"{Nbytes(NBYTES)} a job. The ratio is speed to that of one pinned cudaMemcpyAsync in the same round, and "
        "in the last column of figures to that of the store without checksums.",
        header=("pages", "without", "with", "with to without", "checksums"),
        rows=rows,
    )
