"""vLLM's KV cache groups, and the block tables of those that a prefix needs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from vllm.config import ParallelConfig, VllmConfig
from vllm.v1 import kv_cache_interface
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, KVCacheConfig, KVCacheSpec
from vllm.v1.request import Request

from kvtier_core.engine.step import BlockTables, OfferedStates, ScheduledRequest
from kvtier_core.interfaces import NO_BLOCK
from kvtier_core.layouts import Elements, KVGroup, KVKind, KVStructure
from kvtier_core.transfer.regroup import divides_by_head
from kvtier_vllm import versions


def _spec(name: str) -> type[Any]:
    """One of vLLM's spec classes; an empty one if this version lacks it, so that its kind is not served."""
    return getattr(kv_cache_interface, name, None) or type(name, (), {})


ChunkedLocalAttentionSpec = _spec("ChunkedLocalAttentionSpec")
CircularBufferSpec = _spec("CircularBufferSpec")
MambaSpec = _spec("MambaSpec")
MLAAttentionSpec = _spec("MLAAttentionSpec")
SlidingWindowMLASpec = _spec("SlidingWindowMLASpec")
SlidingWindowSpec = _spec("SlidingWindowSpec")
UniformTypeKVCacheSpecs = _spec("UniformTypeKVCacheSpecs")

#: The blocks of layers with such a spec that a request needs to continue after a prefix, by exact type: a subclass may
#: need something else.
_KINDS: Mapping[type, KVKind] = {
    FullAttentionSpec: KVKind.FULL_ATTENTION,
    MLAAttentionSpec: KVKind.FULL_ATTENTION,
    SlidingWindowSpec: KVKind.SLIDING_WINDOW,
    SlidingWindowMLASpec: KVKind.SLIDING_WINDOW,
    ChunkedLocalAttentionSpec: KVKind.CHUNKED_LOCAL,
    MambaSpec: KVKind.STATE,
}
#: vLLM continues after a prefix without what these keep, as long as it does not reuse it itself.
_SCRATCH = (CircularBufferSpec, SlidingWindowMLASpec)
_NULL_BLOCK = 0


def specs_of(group: int, kv_cache_config: KVCacheConfig) -> dict[str, KVCacheSpec]:
    """The specs of a group's layers, by name."""
    spec = kv_cache_config.kv_cache_groups[group].kv_cache_spec
    inner = spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else {}
    return {name: inner.get(name, spec) for name in kv_cache_config.kv_cache_groups[group].layer_names}


def served(kv_cache_config: KVCacheConfig) -> tuple[int, ...]:
    """The numbers of the groups that a prefix needs."""
    groups = enumerate(kv_cache_config.kv_cache_groups)
    return tuple(number for number, group in groups if not _is_scratch(group.kv_cache_spec))


def _is_scratch(spec: KVCacheSpec) -> bool:
    return type(spec) in _SCRATCH and not spec.prefix_cacheable


def refusal(kv_cache_config: KVCacheConfig) -> str:
    """Why prefixes of this engine cannot be restored; empty if they can."""
    kinds: set[KVKind] = set()
    for number in served(kv_cache_config):
        needs = set()
        for name, spec in specs_of(number, kv_cache_config).items():
            if type(spec) not in _KINDS:
                return f"layer {name} keeps {type(spec).__name__} state, and which part of it a prefix needs is unknown"
            if getattr(spec, "non_causal", False):
                return f"layer {name} attends to later tokens, so KV depends on more than its prefix"
            if isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "none":
                return "vLLM keeps no recurrent states of prefixes when prefix caching is off"
            needs.add((_KINDS[type(spec)], _reach(spec)))
        if len(needs) > 1:
            return f"the layers of KV cache group {number} need different parts of a prefix"
        kinds.update(kind for kind, _ in needs)
    if kinds == {KVKind.STATE}:
        return "a model with only recurrent states is not served yet"
    return ""


def keep_states(kv_cache_config: KVCacheConfig) -> bool:
    """Does any group keep recurrent states?"""
    return any(isinstance(group.kv_cache_spec, MambaSpec) for group in kv_cache_config.kv_cache_groups)


