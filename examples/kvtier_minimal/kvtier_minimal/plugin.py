"""A tier that keeps frames in a dict."""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvtier_core.hookspecs import hookimpl
from kvtier_core.interfaces import Backend, BackendConfig


@attrs.frozen
class MinimalConfig(BackendConfig):
    type: ClassVar[str] = "minimal"  # what users write in YAML; further fields would be further keys

    def open(self, ctx):
        return MinimalBackend()


class MinimalBackend(Backend):
    def __init__(self):
        self._frames = {}

    def contains(self, keys):
        return [key in self._frames for key in keys]

    def read(self, keys, into):
        return [self._read_one(key, view) for key, view in zip(keys, into, strict=True)]

    def _read_one(self, key, view):
        frame = self._frames.get(key, b"")
        if len(frame) > len(view):
            return 0
        view[: len(frame)] = frame
        return len(frame)

    def write(self, keys, frames):
        self._frames.update((key, bytes(frame)) for key, frame in zip(keys, frames, strict=True))

    def delete(self, keys):
        for key in keys:
            self._frames.pop(key, None)


@hookimpl
def kvtier_backends():
    return [MinimalConfig]
