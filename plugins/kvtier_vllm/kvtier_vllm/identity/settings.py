"""An engine's settings as facts: all of vLLM's configuration and environment that is not known to be harmless."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig
from vllm.config import VllmConfig
from vllm.config.utils import SupportsHash

from kvtier_core.errors import KvtierError
from kvtier_core.identity import weights
from kvtier_vllm import speculation
from kvtier_vllm.identity import harmless

#: Keys that the library which saved a model's configuration added; they say nothing about the model.
_NOT_THE_MODEL = ("_name_or_path", "transformers_version")
#: Settings that may hold credentials. Only a digest of their values becomes a fact.
_NOT_SHOWN = (
    "additional_config",
    "ec_manager_config.manager_config",
    "ec_transfer_config.ec_connector_extra_config",
    "load_config.model_loader_extra_config",
    "speculative_config.draft_load_config.model_loader_extra_config",
)
#: Any text under such a name may be a credential, too, even in settings and variables that this version does not know.
_LIKE_A_CREDENTIAL = re.compile(r"token|key|secret|passw|credential", re.IGNORECASE)
#: Settings that vLLM changes while an engine starts, so that `kvtier identity` cannot know them.
_KNOWN_LATE = (
    "cache_config.block_size",
    "cache_config.effective_attention_block_size",
    "cache_config.kv_cache_layout",
    "cache_config.mamba_block_size",
    "cache_config.mamba_page_size_padded",
    "cache_config.skip_page_size_padded",
)
#: Beginnings of the names of variables that change how libraries compute, whether vLLM reads them or not.
OF_LIBRARIES = (
    *("AITER_", "ATEN_", "CUBLAS", "CUDNN", "CUTLASS", "DNNL_", "FLASHINFER_", "FLASH_", "HIPBLAS", "MIOPEN_", "MKL_"),
    *("NVIDIA_", "ONEDNN_", "PYTORCH_", "ROCBLAS_", "TORCH", "TRITON_", "XFORMERS_"),
)


class UnidentifiedError(KvtierError):
    """A setting's value cannot be compared between engines."""


def of_configuration(config: VllmConfig, *, started: bool) -> dict[str, str]:
    """Facts of the configuration: those that only a running engine knows, or all others. Raises UnidentifiedError."""
    skipped = () if speculation.changes_kv(config) else ("speculative_config",)
    pairs = itertools.chain.from_iterable(
        _flat(getattr(config, field.name, None), field.name)
        for field in dataclasses.fields(config)
        if field.name not in skipped
    )
    return {
        name: _digest(json.dumps(value)) if _hidden(name, value) else json.dumps(value)
        for name, value in pairs
        if (name in _KNOWN_LATE) == started
    }


def variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Facts of the environment variables that are set, with the values as they are written.

    All variables that vLLM declares count, and all others whose names begin with ``VLLM_`` or as those of libraries.
    """
    from vllm.envs import environment_variables

    return {
        f"environment {name}": _digest(text) if name not in environment_variables or _hidden(name, text) else text
        for name, text in environment.items()
        if name in environment_variables or name.startswith(("VLLM_", *OF_LIBRARIES))
        if name not in harmless.VARIABLES
    }


def _hidden(name: str, value: object) -> bool:
    """May this value be a credential?"""
    return name.startswith(_NOT_SHOWN) or (isinstance(value, str) and bool(_LIKE_A_CREDENTIAL.search(name)))


def _flat(value: object, name: str) -> Iterator[tuple[str, object]]:
    """The values of a setting and of all below it, by names like ``model_config.hf_config.rope_parameters.factor``."""
    if name in harmless.FIELDS:
        return
    if isinstance(value, PretrainedConfig):
        value = _of_the_model(value.to_dict())
    below: Mapping[Any, object]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield name, type(value).__name__
        below = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    elif isinstance(value, Mapping) and value and all(isinstance(key, str) for key in value):
        below = value
    else:
        yield name, _plain(value, name)
        return
    for key in sorted(below):
        yield from _flat(below[key], f"{name}.{key}" if key.isidentifier() else f"{name}[{json.dumps(key)}]")


def _of_the_model(saved: object) -> object:
    """A saved configuration, which may hold others, without what says nothing about the model."""
    if not isinstance(saved, dict):
        return saved
    return {key: _of_the_model(below) for key, below in saved.items() if key not in _NOT_THE_MODEL}


def _plain(value: object, name: str) -> object:
    """The value as JSON can hold it, the same in every process and on every machine. Raises UnidentifiedError."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str | Path):
        return _with_content(os.fspath(value))
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, Mapping):
        return sorted(([_plain(key, name), _plain(below, name)] for key, below in value.items()), key=json.dumps)
    if isinstance(value, Set):
        return sorted((_plain(below, name) for below in value), key=json.dumps)
    if dataclasses.is_dataclass(value):
        return [[key, below] for key, below in _flat(value, type(value).__name__)]
    if isinstance(value, Sequence):
        return [_plain(below, name) for below in value]
    if isinstance(value, SupportsHash):
        return value.compute_hash()
    kind = type(value).__name__
    raise UnidentifiedError(f"vLLM's setting {name} is a {kind}, which cannot be compared between engines")


def _with_content(text: str) -> str:
    """The text; if it is the path of a file, with a digest of the file as it is now. Raises UnidentifiedError."""
    if not os.path.isabs(text) or not os.path.isfile(text):
        return text
    try:
        return f"{text} {weights.file_digest(Path(text))}"
    except OSError as error:
        raise UnidentifiedError(f"cannot read {text}: {error.strerror}") from error


def _digest(text: str) -> str:
    return f"not shown, blake2b {hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"
