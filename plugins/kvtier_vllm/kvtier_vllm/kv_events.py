"""Publishes to routers which blocks this engine's tiers hold, in vLLM's own events.

A router names blocks by vLLM's hashes, and a tier names chunks by keys, from which no hash can be derived. A request of
this engine has both. It names its chunks when it loads them and when it has computed them, not when it arrives, so a
request that waits costs nothing. A named chunk is published as long as tiers hold it; `docs/metrics.md` lists what is
not published. Memory is needed for the published chunks (their hashes, and four bytes a token) and for the stores under
way. An engine of a server publishes the server's tiers: it is told of all that happens to chunks of its namespace.

Of a hybrid model the groups that keep every token are published, each with its number. A prefix that they hold is the
longest possible hit, which windows and states may shorten.

When vLLM resets its own cache, it publishes `AllBlocksCleared`, at which routers forget the blocks of every medium. No
connector is called then, but vLLM's pool has a new table of blocks. Everything that tiers still hold is therefore
published again after that event, a part in each step: no step waits for all of it, and many resets fill no subscriber's
buffer.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import attrs
import msgspec
from vllm.config import VllmConfig
from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHashListWithBlockSize,
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
)
from vllm.v1.request import Request

from kvtier_core.interfaces import Medium
from kvtier_core.stack.interface import Stack
from kvtier_core.stack.outcomes import Whereabouts
from kvtier_core.types import ChunkKey, Event, EventKind
from kvtier_vllm.versions import to_event_extra_keys

_STORAGE = "STORAGE"  # vLLM 0.30 has no name for it; of every tier that is not in memory

_HELD = {EventKind.STORED, EventKind.PROMOTED, EventKind.WRITTEN, EventKind.READ}
_GONE = {EventKind.EVICTED, EventKind.MISSING, EventKind.CORRUPT, EventKind.INCOMPATIBLE}
_NOT_READ = _GONE | {EventKind.IO_ERROR}


#: Chunks that are published again in one step: some milliseconds.
_AGAIN = 256


def wanted(vllm_config: VllmConfig) -> bool:
    """Does vLLM publish events?"""
    return vllm_config.kv_events_config is not None and vllm_config.kv_events_config.enable_kv_cache_events


@attrs.frozen
class Group:
    """A KV cache group that keeps every token."""

    number: int  #: vLLM's
    block_tokens: int
    kind: str | None  #: as vLLM's own events name it


def obstacle(groups: Sequence[Group]) -> str:
    """The reason why the tiers of an engine with these groups are not in its events; empty if they are."""
    if to_event_extra_keys is None:
        return "this vLLM has a different form of events"
    return "" if groups else "no group of layers keeps every token and has hashes of its blocks"


@attrs.frozen
class _Named:
    """One chunk as a request has it."""

    request: Request
    number: int  #: its place in the prompt, counted in chunks
    known: bool  #: was it published when it was named?


@attrs.define
class _Published:
    """One chunk as subscribers know it."""

    number: int  #: as in `_Named`
    blocks: Mapping[int, BlockStored]  #: by group, without a medium
    tiers: dict[str, str] = attrs.field(factory=dict)  #: that hold it, with their media


class KVEvents:
    """Collects events until `take`. For the scheduler's thread."""

    def __init__(
        self,
        stack: Stack,
        chunk_tokens: int,
        hash_tokens: int,
        groups: Sequence[Group],
        pool: BlockPool,
    ):
        """vLLM makes one hash of ``hash_tokens`` tokens."""
        self._stack = stack
        self._gaps = stack.gaps
        self._clears = 0
        self._media: Mapping[str, str] = {}  # by tier; a server names its tiers when it has opened them
        self._chunk_tokens, self._hash_tokens = chunk_tokens, hash_tokens
        self._groups = groups
        self._pool = pool
        self._table = pool.cached_block_hash_to_block  # only a reset replaces it
        self._named: dict[ChunkKey, _Named] = {}
        self._arriving: dict[ChunkKey, _Named] = {}  # named, and on their way into an arena
        self._published: dict[ChunkKey, _Published] = {}
        #: Those of them that subscribers do not know yet, parents first.
        self._untold: dict[ChunkKey, None] = {}
        #: By medium and group, how many chunks there have a block: those with the same beginning share some.
        self._held = defaultdict[tuple[str, int], Counter[Any]](Counter)
        self._events: list[KVCacheEvent] = []

    def name(self, request: Request, keys: Sequence[ChunkKey], first: int) -> None:
        """Note that a request loads these chunks, or has computed them. ``first`` is the number of the first one."""
        self._follow()
        numbers = range(first, len(request.block_hashes) * self._hash_tokens // self._chunk_tokens)
        for key, number in zip(keys, numbers, strict=False):
            if key not in self._named:  # else the stack has not yet said where it is
                self._named[key] = _Named(request, number, known=key in self._published)

    def keep(self, storing: Collection[ChunkKey]) -> None:
        """Forget the names of chunks that are not ``storing``, once the stack has said where they are, or they arrive.

        Call it in each step. A server's events may come later than the end of the store that they are about.
        """
        ended = {key: each for key, each in self._named.items() if key not in storing and not each.known}
        self._named = {key: each for key, each in self._named.items() if key in storing}
        if ended:
            self._stack.ask_whereabouts(list(ended), partial(self._found, ended, self._clears))

    def _found(self, named: Mapping[ChunkKey, _Named], clears: int, places: Sequence[Whereabouts]) -> None:
        """The answer for chunks that were asked for after ``clears`` calls of `clear`."""
        if clears == self._clears:
            for (key, each), place in zip(named.items(), places, strict=True):
                for tier in self._media.keys() & place.held:
                    self._added(key, tier, each)
                if place.arrives and key not in self._published:
                    self._arriving[key] = each

    def observe(self, events: Sequence[Event]) -> None:
        """Note which chunks have come to a tier, or left it."""
        self._follow()
        left: list[ChunkKey] = []
        for event in events:
            if event.tier in self._media and event.kind in _HELD:
                for key in event.keys:
                    arriving = self._arriving.pop(key, None)
                    self._added(key, event.tier, self._named.get(key, arriving))
            elif event.tier in self._media and event.kind in _GONE:
                left += event.keys
                for key in event.keys:
                    self._removed(key, event.tier)
            if event.kind in _NOT_READ:
                for key in event.keys:
                    self._arriving.pop(key, None)
        for key in left:  # not before the last event: a tier below may have it by then
            if key in self._published and not self._published[key].tiers:
                del self._published[key]
                self._untold.pop(key, None)

    def clear(self) -> None:
        """Publish that no tier holds any of these chunks any more."""
        for key, published in self._published.items():
            for tier in list(published.tiers):
                self._removed(key, tier)
        self._published.clear()
        self._untold.clear()
        self._named.clear()
        self._arriving.clear()
        self._clears += 1

    def take(self) -> list[KVCacheEvent]:
        """The events since the last call. After a reset of vLLM's own cache also a part of what tiers hold."""
        self._follow()
        if self._table is not self._pool.cached_block_hash_to_block:
            self._table = self._pool.cached_block_hash_to_block
            self._held.clear()
            self._events.clear()
            self._untold = dict.fromkeys(sorted(self._published, key=lambda key: self._published[key].number))
        for key in list(islice(self._untold, _AGAIN)):
            del self._untold[key]
            for medium in self._published[key].tiers.values():
                self._hold(self._published[key], medium)
        events, self._events = self._events, []
        return events

    def _follow(self) -> None:
        """Begin anew if events were lost, with the tiers that there are now."""
        if self._gaps != self._stack.gaps:
            self._gaps = self._stack.gaps
            self.clear()
        arenas, shared = self._stack.handles, self._stack.shared
        self._media = {
            tier: MEDIUM_CPU if tier in arenas or medium is Medium.HOST else _STORAGE
            for tier, medium in self._stack.media.items()
            if tier not in shared
        }

    def _added(self, key: ChunkKey, tier: str, named: _Named | None) -> None:
        if key not in self._published:
            if named is None:
                return
            self._published[key] = self._described(named.request, named.number)
            if self._untold:
                self._untold[key] = None  # its parent may be one of them
        published, medium = self._published[key], self._media[tier]
        if tier not in published.tiers:
            published.tiers[tier] = medium
            if key not in self._untold:
                self._hold(published, medium)

    def _hold(self, published: _Published, medium: str) -> None:
        """A tier of this medium holds a chunk. Publish each block once: llm-d's router counts how often it is."""
        for group, blocks in published.blocks.items():
            held = self._held[medium, group]
            known = sum(map(held.__contains__, blocks.block_hashes))
            if known < len(blocks.block_hashes):
                self._events.append(_stored(blocks, known, medium))
            held.update(blocks.block_hashes)

    def _removed(self, key: ChunkKey, tier: str) -> None:
        published = self._published.get(key)
        if published is None or tier not in published.tiers:
            return
        medium = published.tiers.pop(tier)
        if key in self._untold:
            return
        for group, blocks in published.blocks.items():
            held = self._held[medium, group]
            held.subtract(blocks.block_hashes)
            if gone := [each for each in blocks.block_hashes if not held[each]]:
                self._events.append(_of(BlockRemoved, block_hashes=gone, medium=medium, group_idx=group))
            for each in gone:
                del held[each]

    def _described(self, request: Request, number: int) -> _Published:
        """A chunk as vLLM describes its blocks."""
        first = number * self._chunk_tokens
        tokens = array("I", request.all_token_ids[first : first + self._chunk_tokens])
        blocks = {group.number: self._blocks_of(group, request, first, tokens) for group in self._groups}
        return _Published(number, blocks)

    def _blocks_of(self, group: Group, request: Request, first: int, tokens: array[int]) -> BlockStored:
        """The blocks of a group for these tokens, of which ``first`` is the number of the first one."""
        size, adapter = group.block_tokens, request.lora_request
        hashes = BlockHashListWithBlockSize(request.block_hashes, self._hash_tokens, size)
        blocks = range(first // size, (first + len(tokens)) // size)
        return _of(
            BlockStored,
            block_hashes=[maybe_convert_block_hash(hashes[block]) for block in blocks],
            parent_block_hash=maybe_convert_block_hash(hashes[blocks.start - 1]) if first else None,
            token_ids=tokens,
            block_size=size,
            lora_id=adapter.adapter_id if adapter else None,
            lora_name=adapter.name if adapter else None,
            medium=None,
            extra_keys=to_event_extra_keys(
                generate_block_hash_extra_keys(request, block * size, (block + 1) * size, 0)[0] for block in blocks
            ),
            group_idx=group.number,
            kv_cache_spec_kind=group.kind,
        )


def _stored(blocks: BlockStored, known: int, medium: str) -> BlockStored:
    """The event for a chunk of which the first ``known`` blocks are held: other chunks begin with them."""
    return msgspec.structs.replace(
        blocks,
        block_hashes=blocks.block_hashes[known:],
        parent_block_hash=blocks.block_hashes[known - 1] if known else blocks.parent_block_hash,
        token_ids=list(blocks.token_ids[known * blocks.block_size :]),
        extra_keys=blocks.extra_keys and blocks.extra_keys[known:],
        medium=medium,
    )


def _of(kind: Any, **fields: Any) -> Any:
    """A vLLM event; other versions have other fields."""
    fields["locality"] = "LOCAL"
    return kind(**{name: value for name, value in fields.items() if name in kind.__struct_fields__})
