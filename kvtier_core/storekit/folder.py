"""A folder that is accessed through its descriptor, whatever its path leads to later. Raises OSError.

In a folder no link is followed, and no open waits for the other end of a pipe.

Others may write to a folder *above*, such as the root of a pod's volume. They can rename the folder, or put a link or
their own folder in its place. Links there are not followed and folders of others are refused, so a path can lead only
to another folder of this user beside it: no one else wrote there, and each frame names its namespace.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Self

import attrs

from kvtier_core.errors import BackendError
from kvtier_core.interfaces import OpenContext
from kvtier_core.outside import LONGEST_PATH, printable

#: The folder of one of several engines is called this, followed by its number.
_REPLICA = "replica-"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: A folder on the way, which this user may perhaps not read.
_ON_THE_WAY = _FOLDER | os.O_PATH
#: Mark folders and files that kvtier made, by bits without a meaning for them, which stay when kubelet opens them. When
#: another process writes to a file, only the sticky bit stays.
_MADE_FOLDER, _MADE_FILE = stat.S_ISUID, stat.S_ISVTX
#: What follows the name of what was in the place of a file or folder.
ASIDE = ".kvtier-aside-"
_MOUNTS = Path("/proc/self/mountinfo")
#: What sets owner and modes where the file system has none of its own.
_OPTIONS = {
    "cifs": "uid={user},dir_mode=0700,file_mode=0600",
    "smb3": "uid={user},dir_mode=0700,file_mode=0600",
    "fuse.gcsfuse": "uid={user},dir-mode=700,file-mode=600",
}
#: Words for what is not a regular file; anything that is not listed is a device.
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFLNK: "a link", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
#: Links on the way to a folder, as many as Linux follows.
_MAX_LINKS = 40

logger = logging.getLogger("kvtier")

_Opened = Literal["is closed", "is left", "is refused"]


def place_in(path: Path) -> Path:
    """The folder that a tier with this path uses: ``path``, or one of this user in it if it is the root of a volume.

    Whether others may write to a volume depends on the pods that mount it, and must not decide where the frames are.
    """
    is_volume = os.path.realpath(path) in _mounts(_MOUNTS)
    return path / f"kvtier-{os.geteuid()}" if is_volume else path


def own_folder(path: Path, ctx: OpenContext) -> Path:
    """The folder of this engine: one in `place_in(path)` if several share a configuration."""
    path = place_in(path)
    return path / f"{_REPLICA}{ctx.replica}" if ctx.replicas > 1 else path


def own_folders(path: Path) -> list[Path]:
    """All folders that `own_folder` may have returned."""
    path = place_in(path)
    return [path, *(sorted(path.glob(f"{_REPLICA}[0-9]*")) if os.path.isdir(path) else ())]


def folders(settings: Any) -> list[Path]:
    """The paths among the settings of a tier or an observer."""
    settings = getattr(settings, "config", settings)
    values = [getattr(settings, field.name) for field in attrs.fields(type(settings))] if settings else []
    several = [value if isinstance(value, tuple) else (value,) for value in values]
    return [place_in(each) for value in several for each in value if isinstance(each, Path)]


def nearest(folder: Path) -> Path:
    """The folder itself, or the nearest one above it that exists."""
    return next(each for each in (folder, *folder.absolute().parents) if os.path.exists(each))


class NoFile(BackendError):
    """There is a folder, link, pipe, socket or device where a file should be, or a file that is not ours alone."""


class NotOurs(BackendError):
    """A folder that users other than this one could put files into."""


class Folder:
    """Closes its descriptor when the last reference is gone, so that no thread finds another file under its number."""

    def __init__(self, fd: int, *called: Path | str, opened: _Opened = "is refused"):
        """``opened``: what becomes of folders in it, made by kvtier, that kubelet has opened to their group."""
        self.fd = fd
        self._called = called
        self._opened = opened

    @classmethod
    def at(cls, path: Path, *, make: bool = False, looking: bool = False) -> Self:
        """The folder that the path leads to now. Raises BackendError if others than this user may write to it.

        With ``make``, it and the folders above are made if they are missing, and it is closed again if kvtier made it
        and kubelet has opened it to its group; ``looking`` leaves it open, and accepts it all the same.
        """
        return cls._reached(path, make)._accepted(path, make, looking)

    @classmethod
    def _reached(cls, path: Path, make: bool) -> Self:
        """What the path leads to, open only as a folder on the way."""
        found = cls(os.open("/", _ON_THE_WAY), "/")
        names = list(path.absolute().parts[:0:-1])  # still to enter, the next one last
        links = 0
        while names:
            name = names.pop()
            try:
                found = found._below(name, make, mark=not names)
            except NotADirectoryError:
                links += 1
                if not names or links > _MAX_LINKS:
                    must_be_ours(found.status(name), found.path / name if names else path)
                names += reversed(Path(found._link(name)).parts)
        return found

    def _accepted(self, path: Path, make: bool, looking: bool) -> Self:
        """This folder, open for reading, if `at` may return it for these arguments."""
        opened = (make or looking) and self._is_opened() and is_made_folder(os.fstat(self.fd))
        if opened and not looking:
            self._close_to_group()
            logger.warning(
                "kvtier: %s: was made writable by its group, as kubelet does with fsGroup; files that the group "
                "could have changed are not used; to keep them, set fsGroupChangePolicy: OnRootMismatch "
                "in the pod's spec",
                path,
            )
        if not opened:
            must_be_ours(os.fstat(self.fd), path)
        if make and not os.access(".", os.R_OK | os.W_OK | os.X_OK, dir_fd=self.fd):
            raise BackendError(f"{path}: this user cannot write here; grant the permission, or choose another folder")
        becomes: _Opened = "is left" if looking else "is closed" if make else "is refused"
        return type(self)(os.open(".", _FOLDER, dir_fd=self.fd), path, opened=becomes)

    def _below(self, name: str, make: bool, *, mark: bool) -> Self:
        return type(self)(self._enter(name, _ON_THE_WAY, make, mark=mark), *self._called, name)

    @property
    def path(self) -> Path:
        """The path by which it was opened, for messages."""
        return Path(*self._called)

    def __del__(self) -> None:
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)

    def inner(self, name: str, *, make: bool = False) -> Self:
        """The folder of that name in this one. Raises BackendError if others than this user may write to it.

        Another user's is none: NotADirectoryError. With ``make`` it is made if missing, and whatever else is there is
        renamed.
        """
        if make:
            self._make_way(name)
        try:
            fd = self._enter(name, _FOLDER, make, mark=True)
        except NotADirectoryError:
            if not make:
                raise
            with self._naming(name), contextlib.suppress(FileNotFoundError):  # others were faster
                self._put_aside(name)
            fd = self._enter(name, _FOLDER, make, mark=True)
        inner = type(self)(fd, *self._called, name, opened=self._opened)
        if os.fstat(fd).st_uid != os.geteuid():
            raise NotADirectoryError(errno.ENOTDIR, "a folder of another user", str(inner.path))
        opened = inner._is_opened()
        if opened and self._opened == "is closed":
            inner._close_to_group()
        elif not (opened and self._opened == "is left"):
            must_be_ours(os.fstat(fd), *inner._called)
        return inner

    def _enter(self, name: str, flags: int, make: bool, *, mark: bool = False) -> int:
        """A descriptor of the folder of that name in this one. ``mark``: if it is made, it gets the mark of that."""
        with self._naming(name):
            try:
                return os.open(name, flags, dir_fd=self.fd)
            except FileNotFoundError:
                if not make:
                    raise
            try:
                os.mkdir(name, 0o700, dir_fd=self.fd)
            except FileExistsError:
                mark = False  # another process was faster
            except PermissionError:
                raise not_makeable(self.path / name) from None
            fd = os.open(name, flags, dir_fd=self.fd)
        if mark:
            with contextlib.suppress(OSError):  # then it is not closed when it was opened
                os.chmod(".", stat.S_IMODE(os.fstat(fd).st_mode) | _MADE_FOLDER, dir_fd=fd)
        return fd

    def _is_opened(self) -> bool:
        """Has kubelet opened a folder of this user, with mode 0700, to a group of this process?

        It does so at each start of a pod, with everything in a volume with fsGroup.
        """
        status = os.fstat(self.fd)
        opened = status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) & ~_MADE_FOLDER == 0o2770
        return opened and status.st_gid in (os.getegid(), *os.getgroups())

    def _close_to_group(self) -> None:
        """The files in the folder keep their modes, which mark those that the group may have changed.

        Raises BackendError if the file system does not do it.
        """
        os.chmod(".", stat.S_IMODE(os.fstat(self.fd).st_mode) & ~0o077, dir_fd=self.fd)
        must_be_ours(os.fstat(self.fd), *self._called)

    def _link(self, name: str) -> str:
        """The target of a link in this folder. Raises NotOurs if others may have put it there."""
        status = os.fstat(self.fd)
        if not stat.S_ISLNK(self.status(name).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(self.path / name))
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
            raise NotOurs(
                f"{self.path / name}: a link in a folder that others can write to; name the folder that it points to"
            )
        return os.readlink(name, dir_fd=self.fd)

    def open(self, name: str, flags: int, *, marked: bool = True) -> int:
        """A descriptor of a regular file of this user alone; a new one is readable only by this user.

        If a new one is ``marked``, nothing is lost with it: `remove_made` and `clear_opened` remove no other files.
        Raises NoFile for any other file, before a byte of it is read or written.
        """
        if not flags & os.O_EXCL:
            if flags & os.O_CREAT:
                self._make_way(name)
            with contextlib.suppress(FileNotFoundError):  # the open raises it, unless it makes the file
                self._must_be_file(name, self.status(name))  # before it is opened: opening a device can have effects
        # NONBLOCK: opening a pipe would wait for its other end. For files it means nothing.
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        with self._naming(name):
            fd = os.open(name, flags, _MADE_FILE | 0o600 if marked else 0o600, dir_fd=self.fd)
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
        """The status of that name itself, not of the target of a link."""
        with self._naming(name):
            return os.stat(name, dir_fd=self.fd, follow_symlinks=False)

    def entries(self) -> list[os.DirEntry[str]]:
        with os.scandir(self.fd) as entries:
            return list(entries)

    def remove(self, name: str) -> bool:
        """Remove the entry with that name; a folder, or what another user owns, is renamed. False if there is none."""
        try:
            status = self.status(name)
            with self._naming(name):
                if not _stays(status):
                    os.unlink(name, dir_fd=self.fd)
                elif ASIDE in name:
                    return False
                else:
                    self._put_aside(name)
        except FileNotFoundError:
            return False
        return True

    def remove_empty(self, name: str) -> None:
        """Remove an empty folder in this one."""
        os.rmdir(name, dir_fd=self.fd)

    def _make_way(self, name: str) -> None:
        """Rename what another user has put there, and remove a marked file that kubelet has opened to a group."""
        with contextlib.suppress(FileNotFoundError):
            if self._opened != "is left" and self._makes_way(self.status(name)):
                self.remove(name)

    def _makes_way(self, status: os.stat_result) -> bool:
        return status.st_uid != os.geteuid() or self._has_opened(status)

    def _put_aside(self, name: str) -> None:
        os.rename(name, f"{name}{ASIDE}{secrets.token_hex(4)}", src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def remove_made(self, name: str) -> None:
        """Remove a marked file, if it is there. Raises NoFile if it is another."""
        with contextlib.suppress(FileNotFoundError):
            if not is_made(self.status(name)):
                raise NoFile(f"{self.path / name}: not a file that kvtier made; name another folder")
            self.remove(name)

    def clear_opened(self) -> None:
        """Remove what kvtier made here before kubelet opened it to a group: nothing of it is used again."""
        for entry in self.entries():
            with contextlib.suppress(OSError):  # others can have made files in a folder: it stays
                if not entry.is_dir(follow_symlinks=False):
                    if self._has_opened(entry.stat(follow_symlinks=False)):
                        os.unlink(entry.name, dir_fd=self.fd)
                    continue
                inner = Folder(os.open(entry.name, _FOLDER, dir_fd=self.fd))
                if inner._is_opened() and is_made_folder(os.fstat(inner.fd)):
                    inner.clear_opened()
                    os.rmdir(entry.name, dir_fd=self.fd)

    def _has_opened(self, status: os.stat_result) -> bool:
        """Is it the status of a marked file in this folder that kubelet has opened to a group, see `_is_opened`?"""
        of_folder = os.fstat(self.fd)
        opened = is_made(status) and status.st_mode & 0o077 == 0o060
        return opened and bool(of_folder.st_mode & stat.S_ISGID) and status.st_gid == of_folder.st_gid

    def rename(self, name: str, to: Folder, new: str) -> None:
        """Rename a file to ``new`` in the folder ``to``, where it replaces whatever has that name."""
        with contextlib.suppress(FileNotFoundError):
            if _stays(to.status(new)):
                to.remove(new)
        with self._naming(name):
            os.replace(name, new, src_dir_fd=self.fd, dst_dir_fd=to.fd)

    @contextlib.contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        """Put the whole path into errors."""
        try:
            yield
        except OSError as error:
            error.filename, error.filename2 = str(self.path / name), None
            raise


def why_no_file(status: os.stat_result) -> str:
    """Why this is not a file of this user alone; "" if it is one. Others may have put it there, or may write to it."""
    why = ""
    if not stat.S_ISREG(status.st_mode):
        why = f"{_KINDS.get(stat.S_IFMT(status.st_mode), 'a device')} where a file is expected"
    elif status.st_uid != os.geteuid():
        why = f"owned by user {status.st_uid}; kvtier uses only files of its own user; remove it"
    elif status.st_mode & 0o077:
        why = "others can read or write it; remove the file"
    elif status.st_nlink > 1:
        why = "the file has another hard link; remove this one"
    return why


def _stays(status: os.stat_result) -> bool:
    """Can it hold what is not this user's, so that it is renamed and never removed?"""
    return stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid()


