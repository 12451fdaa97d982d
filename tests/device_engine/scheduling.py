"""What the scheduler of an engine does with its requests: paged memory, batches, preemptions, and no forward.

Of groups with a window it keeps what their window needs, and frees the rest while the request runs. Of a recurrent
state it keeps the last one in a block, writes to it in place, and offers it when it is behind a whole block.
"""

from __future__ import annotations

import abc
import sys
from collections.abc import Collection, Sequence
from typing import Any

import attrs

from kvtier_core.config.model import StackConfig
from kvtier_core.config.open import open_stack
from kvtier_core.engine.messages import StepPlan
from kvtier_core.engine.request_view import ANY_MEDIUM, Bypass, KVIdentity, RequestView
from kvtier_core.engine.scheduler.side import SchedulerSide
from kvtier_core.engine.step import ScheduledRequest, Step
from kvtier_core.interfaces import NO_BLOCK, Medium
from kvtier_core.layouts import ChunkLayout, KVKind
from kvtier_core.stack.interface import Stack
from kvtier_testing.samples import make_context


@attrs.define(eq=False)
class HostRequest:
    """What the host knows of a request."""

    request_id: str
    tokens: list[int]
    prompt: int
    identity: KVIdentity | Bypass = KVIdentity()
    hints: dict[str, str] = attrs.field(factory=dict)
    most_loaded: int = sys.maxsize
    media: Collection[Medium] = ANY_MEDIUM
    most_stored: int = sys.maxsize
    memory_only: bool = False
    foreign: int = 0  #: tokens at its beginning that another connector loads, as garbage
    state: str = "waiting"
    tables: list[list[int]] = attrs.field(factory=list)  #: by group
    computed: int = 0
    offered: int = 0  #: tokens that were loaded for it
    preemptions: int = 0
    continued_elsewhere: bool = False
    computed_elsewhere: int = 0
    kept: int = 0  #: tokens of it that are kept for the engine that continues it

    @property
    def blocks(self) -> list[int]:
        """Those of the first group."""
        return self.tables[0]

    def view(self) -> RequestView:
        return RequestView(
            self.request_id, self.tokens, self.prompt, self.identity, self.hints, self.most_loaded, self.media,
            self.most_stored, self.memory_only, self.computed, self.preemptions, "", self.continued_elsewhere,
            self.computed_elsewhere,
        )  # fmt: skip


class Scheduling(abc.ABC):
    """The scheduler of an engine with so many blocks, each of them some request's or free.

    Of each request it computes ``budget`` tokens a step. Subclasses carry out what it plans.
    """

    def __init__(
        self,
        stack: StackConfig,
        layout: ChunkLayout,
        blocks: Sequence[int],
        budget: int,
        ranks: int,
        manager: Stack | None = None,
        **options: Any,
    ):
        """``ranks`` report each store; without a ``manager`` the stack is opened here."""
        self.layout = layout
        self.manager = manager or open_stack(stack, make_context(layout=layout))
        waiting_for = attrs.evolve(layout, ranks=ranks)
        self.side = SchedulerSide(stack, self.manager, make_context().namespace, waiting_for, **options)
        self.plans: list[StepPlan] = []
        self._free = list(blocks)
        self._budget = budget
        self._foreign: list[int] = []  # blocks that another connector loads in the next step
        self._new_blocks: set[int] = set()  # given to requests since the last step
        self._requests: dict[str, HostRequest] = {}

    @abc.abstractmethod
    def _work(self, plan: StepPlan, scheduled: Sequence[ScheduledRequest]) -> None:
        """Carry out a step, and tell the scheduler side and `_loaded` what became of it or of earlier ones."""

    @abc.abstractmethod
    def settle(self) -> None:
        """Step until no copy is under way."""

    def _make_room(self) -> None:
        """Before running requests get blocks for the step: preempt some, if there are too few."""

    # -- what a test does --------------------------------------------------------------------------------

    def submit(self, request_id: str, tokens: Sequence[int], **more: Any) -> HostRequest:
        request = self._requests[request_id] = HostRequest(request_id, list(tokens), len(tokens), **more)
        return request

    def preempt(self, request: HostRequest) -> None:
        self._give_back(request)
        request.state, request.computed = "waiting", 0
        request.preemptions += 1

    def finish(self, request: HostRequest, reason: str = "stop") -> None:
        """Its blocks are another's at once, unless a load still writes to them."""
        request.kept = self.side.finished(request.view(), reason)
        if request.state != "loading":
            self._give_back(request)
            del self._requests[request.request_id]
        request.state = "finished"

    def assert_at_rest(self) -> None:
        self.settle()
        assert not self.manager.pins_by_holder() and not self.manager.jobs
        assert not any(level.inflight for level in self.manager.usage())
        assert not (self.side._loads or self.side._stores.jobs or self.side._requests)
        assert not self.side.busy()

    # -- a step ------------------------------------------------------------------------------------------

    def step(self) -> StepPlan:
        for request in self._requests.values():
            if request.state == "waiting":
                self._admit(request)
        self._make_room()
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
        view = request.view()
        if self.side.still_waits(request.request_id, view.tokens, 0):
            return
        tokens = self.side.match(view, 0)
        if request.foreign:
            tokens = 0  # the other connector was asked first
        needed = sum(-(-len(request.tokens) // group.block_tokens) for group in self.layout.groups)
        if tokens is None or len(self._free) < needed:
            return
        request.tables = [[NO_BLOCK] * self._skipped(number, tokens) for number in range(len(self.layout.groups))]
        self._grow(request, tokens, states=True)
        self._grow(request, len(request.tokens))
        self._foreign += request.blocks[: request.foreign // self.layout.groups[0].block_tokens]
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
