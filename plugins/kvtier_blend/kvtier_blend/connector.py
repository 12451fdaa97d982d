"""`KVTierBlendConnector`: kvtier's connector, which also moves KV to other places if a request allows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvtier_blend.arranger import Arranger
from kvtier_blend.blends import Blends
from kvtier_blend.link_pass import runner_of_caller
from kvtier_blend.messages import BlendPlanMetadata, BlendProgressMetadata
from kvtier_blend.settings import SETTINGS, BlendIdentifier, asks, is_apart, read_settings
from kvtier_core.engine.messages import WorkerProgress
from kvtier_core.engine.scheduler.side import SchedulerSide
from kvtier_core.engine.worker.side import WorkerSide
from kvtier_core.layouts import ChunkLayout
from kvtier_core.types import ChunkKey
from kvtier_core.work.io_pool import run
from kvtier_vllm.connector import KVTierConnector, guarded
from kvtier_vllm.metrics import tokens_by_source
from kvtier_vllm.versions import CacheHitSource


class KVTierBlendConnector(KVTierConnector):
    """Also gives a request KV that is not of its prefix, if the request and its ``cache_salt`` say so.

    What such a request gets is approximate: its answer may differ. Requests of other salts are served as without it.
    """

    settings = frozenset({SETTINGS})
    identifier = BlendIdentifier
    blends: type[Blends] = Blends  #: the class that decides which requests are blended

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig):
        """Raises ConfigError if the configuration is wrong or does not suit the engine."""
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = read_settings(self._kv_transfer_config.kv_connector_extra_config or {})
        self._blends: Blends  # scheduler: once it has a side
        self._runner: Any = None  # worker: vLLM's model runner
        self._kv_caches: dict[str, torch.Tensor] = {}  # worker
        self._arranger: Arranger | None = None  # worker: if its test found nothing
        self._fault: str | None = None  # worker: of the test, until it is reported
        self._is_tested = False  # worker

    # -- the scheduler's connector -----------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Open the stack, as kvtier's connector does."""
        super().bind_kv_cache_manager(kv_cache_manager)
        if isinstance(self.side, SchedulerSide):
            block_tokens = self._vllm_config.cache_config.block_size
            self._blends = self.blends(self._settings, self.side, block_tokens, self.config.load_wait)
            self.side.path_listeners.append(self._learn)

    def _learn(self, request_id: str, keys: Sequence[ChunkKey], first: int) -> None:
        self._blends.learn(self._requests.view(self._requests.request(request_id)), keys, first)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """As kvtier's connector, with the tokens that can be blended after those that are exact."""
        tokens, _ = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if tokens is not None and asks(request):
            more = self._offered(request, tokens)
            tokens = None if more is None else tokens + more
        return tokens, bool(tokens)

    @guarded(SchedulerSide, 0)
    def _offered(self, side: SchedulerSide, request: Request, exact: int) -> int | None:
        return self._blends.offer(self._requests.view(request), exact, is_apart=is_apart(request))

    @guarded(SchedulerSide)
    def _admitted(self, side: SchedulerSide, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        tables = self._tables.of_request(blocks.get_block_ids())
        view = self._requests.view(request)
        exact = self._blends.admitted(view, tables, num_external_tokens, is_apart=is_apart(request))
        if exact:
            self._requests.note_load(request.request_id, exact)

    @guarded(SchedulerSide, {})
    def get_external_cache_hit_sources(
        self, side: SchedulerSide, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """The sources of the tokens of the load that was just admitted, for vLLM's metrics; also of blended tokens."""
        if not num_external_tokens:
            return {}
        return tokens_by_source(self._blends.sources(request.request_id), side.manager.media)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """The plan of a step for the worker, with orders for the requests that are blended."""
        plan = super().build_connector_meta(scheduler_output).plan
        if not isinstance(self.side, SchedulerSide):
            return BlendPlanMetadata(plan)
        planned, impossible = self._blends.take_planned()
        loads = tuple(load for _, load in planned)
        plan = attrs.evolve(plan, loads=(*plan.loads, *loads), failed_loads=(*plan.failed_loads, *impossible))
        return BlendPlanMetadata(plan, tuple(order for order, _ in planned))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Pass the progress of the worker to the scheduler side."""
        super().update_connector_output(connector_output)
        self._note(connector_output)

    @guarded(SchedulerSide)
    def _note(self, side: SchedulerSide, output: KVConnectorOutput) -> None:
        metadata = output.kv_connector_worker_meta
        if isinstance(metadata, BlendProgressMetadata):
            self._blends.tested(metadata.fault)
        self._blends.ended(output.finished_recving or (), output.failed_recving or ())

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As kvtier's connector."""
        if isinstance(self.side, SchedulerSide):
            self._blends.finished(request.request_id)
        return super().request_finished_all_groups(request, block_ids)

    # -- the worker's connector ----------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Inspect the pages, as kvtier's connector does."""
        self._runner, self._kv_caches = runner_of_caller(), kv_caches
        super().register_kv_caches(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """As kvtier's connector. With the first plan, before any page holds KV, test whether this engine can blend."""
        super().handle_preemptions(kv_connector_metadata)
        if kv_connector_metadata.plan.layout is not None and not self._is_tested:
            self._test(kv_connector_metadata.plan.layout)

    @guarded(WorkerSide)
    def _test(self, side: WorkerSide, layout: ChunkLayout) -> None:
        self._is_tested = True
        made = run(lambda: Arranger(self._vllm_config, self._runner, self._kv_caches, layout))
        self._arranger = made.value if made.error is None else None
        self._fault = "" if made.error is None else str(made.error) or type(made.error).__name__

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Receive the plan of the step."""
        super().bind_connector_metadata(connector_metadata)
        if self._arranger:
            self._arranger.begin(connector_metadata.orders)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Requests whose load ended, blended ones when their KV is complete."""
        results = super().get_transfer_results(finished_req_ids)
        return self._arranger.results(results) if self._arranger else results

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """This worker's report after the step, once with the result of its test."""
        metadata = super().build_connector_worker_meta()
        fault, self._fault = self._fault, None
        if fault is None:
            return metadata
        return BlendProgressMetadata(metadata.progress if metadata else WorkerProgress(), fault)
