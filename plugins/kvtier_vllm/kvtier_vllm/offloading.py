"""`KVTier`: a secondary tier of vLLM's own `OffloadingConnector`, which keeps its chunks in kvtier's store tiers.

vLLM loads it by name (docs/vllm-offloading.md) and calls it on the scheduler's thread; it waits for no store. Its keys
are vLLM's block hashes, which cover tokens and salts, but not the weights: everything else that KV depends on is in the
namespace, or the engine is refused.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import attrs
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.platforms import current_platform
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvtier_core.config.load import load_config
from kvtier_core.config.model import IdentityConfig
from kvtier_core.config.registry import Registry
from kvtier_core.errors import ConfigError, Problem
from kvtier_core.types import Namespace
from kvtier_vllm import layout, log, speculation
from kvtier_vllm.identity import model_weights, namespace, settings
from kvtier_vllm.identity.settings import UnidentifiedError
from kvtier_vllm.weight_watch import follow_calls

try:
    from kvtier_hosts.pages import PageStore, Result
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"{error}; pip install 'kvtier[hosts]'") from error

logger = logging.getLogger("kvtier")

#: Fields of vLLM's normalized configuration that say nothing about the content of a chunk.
_HARMLESS = ("extra_config", "engine_id", "enable_kv_cache_events")
#: Hashes for which two prompts with the same key cannot be found.
_STRONG_HASHES = ("sha256", "sha256_cbor")


@attrs.frozen
class _Since:
    """Kept by vLLM with a request: its KV is that of this epoch."""

    epoch: int


class KVTier(SecondaryTierManager):
    """Chunks of vLLM's CPU memory, stored, found and verified by a `PageStore`."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        config: str | Mapping[str, Any],
        backpressure_detector: Any = None,
    ):
        """``config`` is the path of a configuration file, or its keys.

        Raises ConfigError, also for an engine with a feature on which KV depends and which vLLM's keys do not cover.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        log.attach()
        stack = load_config(config, Registry.discover(), label="secondary_tiers")
        vllm_config, kv_cache_config = _of_caller()
        if reason := _refusal(vllm_config, kv_cache_config):
            raise _refused(reason)
        facts = _facts(vllm_config, kv_cache_config, offloading_spec.config, stack.identity)
        replica, replicas = layout.replica_of(vllm_config.parallel_config)
        self._keeps = stack.on_reset == "keep"
        self._memory = primary_kv_view.cast("B")
        self._epoch = 0
        self._jobs: dict[int, TransferJob] = {}  # by ticket
        self._questions: dict[int, tuple[str, Sequence[OffloadKey]]] = {}  # by ticket: the request, and its keys
        self._asking: dict[str, list[OffloadKey]] = {}  # by request: what the end of this step asks for
        self._answers: dict[str, dict[OffloadKey, bool | None]] = {}  # by request; None: not answered yet
        self._ended: list[JobResult] = []
        follow = offloading_spec.kv_events_config.enable_kv_cache_events
        self._store = PageStore(stack, facts, self.block_size_bytes, replica=replica, replicas=replicas, follow=follow)
        follow_calls(_workers_were_called)

    # -- requests ----------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        req_context.set_state(_Since(self._epoch))
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """RETRY until the store has answered, which takes no longer than ``load_wait``."""
        if not self._is_current(req_context):
            return LookupResult.MISS
        answers = self._answers.setdefault(req_context.req_id, {})
        if key not in answers:
            answers[key] = None
            self._asking.setdefault(req_context.req_id, []).append(key)
        known = answers[key]
        return LookupResult.RETRY if known is None else LookupResult.HIT if known else LookupResult.MISS

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        for request, keys in self._asking.items():
            self._questions[self._store.contains(keys)] = request, keys
        self._asking.clear()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._answers.pop(req_context.req_id, None)
        self._asking.pop(req_context.req_id, None)

    def _is_current(self, req_context: ReqContext) -> bool:
        """Has the request begun since the weights may last have changed? Otherwise its KV may be of both."""
        return req_context.get_state(_Since) == _Since(self._epoch)

    # -- transfers ---------------------------------------------------------------------------------

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, self._store.put)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, self._store.get)

    def _submit(self, job: TransferJob, begin: Callable[[Sequence[bytes], Sequence[memoryview]], int]) -> None:
        within = len(self._memory) // self.block_size_bytes
        if not self._is_current(job.req_context) or not all(0 <= int(number) < within for number in job.chunk_ids):
            self._ended.append(JobResult(job.job_id, success=False))
            return
        size = self.block_size_bytes
        chunks = [self._memory[int(number) * size : (int(number) + 1) * size] for number in job.chunk_ids]
        self._jobs[begin(list(job.keys), chunks)] = job

    def get_finished_jobs(self) -> Iterable[JobResult]:
        for result in self._store.poll():
            if job := self._jobs.pop(result.ticket, None):
                self._ended.append(self._end(job, result))
                continue
            request, keys = self._questions.pop(result.ticket)
            if request in self._answers:
                self._answers[request].update((key, key in result.keys) for key in keys)
        ended, self._ended = self._ended, []
        return ended

    def _end(self, job: TransferJob, result: Result) -> JobResult:
        lost = [key for key in job.keys if key not in result.keys]
        if job.is_promotion and job.req_context.req_id in self._answers:  # it computes them, and asks no more
            self._answers[job.req_context.req_id].update(dict.fromkeys(lost, False))
        good = [key for key in job.keys if key in result.keys]
        nbytes = len(good) * self.block_size_bytes
        return JobResult(job.job_id, not lost, good, transfer_time=result.seconds, transfer_bytes=nbytes)

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Chunks that came to kvtier's tiers, and chunks that left all of them. vLLM names their blocks to routers."""
        for came, changes in itertools.groupby(self._store.changes(), key=lambda change: change[1]):
            keys = [OffloadKey(page) for page, _ in changes]
            yield OffloadingEvent(keys, self.medium, removed=not came, removal_expected=True)

    # -- the life of the engine --------------------------------------------------------------------

    def drain_jobs(self) -> None:
        """vLLM's last call before it resets its caches, for new weights, a sleep or a pause; it does not say which."""
        if self._keeps:
            self._store.cancel()
        else:
            self.forget("its caches are reset")
        self._store.changes()  # vLLM has published that all is cleared, and no longer knows the blocks of these

    def forget(self, why: str) -> None:
        """End all jobs, and find nothing that was stored before: the weights may have changed."""
        logger.info("kvtier: %s: stored KV is invalidated", why)
        self._epoch += 1
        self._store.renew()

    def workers_were_called(self, name: str) -> None:
        """A call of the workers may have changed the weights."""
        if not self._keeps:
            self.forget(f"{name} was called on the workers")

    def shutdown(self) -> None:
        self._store.close()
        self._jobs.clear()
        self._memory = self._primary_kv_view = memoryview(b"")  # vLLM unmaps it


