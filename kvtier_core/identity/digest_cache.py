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

from kvtier_core.errors import BackendError
from kvtier_core.storekit.folder import Folder
from kvtier_core.storekit.user_folders import cache_folder

#: Seconds. A file that changed more recently may change again without a new time stamp.
_SETTLE_TIME = 2.0
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Entry:
    """The digest of files in one state."""

    def __init__(self, kind: str, state: tuple[tuple, ...]):
        """``kind`` names what is digested and how. ``state`` has one row per file, its change time in ns last."""
        self._newest = max((row[-1] for row in state), default=0)
        self._folder = cache_folder("digests")
        self._name = hashlib.blake2b(repr((kind, state)).encode(), digest_size=32).hexdigest()

    def recall(self) -> str | None:
        """The digest cached for this state, as 64 hex digits; None if there is none."""
        if self._folder is None:
            return None
        try:
            with open(Folder.at(self._folder).open(self._name, os.O_RDONLY), encoding="ascii") as file:
                found = file.read()
        except (OSError, ValueError, BackendError):
            return None
        return found if _DIGEST.fullmatch(found) else None

    def remember(self, digest: str) -> None:
        """Cache a digest, unless a file has just changed."""
        if self._newest > time.time_ns() - _SETTLE_TIME * 1e9:
            return
        with contextlib.suppress(OSError, BackendError):  # without an entry the digest is computed again
            if self._folder is not None:
                folder, unfinished = Folder.at(self._folder, make=True), f"{self._name}.{os.getpid()}"
                with open(folder.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w", encoding="ascii") as file:
                    file.write(digest)
                folder.rename(unfinished, folder, self._name)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """A lock for these files that one process holds at a time, so that the others can use its digest."""
        with contextlib.ExitStack() as held:
            with contextlib.suppress(OSError, BackendError):
                if self._folder is not None:
                    lock = Folder.at(self._folder, make=True).open(f"{self._name}.lock", os.O_RDWR | os.O_CREAT)
                    held.callback(os.close, lock)
                    fcntl.flock(lock, fcntl.LOCK_EX)
            yield
