"""Whole frames to and from files, past the page cache where that is wanted. Raises OSError."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from pathlib import Path

from kvtier_core.types import PAGE_NBYTES

_PROBE = ".kvtier-probe"
_UNFINISHED = ".tmp"


def nbytes_of(path: Path) -> int:
    """The length of a file; 0 if there is none.

    The length, not the blocks: a frame has no holes, and the tier counts bytes of frames.
    """
    try:
        return path.stat(follow_symlinks=False).st_size
    except FileNotFoundError:
        return 0


def read_frame(path: Path, into: memoryview, *, direct: bool) -> int:
    """Bytes read; 0 if there is no file, or it does not fit, or its length is no frame's."""
    try:
        fd = _open(path, os.O_RDONLY, direct)
    except FileNotFoundError:
        return 0
    try:
        nbytes = os.fstat(fd).st_size
        if not 0 < nbytes <= len(into) or nbytes % PAGE_NBYTES:
            return 0
        if not direct or _aligned(into):
            return _fill(fd, into[:nbytes])
        bounce = _bounce(nbytes)
        count = _fill(fd, bounce)
        into[:count] = bounce[:count]
        return count
    finally:
        os.close(fd)


def write_frame(path: Path, frame: memoryview, *, direct: bool) -> None:
    """The whole file or none, under a temporary name until it is whole.

    Not synced: what a power cut tears is refused by its length or its checksum, and a cache that waited
    for the disk's own memory at each frame would be slower than the recompute it saves.
    """
    unfinished = path.with_suffix(_UNFINISHED)
    try:
        fd = _open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, direct)
        try:
            if direct and not _aligned(frame):
                bounce = _bounce(len(frame))
                bounce[:] = frame
                frame = bounce
            _pour(fd, frame)
        finally:
            os.close(fd)
        os.replace(unfinished, path)
    except OSError:
        # Even an open that was refused may have made the file.
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def probe_direct(folder: Path) -> None:
    """Write a page past the page cache, for an open alone may succeed where a write does not."""
    write_frame(folder / _PROBE, _bounce(PAGE_NBYTES), direct=True)
    (folder / _PROBE).unlink()


def remove_probe(folder: Path) -> None:
    """What a kill in the middle of `probe_direct` left."""
    for left in (folder / _PROBE, (folder / _PROBE).with_suffix(_UNFINISHED)):
        left.unlink(missing_ok=True)


def _open(path: Path, flags: int, direct: bool) -> int:
    # NONBLOCK: the open of a pipe would wait for its other end. Of files it means nothing.
    flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | (os.O_DIRECT if direct else 0)
    return os.open(path, flags, 0o600)


def _fill(fd: int, view: memoryview) -> int:
    done = 0
    while done < len(view):
        count = os.preadv(fd, [view[done:]], done)
        if not count:
            break
        done += count
    return done


def _pour(fd: int, view: memoryview) -> None:
    done = 0
    while done < len(view):
        done += os.pwritev(fd, [view[done:]], done)


def _bounce(nbytes: int) -> memoryview:
    """Memory that O_DIRECT takes."""
    return memoryview(mmap.mmap(-1, nbytes))


def _aligned(view: memoryview) -> bool:
    """Can O_DIRECT use the view itself? The slots of an arena are so; ctypes cannot tell of a read-only view."""
    return not view.readonly and ctypes.addressof(ctypes.c_char.from_buffer(view)) % PAGE_NBYTES == 0
