"""An inference engine of a hundred lines, for the scheduler side: paged memory, batches, a forward, and no model.

Its KV is a digest of all tokens up to and including a block, and of what else the request's KV depends on. Before it
computes anything it asserts that all blocks it stands on hold exactly that. So whatever goes wrong between the
scheduler side and the pages fails there.

With a lookahead, as draft layers have it, the KV of a block depends on so many tokens behind it, too. Of these a step
sees the first one behind what it computes, and writes the KV again that depends on later ones.

Of groups with a window it keeps what their window needs, and frees the rest while the request runs. Of a recurrent
state it keeps the last one in a block, writes to it in place, and offers it when it is behind a whole block.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs

from kvtier_core.config.compose import open_stack
from kvtier_core.config.model import StackConfig
from kvtier_core.engine.messages import ChunkPages, StepPlan, Transfer, WorkerProgress
from kvtier_core.engine.request_view import Bypass, KVIdentity, RequestView
from kvtier_core.engine.scheduler_side import SchedulerSide
from kvtier_core.engine.step import ScheduledRequest, Step, StepResult
from kvtier_core.interfaces import NO_BLOCK
from kvtier_core.layouts import ChunkLayout, KVKind
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
    tables: list[list[int]] = attrs.field(factory=list)  #: by group
    computed: int = 0
    offered: int = 0  #: tokens that were loaded for it
    preemptions: int = 0

    @property
    def blocks(self) -> list[int]:
        """Those of the first group."""
        return self.tables[0]

    def view(self) -> RequestView:
        return RequestView(
            self.request_id, self.tokens, self.prompt, self.identity, self.hints, self.reads_cache,
            self.computed, self.preemptions,
        )  # fmt: skip


class Host:
    """``late_stores`` and ``late_loads`` are steps after which a copy touches its pages, if nothing makes it sooner."""

    def __init__(
        self,
        stack: StackConfig,
        *,
        layout: ChunkLayout = LAYOUT,
        blocks: int = 40,
        budget: int = 16,
        ranks: int = 1,
        lookahead: int = 0,
        **options: Any,
    ):
        """``ranks`` report each store; all but one do nothing else."""
        self.lookahead = lookahead
        self.late_stores = self.late_loads = 0
        self.layout = layout
        self.manager = open_stack(stack, make_context(layout=layout))
        waiting_for = attrs.evolve(layout, ranks=ranks)
        options["lookahead"] = lookahead
        self.side = SchedulerSide(stack, self.manager, make_context().namespace, waiting_for, **options)
        self.plans: list[StepPlan] = []
        self.outcomes = Counter({"": 1})  # of self-tests, to be reported in the next step
        self.invalid: set[int] = set()  # blocks, to be reported in the next step
        self.failing: set[str] = set()  # requests whose loads fail
        self._buffer = PagedBuffer(layout, blocks, random.Random(0))
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
        self._write(request, max(0, request.computed - self.lookahead), request.computed)

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
            ScheduledRequest(each.request_id, each.computed, self._budget_of(each))
            for each in self._requests.values()
            if each.state == "running" and each.computed < len(each.tokens)
        ]
        for each in scheduled:
            self._release_skipped(self._requests[each.request_id], each.computed)
            self._new_blocks.update(self._grow(self._requests[each.request_id], each.end, states=True))
        new_blocks, self._new_blocks = self._new_blocks, set()
        states = {each.request_id: self._offered(each) for each in scheduled}
        plan = self.side.plan(Step(scheduled, new_blocks, self._tables, states))
        self.plans.append(plan)
        self._work(plan, scheduled)
        return plan

    def _admit(self, request: HostRequest) -> None:
        tokens = self.side.match(request.view(), 0)
        if request.foreign:
            tokens = 0  # the other connector was asked first
        needed = sum(-(-len(request.tokens) // group.block_tokens) for group in self.layout.groups)
        if tokens is None or len(self._free) < needed:
            return
        request.tables = [[NO_BLOCK] * self._skipped(number, tokens) for number in range(len(self.layout.groups))]
        self._grow(request, tokens, states=True)
        self._grow(request, len(request.tokens))
        self._foreign += request.blocks[: request.foreign // BLOCK]
        self.side.admitted(request.view(), self._tables(request.request_id), tokens)
        request.offered = tokens
        if tokens:
            request.state = "loading"
        else:
            self._start(request, request.foreign)

    def _start(self, request: HostRequest, computed: int) -> None:
        request.state = "running"
        request.computed = min(computed, len(request.tokens) - 1)  # something must be computed
        for group, table in zip(self.layout.groups, request.tables, strict=True):
            self._new_blocks.update(set(table[request.computed // group.block_tokens :]) - {NO_BLOCK})

    def _grow(self, request: HostRequest, tokens: int, *, states: bool = False) -> list[int]:
        """Blocks for so many tokens, of the last state only, and of that only with ``states``."""
        new = []
        for group, table in zip(self.layout.groups, request.tables, strict=True):
            wanted = -(-tokens // group.block_tokens) - len(table)
            if group.kind is KVKind.STATE:
                wanted = wanted if states else 0
                table += [NO_BLOCK] * (wanted - 1)
                wanted = min(wanted, 1)
            taken = [self._free.pop(0) for _ in range(wanted)]
            table += taken
            new += taken
        return new

    def _skipped(self, number: int, tokens: int) -> int:
        """Blocks of a group that a request with so many computed tokens needs no more."""
        group = self.layout.groups[number]
        match group.kind:
            case KVKind.FULL_ATTENTION:
                return 0
            case KVKind.SLIDING_WINDOW:
                return max(0, tokens - group.reach + 1) // group.block_tokens
            case KVKind.CHUNKED_LOCAL:
                return tokens // group.reach * group.reach // group.block_tokens
            case KVKind.STATE:
                return max(0, tokens - 1) // group.block_tokens

    def _release_skipped(self, request: HostRequest, computed: int) -> None:
        for number, table in enumerate(request.tables):
            for block in range(min(self._skipped(number, computed), len(table))):
                if table[block] != NO_BLOCK:
                    self._free.insert(0, table[block])
                    table[block] = NO_BLOCK

    def _give_back(self, request: HostRequest) -> None:
        for table in request.tables:
            self._free[:0] = [block for block in table if block != NO_BLOCK]  # the next one gets them
        request.tables = [[] for _ in self.layout.groups]

    def _budget_of(self, request: HostRequest) -> int:
        """Tokens to compute in a step: to the end of a block of states, if there are any."""
        end = min(len(request.tokens), request.computed + self._budget)
        sizes = [group.block_tokens for group in self.layout.groups if group.kind is KVKind.STATE]
        if sizes and end // sizes[0] * sizes[0] > request.computed:
            end = end // sizes[0] * sizes[0]
        return end - request.computed

    def _tables(self, request_id: str) -> list[list[int]]:
        return [list(table) for table in self._requests[request_id].tables]

    def _offered(self, scheduled: ScheduledRequest) -> dict[int, dict[int, int]]:
        """The states that a step leaves behind a whole block."""
        tables = self._requests[scheduled.request_id].tables
        states = {
            number: tables[number][scheduled.end // group.block_tokens - 1]
            for number, group in enumerate(self.layout.groups)
            if group.kind is KVKind.STATE and not scheduled.end % group.block_tokens
        }
        return {scheduled.end: states} if states else {}

    # -- the worker --------------------------------------------------------------------------------------

    def _work(self, plan: StepPlan, scheduled: Sequence[ScheduledRequest]) -> None:
        for job in plan.stores_to_fence:
            self._hurry(job)
        progress = self._end_stores()
        for block in self._foreign:
            self._fill(0, block, GARBAGE)
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
        ended = self._end_loads() | set(plan.failed_loads)
        invalid, self.invalid = self.invalid, set()
        failed = ended & {*self.failing, *plan.failed_loads}
        self.side.progress(StepResult(ended, failed, invalid, progress))
        for request_id in ended:
            self._loaded(self._requests[request_id], ok=request_id not in failed)

    def _forward(self, request: HostRequest, scheduled: ScheduledRequest) -> None:
        for number, (group, table) in enumerate(zip(self.layout.groups, request.tables, strict=True)):
            size, start = group.block_tokens, scheduled.computed
            for block in range(max(self._skipped(number, start), request.foreign // size), -(-start // size)):
                tokens = start if group.kind is KVKind.STATE else (block + 1) * size
                if tokens <= request.offered or tokens <= start - max(0, self.lookahead - 1):
                    why = f"{request.request_id} computes on wrong KV in its block {block} of {group.name}"
                    assert self._holds(request, number, table[block], tokens), why
        self._write(request, max(request.offered, scheduled.computed - self.lookahead), scheduled.end)
        request.computed = scheduled.end

    def _write(self, request: HostRequest, start: int, end: int) -> None:
        """The KV of these tokens, and of what else is in their blocks, as far as it can be known."""
        for number, (group, table) in enumerate(zip(self.layout.groups, request.tables, strict=True)):
            size = group.block_tokens
            for block in range(start // size, -(-end // size)):
                if table[block] != NO_BLOCK:
                    kv = self._kv(request, number, min((block + 1) * size, end), seen=end + 1)
                    self._fill(number, table[block], kv)

    def _hurry(self, job: int) -> None:
        self._stores[job] = (0, self._stores[job][1])

    def _end_stores(self) -> WorkerProgress:
        progress = WorkerProgress(self_tests=self.outcomes)
        self.outcomes = Counter()
        for job, (steps, transfer) in list(self._stores.items()):
            self._stores[job] = (steps - 1, transfer)
            if steps <= 0:
                del self._stores[job]
                sums = self._move(transfer, lambda number, slots, pages: self._mover.store(number, pages, slots))
                checksums = {(job, 0): sums} if sums else {}
                progress = progress.merge(WorkerProgress(Counter([job]), Counter(), Counter(), checksums))
        return progress

    def _end_loads(self) -> set[str]:
        ended = {request_id for request_id, (steps, _) in self._loads.items() if steps <= 0}
        for request_id in sorted(ended - self.failing):
            self._move(self._loads[request_id][1], self._mover.load)
        self._loads = {each: (steps - 1, load) for each, (steps, load) in self._loads.items() if each not in ended}
        return ended

    def _move(self, transfer: Transfer, move: Callable[[int, list[int], list[ChunkPages]], None]) -> tuple[int, ...]:
        """Copy slot by slot, because each may hold another part. The checksums of a store."""
        sums = []
        for slot, pages in zip(transfer.slots, transfer.pages, strict=True):
            move(0, [slot.index], [pages])
            self._mover.wait([0])
            (result,) = self._mover.finished()
            assert result.ok
            sums += result.checksums
        return tuple(sums)

    def _loaded(self, request: HostRequest, *, ok: bool) -> None:
        if request.state == "finished":  # aborted meanwhile
            self._give_back(request)
            del self._requests[request.request_id]
        elif not ok:
            self._give_back(request)
            request.state = "waiting"
        else:
            request.computed = request.offered
            self.side.admitted(request.view(), self._tables(request.request_id), 0)
            self._start(request, request.computed)

    # -- pages -------------------------------------------------------------------------------------------

    def _kv(self, request: HostRequest, group: int, tokens: int, seen: int) -> bytes:
        """What the KV of a block of a group depends on that ends behind so many tokens."""
        if self.layout.groups[group].kind is not KVKind.STATE:
            tokens = min(tokens + self.lookahead, seen)
        salt, items = b"", ()
        if isinstance(request.identity, KVIdentity):
            salt, items = request.identity.salt, request.identity.items
        return repr((salt, [item for item in items if item.offset < tokens], request.tokens[:tokens])).encode()

    def _holds(self, request: HostRequest, group: int, block: int, tokens: int) -> bool:
        kv = self._kv(request, group, tokens, seen=len(request.tokens))
        return all(self._buffer.page(layer, block) == _page(kv, layer, nbytes) for layer, nbytes in self._layers(group))

    def _fill(self, group: int, block: int, kv: bytes) -> None:
        for layer, nbytes in self._layers(group):
            self._buffer.put(layer, block, _page(kv, layer, nbytes))

    def _layers(self, group: int) -> Iterator[tuple[int, int]]:
        """The layers of a group, numbered over all groups, with the bytes of a page."""
        before = sum(len(each.page_nbytes) for each in self.layout.groups[:group])
        return enumerate(self.layout.groups[group].page_nbytes, before)


def blocks_of(transfer: Transfer) -> set[int]:
    """The blocks whose pages are copied."""
    return {block for chunk in transfer.pages for row in chunk for block in row if block != NO_BLOCK}


def _page(kv: bytes, layer: int, nbytes: int) -> bytes:
    return hashlib.shake_128(kv + bytes([layer])).digest(nbytes)
