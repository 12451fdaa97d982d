"""What the KV of a request depends on besides its tokens. What cannot be identified is bypassed, never guessed."""

from __future__ import annotations

import json
from collections.abc import Mapping

import attrs
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request

from kvtier_core.vllm.requests import items
from kvtier_core.vllm.requests.adapters import Adapters
from kvtier_core.vllm.requests.fields import POOLING, REQUEST, Unidentified, refuse_others


@attrs.frozen
class Item:
    """A multimodal item of a prompt."""

    content: str  #: a digest
    name: str = attrs.field(eq=False)  #: under which the engine caches what its encoder made of it
    source: str = attrs.field(eq=False)  #: what the encoder makes that of: the content, and an adapter's if it has one
    place: PlaceholderRange = attrs.field(eq=False)

    @property
    def offset(self) -> int:
        return self.place.offset

    def embeds(self, start: int, end: int) -> bool:
        """Does one of the prompt's tokens from ``start`` to ``end`` get an embedding of the item?"""
        start, end = (min(max(at - self.offset, 0), self.place.length) for at in (start, end))
        first, last = self.place.get_embeds_indices_in_range(start, end)
        return last > first


@attrs.frozen
class RequestIdentity:
    """What the KV of a request depends on besides its tokens."""

    salt: bytes = b""
    items: tuple[Item, ...] = ()
    adapter: str = ""  #: a digest; part of the salt
    adapter_name: str = attrs.field(default="", eq=False)

    def extra(self, chunk_tokens: int) -> Mapping[int, bytes]:
        """For each chunk that items lie in: which, and where in it."""
        touching: dict[int, list[tuple[int, int, str]]] = {}
        for item in self.items:
            offset, length = item.offset, item.place.length
            for chunk in range(offset // chunk_tokens, -(-(offset + length) // chunk_tokens)):
                touching.setdefault(chunk, []).append((offset - chunk * chunk_tokens, length, item.content))
        return {chunk: json.dumps(items).encode() for chunk, items in touching.items()}


class Identifier:
    """Made when the engine starts; see `Adapters`."""

    def __init__(self, adapters: Adapters | None = None) -> None:
        self._adapters = adapters or Adapters()

    def identify(self, request: Request) -> RequestIdentity | str:
        """Of a request that the engine has not computed anything of, or why it cannot be told."""
        try:
            return self._identify(request)
        except Unidentified as why:
            return str(why)

    def adapter(self, asked: LoRARequest) -> str | None:
        """A digest of an adapter, whatever else a request has; None if it cannot be told."""
        try:
            return self._adapters.content(asked)
        except Unidentified:
            return None

    def _identify(self, request: Request) -> RequestIdentity:
        refuse_others("a request", request, REQUEST, EngineCoreRequest)
        if request.pooling_params:
            refuse_others("a pooling request", request.pooling_params, POOLING)
        adapter = request.lora_request
        ingredients: dict[str, str] = {}
        if request.cache_salt:
            ingredients["cache_salt"] = request.cache_salt
        if adapter:
            ingredients["adapter"] = self._adapters.content(adapter)
        salt = json.dumps(ingredients).encode() if ingredients else b""
        return RequestIdentity(
            salt,
            tuple(_item(feature, salt) for feature in request.mm_features),
            ingredients.get("adapter", ""),
            adapter.lora_name if adapter else "",
        )


def _item(feature: MultiModalFeatureSpec, salt: bytes) -> Item:
    content = items.content(feature)
    # vLLM puts the adapter's name in front where the encoder has adapters too.
    source = content if feature.identifier == feature.mm_hash else f"{content} {salt.decode()}"
    return Item(content, feature.identifier, source, feature.mm_position)
