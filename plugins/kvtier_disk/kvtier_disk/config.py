"""The settings of a disk tier."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal

import attrs

from kvtier_core.interfaces import Backend, BackendConfig, Medium, OpenContext, Stored
from kvtier_core.storekit.folder import own_folder, own_folders, place_in
from kvtier_core.types import Nbytes


@attrs.frozen
class DiskConfig(BackendConfig):
    """One file per frame, in a folder that belongs to one engine at a time, or that engines share.

    When several engines use the configuration of a folder that is not shared, each has its own folder below it:
    ``replica-0`` and so on.
    """

    type: ClassVar[str] = "disk"
    medium: ClassVar[Medium] = Medium.DISK
    resizable: ClassVar[bool] = True

    path: Path  #: the folder; each engine needs its own unless the folder is shared
    #: Several engines, also on other machines, use the folder at the same time.
    shared: bool = False  # type: ignore[misc]  # the interface leaves it to the user here
    direct: Literal["auto", "on", "off"] = "auto"  #: bypass the page cache (O_DIRECT) where the file system supports it
    io: Literal["auto", "io_uring", "calls"] = "auto"  #: a batch of files at once (io_uring), or one after another
    min_free: Nbytes = Nbytes(1 << 30)  #: no write leaves less than this free on the file system
    quarantine: Nbytes = Nbytes(256 << 20)  #: bytes of damaged frames to keep, unless the folder is shared

    def open(self, ctx: OpenContext) -> Backend:
        from kvtier_disk.backend import DiskBackend
        from kvtier_disk.shared import SharedDiskBackend

        direct, io, min_free = self.direct, self.io, self.min_free
        if self.shared:
            return SharedDiskBackend(place_in(self.path), ctx, direct=direct, io=io, min_free=min_free)
        path = own_folder(self.path, ctx)
        return DiskBackend(path, ctx, direct=direct, io=io, min_free=min_free, quarantine=self.quarantine)

    @contextlib.contextmanager
    def walk(self) -> Iterator[Iterator[Stored]]:
        from kvtier_disk.walk import everything_in, everything_shared_in

        if self.shared:
            yield everything_shared_in(place_in(self.path))
            return
        folders = own_folders(self.path)
        with contextlib.ExitStack() as locks:
            yield itertools.chain.from_iterable([locks.enter_context(everything_in(folder)) for folder in folders])

    def recount(self, capacity: Nbytes) -> None:
        from kvtier_disk.shared_account import recount_folder

        # Count again: others may have written since.
        recount_folder(place_in(self.path), capacity)
