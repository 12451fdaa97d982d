"""The engine's pages as raw memory: where each layer is, and whether whole pages can be copied."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from vllm.config import ParallelConfig, VllmConfig
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, KVCacheSpec

from kvtier_core.config.model import StackConfig
from kvtier_core.engine.messages import WorkerReport
from kvtier_core.engine.worker.side import Pages
from kvtier_core.interfaces import PagedKVCache, PageRun
from kvtier_core.layouts import Elements, KVGroup, KVStructure
from kvtier_core.transfer import numa
from kvtier_vllm import groups, reuse, speculation, versions
from kvtier_vllm.identity import namespace
from kvtier_vllm.identity.settings import UnidentifiedError


def refusal(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """Why this engine cannot be served, according to its configuration; empty if it can."""
    parallel = vllm_config.parallel_config
    if why := reuse.refusal(vllm_config):
        return why
    if why := groups.refusal(kv_cache_config):
        return why
    if parallel.prefill_context_parallel_size > 1:
        return "with prefill context parallelism, which ranks have whole pages after a step is unknown"
    if parallel.enable_elastic_ep:
        return "elastic expert parallelism, which changes the number of ranks, is not served"
    replica, replicas = replica_of(parallel)
    if replica >= replicas:
        return f"vLLM reports data parallel rank {replica}, but not the number of ranks"
    if vllm_config.ec_transfer_config is not None or vllm_config.ec_manager_config.encoder_cache_manager_cls:
        return "embeddings of items may come from a source that kvtier cannot identify"
    return speculation.refusal(vllm_config, groups.keep_states(kv_cache_config))


def replica_of(parallel: ParallelConfig) -> tuple[int, int]:
    """The data parallel rank of this engine, and the number of ranks on all nodes.

    vLLM runs the ranks of a dense model as independent engines, and resets their configuration to one rank of one. It
    leaves only the index, and the size in a field meant for elastic models. Ranks of a model with experts have the same
    values there.
    """
    return parallel.data_parallel_index, parallel.elastic_ep_max_dp_size


def inspect_pages(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    kv_caches: dict[str, torch.Tensor],
    config: StackConfig,
    models: Sequence[nn.Module],
) -> tuple[Pages | None, WorkerReport]:
    """Inspect the pages that vLLM hands over at start-up, and the code of the ``models`` that fill them.

    Returns them for the movers, or None if they cannot be moved, and what this worker reports to the scheduler, which
    alone knows the layout of chunks: another pipeline stage has other layers.
    """
    parallel = vllm_config.parallel_config
    device = next(iter(kv_caches.values())).device
    backends = _attention_backends(vllm_config, kv_caches)
    if why := reuse.refusal_of_backends(backends):
        return None, WorkerReport(device.type, (), (), why)
    try:
        worker_facts = namespace.facts_of_worker(vllm_config, config.identity, models)
        layers, kv_groups = _pages(vllm_config, kv_cache_config, kv_caches)
    except (UnidentifiedError, ValueError) as error:
        return None, WorkerReport(device.type, (), (), str(error))
    pages = functools.partial(PagedKVCache, tuple(layers), kv_cache_config.num_blocks, str(device), parallel.rank)
    replicas = versions.replicas_of(kv_cache_config)
    own_ranks = _own_ranks(vllm_config, kv_cache_config, config, kv_groups)
    heads = parallel.tensor_parallel_size // replicas if not own_ranks else 1  # times those of a rank
    facts = {
        **worker_facts,
        **facts_of_caches(vllm_config, kv_cache_config, device.type, heads),
        "layers": " ".join(_names(kv_cache_config, kv_caches)),
        "page shape": sorted({(*_shape(cache, heads), str(cache.dtype)) for cache in kv_caches.values()}, key=str),
        "attention backend": " ".join(sorted(backends)),
    }
    told = tuple((name, str(fact)) for name, fact in facts.items())
    node = _numa_node(device)
    return pages, WorkerReport(device.type, kv_groups, told, replicas=replicas, own_ranks=own_ranks, numa_node=node)


def _own_ranks(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: StackConfig, kv_groups: Sequence[KVGroup]
) -> str:
    if config.identity.ranks == "own":
        return "ranks: own"
    if config.server is not None:
        return "a server keeps KV apart by the ranks of its engines"
    return groups.own_ranks(vllm_config, kv_cache_config, kv_groups)


def _shape(cache: torch.Tensor, times: int) -> tuple[int, ...]:
    """The shape of a page with ``times`` times the heads: where these count, `_elements` knows that they come first."""
    return tuple(cache.shape[1:]) if times == 1 else (cache.shape[1] * times, *cache.shape[2:])


def _with_heads(spec: KVCacheSpec, times: int) -> KVCacheSpec:
    """The spec with ``times`` times the heads."""
    return spec if times == 1 else dataclasses.replace(spec, num_kv_heads=spec.num_kv_heads * times)


def facts_of_caches(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, device: str, times: int = 1
) -> dict[str, object]:
    """Facts of pages that are known without them, on this type of device, with ``times`` times the heads of a rank."""
    specs = _specs(kv_cache_config).values()
    return {
        "device": device,
        "page layout": kv_cache_config.kv_cache_layout,
        "cache specs": sorted({repr(_with_heads(spec, times)) for spec in specs}),
        "cpu isa": _cpu_isa(vllm_config, kv_cache_config) if device == "cpu" else "none",
    }


def _numa_node(device: torch.device) -> int | None:
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        address: list[Any] = [getattr(gpu, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
        return None if None in address else numa.node_of_gpu(*address)
    return numa.node_of_cpus(os.sched_getaffinity(0))


def _pages(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor]
) -> tuple[list[PageRun], list[KVGroup]]:
    """The pages of all layers, group after group, and the groups. Raises ValueError if the pages are scattered."""
    parallel = vllm_config.parallel_config
    layers: list[PageRun] = []
    kv_groups: list[KVGroup] = []
    for number, caches in by_group(kv_cache_config, kv_caches).items():
        runs: dict[tuple[int, int], PageRun] = {}  # layers that share KV are views of the same pages
        firsts = []  # the names of those that have pages of their own
        for name, cache in caches.items():
            run = _page_run(cache, kv_cache_config.num_blocks)
            if run is None:
                raise ValueError(f"the pages of layer {name} are not stored block by block")
            if (run.base, run.stride) not in runs:
                runs[run.base, run.stride] = run
                firsts.append(name)
        layers += runs.values()
        dtypes = [str(cache.dtype).removeprefix("torch.") for cache in caches.values()]
        nbytes = [run.nbytes for run in runs.values()]
        specs = groups.specs_of(number, kv_cache_config)
        found = {_elements(vllm_config, name, specs.get(name), caches[name], kv_cache_config) for name in firsts}
        elements = found.pop() if len(found) == 1 else ()
        group = groups.kv_group(number, kv_cache_config, parallel, nbytes, dtypes, elements, _depths(firsts))
        kv_groups.append(group)
    return layers, kv_groups


def _elements(
    vllm_config: VllmConfig, name: str, spec: KVCacheSpec | None, cache: torch.Tensor, kv_cache_config: KVCacheConfig
) -> tuple[Elements, ...]:
    """The places of keys and values in a layer's pages; empty if they are not known for its attention backend."""
    layer = vllm_config.compilation_config.static_forward_context.get(name)
    if layer is None or spec is None or groups.structure_of(spec) is not KVStructure.KEYS_AND_VALUES:
        return ()
    heads, tokens, keys = spec.num_kv_heads, spec.block_size, spec.head_size
    values = getattr(spec, "head_size_v", None) or keys
    if cache.shape != (kv_cache_config.num_blocks, heads, tokens, keys + values):
        return ()  # blocks of several that the kernel has, padded heads, or the order of another version
    _, of_head, of_token, of_channel = cache.stride()
    match layer.get_attn_backend().get_name():
        case "FLASH_ATTN" | "FLASHINFER" | "TRITON_ATTN":
            return (
                Elements(heads, tokens, keys, 0, of_head, of_token, of_channel),
                Elements(heads, tokens, values, keys * of_channel, of_head, of_token, of_channel),
            )
        # For each head all keys, channel after channel, then all values, whatever the tensor says. AMX has other tiles.
        case "CPU_ATTN" if _isa(vllm_config, spec) in ("vec", "vec16") and of_token == keys + values:
            return (
                Elements(heads, tokens, keys, 0, of_head, 1, tokens),
                Elements(heads, tokens, values, tokens * keys, of_head, values, 1),
            )
    return ()


