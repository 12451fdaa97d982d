"""What each worker found at start-up, left for the scheduler's side: one small file a rank, in a folder of this user's.

Not vLLM's handshake metadata: a MultiConnector hands what its first connector found to all of them. vLLM makes the
workers before the scheduler, so that a report lies there when it is asked for, or never will.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
import time
from pathlib import Path

import attrs

from kvtier_core.engine.messages import WorkerReport

_SUFFIX = ".report"
#: Seconds. Then the engine that left a report is long past its start.
_STALE = 24 * 3600.0
#: A report lists the names of all layers, and has never had a hundredth of this.
_MOST_NBYTES = 16 << 20


def leave(engine: str, rank: int, report: WorkerReport) -> None:
    """Write a worker's report, over an older one of the same engine and rank. Raises OSError."""
    folder = _folder()
    _sweep(folder)
    handle, unfinished = tempfile.mkstemp(dir=folder, suffix=_SUFFIX)  # 0600
    with open(handle, "w") as file:
        json.dump(attrs.asdict(report), file)
    os.replace(unfinished, folder / _name(engine, rank))


def collect(engine: str, ranks: int) -> list[WorkerReport] | str:
    """The reports of all ranks, or why there are none to be believed."""
    try:
        folder = _folder()
        return [_read(folder / _name(engine, rank)) for rank in range(ranks)]
    except FileNotFoundError:
        return "the workers did not report: do they run on another machine, or with another XDG_RUNTIME_DIR?"
    except (OSError, ValueError, TypeError) as error:
        return f"the reports of the workers cannot be read: {error}"


def remove(engine: str, ranks: int) -> None:
    """Every connector of this engine has read them."""
    with contextlib.suppress(OSError):
        folder = _folder()
        for rank in range(ranks):
            (folder / _name(engine, rank)).unlink(missing_ok=True)


def _name(engine: str, rank: int) -> str:
    return f"{hashlib.blake2b(engine.encode(), digest_size=16).hexdigest()}-{rank}{_SUFFIX}"


def _folder() -> Path:
    """Raises OSError if it cannot be made, or others could write to it."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and _is_ours(Path(runtime)):
        folder = Path(runtime) / "kvtier"
    else:
        folder = Path(tempfile.gettempdir()) / f"kvtier-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not _is_ours(folder):
        raise PermissionError(f"{folder} is not a folder that this user alone may write to")
    return folder


def _is_ours(folder: Path) -> bool:
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022


def _read(path: Path) -> WorkerReport:
    """Raises OSError, ValueError and TypeError."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        return WorkerReport(**json.loads(file.read(_MOST_NBYTES)))


def _sweep(folder: Path) -> None:
    """What engines left that died before they had read it."""
    for file in folder.glob(f"*{_SUFFIX}"):
        with contextlib.suppress(OSError):
            if file.lstat().st_mtime < time.time() - _STALE:
                file.unlink()
