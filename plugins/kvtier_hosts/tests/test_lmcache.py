"""kvtier as an L2 adapter of LMCache's: its own factory, objects of its L1 memory, and its storage manager above it.

`make test-hosts` runs them with the LMCache that it installs.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from chunk_files import sizes
from outsiders import TEXTS, assert_tame
from patience import HANG, wait_until
from servers.redis import one_server

pytest.importorskip("lmcache", reason="LMCache is not installed: make test-hosts")

from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
from lmcache.v1.distributed.config import EvictionConfig, L1ManagerConfig, L1MemoryManagerConfig, StorageManagerConfig
from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig, get_l2_adapter_config_class
from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry
from lmcache.v1.distributed.memory_manager.l1_memory_manager import L1MemoryManager
from lmcache.v1.distributed.storage_manager import StorageManager

from kvtier_core.errors import ConfigError

EXAMPLE = json.loads((Path(__file__).parents[3] / "examples/hosts/lmcache.json").read_text())
(MODEL,) = EXAMPLE["adapter_params"]["models"]
KV = MemoryLayoutDesc([torch.Size((2, 4, 64, 32))], [torch.bfloat16])
NBYTES = 32_768
OTHER = MemoryLayoutDesc([torch.Size((2, 4, 32, 64))], [torch.bfloat16])
#: In memory, not lazily, and in no shared memory, which others could meet.
L1 = L1MemoryManagerConfig(size_in_bytes=16 << 20, use_lazy=False, shm_name="")


def key(number: int, **fields) -> ObjectKey:
    return ObjectKey(**{"chunk_hash": bytes([number]) * 32, "model_name": MODEL, "kv_rank": 0x01000100, **fields})


KEYS = [key(number) for number in range(8)]


def config_of(spec: dict):
    """As LMCache makes it of the JSON behind ``--l2-adapter``."""
    spec = json.loads(json.dumps(spec))
    return get_l2_adapter_config_class(spec["type"]).from_dict(spec)


class Adapter:
    """An adapter that LMCache's factory made, called as its controllers do: it waits at the descriptor of each kind."""

    def __init__(self, spec: dict, memory: L1MemoryManager):
        self.memory = memory
        self.real = create_l2_adapter_from_registry(config_of(spec), memory.get_l1_memory_desc())
        self._stored: dict = {}

    def objects(self, count: int, seed: int | None = None, layout=KV) -> list:
        """Of random bytes, or of none."""
        error, objects = self.memory.allocate(layout, count)
        assert len(objects) == count, error
        random = None if seed is None else torch.Generator().manual_seed(seed)
        for each in objects:
            flat = each.raw_data.view(torch.uint8)
            flat.random_(generator=random) if random else flat.zero_()
        return objects

    def free(self, objects: list) -> None:
        self.memory.free(objects)

    def _wait(self, descriptor: int, ask):
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        deadline = time.monotonic() + HANG
        while time.monotonic() < deadline:
            if (answer := ask()) is not None:
                return answer
            if poll.poll(1000):
                with open(descriptor, "rb", buffering=0, closefd=False) as events:
                    events.read(8)
        raise AssertionError("the task does not end, or is not told")

    def store(self, keys: Sequence[ObjectKey] = KEYS, seed: int = 1, layout=KV) -> bool:
        objects = self.objects(len(keys), seed, layout)
        task = self.real.submit_store_task(list(keys), objects)

        def ask():
            self._stored |= self.real.pop_completed_store_tasks()
            return self._stored.pop(task, None)

        result = self._wait(self.real.get_store_event_fd(), ask)
        self.free(objects)
        return result.is_successful()

    def lookup(self, keys: Sequence[ObjectKey] = KEYS, layout=KV) -> list[int]:
        """The indices of those that are there."""
        task = self.real.submit_lookup_and_lock_task(list(keys), {0: layout, 1: layout})
        ask = self.real.query_lookup_and_lock_result
        found = self._wait(self.real.get_lookup_and_lock_event_fd(), lambda: ask(task))
        assert ask(task) is None, "a result is given once"
        return found.get_indices_list()

    def load(self, keys: Sequence[ObjectKey] = KEYS, seed: int = 1, layout=KV) -> list[int]:
        """The indices of those that were read. Their bytes are compared, and all others are as they were."""
        expected, into = self.objects(len(keys), seed, layout), self.objects(len(keys), None, layout)
        task = self.real.submit_load_task(list(keys), into)
        found = self._wait(self.real.get_load_event_fd(), lambda: self.real.query_load_result(task))
        assert self.real.query_load_result(task) is None, "a result is given once"
        self.real.submit_unlock(list(keys))
        got = found.get_indices_list()
        for number, each in enumerate(into):
            right = expected[number].byte_array if number in got else bytes(each.get_size())
            assert bytes(each.byte_array) == bytes(right), "they are not the bytes that were stored"
        self.free(expected + into)
        return got


