"""Namespaces in a store: where their frames are, and their facts, which explain why an engine finds none."""

from __future__ import annotations

import os
import re

from kvtier_core.storekit.folder import Folder, NoFile
from kvtier_core.types import Namespace

FACTS = "namespace.json"  #: the name of a namespace's facts beside its frames
FACTS_NBYTES = 1 << 20  #: the maximum length of the facts
_HOME = re.compile(r"[0-9a-f]{16}")


def home_of(namespace: Namespace) -> str:
    """The name under which a store keeps the namespace's frames: 16 hex digits of its digest."""
    return namespace.digest.hex()[:16]


def is_home(name: str) -> bool:
    """Can this be a result of `home_of`?"""
    return _HOME.fullmatch(name) is not None


def namespace_of(facts: str | bytes, home: str = "") -> Namespace | None:
    """The namespace with these facts; None if this text has none, or if it has another home."""
    try:
        namespace = Namespace.from_json(facts)
    except (TypeError, ValueError, RecursionError):
        return None
    return namespace if home_of(namespace).startswith(home) else None


def write_facts(folder: Folder, name: str, namespace: Namespace, unfinished: str) -> None:
    """Write the facts into the file ``name``, under the name ``unfinished`` until they are whole. Raises OSError."""
    folder.remove(unfinished)
    try:
        with open(folder.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w", encoding="ascii") as file:
            file.write(namespace.to_json())
        folder.rename(unfinished, folder, name)
    except OSError:
        folder.remove(unfinished)
        raise


def read_facts(folder: Folder, name: str, home: str = "") -> Namespace | None:
    """The namespace whose facts are in this file; None if there is no file, or anything else in it.

    None, too, if the namespace has another home.
    """
    try:
        with open(folder.open(name, os.O_RDONLY), "rb") as file:
            return namespace_of(file.read(FACTS_NBYTES), home)
    except (OSError, NoFile):
        return None
