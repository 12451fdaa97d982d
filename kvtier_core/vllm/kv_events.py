"""Publishes to routers which blocks this engine's tiers hold, in vLLM's own events.

A router names blocks by vLLM's hashes, and a tier names chunks by keys, from which no hash can be derived. Both are
known for the requests of this engine. So only chunks that a request has named since the engine started are published.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
from vllm.config import VllmConfig
from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from kvtier_core.config.model import ArenaTierConfig, StackConfig
from kvtier_core.interfaces import Medium
from kvtier_core.types import ChunkKey, Event, EventKind
from kvtier_core.vllm.versions import to_event_extra_keys

#: Chunks whose tokens are remembered although no tier may ever hold them: some 2 KiB each.
_MOST_NAMED = 1 << 14
_STORAGE = "STORAGE"  # vLLM 0.30 has no name for it

_HELD = {EventKind.STORED, EventKind.PROMOTED, EventKind.WRITTEN, EventKind.READ}
_GONE = {EventKind.EVICTED, EventKind.MISSING, EventKind.CORRUPT, EventKind.INCOMPATIBLE}


def wanted(vllm_config: VllmConfig) -> bool:
    """Does vLLM publish events?"""
    return vllm_config.kv_events_config is not None and vllm_config.kv_events_config.enable_kv_cache_events


def obstacle(kv_cache_config: KVCacheConfig) -> str:
    """The reason why an engine's tiers are not in these events; empty if they are."""
    if to_event_extra_keys is None:
        return "this vLLM has another form of events"
    if len(kv_cache_config.kv_cache_groups) > 1:
        return "that all blocks of a prompt are held does not mean that a hybrid model can continue behind them"
    return ""


@attrs.define
class _Published:
    """The state of one chunk as subscribers know it."""

    hashes: Sequence[Any]
    tiers: set[str] = attrs.field(factory=set)  #: that hold it


class KVEvents:
    """Collects events until `take`. For the scheduler's thread."""

    def __init__(self, config: StackConfig, chunk_tokens: int, block_tokens: int):
        """``block_tokens`` are those of which vLLM makes one hash."""
        self._media = {tier.name: medium for tier in config.tiers if (medium := _medium(tier))}
        self._chunk_tokens = chunk_tokens
        self._block_tokens = block_tokens
        self._named: dict[ChunkKey, BlockStored] = {}  # the oldest first; the medium is not known yet
        self._published: dict[ChunkKey, _Published] = {}
        self._events: list[KVCacheEvent] = []

    def name(self, request: Request, keys: Sequence[ChunkKey]) -> None:
        """Note the keys of a request's chunks, in order. Call it before any of them is stored."""
        blocks = self._chunk_tokens // self._block_tokens
        for number in range(min(len(keys), len(request.block_hashes) // blocks)):
            described = self._named.pop(keys[number], None)
            self._named[keys[number]] = described or self._described(request, number * blocks, blocks)
        while len(self._named) > _MOST_NAMED:
            del self._named[next(iter(self._named))]

    def observe(self, events: Sequence[Event]) -> None:
        """Note which chunks have come to a tier, or left it."""
        for event in events:
            if event.tier in self._media and event.kind in _HELD:
                for key in event.keys:
                    self._added(key, event.tier)
            elif event.tier in self._media and event.kind in _GONE:
                for key in event.keys:
                    self._removed(key, event.tier)

    def clear(self) -> None:
        """Publish that no tier holds any of these chunks any more."""
        for key, published in list(self._published.items()):
            for tier in list(published.tiers):
                self._removed(key, tier)

    def take(self) -> list[KVCacheEvent]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    def _added(self, key: ChunkKey, tier: str) -> None:
        named = self._named.get(key)
        if named is None:
            return
        published = self._published.setdefault(key, _Published(named.block_hashes))
        if not self._at(published, self._media[tier]):
            event = BlockStored(**{name: getattr(named, name) for name in named.__struct_fields__})
            event.medium = self._media[tier]
            self._events.append(event)
        published.tiers.add(tier)

    def _removed(self, key: ChunkKey, tier: str) -> None:
        published = self._published.get(key)
        if published is None or tier not in published.tiers:
            return
        published.tiers.remove(tier)
        if not self._at(published, self._media[tier]):
            self._events.append(_of(BlockRemoved, block_hashes=list(published.hashes), medium=self._media[tier]))
        if not published.tiers:
            del self._published[key]

    def _at(self, published: _Published, medium: str) -> bool:
        """Does a tier of this medium hold the chunk?"""
        return any(self._media[tier] == medium for tier in published.tiers)

    def _described(self, request: Request, first: int, blocks: int) -> BlockStored:
        """The blocks of a chunk as vLLM describes them."""
        size, hashes = self._block_tokens, request.block_hashes
        adapter = request.lora_request
        return _of(
            BlockStored,
            block_hashes=[maybe_convert_block_hash(each) for each in hashes[first : first + blocks]],
            parent_block_hash=maybe_convert_block_hash(hashes[first - 1]) if first else None,
            token_ids=list(request.all_token_ids[first * size : (first + blocks) * size]),
            block_size=size,
            lora_id=adapter.adapter_id if adapter else None,
            lora_name=adapter.name if adapter else None,
            medium=None,
            extra_keys=to_event_extra_keys(
                generate_block_hash_extra_keys(request, block * size, (block + 1) * size, 0)[0]
                for block in range(first, first + blocks)
            ),
        )


def _medium(tier: Any) -> str:
    """vLLM's word for what a tier stores on; empty for a shared store, whose contents are not known."""
    if isinstance(tier, ArenaTierConfig):
        return MEDIUM_CPU
    if tier.config.shared:
        return ""
    return MEDIUM_CPU if tier.config.medium is Medium.HOST else _STORAGE


def _of(kind: type, **fields: Any) -> Any:
    """An event of vLLM's; other versions have other fields."""
    fields |= {"group_idx": 0, "locality": "LOCAL"}
    return kind(**{name: value for name, value in fields.items() if name in kind.__struct_fields__})
