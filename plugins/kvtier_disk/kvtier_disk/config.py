"""What a user may say about a disk tier."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal

import attrs

from kvtier_core.interfaces import Backend, BackendConfig, Medium, OpenContext, Stored
from kvtier_core.types import Nbytes

#: How the folder of one of several engines is called, followed by its number.
_REPLICA = "replica-"


@attrs.frozen
class DiskConfig(BackendConfig):
    """One file per frame, in a folder that belongs to one engine at a time.

    Of several engines that share the configuration each has a folder of its own below it: ``replica-0`` and so on.
    """

    type: ClassVar[str] = "disk"
    medium: ClassVar[Medium] = Medium.DISK

    path: Path  #: the folder; each engine needs one of its own
    direct: Literal["auto", "on", "off"] = "auto"  #: past the page cache (O_DIRECT), if the filesystem can
    io: Literal["auto", "io_uring", "calls"] = "auto"  #: a batch of files at once (io_uring) where that is to be had
    min_free: Nbytes = Nbytes(1 << 30)  #: no write may leave the filesystem less free space than this
    quarantine: Nbytes = Nbytes(256 << 20)  #: of damaged frames so much is kept aside, to be looked at

    def open(self, ctx: OpenContext) -> Backend:
        from kvtier_disk.backend import DiskBackend

        own = self.path / f"{_REPLICA}{ctx.replica}" if ctx.replicas > 1 else self.path
        return DiskBackend(attrs.evolve(self, path=own), ctx)

    @contextlib.contextmanager
    def walk(self) -> Iterator[Iterator[Stored]]:
        from kvtier_disk.walk import everything_in

        folders = [self.path, *sorted(self.path.glob(f"{_REPLICA}[0-9]*"))]
        with contextlib.ExitStack() as locks:
            yield itertools.chain.from_iterable([locks.enter_context(everything_in(folder)) for folder in folders])
