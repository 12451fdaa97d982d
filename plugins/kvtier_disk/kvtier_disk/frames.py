"""Names, finds and lists the frames in a tier's folder. Raises OSError, and BackendError for a refusal.

``path/<namespace>/<first byte of key>/<key>.kv``, all in hex; damaged frames are in ``path/quarantine``.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

import attrs

from kvtier_core.errors import BackendError
from kvtier_core.storekit.folder import ASIDE, Folder, why_no_file
from kvtier_core.storekit.namespaces import is_home
from kvtier_core.types import FRAME_ALIGNMENT, KEY_NBYTES, ChunkKey

_QUARANTINE = "quarantine"
_UNFINISHED = ".tmp"
_SHARD = re.compile(r"[0-9a-f]{2}")
_QUARANTINED = re.compile(rf"([0-9a-f]{{16}})-([0-9a-f]{{{2 * KEY_NBYTES}}})")
_FRAME = re.compile(rf"([0-9a-f]{{{2 * KEY_NBYTES}}})\.kv")


@attrs.frozen
class Place:
    """The place of a file: the folders that lead to it, and its name in the last of them."""

    folders: tuple[str, ...]
    name: str

    def folder(self, base: Folder, *, make: bool = False) -> Folder:
        """The folder that holds the file; ``make`` creates it if it is missing.

        Every folder on the way is checked again: it must still belong to this user alone.
        """
        for name in self.folders:
            base = base.inner(name, make=make)
        return base

    def under(self, path: Path) -> Path:
        """The whole path, for messages."""
        return path.joinpath(*self.folders, self.name)

    def nbytes(self, base: Folder, *, usable: bool = False) -> int:
        """The length of the file; 0 if there is none of this user, or if it must be ``usable`` and others can reach it.

        The length, not the blocks on the disk: a frame has no holes, and the tier counts bytes of frames.
        """
        try:
            status = self.folder(base).status(self.name)
        except (FileNotFoundError, NotADirectoryError):
            return 0
        its = not why_no_file(status) if usable else status.st_uid == os.geteuid() and status.st_nlink == 1
        return status.st_size if its and stat.S_ISREG(status.st_mode) else 0

    def remove(self, base: Folder) -> bool:
        """Remove whatever is there, and its folder if that is empty then. Returns False if there is nothing."""
        try:
            above = Place(self.folders[:-1], "").folder(base)
            removed = self.folder(base).remove(self.name)
        except (FileNotFoundError, NotADirectoryError):
            return False
        if self.folders:
            with contextlib.suppress(OSError, BackendError):  # others are in it
                above.remove_empty(self.folders[-1])
        return removed


@attrs.frozen
class Found:
    """A frame on the disk."""

    mtime_ns: int
    place: Place  #: relative to the tier's folder
    nbytes: int
    namespace_folder: str  #: the first 16 hex digits of its namespace's digest
    key: ChunkKey

    def is_unchanged(self, root: Folder) -> bool:
        """Is it still there, and not replaced by another?"""
        try:
            status = self.place.folder(root).status(self.place.name)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return (status.st_mtime_ns, status.st_size) == (self.mtime_ns, self.nbytes)


def oldest_first(frames: Iterable[Found]) -> list[Found]:
    """The frames by age. There may be a million of them."""
    return sorted(frames, key=lambda found: (found.mtime_ns, found.place.name))


def place_of(key: ChunkKey) -> Place:
    """The place of this key's frame, relative to the folder of its namespace."""
    name = key.hex()
    return Place((name[:2],), f"{name}.kv")


def unfinished(name: str, writer: str = "") -> str:
    """The name of a file until it is whole; ``writer`` names the process, where others write as well."""
    stem = name.rpartition(".")[0]
    return f"{stem}.{writer}{_UNFINISHED}" if writer else f"{stem}{_UNFINISHED}"


def is_unfinished(name: str) -> bool:
    """Was it made by `unfinished`, or by NFS for a file that is removed and still open?"""
    return name.endswith(_UNFINISHED) or name.startswith(".nfs")


def move_to_quarantine(root: Folder, namespace_folder: str, key: ChunkKey) -> Place:
    """Move the file of a damaged frame to where no read finds it; returns its new place."""
    aside = Place((_QUARANTINE,), f"{namespace_folder}-{key.hex()}")
    place = place_of(key)
    place.folder(root.inner(namespace_folder)).rename(place.name, aside.folder(root, make=True), aside.name)
    return aside


def namespace_folders(root: Folder) -> list[str]:
    return [name for name in sorted(entry.name for entry in root.entries()) if is_home(name)]


def everything_of(root: Folder, namespace_folder: str) -> Iterator[tuple[Place, Found | None]]:
    """Everything in the place where only frames of a namespace should be; None for anything that is not a frame."""
    try:
        shards = shards_of(root, namespace_folder)
    except NotADirectoryError:
        yield Place((), namespace_folder), None
        return
    for shard in shards:
        yield from everything_in(root, namespace_folder, shard)


def shards_of(root: Folder, namespace_folder: str) -> list[str]:
    """The names of the folders in a namespace's folder: each holds the frames whose keys begin with its name."""
    try:
        entries = root.inner(namespace_folder).entries()
    except FileNotFoundError:
        return []
    return [entry.name for entry in entries if _SHARD.fullmatch(entry.name)]


def everything_in(root: Folder, namespace_folder: str, shard: str) -> Iterator[tuple[Place, Found | None]]:
    """The same for one shard."""
    try:
        folder = root.inner(namespace_folder).inner(shard)  # its entries are looked at through its descriptor
    except FileNotFoundError:  # removed since it was listed
        return
    except NotADirectoryError:
        yield Place((namespace_folder,), shard), None
        return
    for entry in folder.entries():
        if ASIDE in entry.name:
            continue
        place = Place((namespace_folder, shard), entry.name)
        try:
            found = _frame(place, entry)
        except FileNotFoundError:  # deleted, or written whole, since it was listed
            continue
        yield place, found


def quarantined(root: Folder) -> list[Found]:
    """The damaged frames that are kept."""
    try:
        folder = root.inner(_QUARANTINE)
    except (FileNotFoundError, NotADirectoryError):
        return []
    named = [(entry, name) for entry in folder.entries() if (name := _QUARANTINED.fullmatch(entry.name))]
    return [_found(Place((_QUARANTINE,), entry.name), entry, *name.groups()) for entry, name in named]


def remove_if_empty(root: Folder, namespace_folder: str) -> None:
    """Remove a namespace folder without frames. Raises OSError at the first folder in it that is not empty."""
    folder = root.inner(namespace_folder)
    for shard in folder.entries():
        folder.remove_empty(shard.name)
    root.remove_empty(namespace_folder)


def _frame(place: Place, entry: os.DirEntry[str]) -> Found | None:
    """None for what cannot be a frame: a wrong name, a wrong place, or a length that no frame has."""
    name = _FRAME.fullmatch(entry.name)
    status = entry.stat(follow_symlinks=False)
    namespace_folder, shard = place.folders
    if name is None or shard != entry.name[:2]:
        return None
    if why_no_file(status) or not status.st_size or status.st_size % FRAME_ALIGNMENT:
        return None
    return _found(place, entry, namespace_folder, name[1])


def _found(place: Place, entry: os.DirEntry[str], namespace_folder: str, key: str) -> Found:
    status = entry.stat(follow_symlinks=False)
    return Found(status.st_mtime_ns, place, status.st_size, namespace_folder, ChunkKey(bytes.fromhex(key)))
