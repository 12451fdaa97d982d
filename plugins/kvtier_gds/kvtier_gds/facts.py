"""The facts of the namespaces that have frames in a slab, in files beside it. Raises OSError."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator

from kvtier_core.storekit.folder import Folder
from kvtier_core.storekit.namespaces import read_facts, write_facts
from kvtier_core.types import Namespace

_NAME = re.compile(r"kvtier\.([0-9a-f]{64})\.json")


def keep_facts(folder: Folder, ours: Namespace, others: Collection[bytes]) -> None:
    """Write the facts of our namespace unless the disk is full, and remove those of all but these other digests."""
    for name, digest in list(_listed(folder)):
        if digest not in others and digest != ours.digest:
            folder.remove(name)
    name = f"kvtier.{ours.digest.hex()}.json"
    if read_facts(folder, name) != ours:
        with contextlib.suppress(OSError):
            write_facts(folder, name, ours, "kvtier.json.tmp")


def other_namespaces(folder: Folder, ours: Namespace) -> Iterator[Namespace]:
    """The namespaces whose facts lie here, but for ours."""
    for name, digest in _listed(folder):
        namespace = read_facts(folder, name)
        if namespace is not None and namespace.digest == digest != ours.digest:
            yield namespace


def _listed(folder: Folder) -> Iterator[tuple[str, bytes]]:
    """Name and digest of each file of facts."""
    for name in sorted(entry.name for entry in folder.entries()):
        if match := _NAME.fullmatch(name):
            yield name, bytes.fromhex(match[1])
