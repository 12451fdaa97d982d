"""Which engines may share KV. What cannot be identified is not served, never guessed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import vllm
from vllm.config import LoadConfig, ModelConfig, VllmConfig

from kvtier_core.frame import FORMAT_VERSION
from kvtier_core.types import Namespace
from kvtier_core.vllm import weights
from kvtier_core.vllm.plan import Survey

#: Saved in a configuration by the libraries that write it; they say nothing about the model.
_NOT_THE_MODEL = ("_name_or_path", "transformers_version")


def weights_of(model: ModelConfig, load: LoadConfig) -> str:
    """What the weights are, in a few words and a digest; empty if it cannot be told."""
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


def model_facts(model: ModelConfig, weights_identity: str) -> dict[str, object]:
    """What can be told before an engine runs."""
    config = {name: value for name, value in model.hf_config.to_dict().items() if name not in _NOT_THE_MODEL}
    return {
        "format": FORMAT_VERSION,
        "engine": f"vllm {vllm.__version__}",
        "model": " ".join(model.architectures),
        "model configuration": hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest(),
        "weights": weights_identity,
        "quantization": model.quantization,
        "longest sequence": model.max_model_len,  # some rotary embeddings depend on it
        "dtype": model.dtype,
    }


def engine_facts(config: VllmConfig, chunk_tokens: int, survey: Survey) -> dict[str, object]:
    """What only the running engine knows."""
    return {
        **dict(survey.facts),
        "kv dtype": config.cache_config.cache_dtype,
        "page bytes": " ".join(map(str, survey.page_nbytes)),
        "block tokens": config.cache_config.block_size,
        "chunk tokens": chunk_tokens,
        "tensor parallel ranks": config.parallel_config.tensor_parallel_size,
    }


def namespace(config: VllmConfig, weights_identity: str, chunk_tokens: int, survey: Survey) -> Namespace:
    """Everything that makes the pages of two engines interchangeable, as named facts."""
    model = model_facts(config.model_config, weights_identity)
    return Namespace.of({**model, **engine_facts(config, chunk_tokens, survey)})
