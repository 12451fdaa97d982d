"""A server on a thread of the test's process, and engines' stacks that it serves."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

from patience import HANG

import kvtier_cpu.plugin
import kvtier_disk.plugin
import kvtier_gds.plugin
from kvtier_core.config.load import load_config
from kvtier_core.config.registry import Registry
from kvtier_core.layouts import ChunkLayout
from kvtier_core.server.client import RemoteStack, Waits
from kvtier_core.server.protocol import Opening
from kvtier_core.server.server import Server
from kvtier_core.testing.samples import make_layout
from kvtier_core.types import Namespace, Nbytes

LAYOUT = make_layout((1024, 3072), 4)
FRAME = LAYOUT.frame_nbytes
#: For tests that are not about waiting: on a busy machine an answer takes longer than an engine waits for it.
PATIENT = Waits(lookup=HANG, others=HANG)


def config_of(slots: int, *stores: dict, frame: int = FRAME, keep: Path | None = None):
    """An arena of so many slots, kept in a folder or not, and store tiers below."""
    arena = {"type": "cpu", "capacity": str(Nbytes(slots * frame)), "huge_pages": "off"}
    kept = {**arena, "keep": str(keep), "eviction": "lru"}  # every newcomer is admitted
    tiers = [kept if keep else arena, *stores]
    plugins = kvtier_cpu.plugin, kvtier_disk.plugin, kvtier_gds.plugin
    return load_config({"version": 1, "tiers": tiers}, Registry.of(*plugins))


class Serving:
    """A server that a thread turns."""

    def __init__(self, config, path: Path, **options):
        self.path = path
        self.server = Server(config, path, **options)
        self._thread = threading.Thread(target=self.server.serve, daemon=True)
        self._thread.start()
        self.stacks: list[RemoteStack] = []

    def stack(
        self, model: str = "model", layout: ChunkLayout = LAYOUT, waits: Waits = PATIENT, *, recomputes: bool = True
    ) -> RemoteStack:
        """That of a further engine."""
        opening = Opening(model, "engine", Namespace.of({"model": model}), layout, recomputes)
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
            self.server.close(5.0)


@contextlib.contextmanager
def serving(
    path: Path, slots: int = 16, *stores: dict, frame: int = FRAME, keep: Path | None = None, **options
) -> Iterator[Serving]:
    served = Serving(config_of(slots, *stores, frame=frame, keep=keep), path / "kvtier.sock", **options)
    try:
        yield served
    finally:
        served.close()
