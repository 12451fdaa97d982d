"""A fork copies an object, but not the lock, socket or file behind it, which both processes share.

A child that closed its copy would unlock, shut down, remove or write to what its parent still uses.
"""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Callable, Mapping
from typing import Any, Self

_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


def _process() -> tuple[int, int]:
    """Distinguishes this process from those that it was forked from, also if both are process 1 of a PID namespace."""
    return os.getpid(), _forks


def only_here(close: Callable[[], object]) -> Callable[[], None]:
    """A function that calls ``close`` in this process, and does nothing in a process forked from it."""
    here = _process()

    def closes() -> None:
        if _process() == here:
            close()

    return closes


class ProcessBound:
    """An object that only the process which made it closes. In a process forked from that one, closing does nothing.

    For classes of kvtier's own, whose methods it replaces. Plugins write theirs as they like: see `only_here`.
    """

    __closing: Mapping[str, Callable[[], Any]] = types.MappingProxyType({"close": lambda: None})
    __process: tuple[int, int]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        made = super().__new__(cls)
        made.__process = _process()
        return made

    def __init_subclass__(cls, closing: Mapping[str, Callable[[], Any]] | None = None, **kwargs: Any):
        """``closing`` has the methods that close it, each with a function for its result in a forked process."""
        super().__init_subclass__(**kwargs)
        cls.__closing = closing or cls.__closing
        for name, otherwise in cls.__closing.items():
            if method := vars(cls).get(name):
                setattr(cls, name, ProcessBound.__where_made(method, otherwise))

    @staticmethod
    def __where_made(close: Callable[..., Any], otherwise: Callable[[], Any]) -> Callable[..., Any]:
        @functools.wraps(close)
        def closes(self: ProcessBound, *args: Any, **kwargs: Any) -> Any:
            return close(self, *args, **kwargs) if self.__process == _process() else otherwise()

        return closes
