"""A tier in a folder that several engines share, on one machine or on many."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from kvtier_core.errors import BackendError
from kvtier_core.interfaces import OpenContext
from kvtier_core.storekit.disk_access import OF_ONE_FRAME, effective_access, probe_device
from kvtier_core.storekit.folder import Folder, NoFile, NotOurs, backend_errors
from kvtier_core.storekit.shared_space import SharedSpace
from kvtier_core.types import ChunkKey
from kvtier_disk.files import Access, publish
from kvtier_disk.folder_backend import FolderBackend
from kvtier_disk.frames import Place, namespace_folders
from kvtier_disk.namespaces import make_namespace_folder
from kvtier_disk.shared_account import MOST_LISTED, FolderAccount
from kvtier_disk.shared_folder import SharedFolder

R = TypeVar("R", bound=Sequence[Any] | None)

#: Bytes of the capacity that an engine takes at a time: locking a file on a server costs several round trips.
_QUANTUM = 64 << 20


class SharedDiskBackend(FolderBackend):
    """Frames as files in a folder that no engine locks or cleans."""

    shared = True
    space: SharedSpace | None

    def __init__(self, path: Path, ctx: OpenContext, *, direct: str, io: str, min_free: int):
        folder = SharedFolder(path, trial=ctx.checking)
        super().__init__(path, folder, ctx, direct=direct, io=io, min_free=min_free)
        with backend_errors(path):
            root = folder.take()
            self._access = Access(*effective_access(path, root, direct=direct, io=io), writer=_this_writer())
            if not (ctx.checking and namespace_folders(root)):  # an engine's may be one of these
                make_namespace_folder(root, ctx.namespace, self._access.writer)
        self.space = None
        if ctx.capacity:
            account = FolderAccount(path, folder.folder_again, longest=ctx.capacity, timeout=ctx.timeout)
            account.count()  # fails where files cannot be locked
            self.space = SharedSpace(account, ctx.capacity, quantum=_QUANTUM, most_listed=MOST_LISTED)

    @property
    def used(self) -> int | None:
        return None if self.space is None else self.space.used

    def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        return [found is True for found in self._apart(super().contains, keys)]

    def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> Sequence[int | BackendError]:
        return self._apart(super().read, keys, into)

    def write(self, keys: Sequence[ChunkKey], frames: Sequence[memoryview]) -> Sequence[BackendError | None] | None:
        return self._apart(super().write, keys, frames)

    def close(self) -> None:
        try:
            if self.space is not None:
                self.space.close()
        finally:
            super().close()

    def _write(self, folder: Folder, places: Sequence[Place], frames: Sequence[memoryview]) -> None:
        def replace(number: int) -> None:
            if self.space is not None:
                # Whoever removes a frame gives its bytes back. A rename would not report whether it replaced a frame.
                self._remove(folder, places[number])
            publish(folder, places[number], self._access)

        self._write_taken(folder, places, frames, list(map(len, frames)), replace)

    def _apart(self, call: Callable[..., R], *batch: Sequence[Any]) -> R | list[Any]:
        """The outcome of a call for a batch.

        If it fails for a reason that may concern only one key, and the folder works, each key is tried by itself.
        """
        try:
            return call(*batch)
        except BackendError as error:
            if not _may_be_of_one_key(error) or not self._works():
                raise
        return [_alone(call, *of_one) for of_one in zip(*batch, strict=True)]

    def _works(self) -> bool:
        """Can a page be written into the folder, and read again?"""
        try:
            with backend_errors(self._path):
                probe_device(self._root.folder_again())
        except BackendError:
            return False
        return True


def _may_be_of_one_key(error: BackendError) -> bool:
    cause = error.__cause__
    return isinstance(error, NoFile | NotOurs) or (isinstance(cause, OSError) and cause.errno in OF_ONE_FRAME)


def _alone(call: Callable[..., Sequence[Any] | None], *of_one: Any) -> Any:
    """The outcome for one key, or the error."""
    try:
        outcomes = call(*[[each] for each in of_one])
    except BackendError as error:
        error.__cause__ = error.__context__ = None  # their tracebacks would keep the views
        return error.with_traceback(None)
    return outcomes and outcomes[0]


def _this_writer() -> str:
    """A name that no other writer has, on any machine; it shows people who wrote an unfinished file."""
    host = re.sub(r"[^A-Za-z0-9-]", "_", os.uname().nodename)[:64]
    return f"{host}-{os.getpid()}-{secrets.token_hex(8)}"