def is_made(status: os.stat_result) -> bool:
    """Is it a file that `Folder.open` made and marked, or an empty one, with which nothing is lost?"""
    ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
    return ours and bool(status.st_mode & _MADE_FILE or not status.st_size)


def is_made_folder(status: os.stat_result) -> bool:
    """Is it a folder that kvtier made and marked?"""
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and bool(status.st_mode & _MADE_FOLDER)


def not_makeable(path: Path) -> BackendError:
    return BackendError(f"{path}: user {os.geteuid()} cannot create this folder; {_way_out(path)}")


def is_ours(path: Path) -> bool:
    """Is there a folder of this user, not a link, that no other user may write to?"""
    try:
        Folder.at(path)
    except (OSError, BackendError):
        return False
    return True


def must_be_ours(status: os.stat_result, *called: Path | str) -> None:
    """Raise NotOurs if others could put frames there: a checksum is not a signature."""
    path = Path(*called)
    if stat.S_ISLNK(status.st_mode):
        raise NotOurs(f"{path}: a link; name the folder itself")
    if not stat.S_ISDIR(status.st_mode):
        raise BackendError(f"{path}: not a folder; name one")
    if status.st_uid != os.geteuid():
        owner = status.st_uid
        raise NotOurs(f"{path}: owned by user {owner}; kvtier uses only folders of its own user; {_way_out(path)}")
    if status.st_mode & 0o022:
        if status.st_mode & stat.S_ISVTX:  # others could make files there under the names of ours
            raise NotOurs(f"{path}: others can write to it; name a folder in it that only kvtier uses")
        raise NotOurs(f"{path}: others can write to it; {_of_mount(path) or 'run chmod go-w'}")


