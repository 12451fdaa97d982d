"""The engine's pages as raw memory: where each layer lies, and whether whole pages can be copied."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs
import torch
from vllm.config import ParallelConfig, VllmConfig
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvtier_core.config.model import StackConfig
from kvtier_core.engine.messages import WorkerReport
from kvtier_core.interfaces import PagedKVCache, PageRun
from kvtier_core.types import ChunkLayout
from kvtier_core.vllm.identity import namespace as identity
from kvtier_core.vllm.identity.settings import UnidentifiedError

_ONE_GROUP = "start vLLM with --disable-hybrid-kv-cache-manager, and it has one"


def refusal(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """Why this engine cannot be served, as far as its configuration tells; empty if it can."""
    parallel = vllm_config.parallel_config
    if not vllm_config.model_config.is_prefix_caching_supported:
        return "vLLM itself does not reuse the prefixes of this model"
    groups = kv_cache_config.kv_cache_groups
    specs = _specs(kv_cache_config)
    if len(groups) != 1:
        why = f"the model has {len(groups)} KV cache groups and kvtier restores one"
        return f"{why}; {_ONE_GROUP}" if _can_be_one_group(specs.values()) else why
    for name, spec in specs.items():
        if not isinstance(spec, FullAttentionSpec):
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
    if parallel.data_parallel_size > 1:  # the ranks of a dense model were told that there is one
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
    """Would vLLM keep all layers as if they attended to all tokens, if it were asked to?"""
    windows = (SlidingWindowSpec, ChunkedLocalAttentionSpec)
    kinds = {FullAttentionSpec if isinstance(spec, FullAttentionSpec) else type(spec) for spec in specs}
    return FullAttentionSpec in kinds and kinds <= {FullAttentionSpec, *windows}


def replica_of(parallel: ParallelConfig) -> tuple[int, int]:
    """Which data parallel rank this engine is, and how many they are.

    vLLM runs the ranks of a dense model as engines of their own, and sets their fields back to one rank of one. It
    leaves the index, and the size in a field that is for elastic models. On several nodes that is the size of all.
    """
    return parallel.data_parallel_index, parallel.elastic_ep_max_dp_size


def inspect_pages(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, kv_caches: dict[str, torch.Tensor], config: StackConfig
) -> tuple[PagedKVCache | None, WorkerReport]:
    """Look at the pages that vLLM hands over at start-up; the table is None if they cannot be moved."""
    device = next(iter(kv_caches.values())).device
    try:
        of_the_worker = identity.facts_of_the_worker(vllm_config.model_config, config.identity)
    except UnidentifiedError as error:
        return None, WorkerReport(device.type, (), (), str(error))
    runs: dict[tuple[int, int], PageRun] = {}  # layers that share KV are views of the same pages
    for name in sorted(kv_caches):
        run = _page_run(kv_caches[name], kv_cache_config.num_blocks)
        if run is None:
            return None, WorkerReport(device.type, (), (), f"the pages of layer {name} do not lie block after block")
        runs.setdefault((run.base, run.stride), run)
    page_nbytes = tuple(run.nbytes for run in runs.values())
    _, layout = in_chunks(config, vllm_config, page_nbytes)
    table = PagedKVCache(
        layers=tuple(runs.values()),
        blocks=kv_cache_config.num_blocks,
        device=str(device),
        rank=vllm_config.parallel_config.rank,
        layout=layout,
    )
    facts = {
        **of_the_worker,
        "device": device.type,
        "page layout": kv_cache_config.kv_cache_layout,
        "layers": " ".join(sorted(kv_caches)),
        "page shape": sorted({(*cache.shape[1:], str(cache.dtype)) for cache in kv_caches.values()}, key=str),
        "cache specs": sorted({repr(spec) for spec in _specs(kv_cache_config).values()}),
        "attention backend": _attention_backends(vllm_config, kv_caches),
        "cpu isa": _cpu_isa(vllm_config, kv_cache_config) if device.type == "cpu" else "none",
    }
    return table, WorkerReport(device.type, page_nbytes, tuple((name, str(fact)) for name, fact in facts.items()))


def in_chunks(
    config: StackConfig, vllm_config: VllmConfig, page_nbytes: tuple[int, ...]
) -> tuple[StackConfig, ChunkLayout]:
    """The stack with ``chunk_tokens`` as a number, and its chunks. Scheduler and workers find the same here."""
    block_size = vllm_config.cache_config.block_size
    block = ChunkLayout(page_nbytes, 1, vllm_config.parallel_config.world_size)
    config = config.sized(block_size, block.payload_nbytes)
    return config, attrs.evolve(block, blocks=config.chunk_tokens // block_size)


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


def _page_run(cache: torch.Tensor, blocks: int) -> PageRun | None:
    """None unless the bytes of a page lie side by side. vLLM may cut a page into several kernel blocks."""
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
    """The CPU backend packs its pages differently for each instruction set."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    cache = vllm_config.cache_config
    specs = {(spec.block_size, spec.head_size) for spec in _specs(kv_cache_config).values()}
    dtype = vllm_config.model_config.dtype
    return " ".join(sorted({_get_attn_isa(dtype, block, head, cache.cache_dtype) for block, head in specs}))
