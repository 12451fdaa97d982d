"""The folders of this user that all of the user's processes find, and secrets that they share there."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import tempfile
from pathlib import Path

from kvtier_core.errors import BackendError
from kvtier_core.storekit.folder import Folder, is_ours
from kvtier_core.storekit.trial import TrialFolder

#: Bytes of randomness in a secret.
_SECRET_NBYTES = 32


def runtime_folder(*, trial: bool = False) -> Path:
    """The folder in which this user's processes exchange files. In a ``trial`` it is not made.

    It is in XDG_RUNTIME_DIR; without one in the folder for temporary files, or in this user's cache folder if another
    user has taken its name. Raises OSError if no folder belongs to this user alone.
    """
    folders = _runtime_folders()
    for folder in folders:
        with contextlib.suppress(OSError, BackendError):
            _kind(trial).at(folder, make=True)
            return folder
    why = "cannot be created, or is not private to this user"
    way_out = "set XDG_RUNTIME_DIR, for the engine and for kvtier's commands, to a folder of this user with mode 0700"
    raise PermissionError(f"{' and '.join(map(str, folders))}: {why}; {way_out}")


def _runtime_folders() -> list[Path]:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and is_ours(Path(runtime)):
        return [Path(runtime) / "kvtier"]
    cached = cache_folder("run")
    return [Path(tempfile.gettempdir()) / f"kvtier-{os.geteuid()}", *([cached] if cached else [])]


def _kind(trial: bool) -> type[Folder]:
    return TrialFolder if trial else Folder


def cache_folder(name: str) -> Path | None:
    """A folder of this user's caches; None if there is no home directory."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return cache / "kvtier" / name if cache.is_absolute() else None


def user_secret(name: str, *, make: bool = True) -> str:
    """A random secret of this user that all of the user's processes share under this name, as text.

    It is a file in `runtime_folder`, which the first of them makes: whoever knows the secret can read files of this
    user. Without ``make``, and if there is no file, a secret that is not shared. Raises OSError and BackendError.
    """
    folder = _kind(not make).at(runtime_folder(trial=not make), make=True)
    with open(folder.open(f"{name}.secret", os.O_RDWR | os.O_CREAT), "r+" if make else "r", encoding="ascii") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        secret = file.read()
        if not secret:
            secret = secrets.token_urlsafe(_SECRET_NBYTES)
            if make:
                file.write(secret)
                file.flush()
    return secret
