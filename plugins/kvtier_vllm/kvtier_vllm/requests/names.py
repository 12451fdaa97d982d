"""Tracks what vLLM's caches may hold under a name.

vLLM keeps the encoder's output for an item under the item's name, and its own KV of a prompt under the names of the
prompt's items and adapter. A name may be a counter or a client's choice. Then vLLM may give one request what it cached
for an item of another, and KV computed from that must not be stored under the keys of the first.
"""

from __future__ import annotations

from kvtier_core.engine.request_view import Bypass
from kvtier_vllm.requests.identity import RequestIdentity

#: Number of names in a generation. vLLM's caches have fewer: each name there is that of at least one token.
_GENERATION = 1 << 18

_Name = str | tuple[str, str]  # an item's, or ("adapter", its name)


class CachedNames:
    """The contents that the names in vLLM's caches stand for. ``None`` as a content: not known, or more than one.

    There are two generations of names: when the younger one is full, it replaces the older one. A name in use is in the
    younger one. vLLM's caches also drop what was used least recently, and hold fewer names than a generation has.
    """

    def __init__(self, generation: int = _GENERATION) -> None:
        self._generation = generation
        self._younger: dict[_Name, str | None] = {}
        self._older: dict[_Name, str | None] = {}
        self._encoded: dict[str, str | None] = {}  # the sources of the encoder's outputs that are cached now

    def note_adapter(self, name: str, content: str | None) -> None:
        """Note that a request with this adapter arrived. Nothing has been computed for it yet."""
        self._note(_adapter(name), content)

    def note_load(self, identity: RequestIdentity, tokens: int) -> None:
        """Note that the KV of a request's first ``tokens`` is loaded, and that vLLM may cache it."""
        for item in identity.items:
            if item.place.offset < tokens:
                self._note(item.name, item.source)

    def note_encoding(self, name: str, source: str | None) -> None:
        """Note that the encoder's output under this name is being made from ``source``."""
        self._encoded[name] = source
        self._note(name, source)

    def drop_encoding(self, name: str) -> None:
        """Note that vLLM freed the encoder's output under this name."""
        self._encoded.pop(name, None)

    def check_cached(self, identity: RequestIdentity, computed: int) -> Bypass | None:
        """Is vLLM's own KV of the first ``computed`` tokens certainly this request's? If not, why it may not be."""
        if computed and identity.adapter and not self._is_certain(_adapter(identity.adapter_name), identity.adapter):
            return Bypass("the engine may have cached another LoRA adapter's KV under the same name")
        if any(
            item.place.offset < computed and not self._is_certain(item.name, item.source) for item in identity.items
        ):
            return Bypass("the engine may have cached another item's KV under the same name")
        return None

    def check_encoded(self, identity: RequestIdentity, start: int, end: int) -> Bypass | None:
        """Are the tokens from ``start`` to ``end`` computed from this request's own items? If not, why they may not be.

        If not, the names are no longer trusted: vLLM will cache the KV under them.
        """
        for item in identity.items:
            if item.embeds(start, end) and self._encoded.get(item.name) != item.source:
                self._note(item.name, None)
                return Bypass("an item of its prompt was encoded from another item with the same name")
        return None

    def _note(self, name: _Name, content: str | None) -> None:
        known = self._younger.get(name, self._older.get(name, content))
        self._younger[name] = content if known == content else None
        if len(self._younger) >= self._generation:
            self._older, self._younger = self._younger, {}

    def _is_certain(self, name: _Name, content: str) -> bool:
        """Has the name stood for this content, and for nothing else? It is in use."""
        if name in self._older and name not in self._younger:
            self._note(name, self._older[name])
        return self._younger.get(name, self._older.get(name)) == content


def _adapter(name: str) -> _Name:
    return "adapter", name
