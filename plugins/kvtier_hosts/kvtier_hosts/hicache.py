"""`KVTierHiCache`: a storage backend of SGLang's HiCache, which keeps the pages of its host memory in kvtier's tiers.

SGLang loads it by name (docs/sglang.md) and calls it on its storage threads, never on the scheduler's, so its calls may
wait; none waits much longer than ``load_wait``. SGLang's keys are SHA-256 over tokens, salts and extra keys, but do not
cover the weights: everything else that KV depends on is in the namespace, or the engine is refused.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import sglang
import torch
from sglang.srt.arg_groups.arg_utils import namespace_of
from sglang.srt.arg_groups.overrides import resolution_result
from sglang.srt.configs.model_config import is_multimodal_model
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig, PoolName
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.runtime_context import get_server_args

from kvtier_core.config.load import load_config
from kvtier_core.config.model import NAMED, IdentityConfig, StackConfig
from kvtier_core.config.registry import Registry
from kvtier_core.errors import ConfigError, Problem
from kvtier_core.frames.format import FORMAT_VERSION
from kvtier_core.types import Namespace
from kvtier_hosts.model_pages import fact_of_weights
from kvtier_hosts.pages import PageStore

logger = logging.getLogger("kvtier")

_LABEL = "hicache-storage-backend-extra-config"
#: Seconds after ``load_wait`` that a store may take to report a result.
_GRACE = 1.0

#: Pools whose pages hold all of their KV, and the layouts whose pages they hand out as bytes.
_POOLS = (MHATokenToKVPoolHost, MLATokenToKVPoolHost)
_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
#: Attributes of such a pool that describe its pages.
_OF_POOL = (
    *("layout", "dtype", "page_size", "layer_num", "start_layer", "end_layer", "head_num", "head_dim", "v_head_dim"),
    *("kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim", "storage_format_tag"),
)
#: SGLang's groups of settings on which KV does not depend (when requests are served, and where KV is: the pool
#: describes that), or which are refused where it does (lora, mm); then such settings of other groups. All others count.
_HARMLESS_GROUPS = ("device", "disagg", "lora", "memory", "mm", "schedule", "serving")
_HARMLESS = re.compile(
    "model_path|revision|download_dir|model_checksum|weight_loader_.*|cuda_graph_.*|watermark_.*|expert_distribution_.*"
    "|nccl_port|dist_.*|gated_launch_port|engine_info_bootstrap_port|nnodes|node_rank|load_balance_method|sampling_.*"
    "|grammar_backend|weight_cache_.*|modelexpress_config"
)
_HARMLESS_VARIABLES = re.compile(r"SGLANG_(RUN_ID|LOG_.*|TEST_.*|.*_(DIR|PATH|PORT|PORT_BASE|HOST|TIMEOUT))")
#: Load formats that read the model's folder and nothing else.
_FROM_THE_FOLDER = ("auto", "safetensors", "pt", "mistral")
#: Settings that name more files on which KV depends, existing or not. No other may name a file that exists.
_MORE_FILES = (
    *("quantization_param_path", "modelopt_checkpoint_restore_path", "decrypted_config_file", "kt_weight_path"),
    *("dllm_algorithm_config", "hisparse_config", "speculative_draft_model_path", "uno_lora_path"),
)
#: The prefix of the variables that name code which SGLang imports from elsewhere.
_OTHER_CODE = "SGLANG_EXTERNAL_"
#: The methods with which SGLang writes to the weights of a running engine.
_WRITE_WEIGHTS = (
    *("update_weights_from_disk", "update_weights_from_tensor", "update_weights_from_ipc"),
    *("begin_weight_update", "receive_weights_from_distributed", "load_weights_from_distributed"),
)


class KVTierHiCache(HiCacheStorage):
    """Pages of a rank's host memory, stored, found and verified by a `PageStore`.

    Any thread may call any method. SGLang's memory is never lent: pages are copied, and what does not come in time is
    dropped. What cannot be read or written is a miss.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, options: Mapping[str, Any]):
        """SGLang's ``extra_config`` has ``config``, the path of a configuration file or its keys, and maybe ``model``.

        Raises ConfigError, also for an engine with a feature on which KV depends and which SGLang's keys do not cover.
        """
        extra = storage_config.extra_config or {}
        if "config" not in extra:
            raise _refused("it has no configuration; add the path of a file as 'config'")
        self._stack = load_config(extra["config"], Registry.discover(), label=_LABEL)
        settings = _settings()
        model = _folder(settings["model_path"], extra.get("model"))
        if reason := _refusal(settings, model, storage_config, self._stack):
            raise _refused(reason)
        self._facts = _facts(settings, model, storage_config, self._stack.identity)
        self._replica, self._replicas = _replica(settings, storage_config)
        self._store: PageStore | None = None
        self._ended = threading.Condition()  # of jobs
        self._results: dict[int, frozenset[bytes] | None] = {}  # by ticket that a call waits for
        self._weights_changed = False

    def register_mem_pool_host(self, mem_pool_host: MHATokenToKVPoolHost | MLATokenToKVPoolHost) -> None:
        """Open the tiers for the pages of this pool. Raises ConfigError."""
        if type(mem_pool_host) not in _POOLS or mem_pool_host.layout not in _LAYOUTS:
            kind = f"{type(mem_pool_host).__name__} in the layout {mem_pool_host.layout}"
            raise _refused(f"the pages of its host memory, a {kind}, are not known here to be all of its KV")
        super().register_mem_pool_host(mem_pool_host)
        of_pool = {f"host memory, {name}": getattr(mem_pool_host, name, None) for name in _OF_POOL}
        facts = Namespace.of({**self._facts, "host memory": type(mem_pool_host).__name__, **of_pool})
        self._nbytes = mem_pool_host.get_dummy_flat_data_page().nbytes
        self._store = PageStore(
            self._stack, facts, self._nbytes, replica=self._replica, replicas=self._replicas, told=self._told
        )
        _note_new_weights(self)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        """SGLang registers the pool of all its KV here a second time. Raises ConfigError for any other pool."""
        if host_pool_name != PoolName.KV:
            raise _refused(f"it is a hybrid model: pages of the pool {str(host_pool_name)!r} are not stored here")

    # -- pages of the host memory ------------------------------------------------------------------

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many of these pages are stored, up to the first that is not."""
        names = _names(keys)
        there = self._done(lambda store: store.contains(names))
        return next((count for count, name in enumerate(names) if name not in there), len(names))

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Read pages into the host memory, from every ``page_size``-th index on. Returns which were read."""
        pool, pages = self.mem_pool_host, self._read(keys)
        for key, start in zip(keys, self._starts(keys, host_indices), strict=True):
            if key in pages:
                pool.set_from_flat_data_page(start, pages[key].view(pool.dtype))
        return [key in pages for key in keys]

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Take copies of pages. Returns which were taken; these may still be lost."""
        starts = self._starts(keys, host_indices)
        return self._write(keys, [self.mem_pool_host.get_data_page(start, flat=False) for start in starts])

    def _starts(self, keys: list[str], host_indices: torch.Tensor) -> list[int]:
        return host_indices.view(len(keys), self.mem_pool_host.page_size)[:, 0].tolist() if keys else []

    # -- pages in other memory ---------------------------------------------------------------------

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Sequence[torch.Tensor | None] | None = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """The pages, in these tensors or in new ones; None for each that was not read, whose tensor is unchanged."""
        pages, found = self._read(keys), []
        for key, target in zip(keys, target_locations or [None] * len(keys), strict=True):
            page = pages.get(key)
            if page is not None and target is not None:
                page = target.copy_(page.view(target.dtype).view(target.shape))
            found.append(page if page is None or target is not None else page.view(self.mem_pool_host.dtype))
        return found

    def set(
        self, key: str, value: torch.Tensor | None = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        return value is not None and self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Sequence[torch.Tensor], target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        return all(self._write(keys, values))

    # -- the store ---------------------------------------------------------------------------------

    def _read(self, keys: list[str]) -> dict[str, torch.Tensor]:
        """The pages that were read and verified, as bytes."""
        if self._store is None:
            return {}
        pages = {key: torch.empty(self._nbytes, dtype=torch.uint8) for key in keys}
        good = self._done(lambda store: store.get(_names(pages), [page.numpy().data for page in pages.values()]))
        return {key: page for key, page in pages.items() if key.encode() in good}

    def _write(self, keys: list[str], values: Sequence[torch.Tensor]) -> list[bool]:
        copies = [value.clone(memory_format=torch.contiguous_format) for value in values]
        pages = {key: copy.flatten().view(torch.uint8) for key, copy in zip(keys, copies, strict=True)}
        good = self._done(lambda store: store.put(_names(pages), [page.numpy().data for page in pages.values()]))
        return [key.encode() in good for key in keys]

    def _done(self, begin: Callable[[PageStore], int]) -> frozenset[bytes]:
        """The keys for which a job succeeded; none if it takes too long, or if the weights have changed meanwhile."""
        if self._store is None or self._weights_changed:
            return frozenset()
        with self._ended:
            ticket = begin(self._store)
            self._results[ticket] = None
            self._ended.wait_for(lambda: self._results[ticket] is not None, self._stack.load_wait + _GRACE)
            keys = self._results.pop(ticket)
        return frozenset() if keys is None or self._weights_changed else keys

    def _told(self, call: str) -> None:
        """On the store's thread, or on one that has begun a job of a closed store."""
        with self._ended:
            for each in self._store.poll() if self._store else ():
                if each.ticket in self._results:
                    self._results[each.ticket] = each.keys
            self._ended.notify_all()

    def clear(self) -> None:
        """Never find again what was stored so far."""
        if self._store is not None:
            self._store.renew()

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    def weights_changed(self, call: str) -> None:
        """Stop storing and finding pages: SGLang keeps pages of the former weights, and does not report which."""
        if not self._weights_changed:
            logger.warning("kvtier: %s changes the weights: nothing is stored or found until SGLang restarts", call)
        self._weights_changed = True


