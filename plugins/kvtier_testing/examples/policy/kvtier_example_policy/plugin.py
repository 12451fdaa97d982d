"""Evicts first the chunk that no request has named for the longest time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import attrs

from kvtier_core.hookspecs import hookimpl
from kvtier_core.interfaces import EvictionConfig, EvictionPolicy
from kvtier_core.types import ChunkKey


@attrs.frozen
class ExamplePolicyConfig(EvictionConfig):
    type: ClassVar[str] = "example-policy"  # what users write in YAML; further fields would be further keys

    def open(self) -> EvictionPolicy:
        return ExamplePolicy()


class ExamplePolicy(EvictionPolicy):
    def __init__(self) -> None:
        self._held: dict[ChunkKey, None] = {}  # in the order of their last use

    def request(self, path: Sequence[ChunkKey], now: float, hints: Mapping[str, str]) -> None:
        for key in reversed(path):  # so that a prefix, which others may share, counts as used last
            if key in self._held:
                del self._held[key]
                self._held[key] = None

    def admit(self, key: ChunkKey, nbytes: int) -> None:
        self._held[key] = None

    def forget(self, key: ChunkKey, *, evicted: bool) -> None:
        del self._held[key]

    def victims(self) -> Iterator[ChunkKey]:
        return iter(self._held)


@hookimpl
def kvtier_eviction_policies() -> list[type[EvictionConfig]]:
    return [ExamplePolicyConfig]
