"""What became of a request's tokens in each tier, as events that add up: queried = hit + missed + bypassed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from kvtier_core.engine.scheduler.requests import RequestState
from kvtier_core.types import Event, EventKind

#: Why tokens are bypassed that a tier has, or may have.
DECLINED = "sooner computed than loaded"
NOT_ASKED = "not looked up"


def looked_up(
    tiers: Sequence[str], state: RequestState, hits: Mapping[str, int], chunk_tokens: int, *, asked: bool, ago: float
) -> list[Event]:
    """What became of the tokens that the engine lacked: call it once, when it is known what was loaded of them.

    A tier is queried for what no tier above it had. ``tiers`` are all of them, the hottest first; ``hits`` are tokens
    by tier. Without ``asked`` nothing was looked up for the request. The engine was answered ``ago`` seconds ago.
    """
    events: list[Event] = []
    left = state.view.tokens - state.computed
    request, answered = state.view.request_id, time.time() - ago
    for tier in tiers:
        if left <= 0:
            break
        hit = hits.get(tier, 0)
        here = state.declined.chunks if asked and state.declined and state.declined.tier == tier else 0
        declined = min(here * chunk_tokens, left - hit)
        missed = left - hit - declined if asked else 0
        events += [
            Event(kind, tier, tokens=tokens, why=why, seconds=state.waited, request=request, at=answered)
            for kind, tokens, why in (
                (EventKind.QUERIED, left, ""),
                (EventKind.HIT, hit, ""),
                (EventKind.MISSED, missed, ""),
                (EventKind.BYPASSED, declined, DECLINED),
                (EventKind.BYPASSED, 0 if asked else left, NOT_ASKED),
            )
            if tokens
        ]
        left = missed if asked else left
    return events
