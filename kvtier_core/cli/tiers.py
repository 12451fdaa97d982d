"""The common parts of commands that look at the tiers of a file: finding them, and opening them without a trace."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from kvtier_core.cli.output import Output
from kvtier_core.config.model import StackConfig
from kvtier_core.config.open import OpenedTier, open_tier
from kvtier_core.config.server_client import server_client, server_path
from kvtier_core.config.yaml_nodes import ProblemCollector
from kvtier_core.errors import BackendError, ConfigError, Problem
from kvtier_core.interfaces import OpenContext, SupportsNamespaces
from kvtier_core.layouts import ChunkLayout, KVGroup, KVKind, KVStructure
from kvtier_core.storekit.folder import folders
from kvtier_core.storekit.folder_lock import remove_if_unused
from kvtier_core.types import Namespace, Nbytes

#: KV of a token if no model is named: that of Llama 3.1 8B in 16 bits.
_TOKEN = Nbytes(128 << 10)
#: Tokens of a block if no engine states it.
_BLOCK_TOKENS = 16
#: Bytes of a number, by its type in a model's config.json.
_DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2}


def layout_of(chunk_tokens: int, bytes_per_token: int) -> ChunkLayout:
    """The layout of chunks of one page, for a model of which only the bytes per token are known."""
    page_nbytes = (chunk_tokens * bytes_per_token,)
    group = KVGroup("group 0", KVKind.FULL_ATTENTION, page_nbytes, chunk_tokens, "unknown", KVStructure.OPAQUE)
    return ChunkLayout((group,), chunk_tokens)


def kv_of_token(model: Path | None, output: Output) -> Nbytes:
    """KV of a token of the model in this folder; a default without one, with a warning. Raises BackendError."""
    if model is not None:
        return _token_nbytes(model)
    output.warn(f"assuming {_TOKEN} of KV per token, as in Llama 3.1 8B; pass --model FOLDER for another model")
    return _TOKEN


def _token_nbytes(folder: Path) -> Nbytes:
    """Bytes of a token's KV in all layers, on all ranks, according to the model's ``config.json``. Raises BackendError.

    Layers that keep only a window or a state count as if they kept everything, so this is an upper bound.
    """
    file = folder / "config.json"
    try:
        whole = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise BackendError(f"cannot read {file}: {error}; pass the folder of a model") from error
    of_text = whole.get("text_config") or whole  # a vision model has other parts, too
    try:
        return Nbytes(of_text["num_hidden_layers"] * _of_layer(of_text) * _dtype_nbytes(of_text, whole))
    except (KeyError, TypeError) as error:
        raise BackendError(f"{file}: does not set {error}, which determines the KV of a token; omit --model") from error


def _of_layer(config: Mapping[str, Any]) -> int:
    """The number of values that a layer keeps for a token."""
    if config.get("kv_lora_rank"):  # latent attention: one vector for all heads, and one of positions
        latent: int = config["kv_lora_rank"] + config["qk_rope_head_dim"]
        return latent
    heads: int = config["num_attention_heads"]
    head_size: int = config.get("head_dim") or config["hidden_size"] // heads
    kv_heads: int = config.get("num_key_value_heads") or heads
    return 2 * kv_heads * head_size


def _dtype_nbytes(*configs: Mapping[str, Any]) -> int:
    named = [config.get(key) for config in configs for key in ("dtype", "torch_dtype")]
    return _DTYPES[next(filter(None, named), "bfloat16")]


def sized(config: StackConfig, token: Nbytes) -> tuple[StackConfig, ChunkLayout]:
    """The stack of an engine whose tokens have ``token`` bytes of KV, and the layout of its chunks."""
    config = config.sized(_BLOCK_TOKENS, _BLOCK_TOKENS * token)
    assert config.chunk_tokens != "auto", "not sized"
    return config, layout_of(config.chunk_tokens, token)


def ask_server(config: StackConfig) -> None:
    """Return when the server that an engine's file names has answered. Raises ConfigError if there is no answer."""
    client = server_client()
    try:
        client.probe(server_path(config))
    except BackendError as error:
        raise ConfigError([config.problem("$.server", str(error), "start it with kvtier serve")]) from error


@contextlib.contextmanager
def opened(
    config: StackConfig,
    layout: ChunkLayout,
    numbers: Iterable[int],
    without: list[Problem] | None = None,
    *,
    checking: bool = False,
) -> Iterator[list[OpenedTier]]:
    """Tiers by their numbers, opened as an engine would, in a unique namespace, of which nothing remains.

    The caller deletes the frames that it writes; with ``checking`` no file changes. Raises ConfigError if a tier cannot
    be opened; but if ``without`` is a list, the problems of tiers that are not required are added to it.
    """
    numbers = list(numbers)
    ctx = attrs.evolve(context(layout), checking=checking)
    tiers: list[OpenedTier] = []
    collector, of_optional = ProblemCollector(), ProblemCollector()
    with contextlib.ExitStack() as closing:
        closing.enter_context(no_new_folders(path for number in numbers for path in folders(config.tiers[number])))
        for number in numbers:
            optional = without is not None and not getattr(config.tiers[number], "required", True)
            with of_optional if optional else collector:
                tiers.append(closing.enter_context(open_tier(config, number, ctx)))
                closing.callback(_drop, tiers[-1])
        collector.raise_if_any()
        if without is not None:
            without += of_optional.problems
        yield tiers


def context(layout: ChunkLayout) -> OpenContext:
    """The context of a unique namespace."""
    return OpenContext(Namespace.of({"check": secrets.token_hex(16)}), layout)


@contextlib.contextmanager
def no_new_folders(paths: Iterable[Path]) -> Iterator[None]:
    """Remove the folders that were not there before, and are empty at the end."""
    missing = [each for path in paths for each in (path, *path.parents) if not each.exists()]
    try:
        yield
    finally:
        for folder in missing:
            with contextlib.suppress(OSError, BackendError):  # in use now
                remove_if_unused(folder)


def _drop(tier: OpenedTier) -> None:
    if isinstance(tier.store, SupportsNamespaces):
        with contextlib.suppress(BackendError):  # a store that cannot be reached does not know the namespace
            tier.store.drop_namespace()
