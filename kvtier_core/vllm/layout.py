"""The engine's pages as raw memory: where each layer lies, and whether whole pages can be copied."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import attrs
import torch
from vllm.config import ParallelConfig, VllmConfig
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)

from kvtier_core.config.model import StackConfig
from kvtier_core.engine.messages import WorkerReport
from kvtier_core.interfaces import PagedKVCache, PageRun
from kvtier_core.layouts import ChunkLayout, KVGroup, KVKind, KVStructure
from kvtier_core.vllm.identity import namespace
from kvtier_core.vllm.identity.settings import UnidentifiedError

#: Cache specs that keep the KV of every token, and what their elements are. By exact type: a subclass may differ.
_STRUCTURES = {
    FullAttentionSpec: KVStructure.KEYS_AND_VALUES,
    MLAAttentionSpec: KVStructure.MLA_LATENT,
}
_ONE_GROUP = "start vLLM with --disable-hybrid-kv-cache-manager, and it has one"


def refusal(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """Why this engine cannot be served, according to its configuration; empty if it can."""
    parallel = vllm_config.parallel_config
    if not vllm_config.model_config.is_prefix_caching_supported:
        return "vLLM itself does not reuse the prefixes of this model"
    groups = kv_cache_config.kv_cache_groups
    specs = _specs(kv_cache_config)
    if len(groups) != 1:
        why = f"the model has {len(groups)} KV cache groups and kvtier restores one"
        return f"{why}; {_ONE_GROUP}" if _can_be_one_group(specs.values()) else why
    for name, spec in specs.items():
        if type(spec) not in _STRUCTURES:
            return f"layer {name} keeps {type(spec).__name__} state, not the KV of every token"
        if spec.non_causal:
            return f"layer {name} attends to later tokens, so that KV depends on more than its prefix"
    for what, size in (
        ("pipeline", parallel.pipeline_parallel_size),
        ("prefill context", parallel.prefill_context_parallel_size),
        ("decode context", parallel.decode_context_parallel_size),
    ):
        if size > 1:
            return f"{what} parallelism is not served yet"
    if parallel.enable_elastic_ep:
        return "a number of ranks that may change (elastic expert parallelism) is not served"
    if parallel.data_parallel_size > 1:  # a rank of a dense model sees a size of one here
        return "data parallelism of a model with experts is not served yet"
    replica, replicas = replica_of(parallel)
    if replica >= replicas:
        return f"vLLM says that this is data parallel rank {replica} and not how many there are"
    if vllm_config.ec_transfer_config is not None or vllm_config.ec_manager_config.encoder_cache_manager_cls:
        return "embeddings of items may come from where kvtier cannot see what they were made of"
    if vllm_config.speculative_config is not None:
        return "speculative decoding is not served yet"
    return ""


def _can_be_one_group(specs: Iterable[KVCacheSpec]) -> bool:
    """Can vLLM be configured to keep the KV of all tokens for every layer?"""
    windows = (SlidingWindowSpec, ChunkedLocalAttentionSpec)
    kinds = {FullAttentionSpec if isinstance(spec, FullAttentionSpec) else type(spec) for spec in specs}
    return FullAttentionSpec in kinds and kinds <= {FullAttentionSpec, *windows}


def replica_of(parallel: ParallelConfig) -> tuple[int, int]:
    """The data parallel rank of this engine, and the number of ranks on all nodes.

    vLLM runs the ranks of a dense model as independent engines, and resets their configuration to one rank of one. What
    it leaves is the index, and the size in a field meant for elastic models.
    """
    return parallel.data_parallel_index, parallel.elastic_ep_max_dp_size


def inspect_pages(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, kv_caches: dict[str, torch.Tensor], config: StackConfig
) -> tuple[PagedKVCache | None, WorkerReport]:
    """Inspect the pages that vLLM hands over at start-up.

    Returns them for the movers, or None if they cannot be moved, and what this worker reports to the scheduler.
    """
    device = next(iter(kv_caches.values())).device
    try:
        worker_facts = namespace.facts_of_worker(vllm_config.model_config, config.identity)
    except UnidentifiedError as error:
        return None, WorkerReport(device.type, (), (), str(error))
    runs: dict[tuple[int, int], PageRun] = {}  # layers that share KV are views of the same pages
    for name in sorted(kv_caches):
        run = _page_run(kv_caches[name], kv_cache_config.num_blocks)
        if run is None:
            return None, WorkerReport(device.type, (), (), f"the pages of layer {name} do not lie block after block")
        runs.setdefault((run.base, run.stride), run)
    groups = (_group(kv_cache_config, kv_caches, [run.nbytes for run in runs.values()]),)
    _, layout = in_chunks(config, vllm_config, groups)
    cache = PagedKVCache(
        layers=tuple(runs.values()),
        blocks=kv_cache_config.num_blocks,
        device=str(device),
        rank=vllm_config.parallel_config.rank,
        layout=layout,
    )
    facts = {
        **worker_facts,
        "device": device.type,
        "page layout": kv_cache_config.kv_cache_layout,
        "layers": " ".join(sorted(kv_caches)),
        "page shape": sorted({(*cache.shape[1:], str(cache.dtype)) for cache in kv_caches.values()}, key=str),
        "cache specs": sorted({repr(spec) for spec in _specs(kv_cache_config).values()}),
        "attention backend": _attention_backends(vllm_config, kv_caches),
        "cpu isa": _cpu_isa(vllm_config, kv_cache_config) if device.type == "cpu" else "none",
    }
    return cache, WorkerReport(device.type, groups, tuple((name, str(fact)) for name, fact in facts.items()))


def in_chunks(
    config: StackConfig, vllm_config: VllmConfig, groups: Sequence[KVGroup]
) -> tuple[StackConfig, ChunkLayout]:
    """The stack with ``chunk_tokens`` as a number, and its chunks. Scheduler and workers compute the same here."""
    tokens = math.lcm(*(group.block_tokens for group in groups))
    smallest = ChunkLayout(groups, tokens, vllm_config.parallel_config.world_size)
    config = config.sized(tokens, smallest.payload_nbytes)
    return config, attrs.evolve(smallest, tokens=config.chunk_tokens)


def disagreement(reports: Sequence[WorkerReport]) -> str:
    """Why the pages of these workers cannot be moved together; empty if they can."""
    if refusals := [report.refusal for report in reports if report.refusal]:
        return refusals[0]
    return "" if len(set(reports)) == 1 else "the pages of the workers differ"


def _specs(kv_cache_config: KVCacheConfig) -> dict[str, KVCacheSpec]:
    specs = {}
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        inner = spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else {}
        specs.update((name, inner.get(name, spec)) for name in group.layer_names)
    return specs


def _group(
    kv_cache_config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor], page_nbytes: Sequence[int]
) -> KVGroup:
    """The only group of an engine that is served."""
    (group,) = kv_cache_config.kv_cache_groups
    structures = {_structure(spec) for spec in _specs(kv_cache_config).values()}
    return KVGroup(
        name="group 0",
        kind=KVKind.FULL_ATTENTION,
        page_nbytes=page_nbytes,
        block_tokens=group.kv_cache_spec.block_size,
        dtype=" ".join(sorted({str(cache.dtype).removeprefix("torch.") for cache in kv_caches.values()})),
        structure=structures.pop() if len(structures) == 1 else KVStructure.OPAQUE,
    )


def _structure(spec: KVCacheSpec) -> KVStructure:
    """What the elements of this layer's pages are: OPAQUE unless they are plain numbers, one for each of the KV's."""
    plain = spec.kv_quant_mode == KVQuantMode.NONE and spec.dtype.is_floating_point and spec.tokens_per_state == 1
    indexer = isinstance(spec, MLAAttentionSpec) and spec.cache_role == SparseCacheRole.INDEXER
    return _STRUCTURES[type(spec)] if plain and not indexer else KVStructure.OPAQUE


def _page_run(cache: torch.Tensor, blocks: int) -> PageRun | None:
    """Where a layer's pages lie; None unless each page is contiguous. vLLM may split a page into kernel blocks."""
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


def _attention_backends(vllm_config: VllmConfig, kv_caches: dict[str, torch.Tensor]) -> str:
    layers = vllm_config.compilation_config.static_forward_context
    return " ".join(sorted({layers[name].get_attn_backend().get_name() for name in kv_caches if name in layers}))


def _cpu_isa(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """The instruction sets for which the CPU backend packs its pages; each has its own layout."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    cache = vllm_config.cache_config
    specs = {(spec.block_size, spec.head_size) for spec in _specs(kv_cache_config).values()}
    dtype = vllm_config.model_config.dtype
    return " ".join(sorted({_get_attn_isa(dtype, block, head, cache.cache_dtype) for block, head in specs}))
