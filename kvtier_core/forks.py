"""A fork copies an object, but not the lock, socket or file behind it: those are the same for both processes.

A child that closed its copy would unlock, shut down, remove or write to what its parent still uses.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self


class ProcessBound:
    """An object that only the process which made it closes. In a process forked from that one, closing does nothing."""

    #: The methods that close it, and what each returns in a forked process.
    closing: ClassVar[Mapping[str, Callable[[], Any]]] = {"close": lambda: None}
    _process: int

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        made = super().__new__(cls)
        made._process = os.getpid()
        return made

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        for name in cls.closing.keys() & vars(cls).keys():
            setattr(cls, name, _where_made(vars(cls)[name], cls.closing[name]))


def _where_made(close: Callable[..., Any], otherwise: Callable[[], Any]) -> Callable[..., Any]:
    @functools.wraps(close)
    def closes(self: ProcessBound, *args: Any, **kwargs: Any) -> Any:
        return close(self, *args, **kwargs) if self._process == os.getpid() else otherwise()

    return closes
