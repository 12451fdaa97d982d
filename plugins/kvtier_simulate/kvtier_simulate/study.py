"""One trace, and its results with stacks and with the offline optimum."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property

import attrs

from kvtier_core.config.model import ArenaTierConfig, StackConfig
from kvtier_core.layouts import ChunkLayout, KVGroup, KVKind, KVStructure
from kvtier_core.types import Nbytes
from kvtier_simulate.costs import Costs, Speed
from kvtier_simulate.dry_run import frame_nbytes_in
from kvtier_simulate.optimum import Optimum
from kvtier_simulate.replay import Tally, replay
from kvtier_simulate.stacks import Packing
from kvtier_simulate.traces import Trace

#: Speeds of reading where none is given: a copy between host memory and a GPU, and a good local disk.
ARENA_SPEED, TIER_SPEED = Speed(20.0), Speed(3.0)


def layout_of(chunk_tokens: int, bytes_per_token: int) -> ChunkLayout:
    """The layout of chunks of one page, for a model of which only the bytes per token are known."""
    page_nbytes = (chunk_tokens * bytes_per_token,)
    group = KVGroup("group 0", KVKind.FULL_ATTENTION, page_nbytes, chunk_tokens, "unknown", KVStructure.OPAQUE)
    return ChunkLayout((group,), chunk_tokens)


@attrs.frozen
class Study:
    """A trace with all that is needed to compute how long its prompts would have waited."""

    trace: Trace
    layout: ChunkLayout
    prefill: float = 8000.0  #: tokens per second
    speeds: Mapping[str, Speed] = attrs.field(factory=dict)  #: of tiers, by name, that differ from the defaults
    packing: Packing = "off"  #: of arenas that no file describes
    writes: tuple[Nbytes, ...] = ()  #: bytes a day that may be written to each store tier that no file describes

    def run(self, config: StackConfig, tick: Callable[[], object] = lambda: None) -> Tally:
        """The result of the simulated stack; ``tick`` is called after each prompt. Raises ConfigError."""
        return replay(self.trace, config, self._costs(config), self.layout, tick)

    def bound(self, config: StackConfig) -> Tally:
        """The optimum for tiers of these sizes: each chunk in one of them, those needed soonest in the first."""
        names, hits, capacity = [], [[0] * len(self.trace.prompts)], 0
        for tier in config.tiers:
            capacity += (tier.capacity or 0) // frame_nbytes_in(config, tier, self.layout)
            names.append(tier.name)
            hits.append(self._optimum.hits(capacity))
        tally, costs = Tally(), self._costs(config)
        for prompt, *ends in zip(self.trace.prompts, *hits, strict=True):
            counts = zip(names, ends, ends[1:], strict=False)
            hit_sources = [name for name, start, end in counts for _ in range(end - start)]
            tally.add(self.trace, prompt, hit_sources, costs)
        return tally

    def nothing(self) -> Tally:
        """The result without any cache."""
        tally = Tally()
        for prompt in self.trace.prompts:
            tally.add(self.trace, prompt, (), Costs({}, self.prefill, self.layout.payload_nbytes))
        return tally

    @cached_property
    def _optimum(self) -> Optimum:
        return Optimum(self.trace)

    def _costs(self, config: StackConfig) -> Costs:
        """Store tiers deliver frames at the speed of their stores; unpacking takes as long as copying."""
        speeds = {}
        for tier in config.tiers:
            arena = isinstance(tier, ArenaTierConfig)
            speed = self.speeds.get(tier.name, ARENA_SPEED if arena else TIER_SPEED)
            shorter = 1 if arena else self.layout.frame_nbytes / frame_nbytes_in(config, tier, self.layout)
            speeds[tier.name] = attrs.evolve(speed, gigabytes=speed.gigabytes * shorter)
        return Costs(speeds, self.prefill, self.layout.payload_nbytes)
