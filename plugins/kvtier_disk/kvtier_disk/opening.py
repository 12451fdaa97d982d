"""Opens a tier's folder: cleans it, and finds out what its file system supports."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from kvtier_core.storekit.disk_access import effective_direct, effective_ring, remove_probes
from kvtier_core.storekit.folder import Folder
from kvtier_disk.files import Access
from kvtier_disk.frames import Found, everything_of, namespace_folders, oldest_first, quarantined, remove_if_empty
from kvtier_disk.namespaces import is_kvtiers, remove_facts


def sweep(root: Folder, own: str, fits: Callable[[Found], bool]) -> list[Found]:
    """Remove everything that is no frame, in the folders of namespaces that kvtier has made, and nothing elsewhere.

    Returns the frames that are not in the namespace folder ``own``, oldest first. Frames that do not ``fits`` count as
    no frames.
    """
    remove_probes(root)
    others = []
    names = [name for name in namespace_folders(root) if name == own or is_kvtiers(root, name)]
    lying = [each for name in names for each in everything_of(root, name)]
    for place, found in [*lying, *((found.place, found) for found in quarantined(root))]:
        if found is None or not fits(found):
            with contextlib.suppress(OSError):  # if it cannot be removed, it is still no frame
                place.remove(root)
        elif place.folders[0] != own:
            others.append(found)
    for name in set(names) - {own} - {found.place.folders[0] for found in others}:
        with contextlib.suppress(OSError):
            remove_facts(root, name)
            remove_if_empty(root, name)
    return oldest_first(others)


def effective_access(path: Path, root: Folder, *, direct: str, io: str, writer: str = "") -> Access:
    """How files in ``root`` are accessed, given the settings ``direct`` and ``io``.

    ``writer`` names this process, where others write as well. ``path`` names the folder in errors.
    Raises BackendError if a setting asks for what is not available here.
    """
    bypass = effective_direct(path, root, direct)
    return Access(bypass, effective_ring(path, io, direct=bypass), writer)
