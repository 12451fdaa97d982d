"""The folder of a namespace, and the namespace's facts beside its frames.

``path/<namespace>/namespace.json`` explains why an engine finds no frames; `kvtier identity --diff` reads it, too.
Raises OSError, and BackendError for a refusal.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from kvtier_core.types import Namespace
from kvtier_disk.folder import Folder, NoFile, backend_errors
from kvtier_disk.frames import namespace_folder_name, remove_if_empty, unfinished

_FACTS = "namespace.json"
_MAX_NBYTES = 1 << 20


def make_namespace_folder(root: Folder, namespace: Namespace, writer: str = "") -> Folder:
    """The folder of the namespace; made if missing. Its facts are written into it unless the disk is full.

    ``writer`` names this process, where others write as well.
    """
    name = namespace_folder_name(namespace)
    folder = root.inner(name, make=True)
    if read_facts(root, name) != namespace:
        with contextlib.suppress(OSError):
            _write_facts(folder, namespace, unfinished(_FACTS, writer))
    return folder


def _write_facts(folder: Folder, namespace: Namespace, name: str) -> None:
    folder.remove(name)
    try:
        with open(folder.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w", encoding="ascii") as file:
            file.write(namespace.to_json())
        folder.rename(name, folder, _FACTS)
    except OSError:
        folder.remove(name)
        raise


def read_facts(root: Folder, name: str) -> Namespace | None:
    """The namespace of the folder with this name; None if its facts are missing, or belong to another name."""
    try:
        with open(root.inner(name).open(_FACTS, os.O_RDONLY), "rb") as file:
            written = file.read(_MAX_NBYTES)
        namespace = Namespace.from_json(written)
    except (OSError, NoFile, ValueError, RecursionError):
        return None
    return namespace if namespace_folder_name(namespace) == name else None


def remove_facts(root: Folder, name: str) -> None:
    """Remove the facts from the namespace folder of this name, if there are any."""
    folder = root.inner(name)
    folder.remove(_FACTS)
    folder.remove(unfinished(_FACTS))


def forget_in(path: Path, namespace: Namespace) -> None:
    """Remove the folder of a namespace that has no frames. Raises BackendError."""
    name = namespace_folder_name(namespace)
    with backend_errors(path), contextlib.suppress(FileNotFoundError):
        root = Folder.at(path)
        remove_facts(root, name)
        remove_if_empty(root, name)
