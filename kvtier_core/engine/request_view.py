"""A request as the scheduler side sees it, whatever engine it comes from."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Self

import attrs

from kvtier_core.interfaces import Medium
from kvtier_core.layouts import tenant_mark
from kvtier_core.outside import Printable, stand_in

ANY_MEDIUM = frozenset(Medium)


@attrs.frozen
class Bypass:
    """Nothing is looked up or stored for a request, because not all facts that its KV depends on are certain."""

    reason: str  #: in plain words, for the request's log line


@attrs.frozen
class PromptItem:
    """A part of a prompt that its token ids do not identify: an image, for instance."""

    offset: int  #: of its first token in the prompt
    length: int  #: in tokens
    content: str  #: a digest of all that its embeddings depend on


@attrs.frozen
class KVIdentity:
    """The facts besides its tokens that the KV of a request depends on."""

    salt: bytes = b""  #: separates all of the request's chunks from those with another salt
    items: tuple[PromptItem, ...] = ()
    tenant: bytes = b""  #: the mark of its keys, see `layouts.tenant_mark`

    @classmethod
    def of(cls, cache_salt: str, adapter: str = "") -> Self:
        """The identity of a request with this ``cache_salt`` and this digest of an adapter; empty: without any."""
        facts = {"cache_salt": stand_in(cache_salt)} if cache_salt else {}
        facts |= {"adapter": adapter} if adapter else {}
        return cls(json.dumps(facts).encode() if facts else b"", tenant=tenant_mark(cache_salt))

    def extra(self, chunk_tokens: int) -> Mapping[int, bytes]:
        """For each chunk that contains a part of an item: the items and their places. Keys are chunk numbers."""
        by_chunk: dict[int, list[tuple[int, int, str]]] = {}
        for item in self.items:
            for chunk in range(item.offset // chunk_tokens, -(-(item.offset + item.length) // chunk_tokens)):
                place = (item.offset - chunk * chunk_tokens, item.length, item.content)
                by_chunk.setdefault(chunk, []).append(place)
        return {chunk: json.dumps(places).encode() for chunk, places in by_chunk.items()}


@attrs.frozen
class RequestView:
    """One request at one moment. Engines make a new view for each call; `token_ids` may be their own growing list."""

    request_id: str
    token_ids: Sequence[int]  #: the prompt's, then those generated so far
    prompt_tokens: int  #: number of these that are the prompt
    identity: KVIdentity | Bypass = KVIdentity()
    hints: Mapping[str, str] = attrs.field(factory=dict)  #: from the client, for eviction policies
    most_loaded: int = sys.maxsize  #: tokens to load after those that the engine has, as the client asked
    media: Collection[Medium] = ANY_MEDIUM  #: of the store tiers that it may be loaded from, as the client asked
    most_stored: int = sys.maxsize  #: tokens, from the first one on, that may be stored, as the client asked
    memory_only: bool = False  #: may they be stored in memory only, as the client asked?
    computed_tokens: int = 0  #: tokens, from the first one on, whose KV the engine counts as computed
    preemptions: int = 0  #: number of times that the engine has preempted it
    traceparent: Printable = Printable("")  #: continues the trace of its client (W3C Trace Context)
    continued_elsewhere: bool = False  #: another engine continues its prompt; False if it has not ended well
    computed_elsewhere: int = 0  #: tokens of its prompt, from the first one on, that another engine has just computed

    @property
    def tokens(self) -> int:
        """Number of tokens that the request has now."""
        return len(self.token_ids)

    @property
    def withheld(self) -> int:
        """Number of its tokens that may not be stored."""
        return max(0, self.tokens - self.most_stored)
