"""Stores the chunks that steps complete, from the blocks whose KV is trusted."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from kvtier_core.engine.scheduler.boundaries import Boundaries, PagesOfChunks
from kvtier_core.engine.scheduler.handovers import Handovers
from kvtier_core.engine.scheduler.provenance import Provenance
from kvtier_core.engine.scheduler.requests import Requests, RequestState
from kvtier_core.engine.scheduler.store_jobs import Jobs, StoreJobs
from kvtier_core.engine.scheduler.waiting import Waiting
from kvtier_core.engine.step import BlockTables, ScheduledRequest, Step
from kvtier_core.layouts import ChunkLayout
from kvtier_core.stack.interface import Stores
from kvtier_core.types import ChunkKey


class Storing:
    """Plans the stores of each step. Call every method on the scheduler's thread."""

    def __init__(
        self,
        stack: Stores,
        layout: ChunkLayout,
        requests: Requests,
        handovers: Handovers,
        waiting: Waiting,
        tell_of_path: Callable[[RequestState, int, int], None],
        *,
        lookahead: int,
        save_decode: bool,
    ):
        """``tell_of_path`` is called with a request and the numbers of its chunks that a step completes."""
        self._layout = layout
        self._requests, self._handovers, self._waiting = requests, handovers, waiting
        self._tell_of_path = tell_of_path
        self._lookahead, self._save_decode = lookahead, save_decode
        #: Where requests can continue; None: everywhere.
        self.boundaries = None if layout.keeps_every_token else Boundaries(layout)
        self.provenance = Provenance([group.block_tokens for group in layout.groups], lookahead)
        self.jobs = StoreJobs(stack, layout.ranks, layout.shards)  #: under way
        # Blocks allocated since the last plan that a forward or another connector's load will write. Not those that
        # kvtier loads: the mover's load itself waits for the stores that still read them.
        self._new_blocks: set[int] = set()

    def not_loaded(self, tables: BlockTables, computed: int) -> None:
        """A request was given these blocks, and kvtier loads none of them."""
        for blocks, group in zip(tables, self._layout.groups, strict=True):
            self._new_blocks.update(blocks[computed // group.block_tokens :])

    def to_fence(self, step: Step) -> tuple[int, ...]:
        """Jobs that may still read blocks that are overwritten from this step on."""
        jobs = self.jobs.to_fence(self._new_blocks.union(step.new_blocks))
        self._new_blocks.clear()
        return jobs

    def plan(self, state: RequestState, scheduled: ScheduledRequest, step: Step, *, may_store: bool) -> Jobs:
        """Store the chunks of a request that this step completes, if their KV is trusted."""
        trusted = self.provenance.computed(state.trust, scheduled, step, self._requests.ahead(state))
        known = min(state.view.tokens if self._save_decode else state.view.prompt_tokens, state.view.most_stored)
        # KV that depends on the tokens after a position is computed with the last of them, or just before.
        end = min(trusted + bool(self._lookahead), known)
        whole = self._requests.chunks(end)
        if whole <= state.stored_chunks or state.bypass or not may_store:
            return ()
        stored, state.stored_chunks = state.stored_chunks, whole
        path = self._requests.keys(state, end)
        pages = PagesOfChunks(self._layout, path, step.block_tables(scheduled.request_id))
        # The path begins with the last stored chunk, so that the first new one is known as its child.
        first = max(0, stored - 1)
        if self.boundaries:
            first = pages.whole_from(first)
            offered = step.states.get(scheduled.request_id, {})
            # The next turn of a conversation continues after the prompt, and a repeated prompt one token earlier.
            asked = {self._requests.chunks(state.view.prompt_tokens - left) for left in (0, 1)} | {state.match.shared}
            wanted = self.boundaries.among(stored, whole, asked, offered)
            pages.add_boundaries(wanted, offered)
        self._tell_of_path(state, first, whole)
        return self._begin(state, path, first, pages)

    def _begin(self, state: RequestState, path: Sequence[ChunkKey], first: int, pages: PagesOfChunks) -> Jobs:
        """Store chunks of a path from the ``first`` one on, leading ones perhaps for another engine."""
        salt, memory_only = state.identity.salt, state.view.memory_only
        jobs: Jobs = ()
        if state.view.continued_elsewhere and not memory_only:
            prompt = path[: self._requests.chunks(self._requests.loadable(state.view.prompt_tokens))]
            holder, promised = self._handovers.promise(state, prompt, self._waiting.limit(state))
            if promised > first:
                jobs = self.jobs.begin(path[first:promised], pages.by_key(first), salt, pages.parts, holder)
                first = promised - 1
        for is_unwanted, run in itertools.groupby(path[first:], state.unwanted.__contains__):
            if not is_unwanted:
                jobs += self.jobs.begin(list(run), pages.by_key(first), salt, pages.parts, memory_only=memory_only)
        return jobs

    def distrust_all(self) -> None:
        """Store nothing that the engine's blocks hold now, nor anything that is computed from it."""
        self.provenance.distrust_all()
        for state in self._requests:
            state.trust.tokens = state.trust.tokens and 0
        self.jobs.fail_all()