def own_ranks(config: VllmConfig, kv_cache_config: KVCacheConfig, found: Sequence[KVGroup]) -> str:
    """What keeps engines with another number of tensor-parallel ranks from using this one's KV; empty if nothing does.

    They can if each head of keys and values is on one rank, in the order of the ranks, or all ranks have the same.
    """
    parallel, replicas = config.parallel_config, versions.replicas_of(kv_cache_config)
    if parallel.pipeline_parallel_size > 1 or parallel.decode_context_parallel_size > 1:
        return "its ranks divide more than the heads: layers or tokens"
    if config.speculative_config is not None:
        return "layers of drafts may be divided in another way"
    if len(found) < len(kv_cache_config.kv_cache_groups):
        return "it keeps more than the KV of prompts"
    if other := [group for group in found if group.kind is not KVKind.FULL_ATTENTION]:
        return f"{other[0].name} needs {other[0].needs}"
    if all(group.structure is KVStructure.MLA_LATENT for group in found):
        return "" if replicas == parallel.tensor_parallel_size else "its ranks have latents of their own"
    if other := [group for group in found if not divides_by_head(group)]:
        return f"where the heads lie in the pages of {other[0].name} is unknown"
    total = config.model_config.get_total_num_kv_heads()
    if replicas > 1 or any(group.elements[0].heads * parallel.tensor_parallel_size != total for group in found):
        return f"{total} heads are not divided among its ranks"
    return ""


def scheduler_block(kv_cache_config: KVCacheConfig, parallel: ParallelConfig) -> int:
    """Tokens of the smallest prefix that has whole blocks of every group that is served."""
    blocks = block_tokens(kv_cache_config, parallel)
    return math.lcm(*(blocks[number] for number in served(kv_cache_config)))


def block_tokens(kv_cache_config: KVCacheConfig, parallel: ParallelConfig) -> tuple[int, ...]:
    """Tokens of a block, for each of vLLM's groups.

    With decode context parallelism, a block is n times as long for the n ranks that divide it, and the page of each
    rank has its share of the block's tokens.
    """
    ranks = parallel.decode_context_parallel_size
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return tuple(spec.block_size * (ranks if versions.is_sharded(spec) else 1) for spec in specs)


def whole(kv_cache_config: KVCacheConfig, parallel: ParallelConfig) -> dict[int, int]:
    """Tokens of a block of each served group that keeps every token, by the group's number."""
    blocks, kinds = block_tokens(kv_cache_config, parallel), {}
    for number in served(kv_cache_config):
        kinds[number] = {_KINDS[type(spec)] for spec in specs_of(number, kv_cache_config).values()}
    return {number: blocks[number] for number, kind in kinds.items() if kind == {KVKind.FULL_ATTENTION}}


def kv_group(
    number: int,
    kv_cache_config: KVCacheConfig,
    parallel: ParallelConfig,
    page_nbytes: Sequence[int],
    dtypes: Sequence[str],
    elements: Sequence[Elements] = (),
    depths: Sequence[int] = (),
) -> KVGroup:
    """A served group whose layers have these pages and elements, and these places in the model."""
    specs = specs_of(number, kv_cache_config).values()
    structures = {structure_of(spec) for spec in specs}
    spec = kv_cache_config.kv_cache_groups[number].kv_cache_spec  # also where a pipeline stage has no layer of it
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = next(iter(spec.kv_cache_specs.values()))
    return KVGroup(
        name=f"group {number}",
        kind=_KINDS[type(spec)],
        page_nbytes=page_nbytes,
        block_tokens=block_tokens(kv_cache_config, parallel)[number],
        dtype=" ".join(sorted(set(dtypes))),
        structure=structures.pop() if len(structures) == 1 else KVStructure.OPAQUE,
        reach=_reach(spec),
        elements=elements,
        depths=depths,
    )


def _reach(spec: KVCacheSpec) -> int:
    """Tokens of a window, with those that vLLM retains in addition, or of a chunk of local attention."""
    if isinstance(spec, SlidingWindowSpec):
        return spec.sliding_window + spec.extra_retained_tokens
    return spec.attention_chunk_size if isinstance(spec, ChunkedLocalAttentionSpec) else 0


