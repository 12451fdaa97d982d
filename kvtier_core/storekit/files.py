"""Reads and writes extents of many files: with io_uring all together, otherwise one after the other."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence

from kvtier_core.native import choose
from kvtier_core.types import FRAME_ALIGNMENT

_Move = Callable[[Sequence[int], Sequence[memoryview], Sequence[int]], list[int] | None]

#: Is io_uring compiled in, and allowed by this kernel and its security policy?
ring_works: Callable[[], bool] = choose("ring_works", lambda: False)
_read_files: _Move = choose("read_files", lambda fds, into, at: None)
_write_files: _Move = choose("write_files", lambda fds, views, at: None)


def read_files(
    fds: Sequence[int], into: Sequence[memoryview], *, ring: bool, direct: bool = False, at: Sequence[int] | None = None
) -> list[int | OSError]:
    """Read each file of ``fds``, open without O_NONBLOCK, into the view with the same number.

    ``ring``: use io_uring, if the calling thread can have a ring. ``at`` has the offset in each file, by default 0.
    ``direct``: the files are open with O_DIRECT. Then offsets, and the lengths of views, are multiples of
    `FRAME_ALIGNMENT`; data for a view that is not aligned is read elsewhere and copied.

    Returns for each file the bytes read, fewer than its view has only if the file ends earlier, or the OSError.
    """
    at = [0] * len(fds) if at is None else at
    buffers = [bounce(len(view)) if direct and not _is_aligned(view) else view for view in into]
    raw = _read_files(fds, buffers, at) if ring else None
    if raw is None:
        outcomes = [_moved(os.preadv, *each) for each in zip(fds, buffers, at, strict=True)]
    else:
        outcomes = [outcome if outcome >= 0 else _error(outcome) for outcome in raw]
    for view, buffer, outcome in zip(into, buffers, outcomes, strict=True):
        if buffer is not view and isinstance(outcome, int):
            view[:outcome] = buffer[:outcome]
    return outcomes


def write_files(
    fds: Sequence[int],
    views: Sequence[memoryview],
    *,
    ring: bool,
    direct: bool = False,
    at: Sequence[int] | None = None,
) -> None:
    """Write every byte of each view to the file with the same number; see `read_files`.

    Raises the OSError of the first file that failed, after all requests under way have ended.
    """
    for outcome in write_each(fds, views, ring=ring, direct=direct, at=at):
        if outcome is not None:
            raise outcome


def write_each(
    fds: Sequence[int],
    views: Sequence[memoryview],
    *,
    ring: bool,
    direct: bool = False,
    at: Sequence[int] | None = None,
) -> list[OSError | None]:
    """The same, but all are tried: for each file the error, or None if every byte was written."""
    at = [0] * len(fds) if at is None else at
    views = [_bounce_of(view) if direct and not _is_aligned(view) else view for view in views]
    raw = _write_files(fds, views, at) if ring else None
    if raw is not None:
        return [_error(outcome) if outcome < 0 else None for outcome in raw]
    outcomes = [_moved(os.pwritev, *each) for each in zip(fds, views, at, strict=True)]
    return [outcome if isinstance(outcome, OSError) else None for outcome in outcomes]


def bounce(nbytes: int) -> memoryview:
    """Memory that is aligned for O_DIRECT."""
    return memoryview(mmap.mmap(-1, nbytes))


def _bounce_of(view: memoryview) -> memoryview:
    copy = bounce(len(view))
    copy[:] = view
    return copy


def _is_aligned(view: memoryview) -> bool:
    """Can O_DIRECT use the view itself? Slots of an arena qualify; ctypes finds no address of a read-only view."""
    return not view.readonly and ctypes.addressof(ctypes.c_char.from_buffer(view)) % FRAME_ALIGNMENT == 0


def _moved(call: Callable[[int, list[memoryview], int], int], fd: int, view: memoryview, at: int) -> int | OSError:
    """The bytes moved, fewer than the view has only if the file ends; or the error."""
    done = 0
    try:
        while done < len(view) and (count := call(fd, [view[done:]], at + done)):
            done += count
    except OSError as error:
        return error.with_traceback(None)  # its traceback would keep the view
    return done


def _error(outcome: int) -> OSError:
    return OSError(-outcome, os.strerror(-outcome))
