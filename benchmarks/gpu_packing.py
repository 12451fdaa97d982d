"""Packed stores and loads of a GPU, beside staged ones of the same pages."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from benchmarks.gpu_copies import NBYTES, REPEATS, ROUNDS, Bench
from benchmarks.measure import Case, Table, interleaved, progress
from kvtier_core.types import Nbytes

PAGES = [8 << 10, 64 << 10, 256 << 10]


def tables() -> Iterator[Table]:
    """How fast pages come and go where their shards are packed."""
    for direction in ("store", "load"):
        yield _speeds(direction)


def _speeds(direction: str) -> Table:
    rows: list[list[object]] = []
    for page_nbytes in PAGES:
        progress(f"packed {direction}, pages of {Nbytes(page_nbytes)}")
        raw, packed = Bench(page_nbytes, NBYTES), Bench(page_nbytes, NBYTES, packed=True)
        if direction == "load":
            packed.fill()
        cases = [
            Case("memcpy", functools.partial(raw.memcpy, direction)),
            Case("staged", functools.partial(raw.move, "staged", direction)),
            Case("packed", functools.partial(packed.move, "chosen", direction)),
        ]
        times = interleaved(cases, ROUNDS, REPEATS)
        speeds = [f"{raw.nbytes / times.median(case.name) / 1e9:.1f}" for case in cases]
        rows.append([Nbytes(page_nbytes), *speeds, times.ratio("memcpy", "packed"), times.ratio("staged", "packed")])
        raw.close()
        packed.close()
    return Table(
        title=f"GPU: {direction} of packed shards",
        says=f"{Nbytes(NBYTES)} of pages a job, normal numbers in bfloat16, from call to last byte, in GB/s of pages. "
        "The ratios are the speed of the packed job to that of one pinned cudaMemcpyAsync of the pages, and to that of "
        f"the staged job: median (min to max) of {ROUNDS} rounds, each the best of {REPEATS}.",
        header=("pages", "memcpy GB/s", "staged GB/s", "packed GB/s", "packed to memcpy", "packed to staged"),
        rows=rows,
    )
