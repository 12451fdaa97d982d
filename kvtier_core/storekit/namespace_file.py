"""The facts of a namespace in a file beside its frames: they explain why an engine finds none. Raises OSError."""

from __future__ import annotations

import os

from kvtier_core.storekit.folder import Folder, NoFile
from kvtier_core.types import Namespace

_MAX_NBYTES = 1 << 20


def write_facts(folder: Folder, name: str, namespace: Namespace, unfinished: str) -> None:
    """Write the facts into the file ``name``, under the name ``unfinished`` until they are whole."""
    folder.remove(unfinished)
    try:
        with open(folder.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w", encoding="ascii") as file:
            file.write(namespace.to_json())
        folder.rename(unfinished, folder, name)
    except OSError:
        folder.remove(unfinished)
        raise


def read_facts(folder: Folder, name: str) -> Namespace | None:
    """The namespace whose facts are in this file; None if there is no such file, or anything else in it."""
    try:
        with open(folder.open(name, os.O_RDONLY), "rb") as file:
            return Namespace.from_json(file.read(_MAX_NBYTES))
    except (OSError, NoFile, ValueError, RecursionError):
        return None
