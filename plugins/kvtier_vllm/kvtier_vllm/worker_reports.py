"""The workers' reports to the scheduler side at start-up: one small file per rank, in a folder of this user.

vLLM's handshake metadata is not used: a MultiConnector gives that of its first connector to all connectors. The engine
starts its workers before its scheduler, so a report exists when the scheduler side looks for it, or never will.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import time
from pathlib import Path

import attrs

from kvtier_core.engine.messages import Refusal, WorkerReport
from kvtier_core.errors import BackendError
from kvtier_core.storekit.folder import Folder
from kvtier_core.storekit.user_folders import runtime_folder

_SUFFIX = ".report"
#: Seconds after which a report is stale and removed: the start of an engine takes less.
_MAX_AGE = 24 * 3600.0
#: Bytes of a report that are read. A report lists the names of all layers, and is usually a hundredth of this.
_MAX_NBYTES = 16 << 20


def leave(engine: str, rank: int, report: WorkerReport) -> None:
    """Write a worker's report; it replaces one of the same engine and rank. Raises OSError."""
    path = runtime_folder()
    _sweep(path)
    folder, unfinished = Folder.at(path), f"{secrets.token_hex(8)}{_SUFFIX}"
    with open(folder.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w", encoding="ascii") as file:
        json.dump(attrs.asdict(report), file)
    folder.rename(unfinished, folder, _name(engine, rank))


def collect(engine: str, ranks: int) -> list[WorkerReport] | Refusal:
    """The reports of all ranks of an engine, by rank. A refusal if they are missing or cannot be trusted."""
    try:
        folder = Folder.at(runtime_folder())
        return [_read(folder, _name(engine, rank)) for rank in range(ranks)]
    except FileNotFoundError:
        return Refusal(
            "the workers did not report: do they run on another machine, or with a different XDG_RUNTIME_DIR?"
        )
    except (OSError, ValueError, TypeError, BackendError) as error:
        return Refusal(f"cannot read the reports of the workers: {error}")


def remove(engine: str, ranks: int) -> None:
    """Remove an engine's reports after they have been read."""
    with contextlib.suppress(OSError):
        folder = runtime_folder()
        for rank in range(ranks):
            (folder / _name(engine, rank)).unlink(missing_ok=True)


def _name(engine: str, rank: int) -> str:
    return f"{hashlib.blake2b(engine.encode(), digest_size=16).hexdigest()}-{rank}{_SUFFIX}"


def _read(folder: Folder, name: str) -> WorkerReport:
    """Read a report. Raises OSError, ValueError, TypeError and BackendError."""
    with open(folder.open(name, os.O_RDONLY), "rb") as file:
        return WorkerReport(**json.loads(file.read(_MAX_NBYTES)))


def _sweep(folder: Path) -> None:
    """Remove the reports of engines that died before they read them."""
    for file in folder.glob(f"*{_SUFFIX}"):
        with contextlib.suppress(OSError):
            if file.lstat().st_mtime < time.time() - _MAX_AGE:
                file.unlink()
