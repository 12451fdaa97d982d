"""Memory that several processes map, and that is freed when the last of them ends.

A memfd has no name in any file system: workers open it through ``/proc/<pid>/fd/<fd>`` of its creator. So a container's
small ``/dev/shm`` does not limit it, and no segment outlives its engine: the kernel frees it with the last process that
maps it, even after ``kill -9``. Process ids are reused, so device, inode and size are compared with the creator's
before anything is mapped. Only the creator's user (and root) can open it. Seals fix its length: if one process
truncated it, any other would be killed at its next access.

Memory that must outlive its process has a name, in a folder on a tmpfs, where the kernel does not seal files. Pages
reserved for hugetlbfs are not used there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvtier_core.errors import BackendError
from kvtier_core.storekit.folder import Folder, is_made, nearest
from kvtier_core.storekit.trial import TrialFolder
from kvtier_core.types import size
from kvtier_cpu.memory_limit import must_be_available
from kvtier_cpu.placement import Placement, whole_pages

_SHMEM_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in Python's mmap
_NAME = "memory"  # of a segment in a folder
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_PIECE = 64 << 20  # bytes that are faulted in at a time; between two pieces Ctrl-C is handled

_WHY_NOT = {
    errno.ENOENT: "it is gone, or has closed it",
    errno.EACCES: "it runs as another user, or /proc hides it",
}


class Address(NamedTuple):
    """The address of a segment for another process, and what that must find there."""

    pid: int
    fd: int
    device: int
    inode: int
    nbytes: int


class Segment:
    """Memory for all slots of a placement, allocated now.

    Raises BackendError if the memory, or the requested kind of pages, is not available.
    """

    def __init__(self, placement: Placement, huge_pages: str, keep: Path | None = None, *, checking: bool = False):
        """``keep`` is a folder where the memory outlives this process and where the next process finds it.

        With ``checking`` it only checks whether that folder has room.
        """
        self._file, memory, self.pages = _open(placement, huge_pages, keep, checking)
        self.memory = memoryview(memory)
        status = os.fstat(self._file.fileno())
        self.address = Address(os.getpid(), self._file.fileno(), status.st_dev, status.st_ino, status.st_size)

    def close(self) -> None:
        """Stop other processes from mapping it. It is freed with its last view and the last process that maps it."""
        self._file.close()
        self.memory = memoryview(b"")


def reach(address: Address, *, populate: bool) -> mmap.mmap:
    """Map another process's segment, with all of its pages if ``populate``: otherwise each costs a fault at first use.

    Raises BackendError when it is gone or cannot be opened.
    """
    path = f"/proc/{address.pid}/fd/{address.fd}"
    try:
        with open(path, "r+b", buffering=0) as file:
            status = os.fstat(file.fileno())
            if (status.st_dev, status.st_ino, status.st_size) != address[2:]:
                raise BackendError(f"{path} is no longer the arena it was: its owner is gone")
            memory = mmap.mmap(file.fileno(), address.nbytes)
    except OSError as error:
        why = _WHY_NOT.get(error.errno or 0, error.strerror)
        raise BackendError(f"cannot reach the arena of process {address.pid}: {why}") from error
    if populate:
        with contextlib.suppress(OSError):
            for begin, nbytes in _in_pieces(0, len(memory)):
                _populate(memory, begin, nbytes)
    return memory


def _open(placement: Placement, huge_pages: str, keep: Path | None, checking: bool) -> tuple[io.FileIO, mmap.mmap, str]:
    """A file in memory, its memory, and the kind of its pages."""
    if huge_pages != "off" and keep is None:
        with contextlib.suppress(OSError):  # none are reserved, or too few, or the kernel has none
            return *_make(placement, "hugetlb"), "hugetlb"
    nbytes = placement.nbytes
    huge = huge_pages != "off" and _shmem_enabled() not in ("never", "deny")
    if huge_pages == "on" and not huge:
        raise BackendError(
            f"cpu: huge_pages is on, but {size(nbytes)} of huge pages are not reserved (vm.nr_hugepages) and "
            f"{_SHMEM_ENABLED} is {_shmem_enabled()}; huge_pages: auto uses ordinary pages"
        )
    pages = "transparent" if huge else "off"
    try:
        return *_make(placement, pages, keep, checking), pages
    except OSError as error:
        where = "shared memory" if keep is None else f"memory in {keep}"
        why = "others have taken the space meanwhile" if error.errno == errno.EFAULT else error.strerror
        raise BackendError(f"cpu: cannot allocate {size(nbytes)} of {where}: {why}; lower the capacity") from error


def _make(
    placement: Placement, pages: str, keep: Path | None = None, checking: bool = False
) -> tuple[io.FileIO, mmap.mmap]:
    """A file and its memory: every page is allocated now, while that can still fail. A failure leaves nothing."""
    with contextlib.ExitStack() as undo:
        kept = _Kept(keep, placement) if keep is not None else None
        if pages != "hugetlb":
            must_be_available(placement.nbytes - (kept.nbytes if kept else 0))
        if kept and checking:
            kept.try_out()
        file = io.FileIO(_unnamed(pages) if kept is None or checking else kept.open(undo), "r+")
        undo.callback(file.close)
        page_nbytes = os.fstat(file.fileno()).st_blksize
        _size(file, whole_pages(placement.nbytes, page_nbytes), sealed=kept is None)
        memory = mmap.mmap(file.fileno(), 0)
        if kept and checking:
            undo.pop_all()
            return file, memory
        if pages == "transparent":
            memory.madvise(mmap.MADV_HUGEPAGE)
        for first, end, node in placement.ranges(page_nbytes):
            with placement.on(node):
                for begin, nbytes in _in_pieces(first, end):
                    _allocate(file, memory, begin, nbytes)
        undo.pop_all()
    return file, memory


def _unnamed(pages: str) -> int:
    huge = os.MFD_HUGETLB if pages == "hugetlb" else 0
    return os.memfd_create("kvtier", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | huge)


def _size(file: io.FileIO, nbytes: int, *, sealed: bool) -> None:
    """Give a file this length, for good if ``sealed``."""
    if os.fstat(file.fileno()).st_size != nbytes:
        file.truncate(nbytes)
    if sealed:
        fcntl.fcntl(file.fileno(), fcntl.F_ADD_SEALS, _SEALS)


class _Kept:
    """The file in a folder, which may be missing only in a command that checks.

    Raises BackendError if there is no room for it.
    """

    def __init__(self, keep: Path, placement: Placement):
        self._path = keep
        self.nbytes = 0  #: allocated by a former process
        self._fits = False
        with contextlib.suppress(FileNotFoundError):
            status = Folder.at(keep, looking=True).status(_NAME)
            self.nbytes = 512 * status.st_blocks
            fits = status.st_size == whole_pages(placement.nbytes, status.st_blksize)
            self._fits = fits and is_made(status)
        system = os.statvfs(nearest(keep))
        room = system.f_bavail * system.f_frsize + self.nbytes
        if system.f_blocks and placement.nbytes > room:  # a tmpfs without a bound has none
            raise BackendError(
                f"cpu: capacity needs {size(placement.nbytes)} in {keep}, but {size(room)} is available; lower the "
                "capacity, or enlarge the tmpfs (mount -o remount,size=…)"
            )

    def try_out(self) -> None:
        """Raise the errors that `open` would, and make nothing."""
        folder = TrialFolder.at(self._path, make=True)
        if not self._fits:
            folder.remove_made(_NAME)
        os.close(folder.open(_NAME, os.O_RDWR | os.O_CREAT | (0 if self._fits else os.O_EXCL)))

    def open(self, undo: contextlib.ExitStack) -> int:
        """A file of another length is replaced: processes may still map it. ``undo`` removes a new file.

        Raises BackendError if the file is not kvtier's.
        """
        folder = Folder.at(self._path)
        if not self._fits:
            folder.remove_made(_NAME)
            undo.callback(folder.remove, _NAME)
        return folder.open(_NAME, os.O_RDWR | os.O_CREAT)


def _allocate(file: io.FileIO, memory: mmap.mmap, begin: int, nbytes: int) -> None:
    """Allocate these pages, and change none that exist. Raises OSError where touching a page would raise SIGBUS."""
    try:
        _populate(memory, begin, nbytes)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        os.posix_fallocate(file.fileno(), begin, nbytes)


def _populate(memory: mmap.mmap, begin: int, nbytes: int) -> None:
    """Map these pages, which are allocated if they are missing. Raises OSError if they cannot be."""
    memory.madvise(_MADV_POPULATE_WRITE, begin, nbytes)


def _in_pieces(first: int, end: int) -> Iterator[tuple[int, int]]:
    for begin in range(first, end, _PIECE):
        yield begin, min(_PIECE, end - begin)


def _shmem_enabled() -> str:
    """The kernel's choice of huge pages for shared memory: ``always within_size [advise] never deny force``."""
    try:
        return _SHMEM_ENABLED.read_text("ascii").partition("[")[2].partition("]")[0]
    except OSError:
        return "never"
