"""Many files, each from its beginning, to and from memory: with io_uring all at once, else one call after the other."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from kvtier_core.native import extension


def ring_works() -> bool:
    """Is io_uring built in, and do this kernel and whoever guards it give it to us?"""
    return extension is not None and extension.ring_works()


def read_files(fds: Sequence[int], into: Sequence[memoryview], *, ring: bool) -> list[int]:
    """Bytes that each file filled of its view: all, unless the file ends before. Raises OSError for the first to fail.

    With O_DIRECT views begin and end at whole pages. The files do not have O_NONBLOCK set.
    """
    outcomes = extension.read_files(fds, into) if ring and extension else None
    if outcomes is None:
        return [_all_of(os.preadv, fd, view) for fd, view in zip(fds, into, strict=True)]
    return _raised(outcomes)


def write_files(fds: Sequence[int], views: Sequence[memoryview], *, ring: bool) -> None:
    """Every byte of every view. Raises OSError for the first that failed, when nothing is under way any more."""
    outcomes = extension.write_files(fds, views) if ring and extension else None
    if outcomes is None:
        for fd, view in zip(fds, views, strict=True):
            _all_of(os.pwritev, fd, view)
    else:
        _raised(outcomes)


def _all_of(call: Callable[[int, list[memoryview], int], int], fd: int, view: memoryview) -> int:
    done = 0
    while done < len(view):
        count = call(fd, [view[done:]], done)
        if not count:
            break
        done += count
    return done


def _raised(outcomes: list[int]) -> list[int]:
    for outcome in outcomes:
        if outcome < 0:
            raise OSError(-outcome, os.strerror(-outcome))
    return outcomes
