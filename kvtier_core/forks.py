"""A fork copies an object, but not the lock, socket or file behind it, which both processes share.

A child that closed its copy would unlock, shut down, remove or write to what its parent still uses.
"""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Callable, Mapping
from typing import Any, Self


class ProcessBound:
    """An object that only the process which made it closes. In a process forked from that one, closing does nothing.

    Plugins' classes are derived from it too: its attributes cannot clash with theirs, and frozen objects can have them.
    """

    __closing: Mapping[str, Callable[[], Any]] = types.MappingProxyType({"close": lambda: None})
    __process: int

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        made = super().__new__(cls)
        object.__setattr__(made, "_ProcessBound__process", os.getpid())
        return made

    def __init_subclass__(cls, closing: Mapping[str, Callable[[], Any]] | None = None, **kwargs: Any):
        """``closing`` has the methods that close it, each with a function for its result in a forked process."""
        super().__init_subclass__(**kwargs)
        cls.__closing = closing or cls.__closing
        for name, otherwise in cls.__closing.items():
            if isinstance(method := vars(cls).get(name), types.FunctionType):
                setattr(cls, name, ProcessBound.__where_made(method, otherwise))

    @staticmethod
    def __where_made(close: Callable[..., Any], otherwise: Callable[[], Any]) -> Callable[..., Any]:
        @functools.wraps(close)
        def closes(self: ProcessBound, *args: Any, **kwargs: Any) -> Any:
            return close(self, *args, **kwargs) if self.__process == os.getpid() else otherwise()

        return closes
