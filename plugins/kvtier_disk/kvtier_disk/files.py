"""Whole frames to and from files, past the page cache where that is wanted. Raises OSError."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Iterator, Sequence

import attrs

from kvtier_core.transfer.files import read_files, write_files
from kvtier_core.types import FRAME_ALIGNMENT
from kvtier_disk.folder import Folder, NoFile
from kvtier_disk.frames import Place

_PROBE = ".kvtier-probe"
_UNFINISHED = ".tmp"


@attrs.frozen
class Access:
    """How files are reached."""

    direct: bool  #: past the page cache
    ring: bool  #: all of a batch at once

    @property
    def flags(self) -> int:
        return os.O_DIRECT if self.direct else 0


def read_frames(
    home: Folder, places: Sequence[Place], into: Sequence[memoryview], access: Access
) -> list[int | OSError | NoFile]:
    """Bytes read of each; 0 if there is no file, or it does not fit, or its length is no frame's; or what failed."""
    outcomes: list[int | OSError | NoFile] = [0] * len(places)
    with contextlib.ExitStack() as opened:
        whole: list[tuple[int, int, memoryview]] = []  # the number of a frame, its file, and where it is read to
        bounces: dict[int, memoryview] = {}
        for i, (place, view) in enumerate(zip(places, into, strict=True)):
            try:
                fd = place.folder(home).open(place.name, os.O_RDONLY | access.flags)
            except FileNotFoundError:
                continue
            except (OSError, NoFile) as error:
                outcomes[i] = error.with_traceback(None)  # whose frames would keep the views
                continue
            opened.callback(os.close, fd)
            nbytes = os.fstat(fd).st_size
            if 0 < nbytes <= len(view) and not nbytes % FRAME_ALIGNMENT:
                if access.direct and not _aligned(view):
                    bounces[i] = _bounce(nbytes)
                whole.append((i, fd, bounces.get(i, view)[:nbytes]))
        filled = read_files([fd for _, fd, _ in whole], [view for _, _, view in whole], ring=access.ring)
        for (i, _, _), outcome in zip(whole, filled, strict=True):
            outcomes[i] = outcome
    for i, bounce in bounces.items():
        if isinstance(count := outcomes[i], int):
            into[i][:count] = bounce[:count]
    return outcomes


def write_unfinished(home: Folder, places: Sequence[Place], frames: Sequence[memoryview], access: Access) -> None:
    """All of the frames or none, under temporary names: `publish` makes them whole files, `discard` nothing.

    Not synced: what a power cut tears is refused by its length or its checksum, and a cache that waited
    for the disk's own memory at each frame would be slower than the recompute it saves.
    """
    try:
        with contextlib.ExitStack() as opened:
            fds = []
            for place in places:
                fds.append(_new(place.folder(home, make=True), _unfinished(place), os.O_WRONLY | access.flags))
                opened.callback(os.close, fds[-1])
            bounced = [_bounce_of(frame) if access.direct and not _aligned(frame) else frame for frame in frames]
            write_files(fds, bounced, ring=access.ring)
    except BaseException:
        discard(home, places)  # even an open that was refused may have made the file
        raise


def publish(home: Folder, place: Place) -> None:
    folder = place.folder(home)
    folder.rename(_unfinished(place), folder, place.name)


def discard(home: Folder, places: Sequence[Place]) -> None:
    for place in places:
        with contextlib.suppress(OSError):
            place.folder(home).remove(_unfinished(place))


def probe_direct(folder: Folder) -> None:
    """Write a page past the page cache, for an open alone may succeed where a write does not."""
    with _probe(folder, os.O_DIRECT) as fd:
        os.pwritev(fd, [_bounce(FRAME_ALIGNMENT)], 0)


def probe_device(folder: Folder) -> None:
    """Does what the folder lies on still answer? A page goes there and comes back, past all caches if that can be."""
    try:
        _there_and_back(folder, os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        _there_and_back(folder, 0)


def remove_probes(folder: Folder) -> None:
    """What a kill in the middle of a probe left."""
    for entry in folder.entries():
        if entry.name.startswith(_PROBE):
            folder.remove(entry.name)


def _there_and_back(folder: Folder, flags: int) -> None:
    page, found = _bounce(FRAME_ALIGNMENT), _bounce(FRAME_ALIGNMENT)
    page[:] = os.urandom(FRAME_ALIGNMENT)
    with _probe(folder, flags) as fd:
        os.pwritev(fd, [page], 0)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if os.preadv(fd, [found], 0) != FRAME_ALIGNMENT or found != page:
            raise OSError(errno.EIO, os.strerror(errno.EIO))


@contextlib.contextmanager
def _probe(folder: Folder, flags: int) -> Iterator[int]:
    """A new file, for as long as it lasts; each thread has its own."""
    name = f"{_PROBE}-{threading.get_native_id()}"
    try:
        fd = _new(folder, name, os.O_RDWR | flags)
        try:
            yield fd
        finally:
            os.close(fd)
    finally:
        with contextlib.suppress(OSError):
            folder.remove(name)


def _new(folder: Folder, name: str, flags: int) -> int:
    """A file that was not there before: nothing that somebody left under its name is written to."""
    try:
        return folder.open(name, flags | os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        folder.remove(name)
        return folder.open(name, flags | os.O_CREAT | os.O_EXCL)


def _unfinished(place: Place) -> str:
    return place.name.removesuffix(".kv") + _UNFINISHED


def _bounce(nbytes: int) -> memoryview:
    """Memory that O_DIRECT takes."""
    return memoryview(mmap.mmap(-1, nbytes))


def _bounce_of(frame: memoryview) -> memoryview:
    bounce = _bounce(len(frame))
    bounce[:] = frame
    return bounce


def _aligned(view: memoryview) -> bool:
    """Can O_DIRECT use the view itself? The slots of an arena are so; ctypes cannot tell of a read-only view."""
    return not view.readonly and ctypes.addressof(ctypes.c_char.from_buffer(view)) % FRAME_ALIGNMENT == 0
