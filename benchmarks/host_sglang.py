"""kvtier's stores and SGLang's `file` backend below the host memory of HiCache, called as its storage threads do."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sglang_on_the_cpu as cpu
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory

from benchmarks.bare import must
from benchmarks.host_sides import KVTIER, LOOK, PAGES, SLOTS, Side, compared, disk, stack, uncache, wait_for
from benchmarks.measure import Table

FILE = "SGLang's `file`"
TOKENS, LAYERS, HEADS, DIM = 64, 8, 8, 64  # of a page of 1 MiB in bfloat16
WORKS = (
    ("store", "store", "before_store"),
    ("load from the page cache", "load", "before_load"),
    ("load from the disk", "load", "before_cold_load"),
    (LOOK, "look", "before_look"),
)


def tables(place: Path) -> Iterator[Table]:
    """``place`` is an empty folder on the disk that is measured."""
    torch.set_num_threads(1)
    cpu.settings(cpu.model(place / "model"))
    where = {"module_path": "kvtier_hosts.hicache", "class_name": "KVTierHiCache"}
    ours = {"backend_name": "kvtier", **where, "config": stack(disk(place / "kvtier", direct="off"))}
    theirs = {"file_storage_path": str(place / "file")}
    sides = {FILE: _Backend("file", theirs, place / "file"), KVTIER: _Backend("dynamic", ours, place / "kvtier")}
    says = (
        "Both write and read through the page cache, as SGLang's backend always does, and a store ends with the last "
        "file there. kvtier is called with `interface_v1`, SGLang's backend without: it has none."
    )
    with contextlib.closing(sides[KVTIER].real):
        yield compared("Pages of HiCache's host memory, beside SGLang's own backend", says, sides, WORKS)


class _Backend(Side):
    """One that SGLang's factory made, called as its cache controller does."""

    def __init__(self, kind: str, extra: dict[str, Any], folder: Path):
        tokens = PAGES * TOKENS
        device = MHATokenToKVPool(tokens, TOKENS, torch.bfloat16, HEADS, DIM, LAYERS, "cpu", False)
        self._pool = cpu.scrambled(
            MHATokenToKVPoolHost(
                device._mha_buffer_info(),
                host_to_device_ratio=2.0,
                host_size=0,
                page_size=TOKENS,
                layout="page_first",
                pin_memory=False,
                device_capacity_tokens=tokens,
                start_layer=0,
                end_layer=LAYERS,
            )
        )
        ranks = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
        config = HiCacheStorageConfig(
            **ranks,
            is_mla_model=False,
            enable_storage_metrics=False,
            is_page_first_layout=True,
            model_name="of the benchmark",
            extra_config=json.loads(json.dumps(extra)),
        )
        self.real: Any = StorageBackendFactory.create_backend(kind, config, self._pool)
        self.real.register_mem_pool_host(self._pool)
        self._indices = torch.arange(tokens)
        self._v1 = kind == "dynamic"
        self._folder = folder
        self._keys = _keys(0, PAGES)
        self._others: list[str] = []  # that fill kvtier's arena between two loads

    def before_store(self) -> None:
        super().before_store()
        self._keys = _keys(self.number, PAGES)
        os.sync()  # otherwise the store would wait for what was written before it

    def store(self) -> None:
        self._store(self._keys)

    def before_load(self) -> None:
        if not self._others:
            self._others = _keys(1 << 64, SLOTS)
            self._store(self._others)
        self._load(self._others)

    def before_cold_load(self) -> None:
        self.before_load()
        uncache(self._folder)

    def load(self) -> None:
        self._load(self._keys)

    def look(self) -> None:
        must(self.real.batch_exists(self._keys) == PAGES)

    def _store(self, keys: list[str]) -> None:
        """As `HiCacheController._page_set_zero_copy` or `_generic_page_set`."""
        indices = self._indices[: len(keys) * TOKENS]
        if self._v1:
            must(all(self.real.batch_set_v1(keys, indices)))
            wait_for(lambda: not self.real._store.busy)
        else:
            must(self.real.batch_set(keys, [self._pool.get_data_page(start) for start in indices[::TOKENS]]))

    def _load(self, keys: list[str]) -> None:
        """As `HiCacheController._page_get_zero_copy` or `_generic_page_get`."""
        indices = self._indices[: len(keys) * TOKENS]
        if self._v1:
            must(all(self.real.batch_get_v1(keys, indices)))
            return
        pages = self.real.batch_get(keys, [self._pool.get_dummy_flat_data_page() for _ in keys])
        for start, page in zip(indices[::TOKENS], pages, strict=True):
            self._pool.set_from_flat_data_page(start, page)


def _keys(number: int, count: int) -> list[str]:
    return [f"{number:032x}{place:032x}" for place in range(count)]
