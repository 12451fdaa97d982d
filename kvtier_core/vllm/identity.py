"""Who may share KV with whom. What cannot be identified is bypassed, never guessed."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import attrs
import vllm
from vllm.config import VllmConfig
from vllm.v1.request import Request

from kvtier_core.frame import FORMAT_VERSION
from kvtier_core.types import Namespace
from kvtier_core.vllm import weights
from kvtier_core.vllm.plan import Survey

#: Saved in a configuration by the libraries that write it; they say nothing about the model.
_NOT_THE_MODEL = ("_name_or_path", "transformers_version")


def weights_of(vllm_config: VllmConfig) -> str:
    """What the weights are, in a few words and a digest; empty if it cannot be told."""
    model, load = vllm_config.model_config, vllm_config.load_config
    if load.load_format == "dummy":
        return f"dummy, seed {model.seed}"
    folder = Path(model.model)
    try:
        if not folder.exists():
            from huggingface_hub import snapshot_download

            folder = Path(
                snapshot_download(
                    model.model, revision=model.revision, cache_dir=load.download_dir, local_files_only=True
                )
            )
        return weights.digest(folder) or ""
    except (OSError, ValueError):  # the hub's own errors for what is not on this disk are both
        return ""


def namespace(vllm_config: VllmConfig, weights_identity: str, chunk_tokens: int, survey: Survey) -> Namespace:
    """Everything that makes the pages of two engines interchangeable, as named facts."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    config = {name: value for name, value in model.hf_config.to_dict().items() if name not in _NOT_THE_MODEL}
    return Namespace.of(
        {
            **dict(survey.facts),
            "format": FORMAT_VERSION,
            "engine": f"vllm {vllm.__version__}",
            "model": " ".join(model.architectures),
            "model configuration": hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest(),
            "weights": weights_identity,
            "quantization": model.quantization,
            "longest sequence": model.max_model_len,  # some rotary embeddings depend on it
            "dtype": model.dtype,
            "kv dtype": cache.cache_dtype,
            "page bytes": " ".join(map(str, survey.page_nbytes)),
            "block tokens": cache.block_size,
            "chunk tokens": chunk_tokens,
            "tensor parallel ranks": parallel.tensor_parallel_size,
        }
    )


@attrs.frozen
class RequestIdentity:
    """What the KV of a request depends on besides its tokens."""

    salt: bytes = b""
    items: tuple[tuple[int, int, str], ...] = ()  #: multimodal: offset and length in tokens, digest

    def extra(self, chunk_tokens: int) -> Mapping[int, bytes]:
        """For each chunk that items lie in: which, and where in it."""
        touching: dict[int, list[tuple[int, str]]] = {}
        for offset, length, digest in self.items:
            for chunk in range(offset // chunk_tokens, -(-(offset + length) // chunk_tokens)):
                touching.setdefault(chunk, []).append((offset - chunk * chunk_tokens, digest))
        return {chunk: json.dumps(items).encode() for chunk, items in touching.items()}


def identify(request: Request) -> RequestIdentity | str:
    """Of a request, or why it cannot be told."""
    if request.prompt_embeds is not None:
        return "its prompt is given as embeddings"
    adapter = request.lora_request
    adapter_digest = None
    if adapter is not None:
        adapter_digest = _adapter_digest(adapter.lora_path, _modified(adapter.lora_path))
        if adapter_digest is None:
            return f"the weights of the LoRA adapter {adapter.lora_name!r} cannot be found on disk"
    ingredients = {"cache_salt": request.cache_salt or None, "adapter": adapter_digest}
    return RequestIdentity(
        salt=json.dumps(ingredients).encode() if any(ingredients.values()) else b"",
        items=tuple(
            (feature.mm_position.offset, feature.mm_position.length, feature.identifier)
            for feature in request.mm_features
        ),
    )


@functools.lru_cache(maxsize=256)
def _adapter_digest(path: str, modified: tuple) -> str | None:
    try:
        return weights.digest(Path(path))
    except (OSError, ValueError):
        return None


def _modified(path: str) -> tuple:
    """Changes when a file of the folder does."""
    try:
        return tuple(sorted((f.name, f.stat().st_mtime_ns, f.stat().st_size) for f in Path(path).iterdir()))
    except OSError:
        return ()
