"""A folder by its descriptor: whatever its path comes to mean, this is what is reached. Raises OSError.

Nothing here follows a link, and nothing waits for the other end of a pipe.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from pathlib import Path

from kvtier_core.errors import BackendError

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class NoFile(BackendError):
    """A folder, a link, a pipe, a socket or a device has the name of a file."""


class Folder:
    """Closes its descriptor when nobody refers to it any more: no thread finds another file under its number."""

    def __init__(self, fd: int, *called: Path | str):
        self.fd = fd
        self._called = called

    @classmethod
    def at(cls, path: Path) -> Folder:
        return cls(os.open(path, _FOLDER), path)

    @property
    def path(self) -> Path:
        """What it was called when it was opened; for people."""
        return Path(*self._called)

    def __del__(self) -> None:
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)

    def inner(self, name: str, *, make: bool = False) -> Folder:
        """The folder of that name in this one. Raises BackendError if it is not this user's alone.

        With ``make`` it is made if there is none, and takes the place of what is there and no folder.
        """
        with self._naming(name):
            try:
                fd = os.open(name, _FOLDER, dir_fd=self.fd)
            except (FileNotFoundError, NotADirectoryError):
                if not make:
                    raise
                self.remove(name)
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=self.fd)
                fd = os.open(name, _FOLDER, dir_fd=self.fd)
        inner = Folder(fd, *self._called, name)
        must_be_ours(os.fstat(fd), *inner._called)
        return inner

    def open(self, name: str, flags: int) -> int:
        """A descriptor of a regular file, or of one that is made, for this user alone. Raises NoFile."""
        if not flags & os.O_CREAT:
            self._must_be_file(name, self.status(name))  # before it is opened: that alone may start something
        # NONBLOCK: the open of a pipe would wait for its other end. Of files it means nothing.
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        with self._naming(name):
            fd = os.open(name, flags, 0o600, dir_fd=self.fd)
        try:
            self._must_be_file(name, os.fstat(fd))
            os.set_blocking(fd, True)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _must_be_file(self, name: str, status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode):
            raise NoFile(f"{self.path / name}: {_kind_of(status)} where only a file should be")

    def status(self, name: str) -> os.stat_result:
        """Of the name itself, not of what a link leads to."""
        with self._naming(name):
            return os.stat(name, dir_fd=self.fd, follow_symlinks=False)

    def entries(self) -> list[os.DirEntry[str]]:
        with os.scandir(self.fd) as entries:
            return list(entries)

    def remove(self, name: str) -> None:
        """Remove what has that name, a folder with all that is in it, if there is anything."""
        with self._naming(name), contextlib.suppress(FileNotFoundError):
            if stat.S_ISDIR(self.status(name).st_mode):
                shutil.rmtree(name, dir_fd=self.fd)
            else:
                os.unlink(name, dir_fd=self.fd)

    def rename(self, name: str, to: Folder, new: str) -> None:
        """Takes the place of a file of that name; what is there and no file is removed."""
        with self._naming(name):
            try:
                os.replace(name, new, src_dir_fd=self.fd, dst_dir_fd=to.fd)
            except IsADirectoryError:
                to.remove(new)
                os.replace(name, new, src_dir_fd=self.fd, dst_dir_fd=to.fd)

    def _naming(self, name: str) -> _Naming:
        return _Naming((*self._called, name))


class _Naming:
    """An error tells the whole path."""

    def __init__(self, called: tuple[Path | str, ...]):
        self._called = called

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(Path(*self._called)), None


def _kind_of(status: os.stat_result) -> str:
    """In words."""
    for is_kind, word in (
        (stat.S_ISREG, "a file"),
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISLNK, "a link"),
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISSOCK, "a socket"),
    ):
        if is_kind(status.st_mode):
            return word
    return "a device"


def must_be_ours(status: os.stat_result, *called: Path | str) -> None:
    """Nobody else may put a frame there, or another folder in its place: a checksum is no signature."""
    if stat.S_ISLNK(status.st_mode):
        raise BackendError(f"{Path(*called)}: a link; name the folder itself", retryable=False)
    if not stat.S_ISDIR(status.st_mode):
        raise BackendError(f"{Path(*called)}: not a folder", retryable=False)
    if status.st_uid != os.geteuid():
        raise BackendError(
            f"{Path(*called)}: belongs to user {status.st_uid}; kvtier keeps to its own", retryable=False
        )
    _not_for_others(status, *called)


def parents_must_be_safe(path: Path) -> None:
    """Nobody else may rename a folder on the way to the path. The rule is that of sshd for authorized_keys.

    Sticky folders are allowed here, as /tmp is: only its owner renames what lies in one.
    """
    for folder in Path(os.path.realpath(path.parent)).joinpath(path.name).parents:
        status = os.stat(folder)
        if status.st_uid not in (0, os.geteuid()):
            why = f"belongs to user {status.st_uid}, who may put another folder in the place of {path}"
            raise BackendError(f"{folder}: {why}; use a folder of this user's or of root's", retryable=False)
        _not_for_others(status, folder)


def _not_for_others(status: os.stat_result, *called: Path | str) -> None:
    if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
        raise BackendError(f"{Path(*called)}: others may write to it; take that away with chmod go-w", retryable=False)