def structure_of(spec: KVCacheSpec) -> KVStructure:
    """The type of the elements of this layer's pages: OPAQUE unless they are plain numbers, one for each of the KV."""
    if not isinstance(spec, AttentionSpec):
        return KVStructure.OPAQUE
    mode = getattr(getattr(spec, "kv_quant_mode", None), "name", "")
    plain = mode == "NONE" and spec.dtype.is_floating_point and spec.tokens_per_state == 1
    latent = isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec)
    if not plain or (latent and getattr(spec, "cache_role", None) == "indexer"):
        return KVStructure.OPAQUE
    return KVStructure.MLA_LATENT if latent else KVStructure.KEYS_AND_VALUES


@attrs.frozen
class Tables:
    """vLLM's block tables as the scheduler side needs them."""

    served: tuple[int, ...]  #: vLLM's numbers of the groups that the layout has, in its order
    block_tokens: tuple[int, ...]  #: of each of vLLM's groups
    states_of: frozenset[int]  #: groups of recurrent states
    every_state: frozenset[int]  #: those of them that keep the state after each block, not only the last one

    @classmethod
    def of(cls, kv_cache_config: KVCacheConfig, parallel: ParallelConfig) -> Tables:
        """The tables of an engine that is served."""
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        states = {number: spec for number, spec in enumerate(specs) if isinstance(spec, MambaSpec)}
        return cls(
            served(kv_cache_config),
            block_tokens(kv_cache_config, parallel),
            frozenset(states),
            frozenset(number for number, spec in states.items() if spec.mamba_cache_mode == "all"),
        )

    def keep_states_behind(self, request: Request, tokens: int) -> None:
        """Have vLLM keep the recurrent states after ``tokens`` tokens of a prompt, which others have stored.

        vLLM itself ends a step where a prompt diverges from what its prefix cache has, and keeps the states there. It
        looks for that place just before it asks the connector: what is set here holds until the request is scheduled.
        """
        if self.states_of and tokens > request.shared_prefix_boundary:
            request.shared_prefix_boundary = tokens

    def of_request(self, block_ids: Sequence[Sequence[int]]) -> BlockTables:
        """The tables of the groups that are served."""
        return [[NO_BLOCK if block == _NULL_BLOCK else block for block in block_ids[number]] for number in self.served]

    def new_blocks(self, output: SchedulerOutput) -> set[int]:
        """Blocks given to requests for a step, except those that vLLM found computed, which are only read."""
        blocks: set[int] = set()
        for new in output.scheduled_new_reqs:
            for ids, size in zip(new.block_ids, self.block_tokens, strict=True):
                blocks.update(ids[new.num_computed_tokens // size :])
        for tables in output.scheduled_cached_reqs.new_block_ids:
            for ids in tables or ():
                blocks.update(ids)
        return blocks - {_NULL_BLOCK}

    def states(
        self, output: SchedulerOutput, requests: Sequence[ScheduledRequest]
    ) -> Mapping[str, Mapping[int, OfferedStates]]:
        """The recurrent states that a step leaves, by request and by the number of tokens after which each is.

        None for a request with drafts in this step: its state is copied once the number of right drafts is known.
        """
        places = {number: place for place, number in enumerate(self.served)}
        offered: dict[str, dict[int, dict[int, int]]] = {}
        for request_id, states in output.kv_connector_block_state.boundary_state_offloads.items():
            for number, block, tokens in states:
                offered.setdefault(request_id, {}).setdefault(tokens, {})[places[number]] = block
        for request in requests if self.every_state else ():
            block_ids = output.kv_connector_block_state.get_block_ids(request.request_id)
            for number in self.every_state:
                size = self.block_tokens[number]
                for block in range(request.computed // size, request.end // size):
                    states = offered.setdefault(request.request_id, {}).setdefault((block + 1) * size, {})
                    states[places[number]] = block_ids[number][block]
        for request_id in output.scheduled_spec_decode_tokens:
            offered.pop(request_id, None)
        return offered
