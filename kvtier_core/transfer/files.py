"""Many files, each from its beginning, to and from memory: with io_uring all at once, else one call after the other."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from kvtier_core.native import extension


def ring_works() -> bool:
    """Is io_uring built in, and do this kernel and whoever guards it give it to us?"""
    return extension is not None and extension.ring_works()


def read_files(fds: Sequence[int], into: Sequence[memoryview], *, ring: bool) -> list[int | OSError]:
    """Bytes that each file filled of its view: all, unless the file ends before; or what kept it from being read.

    With O_DIRECT views begin and end at whole pages. The files do not have O_NONBLOCK set.
    """
    outcomes = extension.read_files(fds, into) if ring and extension else None
    if outcomes is None:
        return [_caught(os.preadv, fd, view) for fd, view in zip(fds, into, strict=True)]
    return [outcome if outcome >= 0 else _error(outcome) for outcome in outcomes]


def write_files(fds: Sequence[int], views: Sequence[memoryview], *, ring: bool) -> None:
    """Every byte of every view. Raises OSError for the first that failed, when nothing is under way any more."""
    outcomes = extension.write_files(fds, views) if ring and extension else None
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
        return error.with_traceback(None)  # whose frames would keep the view


def _error(outcome: int) -> OSError:
    return OSError(-outcome, os.strerror(-outcome))
