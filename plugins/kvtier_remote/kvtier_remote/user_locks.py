"""Which processes may touch a memory, as the kernel knows it, whatever happened to the server that lent it.

A process that maps the memory locks one byte of the file, whose number is the boot of the server that lent it. The lock
ends when the process releases it or ends. By the locks, a server that takes over a kept memory sees whether engines of
the former server may still read or write there; it knows neither their numbers nor their containers.
"""

from __future__ import annotations

import fcntl
import os
import struct

#: ``struct flock`` where off_t has 64 bits.
_FLOCK = struct.Struct("hhqqi4x")


def lock(descriptor: int, boot: int) -> int:
    """Open the file of a memory again, and lock it as a user of this boot. Returns the descriptor. Raises OSError.

    The lock belongs to the open file: what is mapped by it may be touched until `unlock`.
    """
    own = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.fcntl(own, fcntl.F_OFD_SETLK, _flock(fcntl.F_RDLCK, _byte(boot), 1))
    except BaseException:
        os.close(own)
        raise
    return own


def unlock(own: int) -> None:
    """Unlock: this process no longer touches the memory."""
    fcntl.fcntl(own, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK, 0, 0))


def used_by_others(descriptor: int, boot: int) -> bool:
    """May processes still touch the memory that a server of another boot has lent it to?"""
    byte = _byte(boot)
    return _is_locked(descriptor, 0, byte) or _is_locked(descriptor, byte + 1, 0)


def _byte(boot: int) -> int:
    return (boot >> 2) + 1  # a length of 0 would mean all bytes that follow


def _is_locked(descriptor: int, first: int, nbytes: int) -> bool:
    found = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, first, nbytes))
    (kind, *_) = _FLOCK.unpack(found)
    return bool(kind != fcntl.F_UNLCK)


def _flock(kind: int, first: int, nbytes: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, first, nbytes, 0)