def _names(keys: Sequence[str] | Mapping[str, Any]) -> list[bytes]:
    return [key.encode() for key in keys]


_backends: weakref.WeakSet[KVTierHiCache] = weakref.WeakSet()


def _note_new_weights(backend: KVTierHiCache) -> None:
    """Notify a backend of each call that may change the weights, before it begins. SGLang itself does not."""
    _backends.add(backend)
    for name in _WRITE_WEIGHTS:
        call = getattr(WeightUpdater, name)
        if not hasattr(call, "kvtier_notes"):
            setattr(WeightUpdater, name, _noted(call))


def _noted(call: Callable) -> Callable:
    @functools.wraps(call)
    def noted(*args: Any, **kwargs: Any) -> Any:
        for each in _backends:
            each.weights_changed(call.__name__)
        return call(*args, **kwargs)

    noted.kvtier_notes = True  # type: ignore[attr-defined]
    return noted


# -- identity ----------------------------------------------------------------------------------------------


def _refused(reason: str) -> ConfigError:
    return ConfigError([Problem(_LABEL, "$", f"KVTierHiCache cannot serve this engine: {reason}")])


def _settings() -> dict[str, Any]:
    """All settings of this process's engine, as SGLang resolved them. Raises ConfigError."""
    try:
        args = get_server_args()
    except ValueError as error:
        raise _refused("its settings are not known in this process; only SGLang's scheduler has them") from error
    return {name: resolution_result(args, name) for name in namespace_of(type(args))}


