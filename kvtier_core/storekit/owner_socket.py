"""A Unix socket that only its user may connect to, in place of one that a killed process left."""

from __future__ import annotations

import contextlib
import errno
import socket
import stat
from pathlib import Path

from kvtier_core.forks import ProcessBound


class _Listener(ProcessBound, socket.socket):
    """Removes its file when it is closed, if no other has taken its place."""

    path, inode = Path(), 0

    def close(self) -> None:
        with contextlib.suppress(OSError):
            if self.path.lstat().st_ino == self.inode:
                self.path.unlink()
        super().close()


def listen(path: Path, backlog: int) -> socket.socket:
    """A socket that listens at ``path``. Raises OSError if a process listens there, or a file of another kind is there.

    Nobody can connect before it is the owner's alone.
    """
    listener = _Listener(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_abandoned(path):
            path.unlink()
        elif path.is_socket():
            raise OSError(errno.EADDRINUSE, f"another process serves {path}")
        listener.bind(str(path))
        listener.path, listener.inode = path, path.lstat().st_ino
        path.chmod(0o600)
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener


def sweep(folder: Path, pattern: str) -> None:
    """Remove the sockets that killed processes left in a folder."""
    for path in folder.glob(pattern):
        with contextlib.suppress(OSError):
            if _is_abandoned(path):
                path.unlink()


def _is_abandoned(path: Path) -> bool:
    """Is there a socket on which nobody listens any more?"""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            return probe.connect_ex(str(path)) == errno.ECONNREFUSED
    return False
