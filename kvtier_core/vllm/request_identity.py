"""What the KV of a request depends on besides its tokens. What cannot be identified is bypassed, never guessed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import attrs
from vllm.lora.request import LoRARequest
from vllm.v1.request import Request

from kvtier_core.vllm import weights

#: A digest of an item's content, as vLLM makes it. Whatever else stands there, a caller thought of.
_CONTENT = re.compile(r"[0-9a-f]{64,}")


@attrs.frozen
class RequestIdentity:
    """What the KV of a request depends on besides its tokens."""

    salt: bytes = b""
    items: tuple[tuple[int, int, str], ...] = ()  #: multimodal: offset and length in tokens, digest

    def extra(self, chunk_tokens: int) -> Mapping[int, bytes]:
        """For each chunk that items lie in: which, and where in it."""
        touching: dict[int, list[tuple[int, int, str]]] = {}
        for offset, length, digest in self.items:
            for chunk in range(offset // chunk_tokens, -(-(offset + length) // chunk_tokens)):
                touching.setdefault(chunk, []).append((offset - chunk * chunk_tokens, length, digest))
        return {chunk: json.dumps(items).encode() for chunk, items in touching.items()}


class Identifier:
    """Remembers which files an adapter's id stood for: the engine loads them once, and they may change."""

    def __init__(self) -> None:
        self._adapters: dict[int, tuple[tuple, str]] = {}  # the state of its files when it was first seen; its digest

    def identify(self, request: Request) -> RequestIdentity | str:
        """Of a request, or why it cannot be told."""
        if request.prompt_embeds is not None:
            return "its prompt is given as embeddings"
        if not all(_CONTENT.fullmatch(item.identifier.rpartition(":")[2]) for item in request.mm_features):
            return "an item of its prompt is named by the caller, not by its content"
        ingredients: dict[str, str] = {}
        if request.cache_salt:
            ingredients["cache_salt"] = request.cache_salt
        if adapter := request.lora_request:
            ingredients["adapter"], problem = self._adapter(adapter)
            if problem:
                return f"LoRA adapter {adapter.lora_name!r}: {problem}"
        return RequestIdentity(
            salt=json.dumps(ingredients).encode() if ingredients else b"",
            items=tuple((f.mm_position.offset, f.mm_position.length, f.identifier) for f in request.mm_features),
        )

    def _adapter(self, asked: LoRARequest) -> tuple[str, str]:
        """A digest of the weights that the engine has under this id, or what is wrong with them."""
        if asked.load_inplace:
            return "", "it is loaded anew under its old id"
        path = Path(asked.lora_path)
        try:
            state = (asked.lora_path, asked.is_3d_lora_weight, weights.state(sorted(path.iterdir())))
            if asked.lora_int_id not in self._adapters:
                self._adapters[asked.lora_int_id] = state, weights.digest(path) or ""
        except (OSError, ValueError):
            return "", "its weights cannot be read from disk"
        before, digest = self._adapters[asked.lora_int_id]
        if not digest:
            return "", "there are no weights in its folder"
        if state != before:
            return "", "its files are not those that the engine saw first"
        return f"{digest} {asked.is_3d_lora_weight}", ""
