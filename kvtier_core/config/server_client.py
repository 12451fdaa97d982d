"""How an engine reaches the server of its node: functions of another package, found by its entry point."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol, cast

from kvtier_core.config.model import UNIX, ArenaTierConfig, StackConfig, StoreTierConfig
from kvtier_core.errors import ConfigError, Problem
from kvtier_core.layouts import ChunkLayout
from kvtier_core.stack.interface import Stack
from kvtier_core.types import Namespace
from kvtier_core.work.io_pool import run

#: The group of entry points; a name is the scheme of an address.
_GROUP = "kvtier.servers"
_ORIGIN = "the installed packages"


class ServerClient(Protocol):
    """The module that an entry point names."""

    def probe(self, path: Path) -> None:
        """Return when the server at this socket has answered. Raises BackendError if there is no answer."""

    def open_stack(
        self, path: Path, *, model: str, engine: str, namespace: Namespace, layout: ChunkLayout, recomputes: bool
    ) -> Stack:
        """The stack that the server has for this namespace, for the scheduler of an engine."""

    def served_tier(self, handle: str) -> ArenaTierConfig:
        """An arena of the server as a tier, for a worker, by its handle in a plan."""

    def served_store(self, name: str, handle: str) -> tuple[StoreTierConfig, str]:
        """A store tier of the server, for a worker, and its own handle. Raises ConfigError if its plugin is missing."""


def server_client() -> ServerClient:
    """The installed client. Raises ConfigError if there is none, or if it cannot be imported."""
    found = [entry for entry in entry_points(group=_GROUP) if entry.name == UNIX.removesuffix(":")]
    if not found:
        hint = "pip install 'kvtier[remote]'"
        raise ConfigError([Problem(_ORIGIN, "$.server", "the client of kvtier serve is not installed", hint)])
    loaded = run(found[0].load)
    if loaded.error is not None:
        raise ConfigError([Problem(_ORIGIN, "$.server", f"{found[0].value} cannot be imported: {loaded.error}")])
    return cast(ServerClient, loaded.value)


def server_path(config: StackConfig) -> Path:
    """The socket of the server that an engine's file names."""
    return Path((config.server or "").removeprefix(UNIX))
