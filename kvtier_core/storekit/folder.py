"""A folder that is accessed through its descriptor, whatever its path leads to later. Raises OSError.

No link is followed, and no open waits for the other end of a pipe.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from kvtier_core.errors import BackendError
from kvtier_core.interfaces import OpenContext

#: The folder of one of several engines is called this, followed by its number.
_REPLICA = "replica-"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def own_folder(path: Path, ctx: OpenContext) -> Path:
    """The folder of this engine: one below ``path`` if several share a configuration."""
    return path / f"{_REPLICA}{ctx.replica}" if ctx.replicas > 1 else path


def own_folders(path: Path) -> list[Path]:
    """All that `own_folder` may have returned."""
    return [path, *sorted(path.glob(f"{_REPLICA}[0-9]*"))]


class NoFile(BackendError):
    """There is a folder, link, pipe, socket or device where a file should be, or a file that is not ours alone."""


class NotOurs(BackendError):
    """A folder that users other than this one could put files into."""


class Folder:
    """Closes its descriptor when the last reference is gone, so that no thread finds another file under its number."""

    def __init__(self, fd: int, *called: Path | str):
        self.fd = fd
        self._called = called

    @classmethod
    def at(cls, path: Path) -> Folder:
        """The folder that the path leads to now. Raises BackendError if others than this user may write to it."""
        folder = cls(os.open(path, _FOLDER), path)
        must_be_ours(os.fstat(folder.fd), path)
        return folder

    @property
    def path(self) -> Path:
        """The path by which it was opened, for messages."""
        return Path(*self._called)

    def __del__(self) -> None:
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)

    def inner(self, name: str, *, make: bool = False) -> Folder:
        """The folder of that name in this one. Raises BackendError if others than this user may write to it.

        With ``make`` it is made if missing, and replaces what is there and is no folder.
        """
        with self._naming(name):
            try:
                fd = os.open(name, _FOLDER, dir_fd=self.fd)
            except (FileNotFoundError, NotADirectoryError) as error:
                if not make:
                    raise
                with contextlib.suppress(FileExistsError, IsADirectoryError):  # another process has made it meanwhile
                    if isinstance(error, NotADirectoryError):
                        os.unlink(name, dir_fd=self.fd)
                    os.mkdir(name, 0o700, dir_fd=self.fd)
                fd = os.open(name, _FOLDER, dir_fd=self.fd)
        inner = Folder(fd, *self._called, name)
        must_be_ours(os.fstat(fd), *inner._called)
        return inner

    def open(self, name: str, flags: int) -> int:
        """A descriptor of a regular file of this user's alone; a new one is readable by this user only.

        Raises NoFile for any other, before a byte of it is read or written.
        """
        if not flags & os.O_EXCL:
            with contextlib.suppress(FileNotFoundError):  # the open raises it, unless it makes the file
                self._must_be_file(name, self.status(name))  # before it is opened: opening a device can have effects
        # NONBLOCK: opening a pipe would wait for its other end. For files it means nothing.
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
        if why := why_no_file(status):
            raise NoFile(f"{self.path / name}: {why}")

    def status(self, name: str) -> os.stat_result:
        """The status of that name itself, not of what a link leads to."""
        with self._naming(name):
            return os.stat(name, dir_fd=self.fd, follow_symlinks=False)

    def entries(self) -> list[os.DirEntry[str]]:
        with os.scandir(self.fd) as entries:
            return list(entries)

    def remove(self, name: str) -> bool:
        """Remove what has that name; a folder with all its contents. False if there is nothing."""
        with self._naming(name):
            try:
                if stat.S_ISDIR(self.status(name).st_mode):
                    shutil.rmtree(name, dir_fd=self.fd)
                else:
                    os.unlink(name, dir_fd=self.fd)
            except FileNotFoundError:
                return False
        return True

    def rename(self, name: str, to: Folder, new: str) -> None:
        """Rename a file to ``new`` in the folder ``to``, where it replaces whatever has that name."""
        with self._naming(name):
            try:
                os.replace(name, new, src_dir_fd=self.fd, dst_dir_fd=to.fd)
            except IsADirectoryError:
                to.remove(new)
                os.replace(name, new, src_dir_fd=self.fd, dst_dir_fd=to.fd)

    @contextlib.contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        """Put the whole path into errors."""
        try:
            yield
        except OSError as error:
            error.filename, error.filename2 = str(self.path / name), None
            raise


def _kind_of(status: os.stat_result) -> str:
    """The kind of a file in words."""
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


def why_no_file(status: os.stat_result) -> str:
    """Why this is no file of this user's alone; "" if it is one. Others may have put it there, or may write to it."""
    why = ""
    if not stat.S_ISREG(status.st_mode):
        why = f"{_kind_of(status)} where only a file should be"
    elif status.st_uid != os.geteuid():
        why = f"a file of user {status.st_uid}; kvtier uses only files of its own user; remove it"
    elif status.st_mode & 0o077:
        why = "others may read or write it; remove the file, or that permission with chmod go-rwx"
    elif status.st_nlink > 1:
        why = "the file has another name, too; remove this one"
    return why


