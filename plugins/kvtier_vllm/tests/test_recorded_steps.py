"""What loads save, as the steps of recorded engines tell it beforehand, and as it turned out."""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
from recorded_steps import ENGINES, HELD, RECORDED, Asked

from kvtier_core.config.load import load_config
from kvtier_core.config.registry import Registry
from kvtier_core.engine.scheduler.prefill_speed import Computed
from kvtier_core.engine.scheduler.requests import Match, Wait
from kvtier_core.engine.scheduler.waiting import Waiting
from kvtier_core.stack.load_choice import LoadChooser, StoreSpeed
from kvtier_core.stack.outcomes import LoadLimit

CHUNK = 64
TIERS = [{"type": "heap", "capacity": "1MiB"}]


@attrs.define
class Pair:
    """Prompts that were partly held, and as many of which nothing was, one just after the other."""

    asked: Asked
    estimate: float = 0.0  #: of the seconds to compute what is held of one of them, from the steps before
    limit: LoadLimit | None = None  #: for loading it
    took: dict[bool, float] = attrs.field(factory=dict)  #: seconds of the steps of prompts, by whether a part was held

    @property
    def saved(self) -> float:
        return self.took[False] - self.took[True]


def entries(engine: str) -> Iterator[list[Any]]:
    for line in RECORDED.read_text().splitlines():
        name, *entry = json.loads(line)
        if name == engine:
            yield entry


@functools.cache
def replayed(engine: str) -> list[Pair]:
    """All but the first pair of each kind: something may be compiled then."""
    config = load_config({"version": 1, "load_wait": "60s", "tiers": TIERS}, Registry.of())
    waiting = Waiting(config, CHUNK, lambda: 0.0)
    pairs: list[Pair] = []
    seconds = 0.0
    for what, *facts in entries(engine):
        match what:
            case "asked":
                asked, seconds = Asked(*facts), 0.0
                if not pairs or len(pairs[-1].took) == 2:
                    pairs.append(Pair(asked))
                pair = pairs[-1]
                if asked.held and waiting.speed.seconds(0, 1, 1):
                    state = SimpleNamespace(match=Match(), wait=Wait(), view=SimpleNamespace(tokens=asked.tokens))
                    pair.asked, pair.limit = asked, waiting.limit(state)
                    pair.estimate = waiting.speed.seconds(0, asked.held, asked.tokens)
            case "step":
                *computed, planned, ended = facts
                step = Computed(*computed)
                waiting.speed.planned(step, planned)
                waiting.speed.ended(ended)
                if step.prompt:
                    seconds += ended - planned
            case "answered":
                pair.took[bool(asked.held)] = seconds
    return pairs[len(HELD) :]


@pytest.mark.parametrize("engine", ENGINES)
def test_seconds_saved_are_those_of_the_engine(engine):
    pairs = replayed(engine)
    estimate = sum(pair.asked.prompts * pair.estimate for pair in pairs)
    assert estimate == pytest.approx(sum(pair.saved for pair in pairs), rel=0.1)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("share", [0.25, 0.5, 0.8, 0.9, 1.0, 1.1, 1.25, 2.0, 4.0])
def test_auto_is_as_good_as_the_best_choice_for_each_kind(engine, share):
    """From a store that takes this share of what computing takes, over all that is asked for."""
    pairs, chosen, choices = replayed(engine), 0.0, defaultdict(lambda: [0.0, 0.0])
    tokens = sum(pair.asked.prompts * pair.asked.held for pair in pairs)
    store = StoreSpeed()
    store.rate = tokens / (share * sum(pair.saved for pair in pairs))  # as if a token were one byte
    for pair in pairs:
        loaded = pair.took[True] + store.seconds(pair.asked.prompts * pair.asked.held)
        choice = LoadChooser("store", store, lambda: 0.0).choose(pair.asked.held // CHUNK, CHUNK, 0, pair.limit)
        chosen += loaded if choice.chunks else pair.took[False]
        choices[pair.asked][0] += loaded
        choices[pair.asked][1] += pair.took[False]
    assert chosen <= 1.02 * sum(map(min, choices.values()))
