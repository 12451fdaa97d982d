"""What a tier does with its folder before anything else: clear it, and try what the filesystem can do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from kvtier_core.errors import BackendError
from kvtier_core.transfer.files import ring_works
from kvtier_disk.config import DiskConfig
from kvtier_disk.files import Access, probe_direct, remove_probes
from kvtier_disk.folder import Folder
from kvtier_disk.frames import Found, everything, homes, remove_if_empty, set_aside
from kvtier_disk.namespaces import remove_facts


def sweep(root: Folder, own: str, fits: Callable[[Found], bool]) -> list[Found]:
    """Remove what is no frame, in every namespace; what is not of the namespace ``own``, oldest first."""
    remove_probes(root)
    others = []
    for place, found in [*everything(root), *((found.place, found) for found in set_aside(root))]:
        if found is None or not fits(found):
            with contextlib.suppress(OSError):  # what cannot be removed is no frame all the same
                place.remove(root)
        elif place.folders[0] != own:
            others.append(found)
    for home in set(homes(root)) - {own} - {found.place.folders[0] for found in others}:
        with contextlib.suppress(OSError):
            remove_facts(root, home)
            remove_if_empty(root, home)
    return sorted(others)


def effective_access(config: DiskConfig, root: Folder) -> Access:
    direct = _effective_direct(config, root)
    if config.io == "calls" or (config.io == "auto" and not direct):
        return Access(direct, ring=False)  # through the page cache a ring only adds a thread of the kernel's
    ring = ring_works()
    if config.io == "io_uring" and not ring:
        raise BackendError(
            f"{config.path}: io is io_uring, and there is none here: kvtier was built without it, or the "
            "kernel or a container's rules forbid it; with io: auto plain calls are used",
            retryable=False,
        )
    return Access(direct, ring)


def _effective_direct(config: DiskConfig, root: Folder) -> bool:
    if config.direct == "off":
        return False
    try:
        probe_direct(root)
    except OSError as error:
        if config.direct == "on":
            raise BackendError(
                f"{config.path}: direct is on, but no page can be written past the page cache: "
                f"{error.strerror}; with direct: auto the page cache is used",
                retryable=False,
            ) from error
        return False
    return True
