"""The settings of a gds tier."""

from __future__ import annotations

import contextlib
import itertools
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal

import attrs

from kvtier_core.interfaces import (
    ArenaConfig,
    Backend,
    BackendConfig,
    DirectReader,
    Medium,
    OpenContext,
    PagedKVCache,
    Stored,
)
from kvtier_core.storekit.folder import own_folder, own_folders
from kvtier_core.types import Nbytes


def _some_and_each_once(config: object, field: attrs.Attribute, paths: tuple[Path, ...]) -> None:
    if not paths:
        raise ValueError("'paths' must name at least one folder")
    if len(set(paths)) < len(paths):
        raise ValueError("'paths' names a folder twice")


@attrs.frozen
class GdsConfig(BackendConfig):
    """Frames in preallocated files, one on each of several drives, that belong to one engine at a time.

    When several engines share a configuration, each has its own folders below these: ``replica-0`` and so on.
    """

    type: ClassVar[str] = "gds"
    medium: ClassVar[Medium] = Medium.DISK
    reads_packed: ClassVar[bool] = True

    #: Folders, each on its own drive; the frames are spread over them.
    paths: tuple[Path, ...] = attrs.field(validator=_some_and_each_once)
    #: ``bounce``: frames pass through the slots of an arena. ``gds``: each of the engine's workers reads them from the
    #: drive into its own memory, or its GPU's where GPUDirect Storage is available, and copies them from there into
    #: pages; stores still pass through an arena. ``auto``: ``gds`` where workers can read into their GPU's memory, and
    #: no slower than into the host's; else ``bounce``.
    mode: Literal["auto", "gds", "bounce"] = "auto"
    direct: Literal["auto", "on", "off"] = "auto"  #: bypass the page cache (O_DIRECT) where the file system supports it
    io: Literal["auto", "io_uring", "calls"] = "auto"  #: a batch of frames at once (io_uring), or one after another
    #: Memory through which frames pass if no arena is above this tier.
    staging: Nbytes = attrs.field(default=Nbytes(2 << 30), validator=attrs.validators.gt(Nbytes(0)))

    def staging_arena(self) -> tuple[ArenaConfig, Nbytes] | None:
        from kvtier_cpu.config import CpuConfig

        return CpuConfig(), self.staging

    def open(self, ctx: OpenContext) -> Backend:
        from kvtier_gds.backend import GdsBackend

        return GdsBackend(
            [own_folder(path, ctx) for path in self.paths], ctx, mode=self.mode, direct=self.direct, io=self.io
        )

    def attach_reader(self, handle: str, cache: PagedKVCache, timeout: float) -> DirectReader:
        from kvtier_gds.reader import open_reader

        return open_reader(handle, cache, timeout)

    @contextlib.contextmanager
    def apart(self) -> Iterator[BackendConfig]:
        """Slabs in separate folders on the same drives: another capacity would truncate this tier's files."""
        from kvtier_gds.slab import remove_slab

        name = f"conform-{secrets.token_hex(8)}"
        paths = tuple(path / name for path in self.paths)
        try:
            yield attrs.evolve(self, paths=paths)
        finally:
            for path in paths:
                remove_slab(path)

    @contextlib.contextmanager
    def walk(self) -> Iterator[Iterator[Stored]]:
        from kvtier_gds.walk import everything_in

        folders = itertools.chain.from_iterable(map(own_folders, self.paths))
        with contextlib.ExitStack() as locks:
            yield itertools.chain.from_iterable([locks.enter_context(everything_in(folder)) for folder in folders])
