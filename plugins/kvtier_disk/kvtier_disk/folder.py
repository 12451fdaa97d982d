"""Which frames lie in a folder, and where. Raises OSError, and BackendError for a refusal.

``path/<namespace>/<first byte of key>/<key>.kv``, all in hex; damaged frames lie in ``path/quarantine``.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

import attrs

from kvtier_core.types import KEY_NBYTES, PAGE_NBYTES, ChunkKey, Namespace
from kvtier_disk.claim import make_ours, must_be_ours

_ASIDE = "quarantine"
_NAMESPACE = re.compile(r"[0-9a-f]{16}")
_SHARD = re.compile(r"[0-9a-f]{2}")
_SET_ASIDE = re.compile(rf"([0-9a-f]{{16}})-([0-9a-f]{{{2 * KEY_NBYTES}}})")
_FRAME = re.compile(rf"([0-9a-f]{{{2 * KEY_NBYTES}}})\.kv")


@attrs.frozen(order=True)
class Found:
    """A frame on the disk. Sorts by age, oldest first."""

    mtime_ns: int
    path: Path
    nbytes: int
    home: str  #: how the digest of its namespace begins, in hex
    key: ChunkKey


class Home:
    """The frames of one namespace."""

    def __init__(self, path: Path, namespace: Namespace):
        self.name = namespace.digest.hex()[:16]
        self.path = path / self.name
        self._aside = path / _ASIDE

    def make(self) -> None:
        """At once, so that in a sticky folder nobody else is first."""
        make_ours(self.path)

    def file(self, key: ChunkKey) -> Path:
        name = key.hex()
        return self.path / name[:2] / f"{name}.kv"

    def make_places(self, files: Iterable[Path]) -> None:
        """The folders above these files."""
        for place in {file.parent for file in files}:
            make_ours(place)

    def put_aside(self, key: ChunkKey) -> Path:
        """Move the file of a damaged frame to where no reader looks; its new name."""
        make_ours(self._aside)
        file = self._aside / f"{self.name}-{key.hex()}"
        os.replace(self.file(key), file)
        return file

    def frames(self) -> list[Found]:
        """Oldest first."""
        return sorted(found for entry in _files(self.path) if (found := _frame(entry)))


def everything(path: Path) -> Iterator[tuple[Path, Found | None]]:
    """All files that lie where only frames should be, in every namespace; None for what is no frame."""
    for home in _folders(path, _NAMESPACE):
        yield from ((Path(entry.path), _frame(entry)) for entry in _files(home))


def set_aside(path: Path) -> list[Found]:
    """What lies in quarantine."""
    try:
        with os.scandir(path / _ASIDE) as entries:
            named = [(entry, name) for entry in entries if (name := _SET_ASIDE.fullmatch(entry.name))]
            return [_found(entry, *name.groups()) for entry, name in named]
    except FileNotFoundError:
        return []


def _folders(parent: Path, name: re.Pattern[str]) -> Iterator[Path]:
    try:
        with os.scandir(parent) as entries:
            for entry in entries:
                if name.fullmatch(entry.name):
                    must_be_ours(Path(entry.path))
                    yield Path(entry.path)
    except FileNotFoundError:
        return


def _files(home: Path) -> Iterator[os.DirEntry[str]]:
    """Whatever is no folder, where only frames should be."""
    for shard in _folders(home, _SHARD):
        with os.scandir(shard) as entries:
            yield from (entry for entry in entries if not entry.is_dir(follow_symlinks=False))


def _frame(entry: os.DirEntry[str]) -> Found | None:
    """None for what cannot be a frame: another name, another place, a length that no frame has."""
    name = _FRAME.fullmatch(entry.name)
    status = entry.stat(follow_symlinks=False)
    *_, home, shard, _ = Path(entry.path).parts
    right_place = name and shard == entry.name[:2]
    if not right_place or not stat.S_ISREG(status.st_mode) or not status.st_size or status.st_size % PAGE_NBYTES:
        return None
    return _found(entry, home, name[1])


def _found(entry: os.DirEntry[str], home: str, key: str) -> Found:
    status = entry.stat(follow_symlinks=False)
    return Found(status.st_mtime_ns, Path(entry.path), status.st_size, home, ChunkKey(bytes.fromhex(key)))
