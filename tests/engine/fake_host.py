"""An inference engine of a hundred lines, for the scheduler side: paged memory, batches, a forward, and no model.

Its KV is a digest of all tokens up to and including a block, and of what else the request's KV depends on. Before it
computes anything it asserts that all blocks it stands on hold exactly that. So whatever goes wrong between the
scheduler side and the pages fails there.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import attrs

from kvtier_core.config.compose import open_stack
from kvtier_core.config.model import StackConfig
from kvtier_core.engine.messages import StepPlan, Transfer, WorkerProgress
from kvtier_core.engine.request_view import Bypass, KVIdentity, RequestView
from kvtier_core.engine.scheduler_side import SchedulerSide
from kvtier_core.engine.step import ScheduledRequest, Step, StepResult
from kvtier_core.interfaces import NO_BLOCK
from kvtier_core.layouts import ChunkLayout
from kvtier_core.testing.samples import PagedBuffer, make_context, make_group

BLOCK = 4
CHUNK = 8
LAYOUT = ChunkLayout([make_group((512, 128), block_tokens=BLOCK)], CHUNK)
FRAME = LAYOUT.frame_nbytes
GARBAGE = b"\xbd"


@attrs.define(eq=False)
class HostRequest:
    """What the host knows of a request."""

    request_id: str
    tokens: list[int]
    prompt: int
    identity: KVIdentity | Bypass = KVIdentity()
    hints: dict[str, str] = attrs.field(factory=dict)
    reads_cache: bool = True
    foreign: int = 0  #: tokens at its beginning that another connector loads, as garbage
    state: str = "waiting"
    blocks: list[int] = attrs.field(factory=list)
    computed: int = 0
    offered: int = 0  #: tokens that were loaded for it
    preemptions: int = 0

    def view(self) -> RequestView:
        return RequestView(
            self.request_id, self.tokens, self.prompt, self.identity, self.hints, self.reads_cache,
            self.computed, self.preemptions,
        )  # fmt: skip


class Host:
    """``late_stores`` and ``late_loads`` are steps after which a copy touches its pages, if nothing makes it sooner."""

    def __init__(self, stack: StackConfig, *, blocks: int = 40, budget: int = 16, ranks: int = 1, **options: Any):
        self.late_stores = self.late_loads = 0
        self.manager = open_stack(stack, make_context(layout=LAYOUT))
        self.side = SchedulerSide(
            stack, self.manager, make_context().namespace, block_tokens=BLOCK, ranks=ranks, **options
        )
        self.plans: list[StepPlan] = []
        self.outcomes = Counter({"": 1})  # of self-tests, to be reported in the next step
        self.invalid: set[int] = set()  # blocks, to be reported in the next step
        self.failing: set[str] = set()  # requests whose loads fail
        self._buffer = PagedBuffer(LAYOUT, blocks, random.Random(0))
        self._mover = stack.arenas[0].config.attach(self.manager.handles[0], self._buffer.kv_cache())
        self._free = list(range(blocks))
        self._budget = budget
        self._foreign: list[int] = []  # blocks that another connector loads in the next step
        self._new_blocks: set[int] = set()  # given to requests since the last step
        self._requests: dict[str, HostRequest] = {}
        self._stores: dict[int, tuple[int, Transfer]] = {}  # steps to go, by job
        self._loads: dict[str, tuple[int, Transfer]] = {}

    # -- what a test does --------------------------------------------------------------------------------

    def submit(self, request_id: str, tokens: Sequence[int], **more: Any) -> HostRequest:
        request = self._requests[request_id] = HostRequest(request_id, list(tokens), len(tokens), **more)
        return request

    def ask(self, request_id: str, tokens: Sequence[int], **more: Any) -> int:
        """Serve a prompt to its end, and let everything come to rest. How many of its tokens were loaded."""
        request = self.submit(request_id, tokens, **more)
        self.run(request)
        self.settle()
        return request.offered

    def run(self, *requests: HostRequest) -> None:
        """Step until these requests have computed all their tokens, and finish them."""
        for _ in range(2000):
            if not (left := [each for each in requests if each.state != "finished"]):
                return
            self.step()
            for each in left:
                if each.state == "running" and each.computed == len(each.tokens):
                    self.finish(each)
        raise AssertionError(f"does not end: {requests}")

    def generate(self, request: HostRequest, token: int) -> None:
        request.tokens.append(token)

    def preempt(self, request: HostRequest) -> None:
        self._give_back(request)
        request.state, request.computed = "waiting", 0
        request.preemptions += 1

    def finish(self, request: HostRequest, reason: str = "stop") -> None:
        """Its blocks are another's at once, unless a load still writes to them."""
        self.side.finished(request.view(), reason)
        if request.state != "loading":
            self._give_back(request)
            del self._requests[request.request_id]
        request.state = "finished"

    def settle(self) -> None:
        while self._stores or self._loads:
            self.step()
        self.side.drain(20.0)

    def assert_at_rest(self) -> None:
        self.settle()
        assert not self.manager.pins_by_holder() and not self.manager.jobs
        assert not any(level.inflight for level in self.manager.usage())
        assert not (self.side._loads or self.side._stores or self.side._requests)
        assert not self.side.busy()

    def close(self) -> None:
        self.settle()
        self._mover.close()
        self.side.close()

    # -- a step ------------------------------------------------------------------------------------------

    def step(self) -> StepPlan:
        for request in self._requests.values():
            if request.state == "waiting":
                self._admit(request)
        scheduled = [
            ScheduledRequest(each.request_id, each.computed, min(self._budget, len(each.tokens) - each.computed))
            for each in self._requests.values()
            if each.state == "running" and each.computed < len(each.tokens)
        ]
        for each in scheduled:
            self._new_blocks.update(self._grow(self._requests[each.request_id], each.end))
        new_blocks, self._new_blocks = self._new_blocks, set()
        plan = self.side.plan(Step(scheduled, new_blocks, lambda request_id: list(self._requests[request_id].blocks)))
        self.plans.append(plan)
        self._work(plan, scheduled)
        return plan

    def _admit(self, request: HostRequest) -> None:
        tokens = self.side.match(request.view(), 0)
        if request.foreign:
            tokens = 0  # the other connector was asked first
        if tokens is None or len(self._free) < -(-len(request.tokens) // BLOCK):
            return
        self._grow(request, len(request.tokens))
        self._foreign += request.blocks[: request.foreign // BLOCK]
        self.side.admitted(request.view(), list(request.blocks), tokens)
        request.offered = tokens
        if tokens:
            request.state = "loading"
        else:
            self._start(request, request.foreign)

    def _start(self, request: HostRequest, computed: int) -> None:
        request.state = "running"
        request.computed = min(computed, len(request.tokens) - 1)  # something must be computed
        self._new_blocks.update(request.blocks[request.computed // BLOCK :])

    def _grow(self, request: HostRequest, tokens: int) -> list[int]:
        new = [self._free.pop(0) for _ in range(len(request.blocks), -(-tokens // BLOCK))]
        request.blocks += new
        return new

    def _give_back(self, request: HostRequest) -> None:
        self._free[:0] = request.blocks  # the next one gets them
        request.blocks = []

    # -- the worker --------------------------------------------------------------------------------------

    def _work(self, plan: StepPlan, scheduled: Sequence[ScheduledRequest]) -> None:
        for job in plan.stores_to_fence:
            self._hurry(job)
        progress = self._end_stores()
        for block in self._foreign:
            self._fill(block, GARBAGE)
        self._foreign = []
        for each in scheduled:
            self._forward(self._requests[each.request_id], each)
        for request_id, transfer in plan.loads:
            self._loads[request_id] = (self.late_loads, transfer)
            for job, (_, store) in self._stores.items():  # a mover does that by itself
                if blocks_of(store) & blocks_of(transfer):
                    self._hurry(job)
        self._stores.update((job, (self.late_stores, transfer)) for job, transfer in plan.stores)
        progress = progress.merge(self._end_stores())
        ended = self._end_loads()
        invalid, self.invalid = self.invalid, set()
        self.side.progress(StepResult(ended, ended & self.failing, invalid, progress))
        for request_id in ended:
            self._loaded(self._requests[request_id])

    def _forward(self, request: HostRequest, scheduled: ScheduledRequest) -> None:
        for block in range(request.foreign // BLOCK, scheduled.computed // BLOCK):
            assert self._holds(request, block), f"{request.request_id} computes on wrong KV in its block {block}"
        for block in range(scheduled.computed // BLOCK, -(-scheduled.end // BLOCK)):
            self._fill(request.blocks[block], self._kv(request, min((block + 1) * BLOCK, scheduled.end)))
        request.computed = scheduled.end

    def _hurry(self, job: int) -> None:
        self._stores[job] = (0, self._stores[job][1])

    def _end_stores(self) -> WorkerProgress:
        progress = WorkerProgress(self_tests=self.outcomes)
        self.outcomes = Counter()
        for job, (steps, transfer) in list(self._stores.items()):
            self._stores[job] = (steps - 1, transfer)
            if steps <= 0:
                del self._stores[job]
                self._mover.store(job, transfer.pages, [slot.index for slot in transfer.slots])
                self._mover.wait([job])
                (result,) = self._mover.finished()
                progress = progress.merge(
                    WorkerProgress(Counter([job]), Counter(), Counter(), {(job, 0): tuple(result.checksums)})
                )
        return progress

    def _end_loads(self) -> set[str]:
        ended = {request_id for request_id, (steps, _) in self._loads.items() if steps <= 0}
        for number, request_id in enumerate(sorted(ended), start=1 << 20):
            transfer = self._loads[request_id][1]
            if request_id not in self.failing:
                self._mover.load(number, [slot.index for slot in transfer.slots], transfer.pages)
                self._mover.wait([number])
                assert [result.ok for result in self._mover.finished()] == [True]
        self._loads = {each: (steps - 1, load) for each, (steps, load) in self._loads.items() if each not in ended}
        return ended

    def _loaded(self, request: HostRequest) -> None:
        if request.state == "finished":  # aborted meanwhile
            self._give_back(request)
            del self._requests[request.request_id]
        elif request.request_id in self.failing:
            self._give_back(request)
            request.state = "waiting"
        else:
            request.computed = request.offered
            self.side.admitted(request.view(), list(request.blocks), 0)
            self._start(request, request.computed)

    # -- pages -------------------------------------------------------------------------------------------

    def _kv(self, request: HostRequest, tokens: int) -> bytes:
        """What the KV of a block depends on that ends behind so many tokens."""
        salt, items = b"", ()
        if isinstance(request.identity, KVIdentity):
            salt, items = request.identity.salt, request.identity.items
        return repr((salt, [item for item in items if item.offset < tokens], request.tokens[:tokens])).encode()

    def _holds(self, request: HostRequest, block: int) -> bool:
        kv = self._kv(request, (block + 1) * BLOCK)
        return all(
            self._buffer.page(layer, request.blocks[block]) == _page(kv, layer, nbytes)
            for layer, nbytes in enumerate(LAYOUT.groups[0].page_nbytes)
        )

    def _fill(self, block: int, kv: bytes) -> None:
        for layer, nbytes in enumerate(LAYOUT.groups[0].page_nbytes):
            self._buffer.put(layer, block, _page(kv, layer, nbytes))


def blocks_of(transfer: Transfer) -> set[int]:
    """The blocks whose pages are copied."""
    return {block for chunk in transfer.pages for row in chunk for block in row if block != NO_BLOCK}


def _page(kv: bytes, layer: int, nbytes: int) -> bytes:
    return hashlib.shake_128(kv + bytes([layer])).digest(nbytes)
