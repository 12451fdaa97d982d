"""The facts of a namespace, beside its frames, so that an engine that finds none of its own can say why.

``path/<namespace>/namespace.json``, for `kvtier identity --diff` too. Raises OSError, and BackendError for a refusal.
"""

from __future__ import annotations

import contextlib
import os

from kvtier_core.types import Namespace
from kvtier_disk.folder import Folder, NoFile
from kvtier_disk.frames import home_of

_FACTS, _UNFINISHED = "namespace.json", "namespace.tmp"
_LONGEST = 1 << 20


def make_home(root: Folder, namespace: Namespace) -> Folder:
    """The folder of the namespace, made if it was not there, with its facts in it unless the disk is full."""
    home = root.inner(home_of(namespace), make=True)
    if read_facts(root, home_of(namespace)) != namespace:
        with contextlib.suppress(OSError):
            _write_facts(home, namespace)
    return home


def _write_facts(home: Folder, namespace: Namespace) -> None:
    home.remove(_UNFINISHED)
    try:
        with open(home.open(_UNFINISHED, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w", encoding="ascii") as file:
            file.write(namespace.to_json())
        home.rename(_UNFINISHED, home, _FACTS)
    except OSError:
        home.remove(_UNFINISHED)
        raise


def read_facts(root: Folder, home: str) -> Namespace | None:
    """None if they were not written, or are not those that gave the folder its name."""
    try:
        with open(root.inner(home).open(_FACTS, os.O_RDONLY), "rb") as file:
            written = file.read(_LONGEST)
        namespace = Namespace.from_json(written)
    except (OSError, NoFile, ValueError, RecursionError):
        return None
    return namespace if home_of(namespace) == home else None


def remove_facts(root: Folder, home: str) -> None:
    folder = root.inner(home)
    folder.remove(_FACTS)
    folder.remove(_UNFINISHED)
