"""Replays a trace, prompt by prompt, through a stack."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs

from kvtier_core.config.model import StackConfig
from kvtier_core.layouts import ChunkLayout
from kvtier_core.stack.manager import StorageManager
from kvtier_core.types import ChunkKey, EventKind
from kvtier_simulate.costs import Costs
from kvtier_simulate.dry_run import Clock, open_dry_run
from kvtier_simulate.traces import Prompt, Trace

#: The events in which bytes enter a tier.
_ARRIVALS = (EventKind.STORED, EventKind.PROMOTED, EventKind.WRITTEN)
#: Number of steps without progress for which a prompt waits for pending chunks.
_PATIENCE = 3
#: The holder of all pins and reservations; prompts come one after another.
_PROMPT = "prompt"


@attrs.define
class Tally:
    """The result of replaying a trace."""

    tokens: int = 0
    each: list[int] = attrs.field(factory=list)  #: tokens of each prompt that came from a tier
    seconds: list[float] = attrs.field(factory=list)  #: of each prompt, until its prefill was over
    hits: Counter[str] = attrs.field(factory=Counter)  #: tokens that came from each tier
    written: Counter[str] = attrs.field(factory=Counter)  #: bytes that went into each tier

    def add(self, trace: Trace, prompt: Prompt, hit_sources: Sequence[str], costs: Costs) -> None:
        """Count a prompt; ``hit_sources`` are the tiers from which its leading chunks came."""
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
        """The share of tokens that need not be computed."""
        return self.hits.total() / self.tokens

    @property
    def mean(self) -> float:
        """Seconds until a prompt's prefill was over, on average."""
        return statistics.fmean(self.seconds)

    @property
    def p95(self) -> float:
        """Seconds that one prompt in twenty exceeded."""
        return sorted(self.seconds)[(len(self.seconds) * 95 - 1) // 100]


def replay(
    trace: Trace, config: StackConfig, costs: Costs, layout: ChunkLayout, tick: Callable[[], object] = lambda: None
) -> Tally:
    """Serve one prompt after another, each computed and stored before the next. Raises ConfigError."""
    clock = Clock()
    manager = open_dry_run(config, layout, clock, max(1, trace.distinct))
    tally = Tally()
    for prompt in trace.prompts:
        clock.now = prompt.at
        hit_sources = serve(manager, prompt.path, tally.written, prompt.hints)
        tally.add(trace, prompt, hit_sources, costs)
        tick()
    manager.close()
    return tally


def serve(
    manager: StorageManager, path: Sequence[ChunkKey], written: Counter[str], hints: Mapping[str, str] | None = None
) -> Sequence[str]:
    """Serve a prompt as the scheduler side does. Returns the tiers from which its leading chunks came."""
    manager.on_request(path, hints)
    sources = _look_up(manager, path, written)
    _account(manager.step(), written)  # as an engine does before each forward
    manager.release(_PROMPT)
    if manager.reserve(path, _PROMPT):
        manager.commit(_PROMPT)
    _account(manager.step(), written)
    _account(manager.drain(timeout=60), written)
    return sources


def _look_up(manager: StorageManager, path: Sequence[ChunkKey], written: Counter[str]) -> Sequence[str]:
    """The tiers of the leading chunks that are READY when nothing is on its way any more."""
    patience, most = _PATIENCE, 0
    while True:
        found = manager.lookup(path, _PROMPT)
        ready = len(found.slots)
        patience, most = (patience - 1, most) if ready <= most else (_PATIENCE, ready)
        if not found.pending or not patience:
            return found.sources
        _account(manager.step(), written)


def _account(events: Iterable, written: Counter[str]) -> None:
    for event in events:
        if event.kind in _ARRIVALS:
            written[event.tier] += event.nbytes
