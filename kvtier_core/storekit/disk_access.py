"""How files in a folder are accessed, and a check that their device still answers. Raises OSError."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvtier_core.errors import BackendError
from kvtier_core.storekit.files import bounce, ring_works
from kvtier_core.storekit.folder import Folder
from kvtier_core.types import FRAME_ALIGNMENT

#: The beginning of the names of probes.
PROBE = ".kvtier-probe"

#: Errors that one frame may cause by itself, if the device still answers. All others concern the whole store.
OF_ONE_FRAME = {
    errno.EACCES,
    errno.EBADMSG,  # the file system's checksum is wrong
    errno.EILSEQ,  # the device's checksum is wrong
    errno.EIO,
    errno.ELOOP,
    errno.ENODATA,  # a bad sector
    errno.ENOTDIR,
    errno.EPERM,
    errno.EREMOTEIO,
    errno.EUCLEAN,  # the file system's own structures are damaged
}

#: Errors of a file system that has no room.
FULL = {errno.ENOSPC, errno.EDQUOT}


def effective_access(path: Path, folder: Folder, *, direct: str, io: str) -> tuple[bool, bool]:
    """O_DIRECT and io_uring in ``folder``, on or off, given ``direct: auto|on|off`` and ``io: auto|io_uring|calls``.

    ``path`` names the folder in errors. Raises BackendError if a setting requires what is not available here.
    """
    bypass = _effective_direct(path, folder, direct)
    return bypass, _effective_ring(path, io, direct=bypass)


def _effective_direct(path: Path, folder: Folder, asked: str) -> bool:
    if asked == "off":
        return False
    try:
        with _probe(folder, os.O_DIRECT) as fd:  # on some file systems the open succeeds and the write fails
            os.pwritev(fd, [bounce(FRAME_ALIGNMENT)], 0)
    except OSError as error:
        if asked == "on":
            raise BackendError(
                f"{path}: direct is on, but writes cannot bypass the page cache: "
                f"{error.strerror}; direct: auto uses the page cache"
            ) from error
        return False
    return True


def _effective_ring(path: Path, asked: str, *, direct: bool) -> bool:
    if asked == "calls" or (asked == "auto" and not direct):
        return False  # with the page cache, a ring only adds a kernel thread
    ring = ring_works()
    if asked == "io_uring" and not ring:
        raise BackendError(
            f"{path}: io is io_uring, which is not available: kvtier was built without it, or the "
            "kernel or a container's rules forbid it; io: auto uses plain calls"
        )
    return ring


def raise_if_store_failed(outcomes: Sequence[object], folder: Folder) -> None:
    """Raise the first OSError that concerns the whole store. After errors of frames the device must still answer."""
    failures = [outcome for outcome in outcomes if isinstance(outcome, OSError)]
    for failure in failures:
        if failure.errno not in OF_ONE_FRAME:
            raise failure
    if failures:
        try:
            probe_device(folder)
        except OSError:
            raise failures[0] from None


def probe_device(folder: Folder) -> None:
    """Write a page to the folder's device and read it back, bypassing all caches if possible. Raises OSError."""
    try:
        _there_and_back(folder, os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        _there_and_back(folder, 0)


def remove_probes(folder: Folder) -> None:
    """Remove the probes of processes that were killed."""
    for entry in folder.entries():
        if entry.name.startswith(PROBE):
            folder.remove(entry.name)


def new_file(folder: Folder, name: str, flags: int) -> int:
    """A descriptor of a new file. Anything that has its name is removed, not written to."""
    try:
        return folder.open(name, flags | os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        folder.remove(name)
        return folder.open(name, flags | os.O_CREAT | os.O_EXCL)


def _there_and_back(folder: Folder, flags: int) -> None:
    page, found = bounce(FRAME_ALIGNMENT), bounce(FRAME_ALIGNMENT)
    page[:] = os.urandom(FRAME_ALIGNMENT)
    with _probe(folder, flags) as fd:
        os.pwritev(fd, [page], 0)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if os.preadv(fd, [found], 0) != FRAME_ALIGNMENT or found != page:
            raise OSError(errno.EIO, os.strerror(errno.EIO))


@contextlib.contextmanager
def _probe(folder: Folder, flags: int) -> Iterator[int]:
    """A new file that is removed afterwards; each has its own name."""
    name = f"{PROBE}-{secrets.token_hex(8)}"
    try:
        fd = new_file(folder, name, os.O_RDWR | flags)
        try:
            yield fd
        finally:
            os.close(fd)
    finally:
        with contextlib.suppress(OSError):
            folder.remove(name)
