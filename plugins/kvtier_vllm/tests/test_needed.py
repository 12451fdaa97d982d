"""`KVGroup.needed` is vLLM's own rule: proved against its cache managers on random groups and random blocks in them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.config import ParallelConfig
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator, get_kv_cache_coordinator
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id, resolve_block_hashes
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from kvtier_core.layouts import KVGroup
from kvtier_vllm.groups import kv_group

TOKENS = 96  #: of the longest prefix
PAGE = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}

sizes = st.sampled_from([1, 2, 4, 8])
full = st.builds(lambda size: FullAttentionSpec(block_size=size, **PAGE), sizes)
#: Of two tokens or more: of one, a token sees nothing but itself, and vLLM looks for a block all the same.
windows = st.builds(
    lambda size, window: SlidingWindowSpec(block_size=size, sliding_window=window, **PAGE), sizes, st.integers(2, 40)
)
states = st.builds(
    lambda size, mode: MambaSpec(block_size=size, shapes=((4,),), dtypes=(torch.float32,), mamba_cache_mode=mode),
    sizes,
    st.sampled_from(["align", "all"]),
)


def local(size: int) -> st.SearchStrategy[KVCacheSpec]:
    """Local attention in chunks of several blocks, as `ChunkLayout` demands."""
    return st.integers(1, 6).map(
        lambda blocks: ChunkedLocalAttentionSpec(block_size=size, attention_chunk_size=blocks * size, **PAGE)
    )


#: vLLM allows local attention only beside groups with blocks of the same size.
of_one_size = sizes.flatmap(
    lambda size: st.tuples(st.just(FullAttentionSpec(block_size=size, **PAGE)), local(size), local(size)).map(list)
)
groups_of_specs = (
    st.lists(st.one_of(full, windows, states), min_size=1, max_size=4)
    | of_one_size
    | sizes.flatmap(lambda size: st.lists(local(size), min_size=1, max_size=1))
)


class Model:
    """vLLM's coordinator for some groups, and what kvtier knows of them."""

    def __init__(self, specs: Sequence[KVCacheSpec]):
        if KVCacheSpecRegistry.get_manager_class(FullAttentionSpec(block_size=1, **PAGE), None) is None:
            register_all_kvcache_specs(None)
        listed = [KVCacheGroupSpec([f"layer {number}"], spec) for number, spec in enumerate(specs)]
        self.config = KVCacheConfig(num_blocks=2000, kv_cache_tensors=[], kv_cache_groups=listed)
        self.alignment = math.lcm(*(spec.block_size for spec in specs))
        self.hashed = math.gcd(*(spec.block_size for spec in specs))
        self.groups: list[KVGroup] = [
            kv_group(number, self.config, ParallelConfig(), [1], ["float32"]) for number in range(len(specs))
        ]
        self.hashes = [bytes([number]) * 32 for number in range(TOKENS // self.hashed)]
        self.coordinator: KVCacheCoordinator = get_kv_cache_coordinator(
            self.config,
            max_model_len=TOKENS,
            max_in_flight_tokens=TOKENS,
            use_eagle=False,
            enable_caching=True,
            enable_kv_cache_events=False,
            dcp_world_size=1,
            pcp_world_size=1,
            scheduler_block_size=self.alignment,
            hash_block_size=self.hashed,
            allow_partial_hash_hits=False,
        )

    def cache(self, group: int, block: int) -> None:
        """vLLM holds this block of the prefix."""
        pool, size = self.coordinator.block_pool, self.groups[group].block_tokens
        hashes = resolve_block_hashes(self.hashes, self.hashed, size)
        key = make_block_hash_with_group_id(hashes[block], group)
        pool.cached_block_hash_to_block.insert(key, pool.get_new_blocks(1)[0])

    def hit(self, most: int) -> int:
        """How many tokens vLLM would take from its prefix cache."""
        return self.coordinator.find_longest_cache_hit(self.hashes, most)[1]

    def restorable(self, most: int, held: Sequence[set[int]]) -> int:
        """The last boundary of which every group has what `needed` says."""
        boundaries = range(most // self.alignment * self.alignment, 0, -self.alignment)
        whole = (
            tokens
            for tokens in boundaries
            if all(held[number].issuperset(group.needed(tokens)) for number, group in enumerate(self.groups))
        )
        return next(whole, 0)


@settings(max_examples=300)
@given(groups_of_specs, st.data())
def test_a_prefix_is_as_long_as_vllms_own_hit(specs, data):
    """Whichever blocks were evicted."""
    model, held = Model(specs), []
    for number, group in enumerate(model.groups):
        blocks = range(TOKENS // group.block_tokens)
        evicted = data.draw(st.sets(st.sampled_from(blocks), max_size=data.draw(st.sampled_from([1, 4, len(blocks)]))))
        held.append(set(blocks) - evicted)
        for block in held[number]:
            model.cache(number, block)
    most = data.draw(st.integers(0, TOKENS))
    assert model.hit(most) == model.restorable(most, held)


@settings(max_examples=300)
@given(groups_of_specs, st.integers(0, 8), st.data())
def test_vllm_keeps_what_is_needed_after_a_hit(specs, extra, data):
    """The blocks that it does not take from a request which has computed so far, and no other."""
    specs = [
        SlidingWindowSpec(
            block_size=spec.block_size, sliding_window=spec.sliding_window, extra_retained_tokens=extra, **PAGE
        )
        if isinstance(spec, SlidingWindowSpec)
        else spec
        for spec in specs
    ]
    model = Model(specs)
    tokens = data.draw(st.integers(1, TOKENS // model.alignment)) * model.alignment
    for group, manager in zip(model.groups, model.coordinator.single_type_managers, strict=True):
        table = manager.req_to_blocks["request"]
        table.extend(manager.block_pool.get_new_blocks(tokens // group.block_tokens))
        manager.remove_skipped_blocks("request", tokens)
        assert [number for number, block in enumerate(table) if not block.is_null] == list(group.needed(tokens))
