"""kvtier's stores and LMCache's own below LMCache's memory, through its interface of L2 adapters."""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import L1MemoryManagerConfig
from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry
from lmcache.v1.distributed.memory_manager.l1_memory_manager import L1MemoryManager

from benchmarks import host_engines
from benchmarks.bare import must
from benchmarks.host_sides import KVTIER, PAGE, PAGES, SLOTS, Side, compared, disk, stack, wait_for
from benchmarks.measure import Table
from benchmarks.stores import redis

MODEL = "of/the-benchmark"
KV = MemoryLayoutDesc([torch.Size((2, 4, 64, PAGE // 1024))], [torch.bfloat16])
FS, NATIVE, RESP = "LMCache's `fs`", "LMCache's `fs_native`", "LMCache's `resp`"


def tables(place: Path) -> Iterator[Table]:
    """``place`` is an empty folder on the disk that is measured."""
    with contextlib.ExitStack() as closing:
        files = {"use_odirect": True, "base_path": str(place / "fs")}
        sides = {
            FS: _adapter(closing, {"type": "fs", **files}),
            NATIVE: _adapter(closing, {"type": "fs_native", **files, "base_path": str(place / "fs_native")}),
            KVTIER: _adapter(closing, _ours(place, disk(place / "kvtier"))),
        }
        says = "All with O_DIRECT. A store ends with its last file."
        yield compared("Pages of LMCache's memory, beside its own adapters for files", says, sides)
    with contextlib.ExitStack() as closing:
        folders = [place / "redis", place / "another-redis"]
        for each in folders:
            each.mkdir()
        servers = [closing.enter_context(redis(each)) for each in folders]
        if theirs_and_ours := [server for server in servers if server is not None]:
            theirs, ours = theirs_and_ours
            url = f"redis://127.0.0.1:{ours.port}"
            sides = {
                RESP: _adapter(closing, {"type": "resp", "host": "127.0.0.1", "port": theirs.port}, theirs.port),
                KVTIER: _adapter(closing, _ours(place, {"type": "redis", "url": url}), ours.port),
            }
            says = (
                "Each has a redis-server on the same cores, over TCP. A store ends with the last answer. LMCache asks "
                "the server in each lookup; kvtier knows what it has stored."
            )
            yield compared("Pages of LMCache's memory, beside its own adapter for Redis", says, sides)
    yield host_engines.lmcache_table(place)


def _ours(place: Path, tier: dict[str, object]) -> dict[str, Any]:
    """The JSON behind ``--l2-adapter``."""
    model = place / "model"
    model.mkdir(exist_ok=True)
    (model / "model.safetensors").write_bytes(b"weights")
    where = {"module_path": "kvtier_hosts.lmcache", "class_name": "KVTierL2Adapter"}
    return {"type": "plugin", **where, "adapter_params": {"config": stack(tier), "models": {MODEL: str(model)}}}


def _adapter(closing: contextlib.ExitStack, spec: dict[str, Any], port: int = 0) -> _Adapter:
    adapter = _Adapter(spec, port)
    closing.callback(adapter.close)
    adapter.open()
    return adapter


class _Adapter(Side):
    """One that LMCache's factory made, called as its controllers do: it waits at the descriptor of each kind."""

    def __init__(self, spec: dict[str, Any], port: int):
        self._memory = L1MemoryManager(L1MemoryManagerConfig(PAGES * PAGE + (1 << 20), use_lazy=False, shm_name=""))
        config = get_l2_adapter_config_class(spec["type"]).from_dict(spec)
        self.real: Any = create_l2_adapter_from_registry(config, self._memory.get_l1_memory_desc())
        self._objects = self._memory.allocate(KV, PAGES)[1]
        for each in self._objects:
            each.raw_data.view(torch.uint8).random_()
        self._port = port
        self._keys = _keys(0, PAGES)
        self._others: list[ObjectKey] = []  # that fill kvtier's arena between two loads

    def open(self) -> None:
        self.look(hits=0)

    def close(self) -> None:
        self.real.close()
        self._memory.free(self._objects)

    def before_store(self) -> None:
        super().before_store()
        self._keys = _keys(self.number, PAGES)
        if self._port:
            with socket.create_connection(("127.0.0.1", self._port)) as server:
                server.sendall(b"FLUSHALL\r\n")
                must(server.recv(16) == b"+OK\r\n")

    def store(self) -> None:
        self._store(self._keys)

    def before_load(self) -> None:
        if not self._others:
            self._others = _keys(-1, SLOTS)
            self._store(self._others)
        self._load(self._others)

    def load(self) -> None:
        self._load(self._keys)

    def look(self, hits: int = PAGES) -> None:
        task = self.real.submit_lookup_and_lock_task(self._keys, {0: KV})
        ask = self.real.query_lookup_and_lock_result
        found = _ended(self.real.get_lookup_and_lock_event_fd(), lambda: ask(task))
        must(found.popcount() == hits)
        self.real.submit_unlock(self._keys)

    def _store(self, keys: list[ObjectKey]) -> None:
        task = self.real.submit_store_task(keys, self._objects[: len(keys)])
        ended = _ended(self.real.get_store_event_fd(), lambda: self.real.pop_completed_store_tasks().get(task))
        must(ended.is_successful())
        models = getattr(self.real, "_models", {}).values()  # kvtier's take copies, and write them afterwards
        wait_for(lambda: not any(model._store.busy for model in models))

    def _load(self, keys: list[ObjectKey]) -> None:
        task = self.real.submit_load_task(keys, self._objects[: len(keys)])
        found = _ended(self.real.get_load_event_fd(), lambda: self.real.query_load_result(task))
        must(found.popcount() == len(keys))


def _keys(number: int, count: int) -> list[ObjectKey]:
    return [ObjectKey(b"%016d%016d" % (number, place), MODEL, kv_rank=0x01000100) for place in range(count)]


def _ended(descriptor: int, ask: Callable[[], Any]) -> Any:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while (answer := ask()) is None:
        poll.poll()
        with open(descriptor, "rb", buffering=0, closefd=False) as events:
            events.read(8)
    return answer