def _counted() -> list[str]:
    """The settings on which KV may depend."""
    groups = namespace_of(type(get_server_args()))
    return [name for name in groups if groups[name] not in _HARMLESS_GROUPS and not _HARMLESS.fullmatch(name)]


def _folder(loaded: str, given: str | None) -> Path:
    """The folder of the model. Raises ConfigError if it is not known."""
    if os.path.isdir(loaded):
        if given and not os.path.samefile(loaded, given):
            raise _refused(f"it loads the model in {loaded}, and 'model' is {given}")
        return Path(loaded)
    if given is None or not os.path.isdir(given):
        raise _refused(f"the model {loaded} is not a folder; set 'model' to the folder with its files")
    return Path(given)


def _refusal(settings: Mapping[str, Any], model: Path, rank: HiCacheStorageConfig, stack: StackConfig) -> str:
    """Why this engine cannot be served; empty if it can. A backend sees keys, but no requests."""
    if settings["enable_lora"] or settings["lora_paths"]:
        return "SGLang's keys contain the name and path of an adapter, not its content"
    if is_multimodal_model(_architectures(model)):
        return "SGLang's keys contain a few bits of each image, or a name that users choose"
    if settings["speculative_algorithm"] not in (None, "NGRAM"):
        return "the KV of a draft model may depend on tokens that are not in SGLang's keys"
    found = [name for name in _MORE_FILES if settings[name]]
    found += [name for name, value in os.environ.items() if value and name.startswith(_OTHER_CODE)]
    if found := found or [name for name in _counted() if os.path.exists(str(settings[name]))]:
        return f"{found[0]} names a file that KV depends on, but that kvtier does not read"
    private = [tier.config.type for tier in stack.stores if not tier.config.shared]
    if rank.is_mla_model and rank.tp_size > 1 and private:
        return f"one of its ranks writes the pages for all: tiers must be shared, but {private[0]} is not"
    return ""


