"""Digests of files, remembered from start to start for as long as the files do not change.

One small file a digest, in a folder that nobody else may write to. What is odd is forgotten, never believed. Without a
home directory or XDG_CACHE_HOME nothing is remembered.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path

#: A file that changed less than so many seconds ago may change again without a new time stamp.
_SETTLED = 2.0
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Entry:
    """The digest of some kind of files that are in some state: rows that end with the time of a change, in ns."""

    def __init__(self, kind: str, state: tuple[tuple, ...]):
        self._newest = max((row[-1] for row in state), default=0)
        self._folder = _folder()
        self._name = hashlib.blake2b(repr((kind, state)).encode(), digest_size=32).hexdigest()

    def recall(self) -> str | None:
        """The 64 hex digits that were computed when the files were in this state."""
        if self._folder is None:
            return None
        try:
            found = (self._folder / self._name).read_text("ascii") if _is_ours(self._folder) else ""
        except (OSError, ValueError):
            return None
        return found if _DIGEST.fullmatch(found) else None

    def remember(self, digest: str) -> None:
        """Keep it, unless a file has just changed."""
        if self._newest > time.time_ns() - _SETTLED * 1e9:
            return
        with contextlib.suppress(OSError):  # then it is computed again
            if self._make_folder():
                unfinished = self._folder / f"{self._name}.{os.getpid()}"
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
                with open(os.open(unfinished, flags, 0o600), "w") as file:
                    file.write(digest)
                os.replace(unfinished, self._folder / self._name)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """One process at a time for these files: the others can then recall what it found."""
        with contextlib.ExitStack() as held:
            with contextlib.suppress(OSError):
                if self._make_folder():
                    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                    lock = os.open(self._folder / f"{self._name}.lock", flags, 0o600)
                    held.callback(os.close, lock)
                    fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _make_folder(self) -> bool:
        """Is there a folder of ours? Raises OSError."""
        if self._folder is None:
            return False
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return _is_ours(self._folder)


def _folder() -> Path | None:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return cache / "kvtier" / "digests" if cache.is_absolute() else None


def _is_ours(folder: Path) -> bool:
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022
