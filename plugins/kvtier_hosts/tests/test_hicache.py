"""kvtier's tiers behind SGLang's HiCache: its own factory, host memory, controller and keys (sglang_on_the_cpu)."""

from __future__ import annotations

import array
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chunk_files import sizes
from patience import HANG
from servers.redis import one_server
from sglang_on_the_cpu import PAGE, Host, host_pool, latent_pool, model, settings

import torch  # isort: skip
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

from kvtier_core.errors import ConfigError
from kvtier_hosts.pages import PageStore

EXAMPLE = json.loads((Path(__file__).parents[3] / "examples/hosts/sglang.json").read_text())
PAGES = 12
FRAME = 8192
PROMPT = RadixKey(array.array("q", range(PAGES * PAGE)))
KEYS = [f"{number:064x}" for number in range(PAGES)]
INDICES = torch.arange(PAGES * PAGE)
RANK = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}


@pytest.fixture(autouse=True)
def weights(tmp_path) -> Path:
    """The folder of the model that SGLang has loaded in this process."""
    folder = model(tmp_path / "model")
    settings(folder)
    return folder


def extra(*tiers, v1: bool = True, **document) -> dict:
    """SGLang's extra configuration for these store tiers."""
    config = {"version": 1, "tiers": [{"type": "cpu", "capacity": f"{64 * FRAME}B"}, *tiers], "load_wait": "20s"}
    return {**EXAMPLE, "interface_v1": int(v1), "config": {**config, **document}}


def disk(path: Path, capacity: str = "64MiB", **settings) -> dict:
    return {"type": "disk", "path": str(path), "capacity": capacity, "min_free": "0B", **settings}


def frames(path: Path) -> list[Path]:
    return [file for file, nbytes in sizes(path).items() if nbytes == FRAME]


@pytest.fixture
def host() -> Iterator[Callable[..., Host]]:
    opened = []

    def start(*tiers, layout: str = "page_first", **options) -> Host:
        opened.append(Host("dynamic", layout, extra(*tiers, **options)))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


@pytest.fixture
def backend() -> Iterator[Callable]:
    """``backend(*tiers)`` is one that SGLang's factory has made, over a host memory of its own."""
    opened = []

    def start(*tiers, pool=None, rank=None, latent: bool = False, given: dict | None = None, **document):
        config = HiCacheStorageConfig(
            **{**RANK, **(rank or {})},
            is_mla_model=latent,
            enable_storage_metrics=False,
            is_page_first_layout=True,
            model_name="a name",
            extra_config={**extra(*tiers, **document), **(given or {})},
        )
        pool = host_pool("page_first") if pool is None else pool
        made = StorageBackendFactory.create_backend("dynamic", config, pool)
        opened.append(made)
        made.register_mem_pool_host(pool)
        made.register_mem_host_pool_v2(pool, PoolName.KV)
        made.on_host_pools_registered()
        return made

    yield start
    for each in opened:
        each.close()


def same(pages: list, expected: list) -> bool:
    return len(pages) == len(expected) and all(map(torch.equal, pages, expected))


@pytest.mark.parametrize("v1", [True, False], ids=["v1", "generic"])
@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_a_prompt_is_prefetched_after_a_restart(host, tmp_path, layout, v1):
    first = host(disk(tmp_path / "kv"), layout=layout, v1=v1)
    assert first.prefetch(PROMPT) == []
    written = first.back_up(PROMPT)
    assert same(first.prefetch(PROMPT), written)
    first.close()
    assert same(host(disk(tmp_path / "kv"), layout=layout, v1=v1).prefetch(PROMPT), written)


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 0x40
    file.write_bytes(content)


def truncate(file: Path, at: int) -> None:
    os.truncate(file, at)


@pytest.mark.parametrize("harm", [flip, truncate])
def test_a_damaged_page_ends_the_prefix(host, tmp_path, harm):
    first = host(disk(tmp_path / "kv"))
    written = first.back_up(PROMPT)
    first.close()
    harm(frames(tmp_path)[0], 4096 + 100)
    found = host(disk(tmp_path / "kv")).prefetch(PROMPT)
    assert len(found) < PAGES
    assert same(found, written[: len(found)])


def test_the_file_backend_of_sglang_serves_a_flipped_byte_and_pages_of_other_weights(weights, tmp_path):
    theirs = Host("file", "page_first", {"file_storage_path": str(tmp_path / "files")})
    written = theirs.back_up(PROMPT)
    theirs.close()
    model(weights, 1)
    theirs = Host("file", "page_first", {"file_storage_path": str(tmp_path / "files")})
    assert same(theirs.prefetch(PROMPT), written)
    flip(sorted((tmp_path / "files").iterdir())[0], 100)
    found = theirs.prefetch(PROMPT)
    theirs.close()
    assert len(found) == PAGES
    assert not same(found, written)


