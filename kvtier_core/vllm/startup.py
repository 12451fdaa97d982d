"""Starts the scheduler side from the workers' reports: opens the stack, or refuses to serve the engine."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import vllm
from vllm.config import KVTransferConfig, VllmConfig

from kvtier_core import native
from kvtier_core.config.compose import Runtime, open_observers, open_stack
from kvtier_core.config.load import load_config
from kvtier_core.config.model import StackConfig
from kvtier_core.config.registry import Registry
from kvtier_core.config.yaml_nodes import shown
from kvtier_core.engine.messages import WorkerReport
from kvtier_core.engine.observers import Observers
from kvtier_core.engine.ranks import Ranks
from kvtier_core.engine.recorder import Recorder
from kvtier_core.engine.scheduler_side import SchedulerSide
from kvtier_core.errors import ConfigError, Problem
from kvtier_core.interfaces import OpenContext
from kvtier_core.layouts import ChunkLayout
from kvtier_core.stack.manager import StorageManager
from kvtier_core.types import Namespace, Nbytes
from kvtier_core.vllm import layout, speculation
from kvtier_core.vllm.identity import model_weights, namespace
from kvtier_core.vllm.identity.settings import UnidentifiedError

logger = logging.getLogger("kvtier")

_RECOMPUTE = "recompute"  #: what vLLM is to do with a request whose load has failed
_CONFIG_KEY = "kvtier.config"
_CONFIG_ENV = "KVTIER_CONFIG"


@attrs.frozen
class Refusal:
    """This engine is not served: nothing is stored or loaded, and vLLM works as without kvtier."""

    reason: str  #: in plain words


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


@attrs.frozen
class Startup:
    """What the scheduler's connector knows at its start."""

    vllm_config: VllmConfig
    transfer: KVTransferConfig  #: of this connector, not of one around it
    config: StackConfig
    registry: Registry

    def open(self, reports: Sequence[WorkerReport]) -> SchedulerSide | Refusal:
        """Open the stack for an engine whose workers sent these reports.

        Raises ConfigError: an engine does not start with an incomplete stack.
        """
        ranks = Ranks(reports, self.vllm_config.parallel_config.pipeline_parallel_size)
        if refusal := ranks.disagreement() or self._missing_mover(reports[0].device):
            return Refusal(refusal)
        try:
            config, chunk = ranks.in_chunks(self.config)
        except ValueError as error:
            return Refusal(str(error))
        weights = model_weights.identify_all(self.vllm_config, self.config.identity)
        if isinstance(weights, model_weights.Unknown):
            return Refusal(weights.reason)
        if weights.warning:
            logger.warning("kvtier: %s", weights.warning)
        policy = reports[0].failure_policy or self.transfer.kv_load_failure_policy
        self._check_failure_policy(policy)
        try:
            return self._open(config, chunk, ranks, weights.fact, Runtime(recomputes=policy == _RECOMPUTE))
        except UnidentifiedError as error:
            return Refusal(str(error))

    def _missing_mover(self, device: str) -> str:
        """Why an arena cannot serve this type of device; empty if all can."""
        lacking = [tier.name for tier in self.config.arenas if device not in tier.config.devices]
        return f"arena {lacking[0]} has no mover for {device} yet" if lacking else ""

    def _check_failure_policy(self, policy: str) -> None:
        if policy != _RECOMPUTE:
            logger.warning(
                "kvtier: kv_load_failure_policy is %r: a request whose load fails will fail. Set it to 'recompute'"
                " (around a MultiConnector, not inside it).",
                policy,
            )

    def _open(
        self, config: StackConfig, chunk: ChunkLayout, ranks: Ranks, weights: str, runtime: Runtime
    ) -> SchedulerSide:
        """Open the stack. Raises ConfigError; UnidentifiedError if a setting cannot be compared between engines."""
        context = self._context(config, chunk, ranks, weights)
        recorder = Recorder(config, context.replicas) if config.record else None
        observers = Observers(open_observers(config, context))
        try:
            manager = open_stack(config, context, runtime)
        except ConfigError:
            observers.close()
            raise
        before_start = Namespace.of(namespace.facts_before_start(self.vllm_config, weights))
        self._log_stack(manager, config, chunk, context, before_start)
        if cold := manager.why_cold():
            logger.info("kvtier: cold because %s", cold)
        draft = speculation.draft_model(self.vllm_config)
        side = SchedulerSide(
            config,
            manager,
            context.namespace,
            chunk,
            lookahead=draft.lookahead if draft else 0,
            loads=self.transfer.is_kv_consumer,
            stores=self.transfer.is_kv_producer,
            observers=observers,
            recorder=recorder,
        )
        for line in side.describe():
            logger.info("kvtier: %s", line)
        about = {"engine": context.engine, "model": self.vllm_config.model_config.model, "replica": context.replica}
        side.status.open(config, {**about, "identity": context.namespace.digest.hex(), "cold": cold})
        return side

    def _context(self, config: StackConfig, chunk: ChunkLayout, ranks: Ranks, weights: str) -> OpenContext:
        """Raises UnidentifiedError if a setting cannot be compared between engines."""
        replica, replicas = layout.replica_of(self.vllm_config.parallel_config)
        return OpenContext(
            namespace=namespace.of_engine(self.vllm_config, weights, config.chunk_tokens, ranks.as_one()),
            layout=chunk,
            engine=self.transfer.engine_id,
            replica=replica,
            replicas=replicas,
            numa_nodes=ranks.numa_nodes(chunk),
        )

    def _log_stack(
        self,
        manager: StorageManager,
        config: StackConfig,
        chunk: ChunkLayout,
        context: OpenContext,
        before_start: Namespace,
    ) -> None:
        """Log what was opened: sizes, tiers, versions and identity."""
        if (count := context.replicas) > 1:
            line = "kvtier: data parallel: replica %d of %d; capacities are divided by %d"
            logger.info(line, context.replica, count, count)
        logger.info(
            "kvtier: chunk_tokens: %s -> %d, in frames of %s",
            self.config.chunk_tokens, config.chunk_tokens, Nbytes(chunk.frame_nbytes),
        )  # fmt: skip
        for line in (*config.describe(), *manager.describe()):
            logger.info("kvtier: %s", line)
        logger.info("kvtier: vLLM %s; %s", vllm.__version__, native.describe())
        digests = context.namespace.digest.hex(), before_start.digest.hex()
        logger.info("kvtier: identity %s, before the start %s", *digests)
        for fact in context.namespace.facts:
            logger.debug("kvtier: identity: %s: %s", *fact)
