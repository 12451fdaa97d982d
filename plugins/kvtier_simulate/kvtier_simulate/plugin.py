"""The observer that the package offers."""

from __future__ import annotations

from kvtier_core.hookspecs import hookimpl
from kvtier_core.interfaces import ObserverConfig
from kvtier_simulate.recording import RecordingConfig


@hookimpl
def kvtier_observers() -> list[type[ObserverConfig]]:
    return [RecordingConfig]
