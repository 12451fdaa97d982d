"""The common parts of commands that look at tiers: what an engine of a file would have, and its start as a trial."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from kvtier_core.cli.output import Output
from kvtier_core.config.model import StackConfig
from kvtier_core.config.open import log_warning
from kvtier_core.config.server_client import server_client, server_path
from kvtier_core.engine.messages import Refusal, WorkerReport
from kvtier_core.engine.scheduler.side import SchedulerSide
from kvtier_core.engine.start.ranks import Ranks
from kvtier_core.engine.start.startup import Engine, Identity
from kvtier_core.errors import BackendError, ConfigError
from kvtier_core.layouts import ChunkLayout, Elements, KVGroup, KVKind, KVStructure
from kvtier_core.storekit import trial
from kvtier_core.types import Namespace, Nbytes

#: The KV of Llama 3.1 8B, if no model is named.
_LAYERS, _HEADS, _CHANNELS = 32, 8, 128
#: Tokens of a block if no engine states it.
BLOCK_TOKENS = 16
#: Bytes of a number, by its type in a model's config.json.
_DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2}


def kv_of(model: Path | None, output: Output) -> KVGroup:
    """The KV of the model in this folder, in an engine; without one that of a usual model, with a warning.

    Raises BackendError.
    """
    if model is not None:
        return _group_of(model)
    group = _keys_and_values(_LAYERS, _HEADS, _CHANNELS, "bfloat16")
    output.warn(
        f"assuming {of_token(group)} of KV per token, as in Llama 3.1 8B; pass --model FOLDER for another model"
    )
    return group


def of_token(group: KVGroup) -> Nbytes:
    """Bytes of a token's KV in all layers."""
    return Nbytes(sum(group.page_nbytes) // group.block_tokens)


def _group_of(folder: Path) -> KVGroup:
    """The KV of a model in all layers, on all ranks, according to its ``config.json``. Raises BackendError.

    Layers that keep only a window or a state count as if they kept everything, so this is an upper bound.
    """
    file = folder / "config.json"
    try:
        whole = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise BackendError(f"cannot read {file}: {error}; pass the folder of a model") from error
    config = whole.get("text_config") or whole  # a vision model has other parts, too
    named = [each.get(key) for each in (config, whole) for key in ("dtype", "torch_dtype")]
    dtype = next(filter(None, named), "bfloat16")
    try:
        layers = config["num_hidden_layers"]
        if config.get("kv_lora_rank"):  # latent attention: one vector for all heads, and one of positions
            latent = BLOCK_TOKENS * _DTYPES[dtype] * (config["kv_lora_rank"] + config["qk_rope_head_dim"])
            return _group([latent] * layers, dtype, KVStructure.MLA_LATENT)
        heads = config["num_attention_heads"]
        channels = config.get("head_dim") or config["hidden_size"] // heads
        return _keys_and_values(layers, config.get("num_key_value_heads") or heads, channels, dtype)
    except (KeyError, TypeError) as error:
        raise BackendError(f"{file}: does not set {error}, which determines the KV of a token; omit --model") from error


def _keys_and_values(layers: int, heads: int, channels: int, dtype: str) -> KVGroup:
    half = BLOCK_TOKENS * heads * channels
    strides = {"of_head": channels, "of_token": heads * channels, "of_channel": 1}
    elements = [Elements(heads, BLOCK_TOKENS, channels, first, **strides) for first in (0, half)]
    return _group([2 * half * _DTYPES[dtype]] * layers, dtype, KVStructure.KEYS_AND_VALUES, elements)


def _group(pages: Sequence[int], dtype: str, structure: KVStructure, elements: Sequence[Elements] = ()) -> KVGroup:
    depths = range(len(pages))
    kind = KVKind.FULL_ATTENTION
    return KVGroup("group 0", kind, pages, BLOCK_TOKENS, dtype, structure, elements=elements, depths=depths)


def sized(config: StackConfig, group: KVGroup) -> tuple[StackConfig, ChunkLayout]:
    """The stack of an engine with this KV, and the layout of its chunks. Raises ConfigError if it has none."""
    try:
        return Ranks([_report(config, group)]).in_chunks(config)
    except ValueError as error:
        raise ConfigError([config.problem("$.chunk_tokens", str(error))]) from error


def _report(config: StackConfig, group: KVGroup) -> WorkerReport:
    """That of a worker with a device that all arenas serve, if there is one."""
    devices = [tier.config.devices for tier in config.arenas]
    device = next((each for each in devices[0] if all(each in its for its in devices)), "cpu") if devices else "cpu"
    return WorkerReport(device, (group,), ())


def started(config: StackConfig, group: KVGroup, warn: Callable[[str], object] = log_warning) -> SchedulerSide:
    """All that an engine with this KV opens when it starts, in a unique namespace; the caller closes it.

    ``warn`` is told what it starts without. Nothing changes, also while it is open: no file or folder is made, and no
    frame removed. Raises ConfigError.
    """
    trial.forget()
    identity = Identity(Namespace.of({"check": secrets.token_hex(16)}), Namespace.of({}))
    engine = Engine(lambda *_: identity, name="a check", model="", version="no engine", checking=True, warn=warn)
    side = engine.open(config, [_report(config, group)])
    if isinstance(side, Refusal):
        raise ConfigError([config.problem("$", f"an engine would not be served: {side.reason}")])
    return side


def ask_server(config: StackConfig) -> None:
    """Return when the server that an engine's file names has answered. Raises ConfigError if there is no answer."""
    client = server_client()
    try:
        client.probe(server_path(config))
    except BackendError as error:
        raise ConfigError([config.problem("$.server", str(error), "start it with kvtier serve")]) from error
