"""Memory in a file that other processes may truncate or be given access to, as they may any file with a name.

An access to a page that is gone would end the process. The compiled extension keeps it alive: the whole mapping becomes
zeros. Without the extension the process ends.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from typing import Self

from kvtier_core.native import choose
from kvtier_core.storekit.folder import why_no_file

_guard: Callable[[int, int], int] = choose("guard", lambda begin, nbytes: -1)
_was_replaced: Callable[[int], bool] = choose("was_replaced", lambda number: False)
_unguard: Callable[[int], None] = choose("unguard", lambda number: None)


class GuardedMemory(mmap.mmap):
    """A file, mapped as a whole. Raises OSError.

    What was copied or computed counts only if the memory is not broken afterwards. Any thread may ask.
    """

    _number = -1
    _file = -1  # only if it has a name
    _opened = False

    def __new__(cls, fd: int) -> Self:
        made = super().__new__(cls, fd, 0)
        if os.fstat(fd).st_nlink:
            made._file = os.dup(fd)
        made._number = _guard(ctypes.addressof(ctypes.c_char.from_buffer(made)), len(made))
        return made

    @property
    def is_broken(self) -> bool:
        """Was the file truncated, or a page of it gone? Could others write to it, now or when this was asked before?"""
        self._opened = self._opened or (self._file >= 0 and why_no_file(os.fstat(self._file)) != "")
        return self._opened or self.size() < len(self) or _was_replaced(self._number)

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        _unguard(self._number)
