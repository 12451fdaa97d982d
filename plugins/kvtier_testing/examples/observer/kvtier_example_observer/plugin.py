"""Writes a line whenever a store is no longer called, or is called again."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import ClassVar

import attrs

from kvtier_core.hookspecs import hookimpl
from kvtier_core.interfaces import Observer, ObserverConfig, OpenContext
from kvtier_core.types import Event, EventKind

_WORDS = {EventKind.BREAKER_OPEN: "is in trouble", EventKind.BREAKER_CLOSED: "is back"}


@attrs.frozen
class ExampleObserverConfig(ObserverConfig):
    type: ClassVar[str] = "example-observer"  # what users write in YAML; the fields are further keys

    tier: str = "disk"

    def open(self, ctx: OpenContext) -> Observer:
        return ExampleObserver(self.tier)


class ExampleObserver(Observer):
    def __init__(self, tier: str) -> None:
        self._tier = tier

    def observe(self, events: Sequence[Event]) -> None:
        for event in events:
            if event.tier == self._tier and event.kind in _WORDS:
                print(f"{event.tier} {_WORDS[event.kind]}: {event.why!r}", file=sys.stderr, flush=True)


@hookimpl
def kvtier_observers() -> list[type[ObserverConfig]]:
    return [ExampleObserverConfig]
