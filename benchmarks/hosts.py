"""Pages of hosts in kvtier's tiers, against the hosts' own stores in the same place."""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, OffloadingKVEventsConfig, OffloadKey, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.config import OffloadingCacheConfig, OffloadingModelConfig, OffloadingParallelConfig
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

from benchmarks import host_engines
from benchmarks.host_sides import KVTIER, PAGE, PAGES, ROUNDS, SLOTS, Side, compared, disk, memory, stack, wait_for
from benchmarks.measure import Table, progress, scratch
from kvtier_core.config.load import load_config
from kvtier_core.config.registry import Registry
from kvtier_core.types import Namespace, Nbytes
from kvtier_hosts.pages import PageStore

FS = "vLLM's fs tier"
#: By module of this package: the packages that it needs besides, where `make test-hosts` has put them, and the tests'.
OTHERS = {
    "host_lmcache": ("build/lmcache-0.5.6", "tests"),
    "host_sglang": ("build/sglang-0.5.23", "tests", "plugins/kvtier_hosts/tests"),
}


def tables(folder: Path) -> Iterator[Table]:
    """The tables of vLLM's stores and hits, and of LMCache's and SGLang's stores if they are installed."""
    progress(f"hosts: {PAGES} pages of {Nbytes(PAGE)}, {ROUNDS} rounds")
    with scratch(folder) as place, _kvtier(place / "kvtier") as ours, _fs(place / "fs") as theirs:
        says = "Both with O_DIRECT where the filesystem has it. A store ends with its last file."
        yield compared("Pages of vLLM's memory, beside its own fs tier", says, {FS: theirs, KVTIER: ours})
    for module, paths in OTHERS.items():
        places = [Path(__file__).parents[1] / each for each in paths]
        if not all(each.exists() for each in places):
            progress(f"{places[0]} is not there: {module} is not measured; make test-hosts")
            continue
        progress(f"hosts: {module}")
        sys.path += map(str, places)
        with scratch(folder) as place:
            yield from importlib.import_module(f"benchmarks.{module}").tables(place)
    with scratch(folder) as place:
        yield host_engines.table(place)


class _Kvtier(Side):
    def __init__(self, pages: PageStore):
        self.pages, self.memory = pages, memory()
        self.others: list[bytes] = []  # that fill the arena between two loads

    def store(self) -> None:
        assert self._ended(self.pages.put(_keys(self.number), self._views())) == PAGES
        wait_for(lambda: not self.pages.busy)

    def before_load(self) -> None:
        if not self.others:
            self.others = [b"other %d" % number for number in range(SLOTS)]
            self._ended(self.pages.put(self.others, self._views()[:SLOTS]))
            wait_for(lambda: not self.pages.busy)
        self._ended(self.pages.get(self.others, self._views()[:SLOTS]))

    def load(self) -> None:
        assert self._ended(self.pages.get(_keys(self.number), self._views())) == PAGES

    def look(self) -> None:
        assert self._ended(self.pages.contains(_keys(self.number))) == PAGES

    def _views(self) -> list[memoryview]:
        return [self.memory[place * PAGE : (place + 1) * PAGE] for place in range(PAGES)]

    def _ended(self, ticket: int) -> int:
        (result,) = wait_for(self.pages.poll)
        assert result.ticket == ticket
        return len(result.keys)


class _Fs(Side):
    def __init__(self, tier: FileSystemTierManager):
        self.tier, self.jobs = tier, 0

    def store(self) -> None:
        self._ended(self.tier.submit_store, is_promotion=False)

    def load(self) -> None:
        self._ended(self.tier.submit_load, is_promotion=True)

    def look(self) -> None:
        self.jobs += 1
        context = ReqContext(str(self.jobs))
        open_keys = set(map(OffloadKey, _keys(self.number)))

        def answered() -> bool:
            open_keys.difference_update(
                [key for key in open_keys if self.tier.lookup(key, context) is LookupResult.HIT]
            )
            self.tier.on_schedule_end(ScheduleEndContext((), ()))
            return not open_keys

        wait_for(answered)
        self.tier.on_request_finished(context)

    def _ended(self, submit: Callable[[TransferJob], None], *, is_promotion: bool) -> None:
        self.jobs += 1
        keys = list(map(OffloadKey, _keys(self.number)))
        submit(TransferJob(self.jobs, keys, np.arange(PAGES), is_promotion, ReqContext(str(self.jobs))))
        (job,) = wait_for(self.tier.get_finished_jobs)
        assert job.success


def _keys(number: int) -> list[bytes]:
    return [b"%032d" % (number * PAGES + place) + bytes(4) for place in range(PAGES)]


@contextlib.contextmanager
def _kvtier(folder: Path) -> Iterator[_Kvtier]:
    config = load_config(stack(disk(folder)), Registry.discover())
    pages = PageStore(config, Namespace.of({"weights": "of the benchmark"}), PAGE)
    try:
        yield _Kvtier(pages)
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
    view = np.frombuffer(memory(), np.int8).reshape(PAGES, PAGE).data
    tier = FileSystemTierManager(spec, view, "fs", root_dir=str(folder))
    try:
        yield _Fs(tier)
    finally:
        tier.shutdown()