def _depths(names: Sequence[str]) -> list[int]:
    """The places of layers in the model: the number in each name; none if a name has several, or has none."""
    numbers = [re.findall(r"(?<![^.])\d+(?![^.])", name) for name in names]
    return [int(number) for (number,) in numbers] if all(len(each) == 1 for each in numbers) else []


def by_group(
    kv_cache_config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor]
) -> dict[int, dict[str, torch.Tensor]]:
    """The tensors of the layers of each group that is served, in the order in which frames have them."""
    served = groups.served(kv_cache_config)
    if len(kv_cache_config.kv_cache_groups) == 1:
        return {served[0]: _in_order(kv_caches)}
    members = {number: kv_cache_config.kv_cache_groups[number].layer_names for number in served}
    return {number: _in_order({name: kv_caches[name] for name in names}) for number, names in members.items()}


def _in_order(caches: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Layers by name; by address if a block has the pages of all side by side, so that they are copied as one.

    Then their addresses differ as the engine's configuration determines. Those of separate allocations are arbitrary.
    """
    order = dict(sorted(caches.items()))
    bases = [cache.data_ptr() for cache in order.values()]
    strides = [cache.stride(0) * cache.element_size() for cache in order.values()]
    if bases and max(bases) - min(bases) < min(strides):
        return dict(sorted(order.items(), key=lambda item: item[1].data_ptr()))
    return order


def _names(kv_cache_config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor]) -> list[str]:
    """All layers, first those of frames in their order."""
    framed = (name for caches in by_group(kv_cache_config, kv_caches).values() for name in caches)
    return list(dict.fromkeys([*framed, *sorted(kv_caches)]))


def _specs(kv_cache_config: KVCacheConfig) -> dict[str, KVCacheSpec]:
    numbers = range(len(kv_cache_config.kv_cache_groups))
    return {name: spec for number in numbers for name, spec in groups.specs_of(number, kv_cache_config).items()}


def _page_run(cache: torch.Tensor, blocks: int) -> PageRun | None:
    """The run of a layer's pages; None unless each page is contiguous. vLLM may split a page into kernel blocks."""
    cuts, rest = divmod(cache.shape[0], blocks)
    if rest or not cuts:
        return None
    inner = sorted(zip(cache.stride()[1:], cache.shape[1:], strict=True))
    if cuts > 1:
        inner = sorted([*inner, (cache.stride(0), cuts)])
    dense = 1
    for stride, size in inner:
        if size > 1 and stride != dense:
            return None
        dense *= size
    return PageRun(
        base=cache.data_ptr(),
        stride=cuts * cache.stride(0) * cache.element_size(),
        nbytes=dense * cache.element_size(),
    )


def _attention_backends(vllm_config: VllmConfig, kv_caches: dict[str, torch.Tensor]) -> set[str]:
    layers = vllm_config.compilation_config.static_forward_context
    return {layers[name].get_attn_backend().get_name() for name in kv_caches if name in layers}


def _cpu_isa(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """The instruction sets for which the CPU backend packs its pages; each has its own layout."""
    specs = [spec for spec in _specs(kv_cache_config).values() if isinstance(spec, AttentionSpec)]
    return " ".join(sorted({_isa(vllm_config, spec) for spec in specs}))


def _isa(vllm_config: VllmConfig, spec: AttentionSpec) -> str:
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    dtype, cache_dtype = vllm_config.model_config.dtype, vllm_config.cache_config.cache_dtype
    return _get_attn_isa(dtype, spec.block_size, spec.head_size, cache_dtype)
