"""A tier that keeps frames in a dict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import attrs

from kvtier_core.hookspecs import hookimpl
from kvtier_core.interfaces import Backend, BackendConfig, OpenContext
from kvtier_core.types import ChunkKey


@attrs.frozen
class ExampleBackendConfig(BackendConfig):
    type: ClassVar[str] = "example-backend"  # what users write in YAML; further fields would be further keys

    def open(self, ctx: OpenContext) -> Backend:
        return ExampleBackend()


class ExampleBackend(Backend):
    def __init__(self) -> None:
        self._frames: dict[ChunkKey, bytes] = {}

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return [key in self._frames for key in keys]

    def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[int]:
        return [self._read_one(key, view) for key, view in zip(keys, into, strict=True)]

    def _read_one(self, key: ChunkKey, view: memoryview) -> int:
        frame = self._frames.get(key, b"")
        if len(frame) > len(view):
            return 0
        view[: len(frame)] = frame
        return len(frame)

    def write(self, keys: Sequence[ChunkKey], frames: Sequence[memoryview]) -> None:
        self._frames.update((key, bytes(frame)) for key, frame in zip(keys, frames, strict=True))

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        for key in keys:
            self._frames.pop(key, None)


@hookimpl
def kvtier_backends() -> list[type[BackendConfig]]:
    return [ExampleBackendConfig]
