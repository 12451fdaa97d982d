"""A cache of digests on disk, so that unchanged files need not be read again at the next start.

Each digest is a small file, in a folder that no other user may write to. An invalid entry is ignored. Without a home
directory or XDG_CACHE_HOME nothing is cached.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from kvtier_core.storekit.folder import is_ours

#: Seconds. A file that changed more recently may change again without a new time stamp.
_SETTLE_TIME = 2.0
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Entry:
    """The digest of files in one state."""

    def __init__(self, kind: str, state: tuple[tuple, ...]):
        """``kind`` names what is digested and how. ``state`` has a row a file, with its change time in ns last."""
        self._newest = max((row[-1] for row in state), default=0)
        self._folder = cache_folder("digests")
        self._name = hashlib.blake2b(repr((kind, state)).encode(), digest_size=32).hexdigest()

    def recall(self) -> str | None:
        """The digest cached for this state, as 64 hex digits; None if there is none."""
        if self._folder is None:
            return None
        try:
            found = (self._folder / self._name).read_text("ascii") if is_ours(self._folder) else ""
        except (OSError, ValueError):
            return None
        return found if _DIGEST.fullmatch(found) else None

    def remember(self, digest: str) -> None:
        """Cache a digest, unless a file has just changed."""
        if self._newest > time.time_ns() - _SETTLE_TIME * 1e9:
            return
        with contextlib.suppress(OSError):  # without an entry the digest is computed again
            if self._make_folder():
                unfinished = self._folder / f"{self._name}.{os.getpid()}"
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
                with open(os.open(unfinished, flags, 0o600), "w", encoding="ascii") as file:
                    file.write(digest)
                os.replace(unfinished, self._folder / self._name)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """A lock for these files that one process holds at a time, so that the others can use its digest."""
        with contextlib.ExitStack() as held:
            with contextlib.suppress(OSError):
                if self._make_folder():
                    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                    lock = os.open(self._folder / f"{self._name}.lock", flags, 0o600)
                    held.callback(os.close, lock)
                    fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _make_folder(self) -> bool:
        """Make the folder. False if there is none that this user alone may write to. Raises OSError."""
        if self._folder is None:
            return False
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return is_ours(self._folder)


def cache_folder(name: str) -> Path | None:
    """A folder of this user's caches; None if there is no home directory."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return cache / "kvtier" / name if cache.is_absolute() else None
