"""Stores below a host, called as the host does, in turn."""

from __future__ import annotations

import abc
import mmap
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import GIB, Case, Table, interleaved, sized
from kvtier_core.types import Nbytes

ROUNDS = sized(9, 1)
PAGE = 1 << 20
PAGES = sized(128, 8)
SLOTS = sized(32, 4)  # of kvtier's arena: a page that is loaded was read from the store
KVTIER = "kvtier"
LOOK = f"which of {PAGES} are there"
#: Rows of a table, and the methods of a side that are measured, and called before.
WORKS = (("store", "store", "before_store"), ("load", "load", "before_load"), (LOOK, "look", "before_look"))
_PAUSE = 1e-4  # seconds between two polls


class Side(abc.ABC):
    """A store below a host. The pages that it looks up and loads are those of the last store."""

    number = 0  #: of stores

    def before_store(self) -> None:
        """Other pages from now on."""
        self.number += 1

    def before_load(self) -> None:
        """Where the store has memory of its own, other pages are there."""

    def before_look(self) -> None:
        """A look needs no preparation."""

    @abc.abstractmethod
    def store(self) -> None: ...

    @abc.abstractmethod
    def load(self) -> None: ...

    @abc.abstractmethod
    def look(self) -> None: ...


def compared(title: str, says: str, sides: Mapping[str, Side], works: Sequence[tuple[str, str, str]] = WORKS) -> Table:
    """``says`` is how these sides are used, and what a store or load ends with."""
    rows: list[tuple[object, ...]] = []
    for what, work, before in works:
        times = interleaved(
            [Case(name, getattr(side, work), getattr(side, before)) for name, side in sides.items()], ROUNDS
        )
        for name in sides:
            seconds = times.median(name)
            speed = f"{seconds * 1000:.1f} ms" if work == "look" else f"{PAGES * PAGE / seconds / GIB:.2f} GiB/s"
            rows.append((what, name, speed, "1" if name == KVTIER else times.ratio(name, KVTIER)))
    return Table(
        title=title,
        says=f"One job of {PAGES} pages of {Nbytes(PAGE)} from the host's memory to the store, or back. kvtier copies "
        f"each page to one of {SLOTS} slots, seals it, and verifies it when it is read; the other checks nothing. "
        f"{says} Ratios are of speeds in the same round: median (min to max) of {ROUNDS}.",
        header=("", "", "speed", "kvtier's, of it"),
        rows=rows,
    )


def wait_for(until: Callable[[], Any]) -> Any:
    """The first true result."""
    while not (found := until()):
        time.sleep(_PAUSE)
    return found


def stack(tier: Mapping[str, object]) -> dict[str, object]:
    """A configuration with this store tier below a small arena."""
    arena = {"type": "cpu", "capacity": f"{SLOTS * (PAGE + 4096)}B", "eviction": "lru"}
    return {"version": 1, "load_wait": "60s", "tiers": [arena, tier]}


def disk(folder: Path, direct: str = "auto") -> dict[str, object]:
    return {"type": "disk", "path": str(folder), "capacity": "1TiB", "min_free": "0B", "direct": direct}


def memory() -> memoryview:
    """The pages of a host, all of them there."""
    pages = memoryview(mmap.mmap(-1, PAGES * PAGE))
    pages[:] = np.random.default_rng(0).bytes(len(pages))
    return pages


def uncache(folder: Path) -> None:
    """Let the files below leave the page cache."""
    os.sync()
    for file in folder.rglob("*"):
        if file.is_file():
            with open(file, "rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
