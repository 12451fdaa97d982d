"""Which frames lie in a tier's folder, and where. Raises OSError, and BackendError for a refusal.

``path/<namespace>/<first byte of key>/<key>.kv``, all in hex; damaged frames lie in ``path/quarantine``.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import attrs

from kvtier_core.types import FRAME_ALIGNMENT, KEY_NBYTES, ChunkKey, Namespace
from kvtier_disk.folder import Folder

_ASIDE = "quarantine"
_NAMESPACE = re.compile(r"[0-9a-f]{16}")
_SHARD = re.compile(r"[0-9a-f]{2}")
_SET_ASIDE = re.compile(rf"([0-9a-f]{{16}})-([0-9a-f]{{{2 * KEY_NBYTES}}})")
_FRAME = re.compile(rf"([0-9a-f]{{{2 * KEY_NBYTES}}})\.kv")


@attrs.frozen(order=True)
class Place:
    """Where a file lies: the folders to go through, and its name in the last of them."""

    folders: tuple[str, ...]
    name: str

    def folder(self, base: Folder, *, make: bool = False) -> Folder:
        """The one that the file lies in. Each on the way is looked at again: it must still be this user's alone."""
        for name in self.folders:
            base = base.inner(name, make=make)
        return base

    def under(self, path: Path) -> Path:
        """For people."""
        return path.joinpath(*self.folders, self.name)

    def nbytes(self, base: Folder) -> int:
        """The length of a file; 0 if there is none.

        The length, not the blocks: a frame has no holes, and the tier counts bytes of frames.
        """
        try:
            status = self.folder(base).status(self.name)
        except (FileNotFoundError, NotADirectoryError):
            return 0
        return status.st_size if stat.S_ISREG(status.st_mode) else 0

    def remove(self, base: Folder) -> None:
        """Remove what is there, a file or not, if there is anything."""
        try:
            self.folder(base).remove(self.name)
        except (FileNotFoundError, NotADirectoryError):
            return


@attrs.frozen(order=True)
class Found:
    """A frame on the disk. Sorts by age, oldest first."""

    mtime_ns: int
    place: Place  #: from the tier's folder on
    nbytes: int
    home: str  #: how the digest of its namespace begins, in hex
    key: ChunkKey


def home_of(namespace: Namespace) -> str:
    """The folder of a namespace's frames."""
    return namespace.digest.hex()[:16]


def place_of(key: ChunkKey) -> Place:
    """Of a key's frame, from the folder of its namespace on."""
    name = key.hex()
    return Place((name[:2],), f"{name}.kv")


def put_aside(root: Folder, home: str, key: ChunkKey) -> Place:
    """Move the file of a damaged frame to where no reader looks; its new place."""
    aside = Place((_ASIDE,), f"{home}-{key.hex()}")
    place = place_of(key)
    place.folder(root.inner(home)).rename(place.name, aside.folder(root, make=True), aside.name)
    return aside


def homes(root: Folder) -> list[str]:
    """The folders of all namespaces."""
    return [name for name in sorted(entry.name for entry in root.entries()) if _NAMESPACE.fullmatch(name)]


def everything(root: Folder) -> Iterator[tuple[Place, Found | None]]:
    """All that lies where only frames should be, in every namespace; None for what is no frame."""
    for home in homes(root):
        yield from everything_of(root, home)


def everything_of(root: Folder, home: str) -> Iterator[tuple[Place, Found | None]]:
    try:
        folder = root.inner(home)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        yield Place((), home), None
        return
    for shard in folder.entries():
        if not _SHARD.fullmatch(shard.name):
            continue
        if not shard.is_dir(follow_symlinks=False):
            yield Place((home,), shard.name), None
            continue
        inner = folder.inner(shard.name)
        for entry in inner.entries():
            place = Place((home, shard.name), entry.name)
            yield place, _frame(place, entry)


def set_aside(root: Folder) -> list[Found]:
    """What lies in quarantine."""
    try:
        folder = root.inner(_ASIDE)
    except (FileNotFoundError, NotADirectoryError):
        return []
    named = [(entry, name) for entry in folder.entries() if (name := _SET_ASIDE.fullmatch(entry.name))]
    return [_found(Place((_ASIDE,), entry.name), entry, *name.groups()) for entry, name in named]


def remove_if_empty(root: Folder, home: str) -> None:
    """The folders of a namespace of which no frame is left. Raises OSError for the first that is not empty."""
    folder = root.inner(home)
    for shard in folder.entries():
        os.rmdir(shard.name, dir_fd=folder.fd)
    os.rmdir(home, dir_fd=root.fd)


def _frame(place: Place, entry: os.DirEntry[str]) -> Found | None:
    """None for what cannot be a frame: another name, another place, a length that no frame has."""
    name = _FRAME.fullmatch(entry.name)
    status = entry.stat(follow_symlinks=False)
    home, shard = place.folders
    right_place = name and shard == entry.name[:2]
    if not right_place or not stat.S_ISREG(status.st_mode) or not status.st_size or status.st_size % FRAME_ALIGNMENT:
        return None
    return _found(place, entry, home, name[1])


def _found(place: Place, entry: os.DirEntry[str], home: str, key: str) -> Found:
    status = entry.stat(follow_symlinks=False)
    return Found(status.st_mtime_ns, place, status.st_size, home, ChunkKey(bytes.fromhex(key)))
