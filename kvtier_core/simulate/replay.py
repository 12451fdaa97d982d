"""A trace, prompt by prompt, through a stack."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import attrs

from kvtier_core.config.model import StackConfig
from kvtier_core.simulate.costs import Costs
from kvtier_core.simulate.dry_run import Clock, open_weightless
from kvtier_core.simulate.traces import Prompt, Trace
from kvtier_core.stack.batches import ready_run
from kvtier_core.stack.manager import StorageManager
from kvtier_core.types import ChunkKey, ChunkLayout, EventKind, Presence

#: In which bytes enter a tier.
_ARRIVALS = (EventKind.STORED, EventKind.PROMOTED, EventKind.WRITTEN)
#: For how many rounds without news a prompt waits for chunks that are said to be on their way.
_PATIENCE = 3


@attrs.define
class Tally:
    """What became of a trace."""

    tokens: int = 0
    each: list[int] = attrs.field(factory=list)  #: tokens of each prompt that came from a tier
    seconds: list[float] = attrs.field(factory=list)  #: of each prompt, until its prefill was over
    hits: Counter[str] = attrs.field(factory=Counter)  #: tokens that came from each tier
    written: Counter[str] = attrs.field(factory=Counter)  #: bytes that went into each tier

    def add(self, trace: Trace, prompt: Prompt, hit_sources: Sequence[str], costs: Costs) -> None:
        """A prompt, and the tiers from which its leading chunks came."""
        chunks = Counter(hit_sources)
        known = 0
        for tier, count in chunks.items():
            self.hits[tier] += trace.tokens_in(prompt, known + count) - trace.tokens_in(prompt, known)
            known += count
        self.tokens += prompt.tokens
        self.each.append(trace.tokens_in(prompt, known))
        self.seconds.append(costs.seconds(prompt.tokens - self.each[-1], chunks))

    @property
    def hit_rate(self) -> float:
        """Of tokens: those that need not be computed."""
        return self.hits.total() / self.tokens

    @property
    def mean(self) -> float:
        return statistics.fmean(self.seconds)

    @property
    def p95(self) -> float:
        return sorted(self.seconds)[(len(self.seconds) * 95 - 1) // 100]


def replay(
    trace: Trace, config: StackConfig, costs: Costs, layout: ChunkLayout, tick: Callable[[], object] = lambda: None
) -> Tally:
    """One prompt after the other, each computed and stored before the next one comes. Raises ConfigError."""
    clock = Clock()
    manager = open_weightless(config, layout, clock)
    tally = Tally()
    for prompt in trace.prompts:
        clock.now = prompt.at
        hit_sources = serve(manager, prompt.path, tally.written)
        tally.add(trace, prompt, hit_sources, costs)
        tick()
    manager.close()
    return tally


def serve(manager: StorageManager, path: Sequence[ChunkKey], written: Counter[str]) -> list[str]:
    """What the scheduler's half does with a prompt; the tiers from which its leading chunks came."""
    manager.on_request(path)
    ready = _look_up(manager, path, written)
    hit_sources = manager.hit_sources(ready)
    slots = manager.pin(ready, "prompt")
    _account(manager.step(), written)  # as an engine does before each forward
    manager.unpin(slots, "prompt")
    manager.commit(list(manager.reserve(path)))
    _account(manager.step(), written)
    _account(manager.drain(timeout=60), written)
    return hit_sources


def _look_up(manager: StorageManager, path: Sequence[ChunkKey], written: Counter[str]) -> Sequence[ChunkKey]:
    """The leading chunks that are READY when nothing is on its way any more."""
    patience, most = _PATIENCE, 0
    while True:
        found = manager.lookup(path)
        ready = ready_run(found)
        patience, most = (patience - 1, most) if ready <= most else (_PATIENCE, ready)
        if Presence.PENDING not in found or not patience:
            return path[:ready]
        _account(manager.step(), written)


def _account(events: Iterable, written: Counter[str]) -> None:
    for event in events:
        if event.kind in _ARRIVALS:
            written[event.tier] += event.nbytes
