"""Which processes may touch a memory, as the kernel knows it, whatever became of the server that lent it.

A process that maps the memory locks one byte of the file: that whose number is the boot of the server that lent it. The
lock ends when the process gives it up, or has ended. A server that takes a kept memory over sees by it whether engines
of the one before may still read or write there; it knows neither their numbers nor in which container they run.
"""

from __future__ import annotations

import fcntl
import os
import struct

#: ``struct flock`` where off_t has 64 bits.
_FLOCK = struct.Struct("hhqqi4x")


def lock(descriptor: int, boot: int) -> int:
    """Open the file of a memory anew, and lock it as a user of this boot. Returns the descriptor. Raises OSError.

    The lock is that of the open file: what is mapped by it may be touched until `unlock`.
    """
    own = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.fcntl(own, fcntl.F_OFD_SETLK, _flock(fcntl.F_RDLCK, _byte(boot), 1))
    except BaseException:
        os.close(own)
        raise
    return own


def unlock(own: int) -> None:
    """This process does not touch the memory any more."""
    fcntl.fcntl(own, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK, 0, 0))


def used_by_others(descriptor: int, boot: int) -> bool:
    """May processes still touch the memory that a server of another boot has lent it to?"""
    byte = _byte(boot)
    return _is_locked(descriptor, 0, byte) or _is_locked(descriptor, byte + 1, 0)


def _byte(boot: int) -> int:
    return (boot >> 2) + 1  # a length of 0 would mean all bytes that follow


def _is_locked(descriptor: int, first: int, nbytes: int) -> bool:
    found = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, first, nbytes))
    return _FLOCK.unpack(found)[0] != fcntl.F_UNLCK


def _flock(kind: int, first: int, nbytes: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, first, nbytes, 0)