def _workers_were_called(engine: EngineCore, name: str) -> None:
    """Notify the tiers of this engine."""
    connector = getattr(getattr(engine, "scheduler", None), "connector", None)
    for each in getattr(connector, "_connectors", [connector]):  # a MultiConnector has several
        if isinstance(each, OffloadingConnector):
            for tier in getattr(each.scheduler.manager, "secondary_tiers", ()):
                if isinstance(tier, KVTier):
                    tier.workers_were_called(name)


# -- identity ----------------------------------------------------------------------------------------------


def _of_caller() -> tuple[VllmConfig, KVCacheConfig]:
    """The configuration of the engine whose connector makes this tier, which gets an extract. Raises ConfigError."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame:
        connector = frame.f_locals.get("self")
        if isinstance(connector, OffloadingConnector):
            return connector._vllm_config, connector._kv_cache_config
        frame = frame.f_back
    raise _refused("only vLLM's OffloadingConnector says which engine it is")


def _refused(reason: str) -> ConfigError:
    why = f"KVTier cannot serve this engine: {reason}"
    return ConfigError([Problem("kv_connector_extra_config", "$.secondary_tiers", why)])


def _refusal(config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """Why this engine cannot be served; empty if it can. A tier sees keys, but no requests."""
    model, algorithm = config.model_config, config.cache_config.prefix_caching_hash_algo
    if why := layout.refusal(config, kv_cache_config):
        return why
    if config.lora_config is not None:
        return "vLLM's keys contain the name of an adapter, not its content; KVTierConnector serves adapters"
    if model.is_multimodal_model:
        return "vLLM's keys contain names of items, which users may choose; KVTierConnector serves images"
    if model.enable_prompt_embeds:
        return "prompts given as embeddings are not visible here"
    if model.runner_type != "generate":
        return "pooling parameters that a model may read are not in vLLM's keys"
    if speculation.draft_model(config) is not None:
        return "the KV of a draft model may depend on tokens that are not in vLLM's keys"
    if algorithm not in _STRONG_HASHES:
        return f"two prompts with the same {algorithm} can be constructed; set prefix_caching_hash_algo to sha256"
    return ""


def _facts(
    config: VllmConfig, kv_cache_config: KVCacheConfig, chunks: OffloadingConfig, asked: IdentityConfig
) -> Namespace:
    """All that the content of a chunk depends on, except what its key covers. Raises ConfigError."""
    weights = model_weights.identify_all(config, asked)
    if isinstance(weights, model_weights.Unknown):
        raise _refused(weights.reason)
    if weights.warning:
        logger.warning("kvtier: %s", weights.warning)
    try:
        return Namespace.of(
            {
                **namespace.facts_before_start(config, weights.fact),
                **settings.of_configuration(config, started=True),
                **namespace.facts_of_code(config, asked),
                **layout.facts_of_caches(config, kv_cache_config, current_platform.device_type),
                **_facts_of_chunks(chunks),
            }
        )
    except UnidentifiedError as error:
        raise _refused(str(error)) from error


def _facts_of_chunks(chunks: OffloadingConfig) -> dict[str, object]:
    """How vLLM makes a chunk of blocks and ranks. The data parallel rank and the path of the model do not matter."""
    parallel = dataclasses.replace(
        chunks.parallel, data_parallel_index=0, data_parallel_size=1, data_parallel_rank_local=None
    )
    plain = dataclasses.replace(chunks, parallel=parallel, model=dataclasses.replace(chunks.model, name=""))
    names = [field.name for field in dataclasses.fields(plain) if field.name not in _HARMLESS]
    return {f"vLLM's chunks, {name}": getattr(plain, name) for name in names}
