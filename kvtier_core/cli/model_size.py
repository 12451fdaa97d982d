"""How many bytes the KV of a token has, from the ``config.json`` of a model's folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtier_core.errors import BackendError
from kvtier_core.types import Nbytes

_DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2}


def token_nbytes(folder: Path) -> Nbytes:
    """Bytes of all layers, on all ranks. Raises BackendError.

    Layers that keep a window or a state alone count as if they kept everything: what is said is the most it can be.
    """
    file = folder / "config.json"
    try:
        whole = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise BackendError(f"{file}: cannot be read: {error}; name the folder of a model") from error
    of_text = whole.get("text_config") or whole  # a model that sees has another part
    try:
        return Nbytes(of_text["num_hidden_layers"] * _of_layer(of_text) * _dtype_nbytes(of_text, whole))
    except (KeyError, TypeError) as error:
        raise BackendError(
            f"{file}: does not say {error}, by which the KV of a token is known; leave --model out"
        ) from error


def _of_layer(config: Mapping[str, Any]) -> int:
    """Numbers that a layer keeps for a token."""
    if config.get("kv_lora_rank"):  # latent attention: one vector for all heads, and one of positions
        return config["kv_lora_rank"] + config["qk_rope_head_dim"]
    heads = config["num_attention_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // heads
    return 2 * (config.get("num_key_value_heads") or heads) * head_size


def _dtype_nbytes(*configs: Mapping[str, Any]) -> int:
    named = [config.get(key) for config in configs for key in ("dtype", "torch_dtype")]
    return _DTYPES[next(filter(None, named), "bfloat16")]