def test_the_file_backend_of_sglang_keeps_a_capacity(tmp_path):
    nbytes = len(host_pool("page_first").get_dummy_flat_data_page()) * 2
    extra = {"file_storage_path": str(tmp_path / "files"), "max_size": 5 * nbytes}
    theirs = Host("file", "page_first", extra)
    theirs.back_up(PROMPT)
    theirs.close()
    assert 0 < len(list((tmp_path / "files").iterdir())) <= 5


def test_half_a_page_costs_the_file_backend_of_sglang_its_whole_batch(tmp_path):
    theirs = Host("file", "page_first", {"file_storage_path": str(tmp_path / "files")})
    theirs.back_up(PROMPT)
    truncate(sorted((tmp_path / "files").iterdir())[0], 100)
    assert theirs.prefetch(PROMPT) == []
    theirs.close()


def test_other_weights_find_nothing_and_take_nothing_away(host, weights, tmp_path):
    for seed in (0, 1):
        model(weights, seed)
        each = host(disk(tmp_path / "kv"))
        assert each.prefetch(PROMPT) == []
        each.back_up(PROMPT)
        each.close()
    model(weights, 0)
    assert len(host(disk(tmp_path / "kv")).prefetch(PROMPT)) == PAGES


@pytest.mark.parametrize("change", [{"attention_backend": "triton"}, {"json_model_override_args": '{"rope_theta": 9}'}])
def test_other_settings_find_nothing(host, weights, tmp_path, change):
    first = host(disk(tmp_path / "kv"))
    first.back_up(PROMPT)
    first.close()
    settings(weights, **change)
    assert host(disk(tmp_path / "kv")).prefetch(PROMPT) == []


def test_salts_and_extra_keys_never_meet(host, tmp_path):
    """They are in SGLang's own keys."""
    pages = host(disk(tmp_path / "kv"))
    pages.back_up(PROMPT)
    for others in ({"cache_salt": "a"}, {"extra_key": "a"}):
        assert pages.prefetch(RadixKey(PROMPT.token_ids, **others)) == []


def test_the_capacity_is_kept(host, tmp_path):
    pages = host(disk(tmp_path / "kv", capacity=f"{5 * FRAME}B", eviction="lru"))
    for begin in range(3):
        pages.back_up(RadixKey(array.array("q", range(begin * 1000, begin * 1000 + 8 * PAGE))))
        assert len(frames(tmp_path)) <= 5
    pages.close()
    assert 0 < len(frames(tmp_path)) <= 5


def test_a_server_that_stands_still_is_waited_for_no_longer_than_load_wait(backend, tmp_path):
    with one_server(tmp_path) as server:
        tier = {"type": "redis", "url": server.url, "timeout": f"{2 * HANG}s"}
        writer = backend(tier)
        assert writer.batch_set_v1(KEYS, INDICES) == [True] * PAGES
        writer.close()
        reader = backend(tier, load_wait="300ms")
        assert reader.batch_exists(KEYS) == PAGES
        before = reader.mem_pool_host.kv_buffer.clone()
        with server.stopped():
            began = time.monotonic()
            assert not any(reader.batch_get_v1(KEYS, INDICES))
            assert reader.batch_exists([key.replace("0", "f") for key in KEYS]) == 0
            assert time.monotonic() - began < HANG
        assert torch.equal(before, reader.mem_pool_host.kv_buffer)


def test_two_hosts_share_a_server(backend, tmp_path):
    with one_server(tmp_path) as server:
        tier = {"type": "redis", "url": server.url}
        ours, theirs = backend(tier), backend(tier)
        ours.batch_set_v1(KEYS, INDICES)
        ours.close()
        assert theirs.batch_exists([*KEYS, "no such page"]) == PAGES
        assert theirs.batch_get_v1(KEYS, INDICES) == [True] * PAGES
        assert torch.equal(theirs.mem_pool_host.kv_buffer[:, INDICES], ours.mem_pool_host.kv_buffer[:, INDICES])


def test_pages_in_memory_of_the_caller(backend, tmp_path):
    pages = backend(disk(tmp_path / "kv"))
    one, two = (pages.mem_pool_host.get_data_page(start) for start in (0, PAGE))
    assert pages.set("one", one)
    assert pages.batch_set(["one", "two"], [one, two])
    assert pages.exists("two")
    assert not pages.exists("three")
    target = torch.zeros_like(one)
    assert pages.get("one", target) is target
    assert torch.equal(target, one)
    found = pages.batch_get(["two", "three", "two"])
    assert torch.equal(found[0], two)
    assert torch.equal(found[2], two)
    assert found[1] is None


