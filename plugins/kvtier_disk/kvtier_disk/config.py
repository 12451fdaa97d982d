"""What a user may say about a disk tier."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal

import attrs

from kvtier_core.interfaces import Backend, BackendConfig, OpenContext, Stored
from kvtier_core.types import Nbytes


@attrs.frozen
class DiskConfig(BackendConfig):
    """One file per frame, in a folder that belongs to one engine at a time."""

    type: ClassVar[str] = "disk"

    path: Path  #: the folder; each engine needs one of its own
    direct: Literal["auto", "on", "off"] = "auto"  #: past the page cache (O_DIRECT), if the filesystem can
    io: Literal["auto", "io_uring", "calls"] = "auto"  #: a batch of files at once (io_uring) where that is to be had
    min_free: Nbytes = Nbytes(1 << 30)  #: no write may leave the filesystem less free space than this
    quarantine: Nbytes = Nbytes(256 << 20)  #: of damaged frames so much is kept aside, to be looked at

    def open(self, ctx: OpenContext) -> Backend:
        from kvtier_disk.backend import DiskBackend

        return DiskBackend(self, ctx)

    @contextlib.contextmanager
    def walk(self) -> Iterator[Iterator[Stored]]:
        from kvtier_disk.walk import everything_in

        with everything_in(self.path) as found:
            yield found
