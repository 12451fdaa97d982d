"""The scheduler's half: knows keys and requests, owns the stack, sees no bytes."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import attrs
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvtier_core.config.model import StackConfig
from kvtier_core.engine.hints import hints_of
from kvtier_core.engine.messages import Progress, StepPlan, Transfer
from kvtier_core.engine.provenance import Provenance, table_of
from kvtier_core.engine.recorder import Recorder
from kvtier_core.engine.stores import Stores
from kvtier_core.interfaces import NO_BLOCK
from kvtier_core.stack.batches import ready_run
from kvtier_core.stack.manager import StorageManager
from kvtier_core.stack.stats import Stats
from kvtier_core.types import ChunkKey, Event, EventKind, Namespace, Presence, Slot
from kvtier_core.vllm.hit_sources import tokens_by_tier
from kvtier_core.vllm.requests.identity import Identifier, RequestIdentity
from kvtier_core.vllm.requests.names import Names

logger = logging.getLogger("vllm.kvtier")

#: For how long without any news the engine is kept stepping, in seconds.
_PATIENCE = 5.0

#: How long a step that schedules nothing waits for the threads, in seconds. The engine would only come back at
#: once and ask again, and take the GIL from them.
_A_LITTLE = 1e-3

#: Events that an operator wants to read about; the others are for counting.
_NEWS = {
    EventKind.CORRUPT: logging.WARNING,
    EventKind.IO_ERROR: logging.WARNING,
    EventKind.BREAKER_OPEN: logging.WARNING,
    EventKind.MISSING: logging.INFO,
    EventKind.BREAKER_CLOSED: logging.INFO,
}


@attrs.define
class _Tracked:
    """What is known of a request that the engine has not finished."""

    request: Request
    identity: RequestIdentity | str
    since: float
    keys: list[ChunkKey] = attrs.field(factory=list)
    saved: int = 0  #: chunks that were stored, or found stored
    preemptions: int = 0
    computed: int = 0  #: tokens that the engine had when it asked last
    known: int | None = None  #: tokens, from the first one on, whose KV is ours; None: not asked yet
    ready: list[ChunkKey] = attrs.field(factory=list)  #: READY then, from the chunk in which ``computed`` lies
    sources: Counter[str] = attrs.field(factory=Counter)  #: tokens of its last load, by tier
    waiting_since: float | None = None
    bypass: str = ""  #: why nothing is looked up for it
    reason: str = ""  #: of the last answer, for the log
    told: bool = False

    def doubt(self, why_not: Callable[..., str], *tokens: int) -> None:
        """Bypass it from here on if its KV is not, or may not be, what its keys say."""
        if not isinstance(self.identity, str) and (why := why_not(self.identity, *tokens)):
            self.identity = self.bypass = why


class SchedulerSide:
    """Every method on the scheduler's thread. That thread is the owner of the stack."""

    def __init__(
        self,
        config: StackConfig,
        manager: StorageManager,
        namespace: Namespace,
        *,
        block_tokens: int,
        ranks: int,
        loads: bool,
        stores: bool,
        observe: Callable[[Sequence[Event]], None],
        recorder: Recorder | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.manager = manager
        self.stats = Stats(clock())
        self._config = config
        self._first_epoch = self._epoch = namespace
        self._database = config.token_database.open(namespace, config.chunk_tokens)
        self._identifier = Identifier()
        self._names = Names()
        self._provenance = Provenance(block_tokens)
        self._loads, self._stores = loads, stores
        self._trial = tuple(manager.reserve_self_test_slots())  # until the self-test is over
        self._untried = ranks  # workers that have not said how their self-test went
        self._refusal = ""  # why nothing is stored or loaded any more
        self._chunk_tokens = config.chunk_tokens
        self._chunk_blocks = config.chunk_tokens // block_tokens
        self._block_tokens = block_tokens
        self._ranks = ranks
        self._handles = tuple(manager.handles)
        self._observe = observe
        self._recorder = recorder
        self._clock = clock
        self._tracked: dict[str, _Tracked] = {}
        self._planned: list[tuple[str, Transfer]] = []
        self._loading: dict[str, list[Slot]] = {}
        self._storing = Stores(manager, ranks)
        self._last_news = clock()
        self._complained = False  # that there is none

    # -- a request arrives -----------------------------------------------------------------------------

    def match(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """How many tokens beyond ``computed`` can be loaded; None: ask again. Polled freely."""
        tracked = self._track(request)
        tracked.computed, tracked.ready = computed, []
        tracked.doubt(self._names.why_not_cached, computed)
        no_role = "" if self._loads else "this engine only stores, says its kv_role"
        if no_role or self._refusal or tracked.bypass or request.skip_reading_prefix_cache:
            tracked.reason = no_role or self._refusal or tracked.bypass or "it asks for no cached prefix"
            return 0, False
        first = computed // self._chunk_tokens
        keys = self._keys(tracked, request.num_tokens)[first:]
        found = self.manager.lookup(keys)
        pending = Presence.PENDING in found or (Presence.READY in found and self._untried)
        if pending and self._may_wait(tracked):
            return None, False
        ready = ready_run(found)
        if not ready or self._untried:
            tracked.reason = self._why_not(keys, found)
            return 0, False
        tracked.ready = keys[:ready]
        return (first + ready) * self._chunk_tokens - computed, True

    def admitted(self, request: Request, block_ids: Sequence[int], tokens: int) -> None:
        """The engine gave the request its blocks, and takes ``tokens`` of what was proposed."""
        tracked = self._track(request)
        tracked.waiting_since = None
        if not request.num_computed_tokens:  # it does not come back from a load
            tracked.known = None
        self._provenance.given(block_ids, request.num_computed_tokens or tracked.computed)
        if tokens:
            self._plan_load(tracked, block_ids, tokens)
        if not tracked.told:
            tracked.told = True
            had = f" (the engine had {tracked.computed})" if tracked.computed else ""
            logger.info(
                "kvtier: %s: hit %d of %d tokens%s: %s",
                request.request_id, tokens, request.num_tokens, had, tracked.reason,
            )  # fmt: skip

    def _plan_load(self, tracked: _Tracked, block_ids: Sequence[int], tokens: int) -> None:
        first = tracked.computed // self._chunk_tokens
        end = tracked.computed + tokens
        self._names.load(tracked.identity, end)
        keys = tracked.ready[: -(-end // self._chunk_tokens) - first]
        wanted = range(tracked.computed // self._block_tokens, -(-end // self._block_tokens))
        pages = tuple(
            tuple(block_ids[block] if block in wanted else NO_BLOCK for block in self._blocks_of(chunk))
            for chunk in range(first, first + len(keys))
        )
        self._provenance.loaded(block_ids[block] for block in wanted)
        hit_sources = self.manager.hit_sources(keys)
        tracked.sources = tokens_by_tier(hit_sources, first, tracked.computed, tokens, self._chunk_tokens)
        slots = self.manager.pin(keys, _loader(tracked.request.request_id))
        self._loading[tracked.request.request_id] = slots
        self._planned.append((tracked.request.request_id, Transfer(tuple(slots), pages)))
        tracked.reason = ", ".join(
            f"{tier} {chunks * self._chunk_tokens}" for tier, chunks in Counter(hit_sources).items()
        )

    def sources(self, request_id: str) -> Mapping[str, int]:
        """Tokens of the load that was just admitted, by the tier that supplied them."""
        tracked = self._tracked.get(request_id)
        return tracked.sources if tracked else {}

    # -- a step ----------------------------------------------------------------------------------------

    def plan(self, output: SchedulerOutput) -> StepPlan:
        """What the workers shall do in this step."""
        idle = not output.total_num_scheduled_tokens
        self._take_in(self.manager.drain(_A_LITTLE) if idle else self.manager.step())
        stores_to_fence = self._storing.stores_to_fence(output, self._block_tokens)
        self._names.follow(output, self._tracked)
        stores = []
        for request_id, scheduled in output.num_scheduled_tokens.items():
            if tracked := self._tracked.get(request_id):
                stores += self._plan_store(tracked, scheduled, output)
        plan = StepPlan(
            arenas=self._handles,
            trial=self._trial,
            loads=tuple(self._planned),
            stores=tuple(stores),
            stores_to_fence=stores_to_fence,
        )
        self._planned = []
        return plan

    def _plan_store(self, tracked: _Tracked, scheduled: int, output: SchedulerOutput) -> list[tuple[int, Transfer]]:
        """The chunks that become whole in this step, as far as they are ours, if nobody keeps them yet."""
        request = tracked.request
        tracked.doubt(
            self._names.why_not_computed, request.num_computed_tokens, request.num_computed_tokens + scheduled
        )
        tracked.known = self._provenance.computed(tracked.known, request, scheduled, output)
        end = min(tracked.known, request.num_tokens)
        if not self._config.save_decode:
            end = min(end, request.num_prompt_tokens)
        whole = end // self._chunk_tokens
        if whole <= tracked.saved or isinstance(tracked.identity, str) or self._refusal or not self._stores:
            return []
        # With its last saved chunk in front, so that the first new one is known to be its child.
        first = max(0, tracked.saved - 1)
        tracked.saved = whole
        blocks = table_of(request, output)
        pages = ([blocks[block] for block in self._blocks_of(chunk)] for chunk in range(first, whole))
        return self._storing.begin(self._keys(tracked, end)[first:whole], pages)

    def progress(self, output: KVConnectorOutput) -> None:
        """What the workers did."""
        if self._provenance.holds_any(output.invalid_block_ids):
            self._disown()
        report = output.kv_connector_worker_meta
        if isinstance(report, Progress):
            self._end_trial(report.tried)
            self._storing.take_in(report)
        failed = self._loading.keys() & (output.failed_recving or ())
        for request_id in output.finished_recving or ():
            self.manager.unpin(self._loading.pop(request_id, ()), _loader(request_id))
        for request_id in failed:
            if tracked := self._tracked.get(request_id):
                tracked.bypass = "its load failed"
                tracked.told = False

    def _disown(self) -> None:
        """Trust nothing that the engine holds now: it is not stored, nor is anything that is computed on it."""
        self._provenance.forget()
        for tracked in self._tracked.values():
            tracked.known = tracked.known and 0
        self._storing.fail()

    def _end_trial(self, tried: Counter[str]) -> None:
        """Nothing is loaded before every rank has seen its bytes come back; nothing ever if one has not."""
        if not tried or not self._untried:
            return
        self._untried -= tried.total()
        if wrong := [what for what in tried if what]:
            self._refusal = f"the self-test failed: {wrong[0]}"
            logger.error("kvtier: %s. Nothing is stored or loaded.", self._refusal)
        if not self._untried:
            self.manager.release_self_test_slots()
            self._trial = ()
            if not self._refusal:
                logger.info("kvtier: self-test: every byte came back")

    # -- endings ---------------------------------------------------------------------------------------

    def finished(self, request: Request) -> None:
        """Nothing is waited for: who is given its blocks comes behind the stores of them, see
        `Stores.stores_to_fence`.
        """
        tracked = self._tracked.pop(request.request_id, None)
        if tracked and self._recorder:
            known = not isinstance(tracked.identity, str)
            self._recorder.record(
                tracked.since,
                request.num_prompt_tokens,
                request.num_output_tokens,
                self._keys(tracked, request.num_prompt_tokens) if known else (),
                str(request.get_finished_reason() or "abort"),
            )

    def busy(self) -> bool:
        """Must the engine keep stepping for what is on its way down? Not for a tier that hangs."""
        if not (self._storing or self._loading or self.manager.jobs):
            return False
        if self._clock() - self._last_news < _PATIENCE:
            return True
        if not self._complained:
            self._complained = True
            self._name_holders()
        return False

    def invalidate_all(self) -> bool:
        """Open a new epoch: nothing stored so far is found again. False if a load of it is under way."""
        self._epoch = self._first_epoch.renewed()
        self._database = self._config.token_database.open(self._epoch, self._chunk_tokens)
        self.manager.invalidate_all(self._epoch)
        for tracked in self._tracked.values():
            # What it has computed is the old epoch's, and what it will compute stands on that.
            tracked.identity = tracked.bypass = "it began before the cache was reset"
        self._disown()
        return not self._loading

    def close(self) -> None:
        if self._epoch is not self._first_epoch:
            self.manager.invalidate_all(self._first_epoch)  # no other process could find what a later epoch stored
        self._take_in(self.manager.close())
        if self._recorder:
            self._recorder.close()
        for line in self.stats.describe():
            logger.info("kvtier: in all: %s", line)
        self._name_holders()

    def _name_holders(self) -> None:
        for holder, pins in self.manager.pins_by_holder().items():
            logger.warning("kvtier: %s still holds %d slots", holder, pins)

    # -- inside ----------------------------------------------------------------------------------------

    def _track(self, request: Request) -> _Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            identity = self._identifier.identify(request)
            if request.lora_request:
                self._names.arrive(request.lora_request, self._identifier.adapter(request.lora_request))
            tracked = self._tracked[request.request_id] = _Tracked(request, identity, self._clock())
            if isinstance(identity, str):
                tracked.bypass = identity
            else:
                self.manager.on_request(self._keys(tracked, request.num_tokens), hints_of(request))
        if tracked.preemptions != request.num_preemptions:
            tracked.preemptions = request.num_preemptions
            tracked.saved, tracked.told = 0, False
        return tracked

    def _blocks_of(self, chunk: int) -> range:
        return range(chunk * self._chunk_blocks, (chunk + 1) * self._chunk_blocks)

    def _keys(self, tracked: _Tracked, tokens: int) -> list[ChunkKey]:
        """Keys of all chunks among the first ``tokens``; computed once and extended."""
        chunks = tokens // self._chunk_tokens
        if chunks > len(tracked.keys):
            identity = tracked.identity
            tracked.keys = self._database.keys(
                tracked.request.all_token_ids[: chunks * self._chunk_tokens],
                known=tracked.keys,
                salt=identity.salt,
                extra=identity.extra(self._chunk_tokens),
            )
        return tracked.keys[:chunks]

    def _may_wait(self, tracked: _Tracked) -> bool:
        now = self._clock()
        if tracked.waiting_since is None:
            tracked.waiting_since = now
        return now - tracked.waiting_since < self._config.load_wait

    def _why_not(self, keys: Sequence[ChunkKey], found: Sequence[Presence]) -> str:
        if not keys:
            return f"nothing left that fills a chunk of {self._chunk_tokens}"
        if found[0] is Presence.MISS:
            return self.manager.miss_reason(keys[0])
        if self._untried:
            return "the self-test is not over"
        return f"it did not come up within {self._config.load_wait}"

    def _take_in(self, events: Sequence[Event]) -> None:
        for event in events:
            if level := _NEWS.get(event.kind):
                logger.log(
                    level, "kvtier: %s: %s: %d chunks: %s", event.tier, event.kind.value, len(event.keys), event.why
                )
        if events:
            self._last_news, self._complained = self._clock(), False
            self.stats.take_in(events)
            self._observe(events)
            for line in self.stats.due(self._clock()):
                logger.info("kvtier: so far: %s", line)


def _loader(request_id: str) -> str:
    """The owner of the pins of a load."""
    return f"request {request_id}"
