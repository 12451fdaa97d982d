"""A Unix socket that only its user may connect to, in place of one that a killed process left; and who has connected.

Its mode alone does not keep others out: somebody may change it, as kubelet does in a volume with fsGroup.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

from kvtier_core.forks import ProcessBound
from kvtier_core.storekit.trial import add_socket

#: The last character of a socket's name until it listens: a longer name could be too long.
_NEW = "~"
#: Bytes that no path of a socket has.
_LONGEST = 108
_CREDENTIALS = struct.Struct("iII")
#: The users of a user namespace that has all of them.
_EVERY_USER = (1 << 32) - 1


class _Listener(ProcessBound, socket.socket):
    """Removes its file when it is closed, if no other has taken its place."""

    path, inode = Path(), 0

    def close(self) -> None:
        with contextlib.suppress(OSError):
            if self.path.lstat().st_ino == self.inode:
                self.path.unlink()
        super().close()


def listen(path: Path, backlog: int, *, trial: bool = False) -> socket.socket:
    """A socket that listens at ``path``. Raises OSError if a process listens there, or a file of another kind is there.

    No process can connect before only the owner has access. In a ``trial`` none can at all, and nothing is at ``path``.
    """
    listener = _Listener(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.nullcontext() if trial else _alone(path):
            abandoned = _is_abandoned(path)
            if os.path.lexists(path) and not abandoned:
                why = f"another process serves {path}" if path.is_socket() else os.strerror(errno.EADDRINUSE)
                raise OSError(errno.EADDRINUSE, why)
            if trial:
                _listen_nowhere(listener, path, backlog)
                return listener
            path.unlink(missing_ok=True)
            _listen_under_another_name(listener, path, backlog)
            listener.path, listener.inode = path, path.lstat().st_ino
    except BaseException:
        listener.close()
        raise
    return listener


def credentials(sock: socket.socket) -> tuple[int, int, int]:
    """Process, user and group at the other end, as the kernel knows them."""
    return _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))


def admits(client: socket.socket) -> bool:
    """May the process at the other end ask everything? It is this user's, or root's."""
    return credentials(client)[1] == 0 or not stranger(client)


def stranger(sock: socket.socket) -> str:
    """The process at the other end and its user, in words; "" if it is this user."""
    process, user, _ = credentials(sock)
    if user != os.geteuid():
        return f"process {process} of user {user}"
    if user == _nobody():
        return f"process {process} of user {user}, who may be any user outside of this namespace,"
    return ""


def _nobody() -> int | None:
    """The number of all users that this user namespace has no number for; None if it has one for each."""
    numbers = [int(line.split()[2]) for line in Path("/proc/self/uid_map").read_text("ascii").splitlines()]
    return None if sum(numbers) == _EVERY_USER else int(Path("/proc/sys/kernel/overflowuid").read_text("ascii"))


def _listen_under_another_name(listener: socket.socket, path: Path, backlog: int) -> None:
    """Give it its name when it listens: until then it would seem to be abandoned."""
    unready = Path(f"{path}"[:-1] + _NEW)
    unready.unlink(missing_ok=True)
    os.fchmod(listener.fileno(), 0o600)  # the mode of the file that bind makes
    listener.bind(str(unready))
    listener.listen(backlog)
    unready.rename(path)


def _listen_nowhere(listener: socket.socket, path: Path, backlog: int) -> None:
    """At an address that the kernel chooses. Raises the OSError of a path that cannot be."""
    if len(os.fsencode(path)) >= _LONGEST:
        raise OSError("AF_UNIX path too long")
    add_socket(path)
    listener.bind("")
    listener.listen(backlog)


def sweep(folder: Path, pattern: str) -> None:
    """Remove the sockets that killed processes left in a folder."""
    for path in (*folder.glob(pattern), *folder.glob(pattern[:-1] + _NEW)):
        with contextlib.suppress(OSError):
            if _is_abandoned(path):
                with _alone(Path(f"{path}"[:-1] + pattern[-1])):
                    if _is_abandoned(path):
                        path.unlink()


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Let one process at a time examine a socket and replace it: a bound one seems abandoned until it listens.

    The lock is a file beside it, which exists only while a process has it. Raises OSError.
    """
    name = f"{path}.lock"
    while True:
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if os.fstat(fd).st_uid != os.geteuid():  # another user could hold it forever
                raise PermissionError(errno.EACCES, f"{name} belongs to another user")
            fcntl.flock(fd, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.stat(name, follow_symlinks=False)):
                    break
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # its holder has removed it
    try:
        yield
    finally:
        os.unlink(name)
        os.close(fd)


def _is_abandoned(path: Path) -> bool:
    """Is there a socket on which no process listens any more?"""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            return probe.connect_ex(str(path)) == errno.ECONNREFUSED
    return False
