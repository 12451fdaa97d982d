"""A server on a thread of the test's process, and engines' stacks that it serves."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path

from books import recount
from patience import HANG

import kvtier_cpu.plugin
import kvtier_disk.plugin
import kvtier_gds.plugin
from kvtier_core.builtin.chained import Chained
from kvtier_core.config.load import load_config
from kvtier_core.config.registry import Registry
from kvtier_core.layouts import ChunkLayout, tenant_mark
from kvtier_core.types import EPOCH, ChunkKey, Namespace, Nbytes
from kvtier_remote.client import RemoteStack, Waits
from kvtier_remote.protocol import Opening
from kvtier_serve.server import Server
from kvtier_testing.samples import make_layout

LAYOUT = make_layout((1024, 3072), 4)
FRAME = LAYOUT.frame_nbytes
#: For tests that are not about waiting: on a busy machine an answer takes longer than an engine waits for it.
PATIENT = Waits(lookup=HANG, others=HANG, start=HANG)


def keys_of(namespace: Namespace, tokens: list[int], salt: bytes = b"") -> list[ChunkKey]:
    """The keys that an engine gives to a prompt whose request has this salt."""
    tenant = tenant_mark(json.loads(salt).get("cache_salt", "")) if salt else b""
    return LAYOUT.keys(Chained(namespace, LAYOUT.tokens).keys(tokens, salt=salt), tenant)


def config_of(slots: int, *stores: dict, frame: int = FRAME, keep: Path | None = None, plugins: tuple = (), **options):
    """An arena of so many slots, kept in a folder or not, and store tiers below, also of other ``plugins``.

    ``options``: others of the arena.
    """
    arena = {"type": "cpu", "capacity": str(Nbytes(slots * frame)), "huge_pages": "off", **options}
    kept = {**arena, "keep": str(keep), "eviction": "lru"}  # every newcomer is admitted
    tiers = [kept if keep else arena, *stores]
    usual = kvtier_cpu.plugin, kvtier_disk.plugin, kvtier_gds.plugin
    return load_config({"version": 1, "tiers": tiers}, Registry.of(*usual, *plugins))


class Serving:
    """A server that a thread turns."""

    def __init__(self, config, path: Path, **options):
        self.path = path
        self.server = Server(config, path, **options)
        self._thread = threading.Thread(target=self.server.serve, daemon=True)
        self._thread.start()
        self.stacks: list[RemoteStack] = []

    def stack(
        self,
        model: str = "model",
        layout: ChunkLayout = LAYOUT,
        waits: Waits = PATIENT,
        *,
        recomputes: bool = True,
        epoch: str = "",
    ) -> RemoteStack:
        """That of a further engine; one with an ``epoch`` leaves nothing for others."""
        facts = {"model": model, EPOCH: epoch} if epoch else {"model": model}
        opening = Opening(model, "engine", Namespace.of(facts), layout, recomputes)
        self.stacks.append(RemoteStack(self.path, opening, waits))
        return self.stacks[-1]

    def close(self) -> None:
        """Hang up all engines, and end."""
        for stack in self.stacks:
            stack.close()
        self.stop()

    def stop(self) -> None:
        """End the server alone."""
        if self._thread.is_alive():
            self.server.stop()
            self._thread.join()
            try:
                recount(self.server)
            finally:
                self.server.close(5.0)


@contextlib.contextmanager
def serving(
    path: Path,
    slots: int = 16,
    *stores: dict,
    frame: int = FRAME,
    keep: Path | None = None,
    eviction: str = "gittins",
    plugins: tuple = (),
    **options,
) -> Iterator[Serving]:
    config = config_of(slots, *stores, frame=frame, keep=keep, eviction=eviction, plugins=plugins)
    served = Serving(config, path / "kvtier.sock", **options)
    try:
        yield served
    finally:
        served.close()
