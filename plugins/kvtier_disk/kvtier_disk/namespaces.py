"""The folder of a namespace, and the namespace's facts beside its frames.

``path/<namespace>/namespace.json`` explains why an engine finds no frames; `kvtier identity --diff` reads it, too.
Raises OSError, and BackendError for a refusal.
"""

from __future__ import annotations

import contextlib

from kvtier_core.storekit import namespaces
from kvtier_core.storekit.folder import Folder, is_made_folder
from kvtier_core.storekit.namespaces import FACTS, home_of
from kvtier_core.types import Namespace
from kvtier_disk.frames import unfinished


def make_namespace_folder(root: Folder, namespace: Namespace, writer: str = "") -> Folder:
    """The folder of the namespace; made if missing. Its facts are written into it unless the disk is full.

    ``writer`` names this process, where others write as well.
    """
    name = home_of(namespace)
    folder = root.inner(name, make=True)
    if read_facts(root, name) != namespace:
        with contextlib.suppress(OSError):
            namespaces.write_facts(folder, FACTS, namespace, unfinished(FACTS, writer))
    return folder


def read_facts(root: Folder, name: str) -> Namespace | None:
    """The namespace of the folder with this name; None if its facts are missing, or belong to another name."""
    try:
        folder = root.inner(name)
    except OSError:
        return None
    return namespaces.read_facts(folder, FACTS, name)


def is_kvtiers(root: Folder, name: str) -> bool:
    """Is this the folder of a namespace, or a folder of another program that is named like one?"""
    return is_made_folder(root.status(name)) or read_facts(root, name) is not None


def remove_facts(root: Folder, name: str) -> None:
    """Remove the facts from the namespace folder of this name, if there are any."""
    folder = root.inner(name)
    folder.remove(FACTS)
    folder.remove(unfinished(FACTS))
