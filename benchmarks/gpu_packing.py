"""Packed stores and loads of a GPU, beside staged ones of the same pages."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from benchmarks.gpu_copies import BLOCKS, LAYERS, NBYTES, REPEATS, ROUNDS, Bench, Matrices
from benchmarks.measure import Case, Table, interleaved, progress
from kvtier_core.transfer.cuda.checksums import MOST_PACKED
from kvtier_core.types import Nbytes

PAGES = [8 << 10, 64 << 10, 256 << 10]


def tables() -> Iterator[Table]:
    """How fast pages come and go where their shards are packed."""
    for direction in ("store", "load"):
        yield _speeds(direction)
    yield _losses()


def _speeds(direction: str) -> Table:
    rows: list[list[object]] = []
    for page_nbytes in PAGES:
        progress(f"packed {direction}, pages of {Nbytes(page_nbytes)}")
        raw, packed = _benches(page_nbytes)
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
        says=f"{Nbytes(NBYTES)} of pages a job, or {MOST_PACKED} chunks, normal numbers in bfloat16, from call to last "
        "byte, in GB/s of pages. The ratios are the speed of the packed job to that of one pinned cudaMemcpyAsync "
        f"of them, and to that of the staged job: median (min to max) of {ROUNDS} rounds, each the best of {REPEATS}.",
        header=("pages", "memcpy GB/s", "staged GB/s", "packed GB/s", "packed to memcpy", "packed to staged"),
        rows=rows,
    )


def _losses() -> Table:
    """How much longer the same matrices take during continuous copies."""
    rows: list[list[object]] = []
    matrices = Matrices()
    for page_nbytes in PAGES:
        progress(f"matrices beside packed copies of pages of {Nbytes(page_nbytes)}")
        raw, packed = _benches(page_nbytes)
        packed.fill()
        cases = [Case("alone", matrices.run)]
        for direction in ("store", "load"):
            for name, copy in (("staged", raw.move), ("chosen", packed.move)):
                work = functools.partial(matrices.run, functools.partial(copy, name, direction))
                cases.append(Case(f"{direction} {name}", work))
        times = interleaved(cases, ROUNDS)
        rows.append([Nbytes(page_nbytes), *(times.ratio(case.name, "alone") for case in cases[1:])])
        raw.close()
        packed.close()
    return Table(
        title="GPU: what a matrix multiplication loses to packed shards",
        says=f"{Matrices.SAYS} The ratio is time to that of the same matrices alone: median (min to max) of {ROUNDS} "
        "rounds.",
        header=("pages", "store, staged", "store, packed", "load, staged", "load, packed"),
        rows=rows,
    )


def _benches(page_nbytes: int) -> tuple[Bench, Bench]:
    """The same pages for shards that are not packed, and that are."""
    nbytes = min(NBYTES, MOST_PACKED * LAYERS * BLOCKS * page_nbytes)
    return Bench(page_nbytes, nbytes), Bench(page_nbytes, nbytes, packed=True)
