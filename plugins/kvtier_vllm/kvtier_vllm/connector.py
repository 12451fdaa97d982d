"""`KVTierConnector`: what vLLM calls. It translates, and leaves every decision to the scheduler or the worker side.

A side that raises an exception is disabled, the reason is logged, and the engine continues without it.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from types import UnionType
from typing import Any, TypeVar

import attrs
import torch
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvtier_core.config.registry import Registry
from kvtier_core.engine.messages import Refusal, StepPlan, WorkerProgress, WorkerReport
from kvtier_core.engine.scheduler.side import SchedulerSide
from kvtier_core.engine.worker.side import WorkerSide
from kvtier_core.outside import printable
from kvtier_core.work.io_pool import run
from kvtier_vllm import groups, kv_events, layout, log, speculation, versions
from kvtier_vllm import worker_reports as reports
from kvtier_vllm.groups import Tables
from kvtier_vllm.identity import model_weights
from kvtier_vllm.metrics import KVTierPromMetrics, KVTierStats, tokens_by_source
from kvtier_vllm.requests.disaggregation import handed_over
from kvtier_vllm.requests.identity import Identifier
from kvtier_vllm.requests.tracker import RequestTracker
from kvtier_vllm.startup import open_side, read_config
from kvtier_vllm.steps import StepPlanMetadata, WorkerProgressMetadata, result_of, step_of
from kvtier_vllm.weight_watch import WeightWatch, follow_calls, models_of_caller

logger = logging.getLogger("kvtier")

Side = SchedulerSide | WorkerSide
_Result = TypeVar("_Result")


def guarded(
    kind: type[Side] | UnionType, default: Any = None
) -> Callable[[Callable[..., _Result]], Callable[..., _Result]]:
    """Decorates a method of the connector that needs a side of this kind, which becomes its first argument.

    It returns ``default`` without one, or if it raises.
    """

    def wrap(method: Callable[..., _Result]) -> Callable[..., _Result]:
        @functools.wraps(method)
        def guard(self: KVTierConnector, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(side := self.side, kind):
                return default
            try:
                return method(self, side, *args, **kwargs)
            except Exception:
                logger.exception("kvtier: %s failed; the engine continues without kvtier", method.__name__)
                self.disable()
                return default

        return guard

    return wrap


class KVTierConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps the KV of prompts in a stack of tiers that YAML describes, and loads it for later prompts.

    vLLM makes one for its scheduler and one in each worker process; each has the methods of both.
    """

    settings: Set[str] = frozenset()  #: keys of ``kv_connector_extra_config`` that are not the stack's
    identifier: type[Identifier] = Identifier  #: what identifies requests

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig):
        """Raises ConfigError if the configuration is wrong or does not suit the engine."""
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        log.attach()
        registry = Registry.discover()
        if role is KVConnectorRole.SCHEDULER:
            registry.log_problems()
        extra = self._kv_transfer_config.kv_connector_extra_config or {}
        stack = {key: value for key, value in extra.items() if key not in self.settings}
        self.config = read_config(stack, registry)
        self.side: Side | None = None
        self._requests: RequestTracker  # scheduler: once it has a side
        self._tables: Tables  # scheduler: once it has a side
        self._stats = KVTierStats()  # scheduler: since the last report
        self._kv_events: kv_events.KVEvents | None = None  # scheduler
        self._reports: Sequence[WorkerReport] | Refusal = ()  # scheduler
        self._promised: list[str] = []  # scheduler: requests whose load is in no plan yet
        self._awaited: set[str] = set()  # worker: requests whose load has not ended
        self._unended: set[int] = set()  # worker: store jobs that are not reported as ended
        self._off = ""  # worker: why it does nothing any more
        self._refusal = ""
        if refusal := layout.refusal(vllm_config, kv_cache_config):
            self._refuse(refusal)
        else:
            self.config.check_engine(groups.scheduler_block(kv_cache_config, vllm_config.parallel_config))
        if role is KVConnectorRole.SCHEDULER and (warning := versions.warning()):
            logger.warning("kvtier: %s", warning)
        # Two kvtier connectors in one MultiConnector have the same name; their reports are equal.
        self._engine = f"{self._kv_transfer_config.engine_id} {vllm_config.instance_id}"
        self._ranks = vllm_config.parallel_config.world_size
        if role is KVConnectorRole.SCHEDULER and not self._refusal:
            self._reports = reports.collect(self._engine, self._ranks)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a store that is dropped is only a later miss."""
        return False

    # -- start-up: the workers report what they found, then the scheduler's connector opens the stack -----

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Inspect the pages of this worker and report them to the scheduler's connector."""
        rank = self._vllm_config.parallel_config.rank
        if self._refusal:
            return self._report(rank, WorkerReport("", (), (), self._refusal))  # the scheduler sees other layers
        if rank == 0:
            model_weights.identify_ahead(self._vllm_config, self.config.identity)
        models = models_of_caller()
        pages, report = layout.inspect_pages(self._vllm_config, self._kv_cache_config, kv_caches, self.config, models)
        # Inside a MultiConnector its settings apply, and vLLM passes them to workers only.
        whole = get_current_vllm_config_or_none()
        if whole and whole.kv_transfer_config:
            policy = whole.kv_transfer_config.kv_load_failure_policy
            alone = whole.kv_transfer_config.kv_connector == self._kv_transfer_config.kv_connector
            report = attrs.evolve(report, failure_policy=policy, is_alone=alone)
        self._report(rank, report)
        if pages is not None:
            caches = layout.by_group(self._kv_cache_config, kv_caches)
            # vLLM zeroes and copies blocks of such models by itself, at the very beginning of a step.
            early = self._kv_cache_config.needs_kv_cache_zeroing
            tensors = list(caches.values())
            arenas, stores = self.config.arenas, self.config.stores
            weights = WeightWatch(models, experts_move=self._vllm_config.parallel_config.enable_eplb)
            self.side = WorkerSide(arenas, rank, pages, tensors, stores=stores, fence_at_once=early, weights=weights)

    def _report(self, rank: int, report: WorkerReport) -> None:
        try:
            reports.leave(self._engine, rank, report)
        except OSError as error:
            logger.warning(
                "kvtier: this worker cannot report its pages to the scheduler, so the engine will not be served: %s",
                error,
            )

    @guarded(WorkerSide)
    def unregister_kv_caches(self, side: WorkerSide) -> None:
        """vLLM 0.33: called before a sleep. No page is touched until `restore_kv_caches`; addresses stay the same."""
        side.suspend()

    @guarded(WorkerSide)
    def restore_kv_caches(self, side: WorkerSide) -> None:
        """vLLM 0.33: called after a sleep. Copies may begin again."""
        side.resume()

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Ignored: the metadata is that of a connector beside this one."""

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Open the stack: vLLM's last call at start-up, when every connector has read the workers' reports."""
        super().bind_kv_cache_manager(kv_cache_manager)
        reports.remove(self._engine, self._ranks)
        if self._refusal:
            return
        if isinstance(self._reports, Refusal):
            return self._refuse(self._reports.reason)
        opened = open_side(self._vllm_config, self._kv_transfer_config, self.config, self._reports)
        if isinstance(opened, Refusal):
            return self._refuse(opened.reason)
        # Two connectors that answer to the same words would end the engine.
        is_alone = all(report.is_alone for report in self._reports)
        # In those of vLLM 0.32 for other devices than GPUs, "no adapter" is number -1, the last one.
        leak = self._vllm_config.lora_config is not None and not current_platform.is_cuda_alike()
        identifier = self.identifier(adapters_leak=leak)
        self._requests = RequestTracker(identifier, reads_handovers=is_alone, defaults=self.config.requests)
        self._tables = Tables.of(self._kv_cache_config, self._vllm_config.parallel_config)
        self.side = opened
        follow_calls(_workers_were_called)
        opened.events.readings.listeners.append(self._stats.add)
        if kv_events.wanted(self._vllm_config):
            self._tell_routers(opened, kv_cache_manager)

    def _tell_routers(self, side: SchedulerSide, kv_cache_manager: KVCacheManager) -> None:
        hash_tokens = self._kv_cache_config.hash_block_size
        whole = groups.whole(self._kv_cache_config, self._vllm_config.parallel_config)
        kinds = versions.kinds_in_events(kv_cache_manager, self._kv_cache_config)
        published = [kv_events.Group(each, size, kinds[each]) for each, size in whole.items() if not size % hash_tokens]
        if obstacle := side.loads_nothing or kv_events.obstacle(published):
            logger.info("kvtier: vLLM's KV events do not cover these tiers: %s", obstacle)
            return
        tokens = side.chunk_tokens, hash_tokens
        self._kv_events = events = kv_events.KVEvents(side.manager, *tokens, published, kv_cache_manager.block_pool)
        side.events.listeners.append(events.observe)
        side.path_listeners.append(
            lambda request_id, keys, first: events.name(self._requests.request(request_id), keys, first)
        )

    def _refuse(self, reason: str) -> None:
        self._refusal = reason
        if self.role is KVConnectorRole.SCHEDULER:
            logger.warning("kvtier: this engine is not served: %s", reason)

    # -- the scheduler's connector -----------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """A request joins vLLM's queue. If this engine is not served, its log line says why."""
        if self._refusal and self.config.log_requests in ("all", "misses"):
            name = printable(request.request_id)
            logger.info("kvtier: %s: %d tokens: 0 from kvtier (%s)", name, request.num_tokens, self._refusal)
        self._arrived(request)

    @guarded(SchedulerSide)
    def _arrived(self, side: SchedulerSide, request: Request) -> None:
        side.arrived(self._requests.view(request))

    @guarded(SchedulerSide, (0, False))
    def get_num_new_matched_tokens(
        self, side: SchedulerSide, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many more tokens can be loaded, asynchronously; None: ask again in the next step."""
        if side.still_waits(request.request_id, request.num_tokens, num_computed_tokens):
            return None, False
        view = self._requests.view(request)
        if bypass := self._requests.check_cached(request.request_id, num_computed_tokens):
            side.track(view)
            side.bypass(request.request_id, bypass)
        tokens = side.match(view, num_computed_tokens)
        self._tables.keep_states_behind(request, side.shared_tokens(request.request_id))
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """vLLM allocated a request's blocks, and waits for a load if there are external tokens."""
        if num_external_tokens:
            self._promised.append(request.request_id)
        self._admitted(request, blocks, num_external_tokens)

    @guarded(SchedulerSide)
    def _admitted(self, side: SchedulerSide, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        tables = self._tables.of_request(blocks.get_block_ids())
        side.admitted(self._requests.view(request), tables, num_external_tokens)
        if num_external_tokens:
            self._requests.note_load(request.request_id, num_external_tokens)

    @guarded(SchedulerSide, {})
    def get_external_cache_hit_sources(
        self, side: SchedulerSide, request: Request, num_external_tokens: int
    ) -> dict[versions.CacheHitSource, int]:
        """The sources of the tokens of the load that was just admitted, for vLLM's metrics."""
        if not num_external_tokens:
            return {}
        return tokens_by_source(side.sources(request.request_id), side.manager.media)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """The plan of a step for the workers. Without a scheduler side it fails the loads that vLLM waits for."""
        plan = self._plan(scheduler_output) or StepPlan(failed_loads=tuple(self._promised))
        self._promised.clear()
        return StepPlanMetadata(plan)

    @guarded(SchedulerSide)
    def _plan(self, side: SchedulerSide, scheduler_output: SchedulerOutput) -> StepPlan:
        for request_id, bypass in self._requests.follow(scheduler_output).items():
            side.bypass(request_id, bypass)
        scheduled = self._requests.scheduled(scheduler_output)
        draft = speculation.draft_model(self._vllm_config)
        plan = side.plan(step_of(scheduler_output, scheduled, self._tables, draft))
        if self._kv_events:
            self._kv_events.keep(side.storing)
        return plan

    @guarded(SchedulerSide)
    def update_connector_output(self, side: SchedulerSide, connector_output: KVConnectorOutput) -> None:
        """Pass the progress of the workers to the scheduler side."""
        epoch = side.epoch
        side.progress(result_of(connector_output))
        if self._kv_events and (epoch != side.epoch or side.loads_nothing):
            self._kv_events.clear()

    @guarded(SchedulerSide)
    def get_kv_connector_stats(self, side: SchedulerSide) -> KVConnectorStats | None:
        """The metrics since the last call. vLLM calls the scheduler's connector once after each step."""
        side.step_ended()
        return self._stats.take()

    def take_events(self) -> Iterable[KVCacheEvent]:
        """The blocks that came to a tier or left it, for subscribers to vLLM's events."""
        return self._kv_events.take() if self._kv_events else ()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """The report that another process made of `get_kv_connector_stats`."""
        return KVTierStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> KVConnectorPromMetrics | None:
        """The metrics at ``/metrics``, in vLLM's front end."""
        return KVTierPromMetrics(*args)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished_all_groups`, for an engine with one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    @guarded(SchedulerSide, (False, None))
    def request_finished_all_groups(
        self, side: SchedulerSide, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended. Its blocks may be freed immediately: what another engine needs of it is in the arena."""
        if view := self._requests.finish(request):
            kept = side.finished(view, str(request.get_finished_reason() or "abort"))
            if view.continued_elsewhere:
                return False, handed_over(kept, self._kv_transfer_config.engine_id, request.request_id)
        return False, None

    @guarded(SchedulerSide, False)
    def has_pending_push_work(self, side: SchedulerSide) -> bool:
        """Must vLLM keep stepping although no request is unfinished?"""
        return side.busy()

    @guarded(SchedulerSide, True)
    def reset_cache(self, side: SchedulerSide) -> bool:
        """Invalidate what is stored: the weights may have changed. False if a request still loads some of it.

        vLLM calls this for new weights, and for each sleep and pause during which they may be changed.
        """
        if self.config.on_reset == "keep":
            logger.info("kvtier: vLLM reset its caches; stored KV is kept: on_reset is keep")
            return True
        logger.info("kvtier: vLLM reset its caches; stored KV is invalidated: weights may have changed")
        return self._invalidate(side)

    @guarded(SchedulerSide)
    def workers_were_called(self, side: SchedulerSide, name: str) -> None:
        """Invalidate what is stored: this call of the workers may have changed the weights."""
        if self.config.on_reset != "keep":
            logger.info("kvtier: %s was called on the workers; stored KV is invalidated", name)
            self._invalidate(side)

    def _invalidate(self, side: SchedulerSide) -> bool:
        ended = side.invalidate_all()
        if self._kv_events:
            self._kv_events.clear()
        return ended

    # -- a worker's connector ------------------------------------------------------------------------------

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Receive the plan of the step."""
        super().bind_connector_metadata(connector_metadata)
        plan: StepPlan = connector_metadata.plan
        self._awaited.update(request_id for request_id, _ in plan.loads)
        self._awaited.update(plan.failed_loads)
        self._unended.update(job for job, _ in plan.stores)
        self._mark()

    @guarded(WorkerSide)
    def _mark(self, side: WorkerSide) -> None:
        """With several connectors, all have fenced by now: `handle_preemptions` of the last comes before this."""
        side.mark()

    @guarded(WorkerSide)
    def handle_preemptions(self, side: WorkerSide, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Called before the step touches a page, and before any connector does."""
        side.watch_weights(kv_connector_metadata.plan)
        side.attach(kv_connector_metadata.plan)
        side.fence(kv_connector_metadata.plan)

    @guarded(WorkerSide)
    def start_load_kv(self, side: WorkerSide, forward_context: Any, **kwargs: Any) -> None:
        """Begin the step's loads."""
        # vLLM's second model runner no longer has such a context, and passes what it computed in kwargs.
        idle = not kwargs and forward_context.attn_metadata is None
        side.load(self._connector_metadata.plan, idle=idle)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: vLLM schedules a request after its load has ended."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to save yet: whole pages are stored, after the forward."""

    @guarded(WorkerSide)
    def wait_for_save(self, side: WorkerSide) -> None:
        """Begin the step's stores. The forward has been enqueued."""
        side.store(self._connector_metadata.plan)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Requests whose load ended. Without a worker side, all awaited loads have failed."""
        loaded = self._loaded()
        if loaded is None:
            loaded = set(self._awaited), set(self._awaited)
        ended, failed = loaded
        self._awaited -= ended
        return KVConnectorTransferResults(finished_recving=ended, failed_recving=failed)

    @guarded(WorkerSide)
    def _loaded(self, side: WorkerSide) -> tuple[set[str], set[str]]:
        return side.loaded()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """This worker's report after the step; None if there is none. Without a worker side, all stores have failed."""
        progress = self._progress()
        if progress:
            self._unended.difference_update(progress.ended)
        elif self._off:
            ended, self._unended = Counter(self._unended), set()
            progress = WorkerProgress(ended, ended, off=self._off)
        return progress and WorkerProgressMetadata(progress)

    @guarded(WorkerSide)
    def _progress(self, side: WorkerSide) -> WorkerProgress | None:
        return side.progress()

    # -- both ------------------------------------------------------------------------------------------------

    @guarded(Side)
    def shutdown(self, side: Side) -> None:
        """Close this connector's side."""
        side.close()
        self.side = None

    def disable(self) -> None:
        """Drop a side that failed. Loads that vLLM waits for are reported as failed: `_promised` and `_awaited`."""
        side, self.side = self.side, None
        self._refusal = "kvtier failed before; see the log"
        if self._kv_events:
            self._kv_events.clear()
        if isinstance(side, SchedulerSide):
            side.abandon()
        if isinstance(side, WorkerSide):
            self._off = f"rank {self._vllm_config.parallel_config.rank} failed; see its log"
            if run(side.close).error is not None:
                self._unended.clear()  # their slots are never free: something may still write to them
                logger.error(
                    "kvtier: unfinished copies of this worker may still use its pages; their results are discarded"
                )


def _workers_were_called(engine: EngineCore, name: str) -> None:
    """Notify the scheduler's connectors of this engine."""
    connector = getattr(getattr(engine, "scheduler", None), "connector", None)
    for each in getattr(connector, "_connectors", [connector]):  # a MultiConnector has several
        if isinstance(each, KVTierConnector):
            each.workers_were_called(name)
