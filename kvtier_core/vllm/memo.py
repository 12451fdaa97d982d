"""What was computed from files, remembered from start to start for as long as the files do not change.

One small file an answer, in a folder that nobody else may write to. Whatever is odd is forgotten, never believed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import stat
import time
from pathlib import Path

#: A file that changed less than so many seconds ago may change again without a new time stamp.
_SETTLED = 2.0
_ANSWER = re.compile(r"[0-9a-f]{64}")


def recall(state: tuple) -> str | None:
    """The 64 hex digits that were computed when the files were in this state."""
    try:
        folder = _folder()
        answer = _entry(folder, state).read_text("ascii") if _is_ours(folder) else ""
    except (OSError, ValueError):
        return None
    return answer if _ANSWER.fullmatch(answer) else None


def remember(state: tuple, answer: str) -> None:
    """``state`` ends each row with the time of its file's last change, in nanoseconds."""
    if max(row[-1] for row in state) > time.time_ns() - _SETTLED * 1e9:
        return
    with contextlib.suppress(OSError):  # then it is computed again
        folder = _folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_ours(folder):
            return
        entry = _entry(folder, state)
        unfinished = entry.with_suffix(f".{os.getpid()}")
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as file:
            file.write(answer)
        os.replace(unfinished, entry)


def _folder() -> Path:
    """Raises FileNotFoundError for a user without a home."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    if not cache.is_absolute():
        raise FileNotFoundError(errno.ENOENT, "no home", str(cache))
    return cache / "kvtier" / "weights"


def _entry(folder: Path, state: tuple) -> Path:
    return folder / hashlib.blake2b(repr(state).encode(), digest_size=32).hexdigest()


def _is_ours(folder: Path) -> bool:
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022
