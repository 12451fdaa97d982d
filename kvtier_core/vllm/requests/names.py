"""What stood behind the names under which the engine caches.

It keeps the encoder's output for an item under the item's name, and its own KV of a prompt under the names of the
prompt's items and adapter. A name need not be of the content: it may be a counter's, or a caller's. Then the engine
gives a request what another one's item became, and what is computed from that must not be stored as this one's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from kvtier_core.vllm.requests.fields import Unidentified
from kvtier_core.vllm.requests.identity import RequestIdentity
from kvtier_core.vllm.requests.items import content

#: So many names are remembered. What the engine cached under a later one is not trusted.
_REMEMBERED = 1 << 18

_Name = str | tuple[str, str]  # an item's, or ("adapter", its name)


class Asker(Protocol):
    """A request of the engine, and what is known of it."""

    request: Request
    identity: RequestIdentity | str


class Names:
    """On the scheduler's thread. ``None`` as a content: nobody knows, or it was more than one."""

    def __init__(self, remembered: int = _REMEMBERED) -> None:
        self._remembered = remembered
        self._ever: dict[_Name, str | None] = {}  # what a name stood for, from the engine's first request on
        self._encoded: dict[str, str | None] = {}  # of what the encoder's output is that is cached now

    def arrive(self, adapter: LoRARequest, content: str | None) -> None:
        """A request with an adapter, before anything is computed for it."""
        self._note(_adapter(adapter.lora_name), content)

    def load(self, identity: RequestIdentity, tokens: int) -> None:
        """KV up to ``tokens`` is loaded, and the engine may cache it."""
        for item in identity.items:
            if item.offset < tokens:
                self._note(item.name, item.source)

    def follow(self, output: SchedulerOutput, askers: Mapping[str, Asker]) -> None:
        """What the encoder makes in this step, after the engine dropped what it no longer needs."""
        for name in output.free_encoder_mm_hashes:
            self._encoded.pop(name, None)
        for request_id, numbers in output.scheduled_encoder_inputs.items():
            asker = askers[request_id]
            for number in numbers:
                name, source = asker.request.mm_features[number].identifier, _source(asker, number)
                self._encoded[name] = source
                self._note(name, source)

    def why_not_cached(self, identity: RequestIdentity, computed: int) -> str:
        """Why the engine's own KV of the first ``computed`` tokens may be another prompt's; empty if it is not."""
        if computed and identity.adapter and not self._vouch(_adapter(identity.adapter_name), identity.adapter):
            return "the engine may have cached another LoRA adapter's KV under the same name"
        if any(item.offset < computed and not self._vouch(item.name, item.source) for item in identity.items):
            return "the engine may have cached another item's KV under the same name"
        return ""

    def why_not_computed(self, identity: RequestIdentity, start: int, end: int) -> str:
        """Why what this step computes of the tokens may be of another item; empty if it is not."""
        for item in identity.items:
            if item.embeds(start, end) and self._encoded.get(item.name) != item.source:
                self._note(item.name, None)
                return "an item of its prompt was encoded from another one of the same name"
        return ""

    def _note(self, name: _Name, content: str | None) -> None:
        if self._ever.setdefault(name, content) != content:
            self._ever[name] = None
        if len(self._ever) > self._remembered:
            del self._ever[name]

    def _vouch(self, name: _Name, content: str) -> bool:
        return self._ever.get(name) == content


def _source(asker: Asker, number: int) -> str | None:
    """What the encoder is given. A request that is bypassed for something else may have well-known items."""
    if isinstance(asker.identity, RequestIdentity):
        return asker.identity.items[number].source
    feature = asker.request.mm_features[number]
    try:
        return content(feature) if feature.identifier == feature.mm_hash else None
    except Unidentified:
        return None


def _adapter(name: str) -> _Name:
    return "adapter", name
