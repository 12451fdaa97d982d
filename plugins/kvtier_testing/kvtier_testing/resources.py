"""The resources of this process: descriptors, threads, child processes, shared memory, files. From Linux's /proc."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import attrs

#: Whether any of this can be read here.
READABLE = Path("/proc/self/task").is_dir() and Path("/proc/self/maps").is_file()

#: Seconds after which what a law waits for counts as hanging, however busy the machine is. Some pools end a thread that
#: has been idle for ten (Rust's Tokio).
PATIENCE = 120.0
_SHARED_ANONYMOUS = "/dev/zero (deleted)"  # reserved by the kernel when it is mapped
_SECTOR = 512  # in which `st_blocks` counts


@attrs.frozen
class Resources:
    """The resources of a process at one moment."""

    held: dict[tuple[str, object], str]  #: by kind and identity: the description

    @classmethod
    def now(cls) -> Resources:
        """Look at this process."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # an earlier test may have left something open
            gc.collect()  # garbage that is not yet collected does not count
        looked_at = {
            "descriptor of": _descriptors(),
            "thread": _threads(),
            "child process": _children(),
            "shared memory of": _shared_mappings(),
        }
        return cls({(kind, each): told for kind, found in looked_at.items() for each, told in found})

    def since(self) -> list[str]:
        """Descriptions of the resources that did not exist then; waits a moment for those that are about to end."""
        deadline = time.monotonic() + PATIENCE
        while True:
            left = [f"{each[0]} {told}" for each, told in Resources.now().held.items() if each not in self.held]
            if not left or time.monotonic() >= deadline:
                return left
            time.sleep(0.05)


def written_files() -> set[str]:
    """Paths of regular files that this process has open for writing, or maps shared and writable."""
    held = set()
    for fd, path in _descriptors():
        with contextlib.suppress(OSError):
            flags = Path(f"/proc/self/fdinfo/{fd}").read_text("utf-8", "replace").split("flags:")[1].split()[0]
            if int(flags, 8) & os.O_ACCMODE != os.O_RDONLY:
                held.add(path)
    held |= {path for _, path in _shared_mappings()}
    return set(filter(os.path.isfile, held))


def may_fail_when_touched(view: memoryview) -> bool:
    """Is a writable view in a file with holes, so that a write may find no room, and end the process?

    Memory without a file is not judged: once it is mapped, the kernel answers for it.
    """
    begin = ctypes.addressof(ctypes.c_char.from_buffer(view))
    for start, end, fields, path in _mappings():
        if start <= begin < end:
            shared_file = "s" in fields[1] and path and path != _SHARED_ANONYMOUS
            return bool(shared_file) and not _is_resident(begin, len(view)) and not _is_allocated(fields[3], fields[4])
    return False


def _is_resident(begin: int, nbytes: int) -> bool:
    """Are all pages of this range in memory?"""
    page = os.sysconf("SC_PAGESIZE")
    start = begin // page * page
    count = -(-(begin + nbytes - start) // page)
    pages = (ctypes.c_ubyte * count)()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(count * page), pages):
        raise OSError(ctypes.get_errno(), "mincore")
    return all(each & 1 for each in pages)


def _is_allocated(device: str, inode: str) -> bool:
    """Is the file of this inode without holes? It must be one of the open files."""
    major, minor = (int(part, 16) for part in device.split(":"))
    for fd, _ in _descriptors():
        with contextlib.suppress(OSError):
            status = os.fstat(fd)
            if (status.st_dev, status.st_ino) == (os.makedev(major, minor), int(inode)):
                return status.st_blocks * _SECTOR >= status.st_size
    return False


def _descriptors() -> Iterator[tuple[int, str]]:
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # that of the listing itself is gone
            yield fd, os.readlink(f"/proc/self/fd/{fd}")


def _threads() -> Iterator[tuple[int, str]]:
    for thread in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(OSError):
            name = Path(f"/proc/self/task/{thread}/comm").read_text("utf-8", "replace").strip()
            if not name.startswith("iou-wrk-"):  # the kernel's, for an io_uring: it starts and ends them as it likes
                yield thread, name


def _children() -> Iterator[tuple[int, str]]:
    for thread, _ in _threads():
        with contextlib.suppress(OSError):  # not every kernel has this file
            for child in map(int, Path(f"/proc/self/task/{thread}/children").read_text("utf-8", "replace").split()):
                with contextlib.suppress(OSError):
                    yield child, f"{child} ({Path(f'/proc/{child}/comm').read_text('utf-8', 'replace').strip()})"


def _shared_mappings() -> Iterator[tuple[tuple[int, int, str, str], str]]:
    for start, end, fields, path in _mappings():
        if fields[1].startswith("rw") and "s" in fields[1]:
            yield (start, end, fields[3], fields[4]), path


def _mappings() -> Iterator[tuple[int, int, list[str], str]]:
    """Begin, end, the words of the line, and the path."""
    for line in Path("/proc/self/maps").read_text("utf-8", "surrogateescape").splitlines():
        fields = line.split(maxsplit=5)
        start, end = (int(each, 16) for each in fields[0].split("-"))
        yield start, end, fields, fields[5] if len(fields) > 5 else ""
