"""Whole frames to and from files, past the page cache where that is wanted. Raises OSError."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import attrs

from kvtier_core.files import read_files, write_files
from kvtier_core.types import PAGE_NBYTES

_PROBE = ".kvtier-probe"
_UNFINISHED = ".tmp"


def nbytes_of(path: Path) -> int:
    """The length of a file; 0 if there is none.

    The length, not the blocks: a frame has no holes, and the tier counts bytes of frames.
    """
    try:
        return path.stat(follow_symlinks=False).st_size
    except FileNotFoundError:
        return 0


@attrs.frozen
class Access:
    """How files are reached."""

    direct: bool  #: past the page cache
    ring: bool  #: all of a batch at once


def read_frames(paths: Sequence[Path], into: Sequence[memoryview], access: Access) -> list[int]:
    """Bytes read of each; 0 if there is no file, or it does not fit, or its length is no frame's."""
    counts = [0] * len(paths)
    with contextlib.ExitStack() as opened:
        whole: list[tuple[int, int, memoryview]] = []  # the number of a frame, its file, and where it is read to
        bounces: dict[int, memoryview] = {}
        for i, (path, view) in enumerate(zip(paths, into, strict=True)):
            try:
                fd = _open(path, os.O_RDONLY, access.direct)
            except FileNotFoundError:
                continue
            opened.callback(os.close, fd)
            nbytes = os.fstat(fd).st_size
            if 0 < nbytes <= len(view) and not nbytes % PAGE_NBYTES:
                os.set_blocking(fd, True)
                if access.direct and not _aligned(view):
                    bounces[i] = _bounce(nbytes)
                whole.append((i, fd, bounces.get(i, view)[:nbytes]))
        filled = read_files([fd for _, fd, _ in whole], [view for _, _, view in whole], ring=access.ring)
        for (i, _, _), count in zip(whole, filled, strict=True):
            counts[i] = count
    for i, bounce in bounces.items():
        into[i][: counts[i]] = bounce[: counts[i]]
    return counts


def write_unfinished(paths: Sequence[Path], frames: Sequence[memoryview], access: Access) -> None:
    """All of the frames or none, under temporary names: `publish` makes them whole files, `discard` nothing.

    Not synced: what a power cut tears is refused by its length or its checksum, and a cache that waited
    for the disk's own memory at each frame would be slower than the recompute it saves.
    """
    try:
        with contextlib.ExitStack() as opened:
            fds = []
            for path in paths:
                fds.append(_open(_unfinished(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, access.direct))
                opened.callback(os.close, fds[-1])
                os.set_blocking(fds[-1], True)
            bounced = [_bounce_of(frame) if access.direct and not _aligned(frame) else frame for frame in frames]
            write_files(fds, bounced, ring=access.ring)
    except OSError:
        discard(paths)  # even an open that was refused may have made the file
        raise


def publish(path: Path) -> None:
    os.replace(_unfinished(path), path)


def discard(paths: Sequence[Path]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            _unfinished(path).unlink()


def probe_direct(folder: Path) -> None:
    """Write a page past the page cache, for an open alone may succeed where a write does not."""
    write_unfinished([folder / _PROBE], [_bounce(PAGE_NBYTES)], Access(direct=True, ring=False))
    discard([folder / _PROBE])


def remove_probe(folder: Path) -> None:
    """What a kill in the middle of `probe_direct` left."""
    _unfinished(folder / _PROBE).unlink(missing_ok=True)


def _open(path: Path, flags: int, direct: bool) -> int:
    # NONBLOCK: the open of a pipe would wait for its other end. Of files it means nothing.
    flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | (os.O_DIRECT if direct else 0)
    return os.open(path, flags, 0o600)


def _unfinished(path: Path) -> Path:
    return path.with_suffix(_UNFINISHED)


def _bounce(nbytes: int) -> memoryview:
    """Memory that O_DIRECT takes."""
    return memoryview(mmap.mmap(-1, nbytes))


def _bounce_of(frame: memoryview) -> memoryview:
    bounce = _bounce(len(frame))
    bounce[:] = frame
    return bounce


def _aligned(view: memoryview) -> bool:
    """Can O_DIRECT use the view itself? The slots of an arena are so; ctypes cannot tell of a read-only view."""
    return not view.readonly and ctypes.addressof(ctypes.c_char.from_buffer(view)) % PAGE_NBYTES == 0