def _architectures(model: Path) -> list[str]:
    try:
        named: list[str] = json.loads((model / "config.json").read_bytes())["architectures"]
        return named
    except (OSError, ValueError, KeyError) as error:
        raise _refused(f"config.json in {model} does not say of which architecture it is: {error!r}") from error


def _facts(
    settings: Mapping[str, Any], model: Path, rank: HiCacheStorageConfig, asked: IdentityConfig
) -> dict[str, object]:
    """All that the content of a page depends on, except what its key covers, and the pool. Raises ConfigError."""
    variables = {name for name in os.environ if name.startswith("SGLANG_") and not _HARMLESS_VARIABLES.fullmatch(name)}
    same = rank.is_mla_model  # in all tensor-parallel ranks
    return {
        "format": FORMAT_VERSION,
        "engine": f"sglang {sglang.__version__}, torch {torch.__version__}",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else settings["device"],
        "weights": _weights(settings, model, asked),
        "tensor-parallel rank": "any" if same else rank.tp_rank,
        "rank of the context": f"{rank.attn_cp_rank} of {rank.attn_cp_size}, {rank.dcp_rank} of {rank.dcp_size}",
        "stage": f"{rank.pp_rank} of {rank.pp_size}",
        "ranks with the same pages": rank.tp_size if same else 1,
        **{f"SGLang, {name}": settings[name] for name in _counted()},
        **{name: hashlib.blake2b(os.environb[name.encode()], digest_size=16).hexdigest() for name in variables},
    }


def _weights(settings: Mapping[str, Any], model: Path, asked: IdentityConfig) -> str:
    """Identifies the weights. Raises ConfigError if it cannot."""
    if asked.named:
        return asked.weights
    if settings["load_format"] not in _FROM_THE_FOLDER or settings["weight_cache_mode"] != "off":
        why = f"load_format {settings['load_format']!r} with weight_cache_mode {settings['weight_cache_mode']!r}"
        raise _refused(f"{why} may read the weights from elsewhere; name them with identity: {{weights: {NAMED}…}}")
    try:
        return fact_of_weights(model, asked)
    except (OSError, ValueError) as error:
        raise _refused(f"the weights in {model} cannot be read: {error}") from error


def _replica(settings: Mapping[str, Any], rank: HiCacheStorageConfig) -> tuple[int, int]:
    """The number of this rank, and the number of ranks: each has its own store."""
    sizes = [settings["dp_size"] if settings["enable_dp_attention"] else 1]
    sizes += [rank.pp_size, rank.attn_cp_size, rank.tp_size]
    number, count = 0, 1
    for size, at in zip(sizes, (rank.dp_rank, rank.pp_rank, rank.attn_cp_rank, rank.tp_rank), strict=True):
        number, count = number * size + at, count * size
    return number, count
