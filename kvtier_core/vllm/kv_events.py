"""Publishes to routers which blocks this engine's tiers hold, in vLLM's own events.

A router names blocks by vLLM's hashes, and a tier names chunks by keys, from which no hash can be derived. A request of
this engine has both. It names its chunks when it loads them and when it has computed them, not when it arrives, so a
request that waits costs nothing. A named chunk is published as long as tiers hold it; `docs/metrics.md` lists what is
not published. Memory is needed for the published chunks (their hashes, and four bytes a token) and for the stores under
way.

When vLLM resets its own cache, it publishes `AllBlocksCleared`, at which routers forget the blocks of every medium. No
connector is called then, but vLLM's pool has a new table of blocks. Everything that tiers still hold is therefore
published again, in the same batch, after that event.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import attrs
import msgspec
from vllm.config import VllmConfig
from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from kvtier_core.config.model import ArenaTierConfig, StackConfig
from kvtier_core.interfaces import Medium
from kvtier_core.stack.outcomes import Whereabouts
from kvtier_core.types import ChunkKey, Event, EventKind
from kvtier_core.vllm.versions import to_event_extra_keys

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
        return "that all blocks of a prompt are held does not mean that a hybrid model can continue after them"
    return ""


@attrs.define
class _Published:
    """One chunk as subscribers know it."""

    number: int  #: its place in prompts, counted in chunks
    blocks: BlockStored  #: without a medium
    tiers: set[str] = attrs.field(factory=set)  #: that hold it

    def stored(self, medium: str) -> BlockStored:
        return msgspec.structs.replace(self.blocks, medium=medium, token_ids=list(self.blocks.token_ids))


class KVEvents:
    """Collects events until `take`. For the scheduler's thread."""

    def __init__(
        self,
        config: StackConfig,
        chunk_tokens: int,
        block_tokens: int,
        pool: BlockPool,
        whereabouts: Callable[[Sequence[ChunkKey]], Sequence[Whereabouts]],
    ):
        """``block_tokens`` are those of which vLLM makes one hash; ``whereabouts`` is that of the stack."""
        self._media = {tier.name: medium for tier in config.tiers if (medium := _medium(tier))}
        self._block_tokens = block_tokens
        self._blocks = chunk_tokens // block_tokens  # of a chunk
        self._pool = pool
        self._table = pool.cached_block_hash_to_block  # only a reset replaces it
        self._whereabouts = whereabouts
        self._named: dict[ChunkKey, tuple[Request, int]] = {}  # a request that has the chunk, and its number there
        self._published: dict[ChunkKey, _Published] = {}
        #: By medium, how many chunks in its tiers have a block: those with the same beginning share some.
        self._held = {medium: Counter[Any]() for medium in self._media.values()}
        self._events: list[KVCacheEvent] = []

    def name(self, request: Request, keys: Sequence[ChunkKey], first: int) -> None:
        """A request loads these chunks, or has computed them. ``first`` is the number of the first one."""
        numbers = range(first, len(request.block_hashes) // self._blocks)
        named = {key: (request, number) for key, number in zip(keys, numbers, strict=False)}
        self._named.update(named)
        unknown = [key for key in named if key not in self._published]
        for key, place in zip(unknown, self._whereabouts(unknown), strict=True):
            for tier in self._media.keys() & place.tiers:
                self._added(key, tier)

    def keep(self, keys: Collection[ChunkKey]) -> None:
        """Forget the names of chunks that are not published, except ``keys``, which are being stored.

        Call it when all events of the stores that have ended have been observed.
        """
        self._named = {key: named for key, named in self._named.items() if key in keys}

    def observe(self, events: Sequence[Event]) -> None:
        """Note which chunks have come to a tier, or left it."""
        left: list[ChunkKey] = []
        for event in events:
            if event.tier in self._media and event.kind in _HELD:
                for key in event.keys:
                    self._added(key, event.tier)
            elif event.tier in self._media and event.kind in _GONE:
                left += event.keys
                for key in event.keys:
                    self._removed(key, event.tier)
        for key in left:  # not before the last event: a tier below may have it by then
            if key in self._published and not self._published[key].tiers:
                del self._published[key]

    def clear(self) -> None:
        """Publish that no tier holds any of these chunks any more."""
        for key, published in self._published.items():
            for tier in list(published.tiers):
                self._removed(key, tier)
        self._published.clear()
        self._named.clear()

    def take(self) -> list[KVCacheEvent]:
        """The events since the last call. If vLLM has reset its own cache since then: all that tiers hold."""
        if self._table is not self._pool.cached_block_hash_to_block:
            self._table = self._pool.cached_block_hash_to_block
            held = sorted(self._published.values(), key=lambda each: each.number)  # parents first
            self._events = [
                each.stored(medium) for each in held for medium in sorted({*map(self._media.get, each.tiers)})
            ]
        events, self._events = self._events, []
        return events

    def _added(self, key: ChunkKey, tier: str) -> None:
        if key not in self._published:
            if key not in self._named:
                return
            self._published[key] = self._described(*self._named[key])
        published, held = self._published[key], self._held[self._media[tier]]
        if tier in published.tiers:
            return
        published.tiers.add(tier)
        if not all(map(held.__contains__, published.blocks.block_hashes)):
            self._events.append(published.stored(self._media[tier]))
        held.update(published.blocks.block_hashes)

    def _removed(self, key: ChunkKey, tier: str) -> None:
        published = self._published.get(key)
        if published is None or tier not in published.tiers:
            return
        published.tiers.remove(tier)
        held = self._held[self._media[tier]]
        held.subtract(published.blocks.block_hashes)
        if gone := [each for each in published.blocks.block_hashes if not held[each]]:
            self._events.append(_of(BlockRemoved, block_hashes=gone, medium=self._media[tier]))
        for each in gone:
            del held[each]

    def _described(self, request: Request, number: int) -> _Published:
        """A chunk as vLLM describes its blocks."""
        size, hashes, adapter = self._block_tokens, request.block_hashes, request.lora_request
        blocks = range(number * self._blocks, (number + 1) * self._blocks)
        described = _of(
            BlockStored,
            block_hashes=[maybe_convert_block_hash(hashes[block]) for block in blocks],
            parent_block_hash=maybe_convert_block_hash(hashes[blocks.start - 1]) if number else None,
            token_ids=array("I", request.all_token_ids[blocks.start * size : blocks.stop * size]),
            block_size=size,
            lora_id=adapter.adapter_id if adapter else None,
            lora_name=adapter.name if adapter else None,
            medium=None,
            extra_keys=to_event_extra_keys(
                generate_block_hash_extra_keys(request, block * size, (block + 1) * size, 0)[0] for block in blocks
            ),
        )
        return _Published(number, described)


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
