"""Reads the configuration from vLLM's, and opens the scheduler side for vLLM's engine."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import vllm
from vllm.config import KVTransferConfig, VllmConfig

from kvtier_core.config.load import load_config
from kvtier_core.config.model import IdentityConfig, StackConfig
from kvtier_core.config.registry import Registry
from kvtier_core.config.yaml_nodes import shown
from kvtier_core.engine.messages import Refusal, WorkerReport
from kvtier_core.engine.scheduler.side import SchedulerSide
from kvtier_core.engine.start.startup import Engine, Identity
from kvtier_core.errors import ConfigError, Problem
from kvtier_core.types import Namespace
from kvtier_vllm import layout, speculation
from kvtier_vllm.identity import model_weights, namespace
from kvtier_vllm.identity.settings import UnidentifiedError

logger = logging.getLogger("kvtier")

_RECOMPUTE = "recompute"  #: what vLLM is to do with a request whose load has failed
_CONFIG_KEY = "kvtier.config"
_CONFIG_ENV = "KVTIER_CONFIG"


def read_config(extra: Mapping[str, Any], registry: Registry) -> StackConfig:
    """The stack from ``kv_connector_extra_config``, or from the file named there or in KVTIER_CONFIG.

    ``extra`` holds either the path of a YAML file as ``kvtier.config``, or the keys of such a file. Raises ConfigError
    with every problem found.
    """
    inline = {key: value for key, value in extra.items() if key != _CONFIG_KEY}
    path = extra.get(_CONFIG_KEY) or (None if inline else os.environ.get(_CONFIG_ENV))
    if path and not isinstance(path, str):
        why = f"expected the path of a file, found {shown(path)}"
        raise ConfigError([Problem("kv_connector_extra_config", f"$.{_CONFIG_KEY}", why)])
    if path and not inline:
        return load_config(path, registry)
    return load_config(dict(extra), registry, label="kv_connector_extra_config")


def open_side(
    vllm_config: VllmConfig, transfer: KVTransferConfig, config: StackConfig, reports: Sequence[WorkerReport]
) -> SchedulerSide | Refusal:
    """Open the stack of the scheduler's connector, as `Engine.open`.

    ``transfer`` is the configuration of this connector, not of one around it.
    """
    policy = reports[0].failure_policy or transfer.kv_load_failure_policy
    replica, replicas = layout.replica_of(vllm_config.parallel_config)
    draft = speculation.draft_model(vllm_config)
    engine = Engine(
        functools.partial(_identify, vllm_config, config.identity),
        name=transfer.engine_id,
        model=vllm_config.model_config.model,
        version=f"vLLM {vllm.__version__}",
        stages=vllm_config.parallel_config.pipeline_parallel_size,
        replica=replica,
        replicas=replicas,
        lookahead=draft.lookahead if draft else 0,
        loads=transfer.is_kv_consumer,
        stores=transfer.is_kv_producer,
        recomputes=policy == _RECOMPUTE,
    )
    opened = engine.open(config, reports)
    if isinstance(opened, SchedulerSide) and not engine.recomputes:
        logger.warning(
            "kvtier: kv_load_failure_policy is %r: a request whose load fails will fail. Set it to 'recompute'"
            " (around a MultiConnector, not inside it).",
            policy,
        )
    return opened


def _identify(
    vllm_config: VllmConfig, asked: IdentityConfig, chunk_tokens: int, report: WorkerReport
) -> Identity | Refusal:
    weights = model_weights.identify_all(vllm_config, asked)
    if isinstance(weights, model_weights.Unknown):
        return Refusal(weights.reason)
    if weights.warning:
        logger.warning("kvtier: %s", weights.warning)
    try:
        found = namespace.of_engine(vllm_config, weights.fact, chunk_tokens, report)
        return Identity(found, Namespace.of(namespace.facts_before_start(vllm_config, weights.fact)))
    except UnidentifiedError as error:
        return Refusal(str(error))
