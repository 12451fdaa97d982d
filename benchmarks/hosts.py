"""Pages of a host in kvtier's disk tier, against vLLM's own `fs` tier in the same folder's filesystem."""

from __future__ import annotations

import contextlib
import mmap
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from vllm.v1.kv_offload.base import LookupResult, OffloadingKVEventsConfig, OffloadKey, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.config import OffloadingCacheConfig, OffloadingModelConfig, OffloadingParallelConfig
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

from benchmarks.measure import GIB, Case, Table, interleaved, progress, scratch
from kvtier_core.config.load import load_config
from kvtier_core.config.registry import Registry
from kvtier_core.hosts.pages import PageStore
from kvtier_core.types import Namespace, Nbytes

ROUNDS = 9
PAGE = 1 << 20
PAGES = 128
SLOTS = 32  # of the arena: a page that is loaded was read from the disk
FS, KVTIER = "vLLM's fs tier", "kvtier"
_PAUSE = 1e-4  # seconds between two polls


def tables(folder: Path) -> Iterator[Table]:
    progress(f"hosts: {PAGES} pages of {Nbytes(PAGE)}, {ROUNDS} rounds")
    with scratch(folder) as place, _kvtier(place / "kvtier") as ours, _fs(place / "fs") as theirs:
        rows = []
        for what, work in (("store", "store"), ("load", "load"), (f"which of {PAGES} are there", "look")):
            sides = [(FS, theirs), (KVTIER, ours)]
            cases = [Case(name, getattr(side, work), getattr(side, f"before_{work}")) for name, side in sides]
            times = interleaved(cases, ROUNDS)
            for name, _ in sides:
                seconds = times.median(name)
                speed = f"{seconds * 1000:.1f} ms" if work == "look" else f"{PAGES * PAGE / seconds / GIB:.2f} GiB/s"
                rows.append((what, name, speed, "1" if name == FS else times.ratio(FS, name)))
    yield Table(
        title="Pages of a host, beside vLLM's own fs tier",
        says=f"One job of {PAGES} pages of {Nbytes(PAGE)} from the host's memory to files, or back, both with O_DIRECT "
        f"where the filesystem has it. kvtier copies each page to one of {SLOTS} slots, seals it, and verifies it "
        "when it is read; the fs tier reads and writes the host's memory and checks nothing. A store ends with its "
        "last file, a lookup with the answer to the last key. Ratios are of speeds in the same round: median (min to "
        f"max) of {ROUNDS}.",
        header=("", "", "speed", "of the fs tier"),
        rows=rows,
    )


@attrs.define
class _Side:
    """One of the two. The keys that it looks up and loads are those of the last store."""

    page_keys: list[bytes] = attrs.field(factory=list)
    number: int = 0

    def before_store(self) -> None:
        self.number += 1
        self.page_keys = [b"%032d" % (self.number * PAGES + place) + bytes(4) for place in range(PAGES)]

    def before_load(self) -> None:
        pass

    before_look = before_load


@attrs.define
class _Kvtier(_Side):
    pages: PageStore = attrs.field(kw_only=True)
    memory: memoryview = attrs.field(kw_only=True)
    others: list[bytes] = attrs.field(factory=list)  #: that fill the arena between two loads

    def store(self) -> None:
        assert self._ended(self.pages.put(self.page_keys, self._views())) == PAGES
        _wait(lambda: not self.pages.busy)

    def before_load(self) -> None:
        if not self.others:
            self.others = [b"other %d" % number for number in range(SLOTS)]
            self._ended(self.pages.put(self.others, self._views()[:SLOTS]))
            _wait(lambda: not self.pages.busy)
        self._ended(self.pages.get(self.others, self._views()[:SLOTS]))

    def load(self) -> None:
        assert self._ended(self.pages.get(self.page_keys, self._views())) == PAGES

    def look(self) -> None:
        assert self._ended(self.pages.contains(self.page_keys)) == PAGES

    def _views(self) -> list[memoryview]:
        return [self.memory[place * PAGE : (place + 1) * PAGE] for place in range(PAGES)]

    def _ended(self, ticket: int) -> int:
        (result,) = _wait(self.pages.poll)
        assert result.ticket == ticket
        return len(result.keys)


@attrs.define
class _Fs(_Side):
    tier: FileSystemTierManager = attrs.field(kw_only=True)
    jobs: int = 0

    def store(self) -> None:
        self._ended(self.tier.submit_store, is_promotion=False)

    def load(self) -> None:
        self._ended(self.tier.submit_load, is_promotion=True)

    def look(self) -> None:
        self.jobs += 1
        context = ReqContext(str(self.jobs))
        open_keys = set(map(OffloadKey, self.page_keys))

        def answered() -> bool:
            open_keys.difference_update(
                [key for key in open_keys if self.tier.lookup(key, context) is LookupResult.HIT]
            )
            self.tier.on_schedule_end(ScheduleEndContext((), ()))
            return not open_keys

        _wait(answered)
        self.tier.on_request_finished(context)

    def _ended(self, submit: Callable[[TransferJob], None], *, is_promotion: bool) -> None:
        self.jobs += 1
        keys = list(map(OffloadKey, self.page_keys))
        submit(TransferJob(self.jobs, keys, np.arange(PAGES), is_promotion, ReqContext(str(self.jobs))))
        (job,) = _wait(self.tier.get_finished_jobs)
        assert job.success


def _wait(until: Callable[[], Any]) -> Any:
    while not (found := until()):
        time.sleep(_PAUSE)
    return found


@contextlib.contextmanager
def _kvtier(folder: Path) -> Iterator[_Kvtier]:
    tiers = [
        {"type": "cpu", "capacity": f"{SLOTS * (PAGE + 4096)}B", "eviction": "lru"},
        {"type": "disk", "path": str(folder), "capacity": "1TiB", "min_free": "0B"},
    ]
    config = load_config({"version": 1, "load_wait": "60s", "tiers": tiers}, Registry.discover())
    pages = PageStore(config, Namespace.of({"weights": "of the benchmark"}), PAGE)
    try:
        yield _Kvtier(pages=pages, memory=_memory())
    finally:
        pages.close()


@contextlib.contextmanager
def _fs(folder: Path) -> Iterator[_Fs]:
    config = types.SimpleNamespace(
        groups=(),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        model=OffloadingModelConfig(name="of the benchmark", dtype="bfloat16"),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
        canonical_layout=False,
        replicated_layout=False,
    )
    spec: Any = types.SimpleNamespace(
        config=config, blocks_per_chunk=1, kv_events_config=OffloadingKVEventsConfig(False, False)
    )
    view = np.frombuffer(_memory(), np.int8).reshape(PAGES, PAGE).data
    tier = FileSystemTierManager(spec, view, "fs", root_dir=str(folder))
    try:
        yield _Fs(tier=tier)
    finally:
        tier.shutdown()


def _memory() -> memoryview:
    """The pages of a host, all of them there."""
    memory = memoryview(mmap.mmap(-1, PAGES * PAGE))
    memory[:] = np.random.default_rng(0).bytes(len(memory))
    return memory
