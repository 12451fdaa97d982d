"""Memory in a file that other processes may truncate, as they may any file with a name.

An access to a page that is gone would end the process. The compiled extension keeps it alive: the whole mapping becomes
zeros. Without the extension the process ends.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from typing import Self

from kvtier_core.native import choose

_guard: Callable[[int, int], int] = choose("guard", lambda begin, nbytes: -1)
_was_replaced: Callable[[int], bool] = choose("was_replaced", lambda number: False)
_unguard: Callable[[int], None] = choose("unguard", lambda number: None)


class GuardedMemory(mmap.mmap):
    """A file, mapped as a whole. Raises OSError.

    What was copied or computed counts only if the memory is not broken afterwards. Any thread may ask.
    """

    _number = -1

    def __new__(cls, fd: int) -> Self:
        made = super().__new__(cls, fd, 0)
        made._number = _guard(ctypes.addressof(ctypes.c_char.from_buffer(made)), len(made))
        return made

    @property
    def is_broken(self) -> bool:
        """Was the file truncated, or was a page of it gone?"""
        return self.size() < len(self) or _was_replaced(self._number)

    def __del__(self) -> None:
        _unguard(self._number)