def _way_out(path: Path) -> str:
    """How this user can have a folder there."""
    group = nearest(path).stat().st_gid
    if group and group in (os.getegid(), *os.getgroups()):  # as with fsGroup: to set it is no way out
        usual = f"chown it, or let group {group} write to it and name a folder in it"
    else:
        group = os.getegid() or os.geteuid()
        usual = f"name a folder in it, chown it, or set securityContext: {{fsGroup: {group}}} in the pod's spec"
    return _of_mount(path) or usual


def _of_mount(path: Path) -> str:
    """The options that set owner and modes on file systems where chown and chmod do not; "" on others."""
    kind = file_system_of(Path(os.path.realpath(path)), _MOUNTS)
    options = _OPTIONS.get(kind, "")
    return options and f"mount this {kind} with {options.format(user=os.geteuid())}"


def file_system_of(path: Path, mounts: Path = _MOUNTS) -> str:
    """The kind of file system that an absolute path is on, as the kernel calls it: ``tmpfs``. Raises OSError."""
    kinds = _mounts(mounts)
    return next((kinds[folder] for folder in map(str, (path, *path.parents)) if folder in kinds), "unknown")


def _mounts(file: Path) -> dict[str, str]:
    """The kind of file system of each mount, by its path."""
    kinds = {}
    for line in file.read_text("utf-8", "surrogateescape").splitlines():
        mount, _, file_system = line.partition(" - ")
        path = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), mount.split()[4])
        kinds[path] = file_system.split()[0]
    return kinds


@contextlib.contextmanager
def backend_errors(path: Path) -> Iterator[None]:
    """Turn errors of the system into BackendErrors that name the file, or ``path`` if the system does not."""
    try:
        yield
    except OSError as error:
        raise BackendError(f"{printable(str(error.filename or path), LONGEST_PATH)}: {error.strerror}") from error