def test_ranks_have_pages_of_their_own_unless_their_attention_is_latent(backend, tmp_path):
    tier = disk(tmp_path / "kv", shared=True)
    for latent, pool in ((False, host_pool), (True, latent_pool)):
        ranks = [{"tp_rank": rank, "tp_size": 2} for rank in (0, 1)]
        first, second = (backend(tier, pool=pool("page_first"), rank=rank, latent=latent) for rank in ranks)
        assert first.batch_set_v1(KEYS, INDICES) == [True] * PAGES
        first.close()
        assert second.batch_exists(KEYS) == (PAGES if latent else 0)
        assert second.batch_get_v1(KEYS, INDICES) == [latent] * PAGES
    assert torch.equal(first.mem_pool_host.kv_buffer[INDICES], second.mem_pool_host.kv_buffer[INDICES])


def test_after_clear_nothing_earlier_is_found(backend, tmp_path):
    pages = backend(disk(tmp_path / "kv"))
    pages.batch_set_v1(KEYS, INDICES)
    pages.clear()
    assert pages.batch_exists(KEYS) == 0
    assert not any(pages.batch_get_v1(KEYS, INDICES))


def test_after_a_call_that_may_change_the_weights_nothing_is_stored_or_found(backend, tmp_path):
    pages = backend(disk(tmp_path / "kv"))
    pages.batch_set_v1(KEYS, INDICES)
    names = ("tp_rank", "device", "gpu_id", "model_config", "custom_weight_loaders", "get_model", "get_model_runner")
    updater = WeightUpdater(**dict.fromkeys((*names, "update_model_fields", "recapture_cuda_graph")))
    with pytest.raises(TypeError):  # it has no model
        updater.update_weights_from_disk("elsewhere", "auto")
    assert pages.batch_exists(KEYS) == 0
    assert not any(pages.batch_get_v1(KEYS, INDICES))
    assert not any(pages.batch_set_v1([f"{key}9" for key in KEYS], INDICES))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"enable_lora": True}, "the name and path of an adapter, not its content"),
        ({"load_format": "npcache"}, "may read the weights from elsewhere; name them with identity: "),
        ({"quantization_param_path": "scales.json"}, "names a file that KV depends on"),
        ({"speculative_token_map": __file__}, "speculative_token_map names a file that KV depends on"),
    ],
)
def test_an_engine_with_what_keys_do_not_cover_is_refused(backend, weights, tmp_path, change, why):
    settings(weights, **change)
    with pytest.raises(ConfigError, match=why):
        backend(disk(tmp_path / "kv"))


def test_code_from_elsewhere_is_refused_whatever_its_variable(backend, tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_EXTERNAL_ANYTHING", "mine")
    with pytest.raises(ConfigError, match="SGLANG_EXTERNAL_ANYTHING names a file that KV depends on"):
        backend(disk(tmp_path / "kv"))


def test_a_model_that_reads_pictures_is_refused(backend, weights, tmp_path):
    model(weights, architectures=["Qwen2VLForConditionalGeneration"])
    with pytest.raises(ConfigError, match="a few bits of each image"):
        backend(disk(tmp_path / "kv"))


def test_another_folder_than_the_one_that_is_loaded_is_refused(backend, tmp_path):
    other = model(tmp_path / "other")
    with pytest.raises(ConfigError, match="it loads the model in .*model, and 'model' is .*other"):
        backend(disk(tmp_path / "kv"), given={"model": str(other)})


def test_latent_attention_in_several_ranks_needs_a_shared_tier(backend, tmp_path):
    with pytest.raises(ConfigError, match="tiers must be shared, but disk is not"):
        backend(disk(tmp_path / "kv"), rank={"tp_size": 2}, latent=True)


def test_a_hybrid_model_is_refused_with_its_second_pool(backend, tmp_path):
    pages = backend(disk(tmp_path / "kv"))
    with pytest.raises(ConfigError, match="it is a hybrid model: pages of the pool 'mamba' are not stored here"):
        pages.register_mem_host_pool_v2(object(), PoolName.MAMBA)


def test_a_pool_that_is_not_known_is_refused(backend, tmp_path):
    class Another(type(host_pool("page_first"))):
        """Its pages may be only a part of its KV."""

    pool = host_pool("page_first")
    pool.__class__ = Another
    with pytest.raises(ConfigError, match="a Another in the layout page_first, are not known here"):
        backend(disk(tmp_path / "kv"), pool=pool)


class Bounded(threading.Condition):
    """On which nothing waits for ever."""

    def wait_for(self, predicate, timeout=None):
        assert timeout is not None
        return super().wait_for(predicate, timeout)


def test_a_result_that_never_comes_is_no_page(backend, tmp_path, monkeypatch):
    pages = backend(disk(tmp_path / "kv"), load_wait="100ms")
    pages.batch_set_v1(KEYS, INDICES)
    monkeypatch.setattr(pages, "_ended", Bounded())
    with monkeypatch.context() as silent:
        silent.setattr(PageStore, "poll", lambda store: [])
        found = pages.batch_get_v1(KEYS, INDICES)
    assert found == [False] * PAGES
