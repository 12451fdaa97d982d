"""`KVTierConnector`: what vLLM calls. Decides nothing; each half lives in its own file.

Nothing of kvtier's may take the engine down. A half that raises is let go, with the reason in the log,
and the engine goes on without it.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
import vllm
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvtier_core import native
from kvtier_core.config.model import StackConfig, load_config, open_stack
from kvtier_core.config.registry import Registry
from kvtier_core.config.yaml_nodes import shown
from kvtier_core.engine import worker_reports as reports
from kvtier_core.engine.messages import StepPlan, WorkerReport
from kvtier_core.engine.recorder import Recorder
from kvtier_core.engine.scheduler_side import SchedulerSide
from kvtier_core.engine.worker_side import WorkerSide
from kvtier_core.errors import ConfigError, Problem
from kvtier_core.interfaces import OpenContext
from kvtier_core.transfer.io_pool import run
from kvtier_core.types import Namespace, Nbytes
from kvtier_core.vllm import layout, versions
from kvtier_core.vllm.hit_sources import as_vllm_says
from kvtier_core.vllm.identity import model_weights
from kvtier_core.vllm.identity import namespace as identity
from kvtier_core.vllm.identity.settings import UnidentifiedError

logger = logging.getLogger("vllm.kvtier")

_CONFIG_KEY = "kvtier.config"
_CONFIG_ENV = "KVTIER_CONFIG"


def configured(extra: Mapping[str, Any], registry: Registry) -> StackConfig:
    """From the YAML file named in ``kvtier.config`` or KVTIER_CONFIG, or from the same keys given inline.

    Raises ConfigError with every problem found.
    """
    inline = {key: value for key, value in extra.items() if key != _CONFIG_KEY}
    path = extra.get(_CONFIG_KEY) or (None if inline else os.environ.get(_CONFIG_ENV))
    if path and not isinstance(path, str):
        why = f"expected the path of a file, found {shown(path)}"
        raise ConfigError([Problem("kv_connector_extra_config", f"$.{_CONFIG_KEY}", why)])
    if path and not inline:
        return load_config(path, registry)
    return load_config(dict(extra), registry, label="kv_connector_extra_config")


def guarded(neutral: Any = None) -> Callable:
    """What a method answers when there is no half to ask, or it fails now."""

    def wrap(method: Callable) -> Callable:
        @functools.wraps(method)
        def guard(self: KVTierConnector, *args: Any, **kwargs: Any) -> Any:
            if self.side is None:
                return neutral
            try:
                return method(self, *args, **kwargs)
            except Exception:
                logger.exception("kvtier: %s failed; the engine goes on without kvtier", method.__name__)
                self._disable()
                return neutral

        return guard

    return wrap


class KVTierConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps the KV of prompts in a stack of tiers chosen in YAML, and gives it back."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._registry = Registry.discover()
        self.config = configured(self._kv_transfer_config.kv_connector_extra_config or {}, self._registry)
        self.side: SchedulerSide | WorkerSide | None = None
        self._reports: list[WorkerReport] | str = []
        self._promised: list[str] = []  # scheduler: loads that the engine waits for and no worker was told of
        self._awaited: set[str] = set()  # worker: loads that the engine waits for
        self._refusal = ""
        if refusal := layout.refusal(vllm_config, kv_cache_config):
            self._refuse(refusal)
        else:
            self.config.check_engine(vllm_config.cache_config.block_size)
        if role is KVConnectorRole.SCHEDULER and (doubt := versions.doubt()):
            logger.warning("kvtier: %s", doubt)
        # Two connectors of one engine, beside each other, share its name; and they find the same.
        self._engine = f"{self._kv_transfer_config.engine_id} {vllm_config.instance_id}"
        self._ranks = vllm_config.parallel_config.world_size
        if role is KVConnectorRole.SCHEDULER and not self._refusal:
            self._reports = reports.collect(self._engine, self._ranks)

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a store that is dropped is only a later miss

    # -- start-up: pages, then what the workers found, then the stack -----------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._refusal:
            return
        if self._vllm_config.parallel_config.rank == 0:
            model_weights.identify_ahead(
                self._vllm_config.model_config, self._vllm_config.load_config, self.config.identity
            )
        table, report = layout.inspect_pages(self._vllm_config, self._kv_cache_config, kv_caches, self.config)
        # Inside a MultiConnector its settings count, and vLLM shows them to workers alone.
        whole = get_current_vllm_config_or_none()
        if whole and whole.kv_transfer_config:
            report = attrs.evolve(report, failure_policy=whole.kv_transfer_config.kv_load_failure_policy)
        try:
            reports.leave(self._engine, self._vllm_config.parallel_config.rank, report)
        except OSError as error:
            logger.warning("kvtier: this worker cannot report what it found: %s", error)
        if table is not None:
            self.side = WorkerSide(self.config.arenas, table, kv_caches)

    @guarded()
    def unregister_kv_caches(self) -> None:
        """vLLM 0.33: before a sleep, until `restore_kv_caches`. The pages come back at the same addresses."""
        self.side.leave_pages()

    @guarded()
    def restore_kv_caches(self) -> None:
        self.side.return_to_pages()

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """It is that of a connector beside this one."""

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """The last step of vLLM's start-up: now every connector has read what the workers reported."""
        super().bind_kv_cache_manager(kv_cache_manager)
        reports.remove(self._engine, self._ranks)
        if self._refusal:
            return
        if isinstance(self._reports, str):
            return self._refuse(self._reports)
        report = self._reports[0]
        if refusal := layout.disagreement(self._reports) or self._missing_mover(report.device):
            return self._refuse(refusal)
        weights = model_weights.identify(
            self._vllm_config.model_config, self._vllm_config.load_config, self.config.identity
        )
        if isinstance(weights, model_weights.Unknown):
            return self._refuse(weights.reason)
        if weights.warning:
            logger.warning("kvtier: %s", weights.warning)
        self._warn_of(report.failure_policy or self._kv_transfer_config.kv_load_failure_policy)
        try:
            self.side = self._open(report, weights.fact)
        except UnidentifiedError as error:
            self._refuse(str(error))

    def _warn_of(self, failure_policy: str) -> None:
        if failure_policy != "recompute":
            logger.warning(
                "kvtier: kv_load_failure_policy is %r: a request whose load fails will fail. Set it to 'recompute'"
                " (around a MultiConnector, not inside it).",
                failure_policy,
            )

    def _missing_mover(self, device: str) -> str:
        lacking = [tier.name for tier in self.config.arenas if device not in tier.config.devices]
        return f"arena {lacking[0]} has no mover for {device} yet" if lacking else ""

    def _refuse(self, why: str) -> None:
        self._refusal = why
        if self.role is KVConnectorRole.SCHEDULER:
            logger.warning("kvtier: this engine is not served: %s", why)

    def _open(self, report: WorkerReport, weights: str) -> SchedulerSide:
        """Raises ConfigError: an engine does not start with half a stack."""
        config, chunk = layout.in_chunks(self.config, self._vllm_config, report.page_nbytes)
        replica, replicas = layout.replica_of(self._vllm_config.parallel_config)
        context = OpenContext(
            namespace=identity.namespace(self._vllm_config, weights, config.chunk_tokens, report),
            layout=chunk,
            engine=self._kv_transfer_config.engine_id,
            replica=replica,
            replicas=replicas,
        )
        recorder = Recorder(config, replicas) if config.record else None
        manager = open_stack(config, context)
        if replicas > 1:
            told = "kvtier: data parallel: replica %d of %d; capacities are divided by %d"
            logger.info(told, replica, replicas, replicas)
        logger.info(
            "kvtier: chunk_tokens: %s -> %d, in frames of %s",
            self.config.chunk_tokens, config.chunk_tokens, Nbytes(chunk.frame_nbytes),
        )  # fmt: skip
        for line in manager.describe():
            logger.info("kvtier: %s", line)
        logger.info("kvtier: vLLM %s; %s", vllm.__version__, native.describe())
        before = Namespace.of(identity.facts_before_start(self._vllm_config, weights))
        logger.info("kvtier: identity %s, before the start %s", context.namespace.digest.hex(), before.digest.hex())
        for fact in context.namespace.facts:
            logger.debug("kvtier: identity: %s: %s", *fact)
        if cold := manager.why_cold():
            logger.info("kvtier: cold because %s", cold)
        return SchedulerSide(
            config,
            manager,
            context.namespace,
            block_tokens=self._vllm_config.cache_config.block_size,
            ranks=chunk.ranks,
            loads=self._kv_transfer_config.is_kv_consumer,
            stores=self._kv_transfer_config.is_kv_producer,
            observe=self._registry.observe,
            recorder=recorder,
        )

    # -- the scheduler's half ----------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        if self._refusal:
            logger.info("kvtier: %s: hit 0 of %d tokens: %s", request.request_id, request.num_tokens, self._refusal)

    @guarded((0, False))
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.side.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._promised.append(request.request_id)
        self._admitted(request, blocks, num_external_tokens)

    @guarded()
    def _admitted(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self.side.admitted(request, blocks.get_block_ids()[0], num_external_tokens)

    @guarded({})
    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[versions.CacheHitSource, int]:
        if not num_external_tokens:
            return {}
        media = {tier.name: tier.config.medium for tier in self.config.tiers}
        return as_vllm_says(self.side.sources(request.request_id), media)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        plan = self._plan(scheduler_output) or StepPlan(failed_loads=tuple(self._promised))
        self._promised.clear()
        return plan

    @guarded()
    def _plan(self, scheduler_output: SchedulerOutput) -> StepPlan:
        return self.side.plan(scheduler_output)

    @guarded()
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self.side.progress(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @guarded((False, None))
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.side.finished(request)
        return False, None

    @guarded(False)
    def has_pending_push_work(self) -> bool:
        return self.side.busy()

    @guarded(True)
    def reset_cache(self) -> bool:
        """The weights may be others now. False if a request still loads what was stored before.

        vLLM calls this for new weights, and for each sleep and pause during which they may be changed.
        """
        if self.config.on_reset == "keep":
            logger.info("kvtier: vLLM reset its caches; what is stored is kept: on_reset is keep")
            return True
        logger.info("kvtier: vLLM reset its caches; what is stored is forgotten, since weights may be others now")
        return self.side.invalidate_all()

    # -- a worker's half -----------------------------------------------------------------------------------

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        plan: StepPlan = connector_metadata
        self._awaited.update(request_id for request_id, _ in plan.loads)
        self._awaited.update(plan.failed_loads)

    @guarded()
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Called before the step touches a page, and before any connector does."""
        self.side.attach(kv_connector_metadata)
        self.side.fence(kv_connector_metadata)

    @guarded()
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        # vLLM's second model runner has no such context any more, and says in kwargs what it computed.
        idle = not kwargs and forward_context.attn_metadata is None
        self.side.load(self._connector_metadata, idle=idle)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: what a forward needs has been loaded before it is scheduled."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Whole pages are stored, after the forward."""

    @guarded()
    def wait_for_save(self) -> None:
        self.side.store(self._connector_metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        loaded = self._loaded()
        if loaded is None:
            loaded = set(self._awaited), set(self._awaited)
        ended, failed = loaded
        self._awaited -= ended
        return KVConnectorTransferResults(finished_recving=ended, failed_recving=failed)

    @guarded()
    def _loaded(self) -> tuple[set[str], set[str]]:
        return self.side.loaded()

    @guarded()
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self.side.progress()

    # -- both ------------------------------------------------------------------------------------------------

    @guarded()
    def shutdown(self) -> None:
        self.side.close()
        self.side = None

    def _disable(self) -> None:
        """Of a half that failed. Whoever waits for a load is told that it failed: `_promised` and `_awaited`."""
        side, self.side = self.side, None
        self._refusal = "kvtier failed before; see the log"
        if isinstance(side, WorkerSide) and run(side.close).error is not None:
            logger.error("kvtier: a copy may still be under way")
