"""The folder: whose it is, which frames lie in it and where. Raises OSError, and BackendError for a refusal."""

from __future__ import annotations

import fcntl
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import attrs

from kvtier_core.errors import BackendError
from kvtier_core.types import KEY_NBYTES, PAGE_NBYTES, ChunkKey, Namespace

_NAMESPACE = re.compile(r"[0-9a-f]{16}")
_SHARD = re.compile(r"[0-9a-f]{2}")
_FRAME = re.compile(rf"([0-9a-f]{{{2 * KEY_NBYTES}}})\.kv")


@attrs.frozen(order=True)
class Found:
    """A frame on the disk. Sorts by age, oldest first."""

    mtime_ns: int
    path: Path
    nbytes: int

    @property
    def key(self) -> ChunkKey:
        return ChunkKey(bytes.fromhex(self.path.stem))


class Folder:
    """``path/<namespace>/<first byte of key>/<key>.kv``, all in hex, claimed by one process at a time."""

    def __init__(self, path: Path, namespace: Namespace):
        self.path = path
        self._home = path / namespace.digest.hex()[:16]
        self._lock: int | None = None

    @property
    def claimed(self) -> bool:
        return self._lock is not None

    def file(self, key: ChunkKey) -> Path:
        name = key.hex()
        return self._home / name[:2] / f"{name}.kv"

    def claim(self) -> None:
        """Make the folder if it is not there, and keep every other process out until `release`."""
        _inspect(self.path)
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(self.path, os.R_OK | os.W_OK | os.X_OK):
            raise BackendError(f"{self.path}: this user may not write here", retryable=False)
        before, self._lock = self._lock, _lock(self.path)
        if before is not None:
            _unlock(before)

    def release(self) -> None:
        if self._lock is not None:
            lock, self._lock = self._lock, None
            _unlock(lock)

    def still_there(self) -> bool:
        """Is the path still the folder that was claimed?"""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._lock))
        except FileNotFoundError:
            return False

    def make_place(self, key: ChunkKey) -> None:
        """The folders above the file of this key."""
        place = self.file(key).parent
        self._home.mkdir(mode=0o700, exist_ok=True)
        place.mkdir(mode=0o700, exist_ok=True)

    def frames(self) -> list[Found]:
        """Those of this namespace, oldest first."""
        return sorted(found for entry in _files(self._home) if (found := _frame(entry)))

    def sweep(self) -> list[Found]:
        """Remove what is no frame, in every namespace; the frames of the others, oldest first."""
        others = []
        for home in _folders(self.path, _NAMESPACE):
            for entry in _files(home):
                found = _frame(entry)
                if found is None:
                    os.unlink(entry.path)
                elif home != self._home:
                    others.append(found)
        return sorted(others)


def _inspect(path: Path) -> None:
    if path.is_symlink() and path.lstat().st_uid not in (0, os.geteuid()):
        # A link that somebody else made leads wherever he likes.
        owner = path.lstat().st_uid
        raise BackendError(f"{path}: a link that belongs to user {owner}; name the folder itself", retryable=False)
    if path.exists() and not path.is_dir():
        raise BackendError(f"{path}: not a folder", retryable=False)


def _lock(folder: Path) -> int:
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if not isinstance(error, BlockingIOError):
            raise
        raise BackendError(
            f"{folder}: another live process keeps its frames here; give each engine a path of its own",
            retryable=False,
        ) from None
    return lock


def _unlock(lock: int) -> None:
    # A process forked from this one has the lock too; closing alone would leave it there.
    fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)


def _folders(parent: Path, name: re.Pattern[str]) -> Iterator[Path]:
    try:
        with os.scandir(parent) as entries:
            for entry in entries:
                if name.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                    yield Path(entry.path)
    except FileNotFoundError:
        return


def _files(home: Path) -> Iterator[os.DirEntry[str]]:
    """Whatever is no folder, where only frames should be."""
    for shard in _folders(home, _SHARD):
        with os.scandir(shard) as entries:
            yield from (entry for entry in entries if not entry.is_dir(follow_symlinks=False))


def _frame(entry: os.DirEntry[str]) -> Found | None:
    """None for what cannot be a frame: another name, another place, a length that no frame has."""
    name = _FRAME.fullmatch(entry.name)
    status = entry.stat(follow_symlinks=False)
    right_place = name and Path(entry.path).parent.name == entry.name[:2]
    if not right_place or not stat.S_ISREG(status.st_mode) or not status.st_size or status.st_size % PAGE_NBYTES:
        return None
    return Found(status.st_mtime_ns, Path(entry.path), status.st_size)