@pytest.fixture
def model(tmp_path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights" * 1000)
    return folder


def ours(tier: dict, model: Path, **settings) -> dict:
    stack = {"version": 1, "load_wait": "20s", "tiers": [{"type": "cpu", "capacity": "4MiB"}, tier], **settings}
    return EXAMPLE | {"adapter_params": {"config": stack, "models": {MODEL: str(model)}}}


def disk(tmp_path) -> dict:
    return {"type": "disk", "path": str(tmp_path / "kv"), "capacity": "64MiB", "min_free": "0B"}


@pytest.fixture
def adapter(tmp_path, model) -> Iterator:
    """``adapter()`` has our disk; ``adapter(spec)`` is another. All are closed in the end."""
    logging.getLogger("kvtier").addHandler(logging.NullHandler())  # else LMCache's take all lines
    opened = []

    def start(spec=None) -> Adapter:
        opened.append(Adapter(spec or ours(disk(tmp_path), model), L1MemoryManager(L1)))
        return opened[-1]

    yield start
    for each in opened:
        each.real.close()


def objects_in(folder: Path) -> list[Path]:
    return [file for file, nbytes in sizes(folder).items() if nbytes >= NBYTES]


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x40
    file.write_bytes(content)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def damage(folder: Path, harm=flip) -> None:
    assert len(objects_in(folder)) == len(KEYS)
    for file in objects_in(folder):
        harm(file)


def test_stored_objects_are_found_and_read(adapter):
    serving = adapter()
    real = serving.real
    assert len({real.get_store_event_fd(), real.get_lookup_and_lock_event_fd(), real.get_load_event_fd()}) == 3
    assert serving.lookup() == serving.load() == []
    assert serving.store()
    assert serving.lookup() == serving.load() == list(range(8))


def test_stored_objects_are_found_after_a_restart(adapter):
    first = adapter()
    first.store()
    first.real.close()
    assert adapter().load() == list(range(8))


@pytest.mark.parametrize("harm", [flip, truncate])
def test_a_damaged_object_is_not_loaded(adapter, tmp_path, harm):
    first = adapter()
    first.store()
    first.real.close()
    damage(tmp_path / "kv", harm)
    second = adapter()
    assert second.load() == second.lookup() == []


def test_the_capacity_is_kept(adapter, tmp_path, model):
    """A frame is a header of 4 KiB and the object; there is room for three."""
    serving = adapter(ours(disk(tmp_path) | {"capacity": "110KiB"}, model))
    for number in range(0, 32, 8):
        serving.store([key(number + each) for each in range(8)])
        assert len(objects_in(tmp_path / "kv")) <= 3
    serving.real.close()
    assert 0 < len(objects_in(tmp_path / "kv")) <= 3


def test_lmcaches_own_adapter_for_files(adapter, tmp_path, model):
    """A restart finds all, whatever the weights are. Half a file is no hit, but its bytes are in the object."""
    spec = {"type": "fs", "base_path": str(tmp_path / "theirs")}
    first = adapter(spec)
    assert first.store()
    first.real.close()
    (model / "model.safetensors").write_bytes(b"WEIGHTS" * 1000)
    second = adapter(spec)
    assert second.load() == list(range(8))
    damage(tmp_path / "theirs")
    with pytest.raises(AssertionError, match="not the bytes that were stored"):
        second.load()
    for file in (tmp_path / "theirs").iterdir():
        truncate(file)
    assert second.lookup() == list(range(8))
    with pytest.raises(AssertionError, match="not the bytes that were stored"):
        second.load()
    assert second.store([key(number) for number in range(8, 64)])
    assert len(list((tmp_path / "theirs").iterdir())) == 64


def test_other_weights_under_the_same_name_are_not_found(adapter, model):
    first = adapter()
    first.store()
    first.real.close()
    (model / "model.safetensors").write_bytes(b"WEIGHTS" * 1000)
    second = adapter()
    assert second.lookup() == second.load() == []


@pytest.mark.parametrize(
    "fields", [{"cache_salt": "theirs"}, {"kv_rank": 0x02000200}, {"object_group_id": 1}], ids="".join
)
def test_every_field_of_a_key_counts(adapter, fields):
    serving = adapter()
    serving.store()
    others = [key(number, **fields) for number in range(8)]
    assert serving.lookup(others) == serving.load(others) == []
    serving.store(others, seed=2)
    assert serving.load(others, seed=2) == serving.load() == list(range(8))


def test_fields_of_keys_do_not_run_together(adapter):
    serving = adapter()
    serving.store([key(0, cache_salt="', 0, ''")])
    serving.store([key(1, chunk_hash=b"a", cache_salt="bc")])
    others = [key(1, chunk_hash=b"ab", cache_salt="c"), key(1, chunk_hash=b"abc"), key(0)]
    assert serving.lookup(others) == []


def test_a_model_that_is_not_named_is_refused(adapter, caplog):
    serving = adapter()
    strange = [key(0, model_name="org/strange")]
    assert not serving.store(strange)
    assert serving.lookup(strange) == serving.load(strange) == []
    told = "objects of org/strange are neither stored nor found: its weights are unknown; name their folder"
    assert caplog.text.count(told) == 1
    assert not serving.store([KEYS[0], *strange]), "a task fails as a whole"


def test_models_that_clients_name_forge_no_line_and_fill_no_log(adapter, caplog):
    serving = adapter()
    caplog.clear()
    for name in (*TEXTS.values(), *map(str, range(100))):
        assert serving.lookup([key(0, model_name=name)]) == []
    assert sum("neither stored nor found" in line for line in caplog.messages) == 64
    assert_tame(*caplog.messages)


def test_objects_of_another_shape_or_encoded_by_lmcache_are_refused(adapter, caplog):
    serving = adapter()
    assert serving.lookup() == []
    assert not serving.store(layout=OTHER)
    assert serving.lookup(layout=OTHER) == []
    (encoded,) = serving.objects(1, seed=1)
    encoded.set_used_size(1000)
    task = serving.real.submit_store_task(KEYS[:1], [encoded])
    assert not serving.real.pop_completed_store_tasks()[task].is_successful()
    assert "objects of org/model are neither stored nor found: LMCache encodes them (serde)" in caplog.text
    serving.free([encoded])


def test_nothing_is_stored_and_nothing_found_if_it_opens_late(adapter, tmp_path, model, monkeypatch):
    released = threading.Event()
    monkeypatch.setattr("kvtier_core.identity.weights.digest", lambda *_, **__: (released.wait(HANG), "a" * 64)[1])
    serving = adapter(ours(disk(tmp_path), model, load_wait="0.1s"))
    assert not serving.store()
    assert serving.lookup() == []
    released.set()
    wait_until(serving.store, "it does not open")


def test_a_store_that_hangs_holds_no_controller(adapter, model, tmp_path):
    """Loads end within ``load_wait``, as misses. That a call returns is seen by the order: the server answers later."""
    with one_server(tmp_path / "redis") as server:
        spec = ours({"type": "redis", "url": server.url}, model, load_wait="1s")
        first = adapter(spec)
        assert first.store()
        first.real.close()
        second = adapter(spec)
        assert len(second.lookup()) == 8
        with server.stopped():
            assert second.load() == []
            assert second.lookup(KEYS[4:]) == []
            second.store([key(number) for number in range(20, 24)])
        wait_until(lambda: second.load() == list(range(8)), "it does not recover")


def test_a_task_signals_the_descriptor_of_its_kind(adapter):
    serving = adapter()
    assert serving.store()
    fds = [serving.real.get_store_event_fd(), serving.real.get_lookup_and_lock_event_fd()]
    poll = select.poll()
    for fd in (*fds, serving.real.get_load_event_fd()):
        poll.register(fd, select.POLLIN)
    assert not poll.poll(0)
    serving.real.submit_lookup_and_lock_task(KEYS, {0: KV})
    assert poll.poll(60_000) == [(fds[1], select.POLLIN)]


def test_lmcaches_own_check_passes(tmp_path, model):
    """It asks for objects before the first one is stored, gives no layouts, and its objects have one shape."""
    spec = ours(disk(tmp_path), model)
    command = [sys.executable, "-m", "lmcache.v1.basic_check", "--mode", "test_l2_adapter"]
    command += ["--model", MODEL, "--l2-adapter", json.dumps(spec), "--obj-size", "4096"]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=HANG).stdout
    rates = re.findall(r"\| (\w+)[^|]*\|.*\| *(\d+/\d+) \| *([\d.]+)% \|", said)
    assert rates == [(phase, "5/5", "100.0") for phase in ("LOOKUP", "STORE", "LOOKUP", "LOAD")], said


