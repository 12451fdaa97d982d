"""Reads and writes many files, each from its beginning: with io_uring all at once, else one after the other."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from kvtier_core.native import choose

_ring_works = choose("ring_works", lambda: False)
_read_files = choose("read_files", lambda fds, into: None)
_write_files = choose("write_files", lambda fds, views: None)


def ring_works() -> bool:
    """Is io_uring compiled in, and allowed by this kernel and its security policy?"""
    return _ring_works()


def read_files(fds: Sequence[int], into: Sequence[memoryview], *, ring: bool) -> list[int | OSError]:
    """Read each file of ``fds`` from its beginning into the view with the same number.

    With O_DIRECT, views begin and end at multiples of `FRAME_ALIGNMENT`. The files must not have O_NONBLOCK set.
    ``ring``: with io_uring, where the calling thread gets a ring.

    Returns for each file the bytes read, fewer than its view only where the file ends before, or the OSError.
    """
    outcomes = _read_files(fds, into) if ring else None
    if outcomes is None:
        return [_caught(os.preadv, fd, view) for fd, view in zip(fds, into, strict=True)]
    return [outcome if outcome >= 0 else _error(outcome) for outcome in outcomes]


def write_files(fds: Sequence[int], views: Sequence[memoryview], *, ring: bool) -> None:
    """Write every byte of each view to the file with the same number, from its beginning; see `read_files`.

    Raises the OSError of the first file that failed, after all requests under way have ended.
    """
    outcomes = _write_files(fds, views) if ring else None
    if outcomes is None:
        for fd, view in zip(fds, views, strict=True):
            _all_of(os.pwritev, fd, view)
    else:
        for outcome in outcomes:
            if outcome < 0:
                raise _error(outcome)


def _all_of(call: Callable[[int, list[memoryview], int], int], fd: int, view: memoryview) -> int:
    done = 0
    while done < len(view):
        count = call(fd, [view[done:]], done)
        if not count:
            break
        done += count
    return done


def _caught(call: Callable[[int, list[memoryview], int], int], fd: int, view: memoryview) -> int | OSError:
    try:
        return _all_of(call, fd, view)
    except OSError as error:
        return error.with_traceback(None)  # its traceback would keep the view


def _error(outcome: int) -> OSError:
    return OSError(-outcome, os.strerror(-outcome))