def is_ours(path: Path) -> bool:
    """Is there a folder of this user's, no link, that no other may write to?"""
    try:
        must_be_ours(path.lstat(), path)
    except (OSError, BackendError):
        return False
    return True


def must_be_ours(status: os.stat_result, *called: Path | str) -> None:
    """Raise NotOurs if others could put frames there, or replace the folder: a checksum is no signature."""
    if stat.S_ISLNK(status.st_mode):
        raise NotOurs(f"{Path(*called)}: a link; name the folder itself")
    if not stat.S_ISDIR(status.st_mode):
        raise BackendError(f"{Path(*called)}: not a folder; name one")
    if status.st_uid != os.geteuid():
        raise NotOurs(f"{Path(*called)}: belongs to user {status.st_uid}; kvtier uses only folders of its own user")
    if status.st_mode & 0o022:
        if status.st_mode & stat.S_ISVTX:  # others could make files there under the names of ours
            raise NotOurs(f"{Path(*called)}: others may write to it; name a folder in it that is kvtier's alone")
        raise _for_others(*called)


def make_safe(path: Path) -> None:
    """Make a folder, and those above it, as far as they are missing. Raises BackendError if it is not safe to use."""
    for folder in reversed((path, *path.parents)):  # mkdir(parents=True) would give the parents the mode of the umask
        if not folder.exists():
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
    must_be_ours(path.lstat(), path)
    parents_must_be_safe(path)
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise BackendError(f"{path}: this user may not write here; give it the permission, or name another folder")


def parents_must_be_safe(path: Path) -> None:
    """Raise NotOurs if others could rename a folder on the way to the path. sshd has the same rule for its keys.

    Sticky folders such as /tmp are allowed: only the owner of an entry can rename it there.
    """
    for folder in Path(os.path.realpath(path.parent)).joinpath(path.name).parents:
        status = os.stat(folder)
        if status.st_uid not in (0, os.geteuid()):
            why = f"belongs to user {status.st_uid}, who could replace {path} with another folder"
            raise NotOurs(f"{folder}: {why}; use a folder of this user or of root")
        if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
            raise _for_others(folder)


def file_system_of(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """The kind of file system that an absolute path is on, as the kernel calls it: ``tmpfs``. Raises OSError."""
    kinds = {}
    for line in mounts.read_text("utf-8", "surrogateescape").splitlines():
        mount, _, file_system = line.partition(" - ")
        kinds[mount.split()[4]] = file_system.split()[0]
    return next((kinds[folder] for folder in map(str, (path, *path.parents)) if folder in kinds), "unknown")


@contextlib.contextmanager
def backend_errors(path: Path) -> Iterator[None]:
    """Errors of the system become BackendErrors that name the file; ``path`` if the system does not."""
    try:
        yield
    except OSError as error:
        raise BackendError(f"{error.filename or path}: {error.strerror}") from error


def _for_others(*called: Path | str) -> NotOurs:
    return NotOurs(f"{Path(*called)}: others may write to it; remove that permission with chmod go-w")
