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
from kvtier_core.config.compose import OpenedTier, open_tiers
from kvtier_core.config.load import load_config
from kvtier_core.config.model import UNIX, StackConfig, StoreTierConfig
from kvtier_core.config.registry import Registry
from kvtier_core.config.yaml_nodes import ProblemCollector
from kvtier_core.errors import BackendError, ConfigError, Problem
from kvtier_core.interfaces import OpenContext, Stored, SupportsNamespaces, SupportsWalk
from kvtier_core.layouts import ChunkLayout
from kvtier_core.simulate.stacks import layout_of
from kvtier_core.storekit.folder import place_in
from kvtier_core.types import Namespace, Nbytes

#: KV of a token where no model is named: that of Llama 3.1 8B in 16 bits.
_TOKEN = Nbytes(128 << 10)
#: Tokens of a block where no engine says it.
_BLOCK_TOKENS = 16
#: Bytes of a number, by its type in a model's config.json.
_DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2}


def store_tier(file: str, name: str) -> StoreTierConfig:
    """The store tier of this name. Raises ConfigError, and BackendError if the file has none."""
    tiers = {tier.name: tier for tier in load_config(file, Registry.discover()).stores}
    if name not in tiers:
        raise BackendError(f"{file} has no tier {name!r} below its arenas; it has: {', '.join(tiers) or 'none'}")
    return tiers[name]


def walk(tier: StoreTierConfig) -> contextlib.AbstractContextManager[Iterator[Stored]]:
    """Everything in the store of a tier; see `SupportsWalk`. Raises BackendError."""
    if not isinstance(tier.config, SupportsWalk):
        raise BackendError(f"a tier of type {tier.config.type} cannot be walked")
    return tier.config.walk()


def kv_of_token(model: Path | None, output: Output) -> Nbytes:
    """KV of a token of the model in this folder; without one it is assumed, which is said. Raises BackendError."""
    if model is not None:
        return _token_nbytes(model)
    output.warn(f"assumed: a token has {_TOKEN} of KV, as in Llama 3.1 8B; --model FOLDER names another model")
    return _TOKEN


def _token_nbytes(folder: Path) -> Nbytes:
    """Bytes of a token's KV in all layers, on all ranks, by the model's ``config.json``. Raises BackendError.

    Layers that keep a window or a state alone count as if they kept everything, so it is the most it can be.
    """
    file = folder / "config.json"
    try:
        whole = json.loads(file.read_bytes())
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


def sized(config: StackConfig, token: Nbytes) -> tuple[StackConfig, ChunkLayout]:
    """The stack as an engine has it whose tokens have so many bytes of KV, and the layout of its chunks."""
    config = config.sized(_BLOCK_TOKENS, _BLOCK_TOKENS * token)
    return config, layout_of(config.chunk_tokens, token)


def ask_server(config: StackConfig) -> None:
    """Return when the server that an engine's file names has answered. Raises ConfigError if it does not."""
    from kvtier_core.server.memory import probe

    try:
        probe(Path((config.server or "").removeprefix(UNIX)))
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
    """Tiers by their numbers, opened as an engine would, in a namespace that nobody else has; nothing of it is left.

    The caller deletes the frames that it writes; with ``checking`` no file changes. Raises ConfigError if a tier cannot
    be opened; but if ``without`` is a list, it gets the problems of those that are not required.
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
                tiers += closing.enter_context(open_tiers(config, [number], ctx))
                closing.callback(_drop, tiers[-1])
        collector.raise_if_any()
        if without is not None:
            without += of_optional.problems
        yield tiers


def context(layout: ChunkLayout) -> OpenContext:
    """That of a namespace which nobody else has."""
    return OpenContext(Namespace.of({"check": secrets.token_hex(16)}), layout)


@contextlib.contextmanager
def no_new_folders(paths: Iterable[Path]) -> Iterator[None]:
    """Remove the folders that were not there before, and are empty at the end."""
    missing = [each for path in paths for each in (path, *path.parents) if not each.exists()]
    try:
        yield
    finally:
        for folder in missing:
            with contextlib.suppress(OSError):  # somebody uses it now
                folder.rmdir()


def _drop(tier: OpenedTier) -> None:
    if isinstance(tier.store, SupportsNamespaces):
        with contextlib.suppress(BackendError):  # a store that cannot be reached was told nothing
            tier.store.drop_namespace()


def folders(settings: Any) -> list[Path]:
    """The paths among the settings of a tier, an observer or a recorder."""
    settings = getattr(settings, "config", settings)
    values = [getattr(settings, field.name) for field in attrs.fields(type(settings))] if settings else []
    several = [value if isinstance(value, tuple) else (value,) for value in values]
    return [place_in(each) for value in several for each in value if isinstance(each, Path)]


def nearest(folder: Path) -> Path:
    """The folder itself, or the nearest one above it that is there."""
    return next(each for each in (folder, *folder.absolute().parents) if each.exists())
