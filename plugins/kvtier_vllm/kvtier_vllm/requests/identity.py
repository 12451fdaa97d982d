"""The facts besides its tokens that the KV of a vLLM request depends on. A request with an unknown one is bypassed."""

from __future__ import annotations

import attrs
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request

from kvtier_core.engine.request_view import Bypass, KVIdentity, PromptItem
from kvtier_core.outside import stand_in
from kvtier_vllm.requests import items
from kvtier_vllm.requests.adapters import Adapters
from kvtier_vllm.requests.fields import POOLING, REQUEST, Unidentified, refuse_others


@attrs.frozen
class Item:
    """A multimodal item of a prompt."""

    content: str  #: a digest of the item
    name: str = attrs.field(eq=False)  #: under which vLLM caches what the encoder made of it
    source: str = attrs.field(eq=False)  #: what it is made from: the content, and an adapter's if there is one
    place: PlaceholderRange = attrs.field(eq=False)

    def embeds(self, start: int, end: int) -> bool:
        """Does one of the prompt's tokens from ``start`` to ``end`` receive an embedding of the item?"""
        start, end = (min(max(at - self.place.offset, 0), self.place.length) for at in (start, end))
        first, last = self.place.get_embeds_indices_in_range(start, end)
        return last > first


@attrs.frozen
class RequestIdentity:
    """A request's `KVIdentity`, and the names under which vLLM caches what belongs to the request."""

    kv: KVIdentity = KVIdentity()
    items: tuple[Item, ...] = ()
    adapter: str = ""  #: a digest; it is part of the salt
    adapter_name: str = attrs.field(default="", eq=False)


class Identifier:
    """Identifies requests. Make one when the engine starts; see `Adapters`."""

    def __init__(self, adapters: Adapters | None = None, *, adapters_leak: bool = False) -> None:
        """``adapters_leak``: may the engine apply an adapter to requests without one, if a step has both?"""
        self._adapters = adapters or Adapters()
        self._adapters_leak = adapters_leak

    def identify(self, request: Request) -> RequestIdentity | Bypass:
        """The facts that the KV of a request will depend on. Call it before the engine has computed any of it."""
        try:
            return self._identify(request)
        except Unidentified as why:
            return Bypass(str(why))

    def adapter(self, asked: LoRARequest) -> str | None:
        """A digest of an adapter, whatever else its request has; None if it cannot be identified."""
        try:
            return self._adapters.content(asked)
        except Unidentified:
            return None

    def salt(self, request: Request) -> str:
        """The salt that separates what the request stores and loads."""
        return request.cache_salt or ""

    def _identify(self, request: Request) -> RequestIdentity:
        refuse_others("a request", request, REQUEST, EngineCoreRequest)
        if request.pooling_params:
            refuse_others("a pooling request", request.pooling_params, POOLING)
        adapter = request.lora_request
        if self._adapters_leak and not adapter:
            raise Unidentified("vLLM's LoRA kernels for this device may apply an adapter to it")
        content = self._adapters.content(adapter) if adapter else ""
        kv = KVIdentity.of(self.salt(request), content)
        found = tuple(_item(feature, kv.salt) for feature in request.mm_features)
        places = tuple(PromptItem(item.place.offset, item.place.length, item.content) for item in found)
        return RequestIdentity(
            attrs.evolve(kv, items=places), found, content, stand_in(adapter.lora_name) if adapter else ""
        )


def _item(feature: MultiModalFeatureSpec, salt: bytes) -> Item:
    content = items.content(feature)
    # vLLM prefixes the name with the adapter's where the encoder has adapters too.
    source = content if feature.identifier == feature.mm_hash else f"{content} {salt.decode()}"
    return Item(content, stand_in(feature.identifier), source, feature.mm_position)
