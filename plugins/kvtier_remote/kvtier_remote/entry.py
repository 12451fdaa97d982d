"""What an engine calls: see `kvtier_core.config.server_client.ServerClient`."""

from __future__ import annotations

from pathlib import Path

from kvtier_core.layouts import ChunkLayout
from kvtier_core.stack.interface import Stack
from kvtier_core.types import Namespace
from kvtier_remote.client import RemoteStack
from kvtier_remote.memory import probe, served_store, served_tier
from kvtier_remote.protocol import Opening

__all__ = ["open_stack", "probe", "served_store", "served_tier"]


def open_stack(
    path: Path, *, model: str, engine: str, namespace: Namespace, layout: ChunkLayout, recomputes: bool
) -> Stack:
    """The stack of the server at this socket."""
    return RemoteStack(path, Opening(model, engine, namespace, layout, recomputes))
