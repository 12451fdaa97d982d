"""What the engine tells the scheduler side about a step: before it what will be computed, after it what happened."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import attrs

from kvtier_core.engine.messages import WorkerProgress


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
    """What the engine will do in its next step."""

    requests: Sequence[ScheduledRequest]  #: in the order in which they were scheduled
    #: Blocks that the engine gave to running requests since the last step, and that the step may write to. What was
    #: allocated for a request that was admitted meanwhile need not be among them.
    new_blocks: Collection[int]
    #: The block ids of a scheduled request, in token order. Called only where they are needed: engines copy them.
    block_table: Callable[[str], Sequence[int]]

    @property
    def computes_nothing(self) -> bool:
        """True if no token is scheduled: the engine steps only so that transfers can continue."""
        return not any(request.scheduled for request in self.requests)


@attrs.frozen
class StepResult:
    """What became of earlier steps, as far as the engine knows by now."""

    ended_loads: Collection[str] = ()  #: requests whose load ended on all ranks, successfully or not
    failed_loads: Collection[str] = ()  #: those of them with a page that was not loaded
    invalid_blocks: Collection[int] = ()  #: blocks that a connector reports as not loaded correctly
    progress: WorkerProgress | None = None  #: what the workers reported; None if nothing