def test_an_adapter_closes_under_load(adapter):
    """Every task ends, before or after, and closed descriptors are not written to."""
    serving = adapter()
    assert serving.lookup() == []
    objects = serving.objects(8, seed=1)
    begun, ended = [], {}

    def submit() -> None:
        for number in range(300):
            begin = serving.real.submit_store_task if number % 2 else serving.real.submit_load_task
            begun.append((number % 2, begin(KEYS, objects)))

    threads = [threading.Thread(target=submit) for _ in range(2)]
    for each in threads:
        each.start()
    fds = [serving.real.get_store_event_fd(), serving.real.get_load_event_fd()]
    serving.real.close()
    for each in threads:
        each.join()
    ended = serving.real.pop_completed_store_tasks()
    assert sorted(ended) == sorted(task for stores, task in begun if stores)
    assert all(serving.real.query_load_result(task) is not None for stores, task in begun if not stores)
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ({}, "expected config, a file or its keys, and models; got []"),
        ({"config": {}, "models": {}, "extra": 1}, "got ['config', 'extra', 'models']"),
        ({"config": {}, "models": {}}, 'it does not name a model; write {"NAME": "FOLDER OF ITS WEIGHTS"}'),
        ({"config": {"version": 1}, "models": {MODEL: "/none"}}, "tiers"),
    ],
)
def test_wrong_parameters_are_explained(adapter, model, tmp_path, params, why):
    with pytest.raises(ConfigError) as refused:
        adapter(ours(disk(tmp_path), model) | {"adapter_params": params})
    assert why in str(refused.value)


