"""The messages of the engine to the scheduler side: its plan before a step, and the outcome after it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import attrs

from kvtier_core.engine.messages import WorkerProgress

#: For each group of the layout, the block ids of a request in token order; NO_BLOCK where the engine keeps none.
BlockTables = Sequence[Sequence[int]]

#: By group, the block of a recurrent state that a step leaves, which may be copied after the step.
OfferedStates = Mapping[int, int]


@attrs.frozen
class ScheduledRequest:
    """A request for which the engine computes tokens in a step."""

    request_id: str
    computed: int  #: tokens, from the first one on, whose KV exists before the step
    scheduled: int  #: tokens whose KV the step computes

    @property
    def end(self) -> int:
        """Tokens whose KV exists after the step."""
        return self.computed + self.scheduled


@attrs.frozen
class Step:
    """The engine's plan for its next step."""

    requests: Sequence[ScheduledRequest]  #: in the order in which they were scheduled
    #: Blocks that the engine gave to running requests since the last step, and that the step may write to. Blocks of a
    #: request that was admitted meanwhile need not be among them.
    new_blocks: Collection[int]
    #: The block tables of a scheduled request as they are in this step. Called only if needed: engines copy them.
    block_tables: Callable[[str], BlockTables]
    #: The recurrent states that the step leaves, by request and by the number of tokens before each.
    states: Mapping[str, Mapping[int, OfferedStates]] = attrs.field(factory=dict)
    #: False: it leaves some KV of its tokens unwritten, for instance that of a draft model which does not run.
    writes_all: bool = True

    @property
    def computes_nothing(self) -> bool:
        """True if no token is scheduled: the engine steps only so that transfers can continue."""
        return not any(request.scheduled for request in self.requests)


@attrs.frozen
class StepResult:
    """The outcomes of earlier steps that the engine knows by now."""

    ended_loads: Collection[str] = ()  #: requests whose load ended on all ranks, successfully or not
    failed_loads: Collection[str] = ()  #: those of them with a page that was not loaded
    invalid_blocks: Collection[int] = ()  #: blocks that a connector reports as not loaded correctly
    progress: WorkerProgress | None = None  #: the workers' report; None if there is none
