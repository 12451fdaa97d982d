"""How much memory the index of a tier takes, with its policy and ghosts."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measure import Table, progress, sized
from kvtier_core.interfaces import EvictionConfig
from kvtier_core.policies.gittins import GittinsConfig
from kvtier_core.policies.lru import LruConfig
from kvtier_core.stack.index.cache_index import CacheIndex
from kvtier_core.types import KEY_NBYTES, ChunkKey

ENTRIES = sized(1_000_000, 10_000)
PROMPT = 100  # chunks
TURNOVER = 6  # times as many chunks come, so that there are as many ghosts as there ever will be
CASES = {"lru": LruConfig(), "gittins": GittinsConfig()}


def tables(folder: Path) -> Iterator[Table]:
    progress(f"entries: {TURNOVER} times {ENTRIES} chunks with each of {', '.join(CASES)}")
    yield Table(
        title="Bytes of the index",
        says=f"What a process grows by while {TURNOVER * ENTRIES:,} chunks pass through a tier of {ENTRIES:,}, in "
        f"prompts of {PROMPT} that share nothing: key, size, place, parent, the policy's order, and its ghosts.",
        header=("policy", "bytes an entry"),
        rows=[(name, f"{_in_new_process(config):.0f}") for name, config in CASES.items()],
    )


def _in_new_process(config: EvictionConfig) -> float:
    with multiprocessing.get_context("spawn").Pool(1) as process:
        return process.apply(_grown, (config,))


def _grown(config: EvictionConfig) -> float:
    index = CacheIndex(config.open())
    before = _resident_nbytes()
    for number in range(TURNOVER * ENTRIES // PROMPT):
        path = [ChunkKey(os.urandom(KEY_NBYTES)) for _ in range(PROMPT)]
        index.request(path, number / 10, {})
        beyond = len(index) + PROMPT - ENTRIES
        index.remove(index.select_victims(beyond, lambda key: 1), evicted=True)
        index.admit(path, [None, *path[:-1]], 1)
    return (_resident_nbytes() - before) / ENTRIES


def _resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