@pytest.fixture
def manager(tmp_path, model) -> Iterator:
    """``manager()`` is a context with LMCache's storage manager, its L1 and its controllers, above our adapter."""

    @contextlib.contextmanager
    def start() -> Iterator[StorageManager]:
        adapters = L2AdaptersConfig([config_of(ours(disk(tmp_path), model))])
        config = StorageManagerConfig(L1ManagerConfig(memory_config=L1), EvictionConfig("LRU"), adapters)
        opened = StorageManager(config)
        try:
            yield opened
        finally:
            opened.close()

    return start


def prefetch(manager: StorageManager) -> list[int]:
    handle = manager.submit_prefetch_task(PrefetchTaskSpec([GroupedObjectKeys(KEYS, 0, KV)]))
    assert manager.wait_prefetch_status(handle, 60)
    return manager.query_prefetch_status(handle).hit_cells[0].get_indices_list()


def test_their_controllers_store_and_prefetch_through_it(manager, tmp_path):
    """After a restart their L1 is empty: what a prefetch finds comes from our disk."""
    contents = {}
    with manager() as first:
        for each, memory in first.reserve_write(KEYS, KV).items():
            memory.raw_data.view(torch.uint8).random_()
            contents[each] = bytes(memory.byte_array)
        first.finish_write(KEYS)
        wait_until(lambda: len(objects_in(tmp_path / "kv")) == len(KEYS), "they are not stored")
    with manager() as second:
        assert prefetch(second) == list(range(8))
        with second.read_prefetched_results(KEYS) as objects:
            assert [bytes(each.byte_array) for each in objects] == [contents[each] for each in KEYS]


def test_its_lines_go_where_lmcaches_go(manager, capfd):
    with manager() as opened:
        assert prefetch(opened) == []
        assert "LMCache INFO:\x1b[0m kvtier: identity " in capfd.readouterr().err
