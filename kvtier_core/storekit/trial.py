"""What a check opens: it finds out what could be made, and makes, changes and removes nothing. Raises OSError."""

from __future__ import annotations

import errno
import os
import secrets
from collections import Counter
from pathlib import Path
from typing import Self

from kvtier_core.storekit.folder import Folder, not_makeable

#: Bytes of the longest name of a file, on any file system.
_LONGEST_NAME = 255
#: Errors of file systems, and of kernels, without files that have no name.
_ALL_HAVE_NAMES = {errno.EOPNOTSUPP, errno.EISDIR}

#: Folders, and sockets, that the check would have made.
_made: set[str] = set()
_sockets: set[str] = set()
#: By device: bytes of preallocated files that checks which are under way would have taken.
taken: Counter[int] = Counter()


class TrialFolder(Folder):
    """A folder in which nothing changes: a new file in it has no name, and what is removed stays.

    One that is yet to be made has the descriptor of the nearest folder above.
    """

    _missing = 0  # number of folders between its descriptor and it, itself included

    def _accepted(self, path: Path, make: bool, looking: bool) -> Self:
        if not self._missing:
            return super()._accepted(path, make, looking)
        _made.add(os.path.realpath(path))
        return self

    def _below(self, name: str, make: bool, *, mark: bool) -> Self:
        try:
            self._must_have(name)
            return super()._below(name, False, mark=mark)
        except FileNotFoundError:
            if not make:
                raise
        return self._to_be_made(name)

    def _to_be_made(self, name: str) -> Self:
        with self._naming(name):
            try:
                os.close(nameless(".", os.O_RDWR, dir_fd=self.fd))
            except PermissionError:
                raise not_makeable(self.path / name) from None
        made = type(self)(os.dup(self.fd), *self._called, name, opened=self._opened)
        made._missing = self._missing + (-1 if name == ".." else 1)
        return made

    def _must_have(self, name: str) -> None:
        if self._missing:
            error = errno.ENAMETOOLONG if len(os.fsencode(name)) > _LONGEST_NAME else errno.ENOENT
            raise OSError(error, os.strerror(error), str(self.path / name))

    def inner(self, name: str, *, make: bool = False) -> Self:
        try:
            self._must_have(name)
            return super().inner(name)
        except (FileNotFoundError, NotADirectoryError):
            if not make:
                raise
        return self._to_be_made(name)

    def open(self, name: str, flags: int, *, marked: bool = True) -> int:
        try:
            status = self.status(name)
            is_new = bool(flags & os.O_EXCL) or bool(flags & os.O_CREAT and self._makes_way(status))
        except FileNotFoundError:
            if not flags & os.O_CREAT:
                raise
            is_new = True
        if is_new:
            with self._naming(name):
                return nameless(".", flags, dir_fd=self.fd)
        os.close(super().open(name, flags & ~os.O_CREAT))
        return super().open(name, flags & ~(os.O_CREAT | os.O_ACCMODE))  # only for reading

    def status(self, name: str) -> os.stat_result:
        self._must_have(name)
        return super().status(name)

    def entries(self) -> list[os.DirEntry[str]]:
        return [] if self._missing else super().entries()

    def remove(self, name: str) -> bool:
        try:
            self.status(name)
        except FileNotFoundError:
            return False
        return True

    def _close_to_group(self) -> None:
        pass

    def remove_empty(self, name: str) -> None:
        pass

    def clear_opened(self) -> None:
        pass

    def rename(self, name: str, to: Folder, new: str) -> None:
        pass


def forget() -> None:
    """A new check begins: what former ones would have made does not count."""
    _made.clear()
    _sockets.clear()


def nameless(folder: str | Path, flags: int, *, dir_fd: int | None = None) -> int:
    """A descriptor of a new file that nobody can find. It has a name for a moment where all files have one."""
    flags = flags & ~(os.O_CREAT | os.O_EXCL) | (0 if flags & os.O_ACCMODE else os.O_RDWR) | os.O_CLOEXEC
    try:
        return os.open(folder, flags | os.O_TMPFILE, 0o600, dir_fd=dir_fd)
    except OSError as error:
        if error.errno not in _ALL_HAVE_NAMES:
            raise
    name = f"{folder}/.kvtier-trial-{secrets.token_hex(8)}"
    fd = os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=dir_fd)
    os.unlink(name, dir_fd=dir_fd)
    return fd


def new_file(folder: Path, name: str, flags: int, *, trial: bool) -> int:
    """A descriptor of a new file for this user, in a folder that is made if missing, whoever else may use it.

    In a ``trial`` neither is made.
    """
    if not trial:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(folder / name, flags | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    nearest = next(each for each in (folder, *folder.absolute().parents) if os.path.lexists(each))
    fd = nameless(nearest, flags)
    path = Path(os.path.realpath(folder))
    if not _sockets.isdisjoint(map(str, (path, *path.parents))):
        os.close(fd)
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    _made.add(str(path))
    return fd


def add_socket(path: Path) -> None:
    """The check would make a socket there. Raises OSError if it could not, or would have made something else."""
    real = os.path.realpath(path)
    if real in _sockets or _would_be_there(real):
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    if not _would_be_there(os.path.realpath(path.parent)):
        os.close(nameless(path.parent, os.O_RDWR))
    _sockets.add(real)


def _would_be_there(folder: str) -> bool:
    """Would the check have made this folder?"""
    return any(each == folder or each.startswith(f"{folder}/") for each in _made)
