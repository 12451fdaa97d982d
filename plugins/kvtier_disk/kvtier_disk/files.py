"""Reads and writes whole frames as files, bypassing the page cache if asked to. Raises OSError."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import secrets
from collections.abc import Iterator, Sequence

import attrs

from kvtier_core.errors import BackendError
from kvtier_core.transfer.files import read_files, write_files
from kvtier_core.types import FRAME_ALIGNMENT
from kvtier_disk.folder import Folder, NoFile
from kvtier_disk.frames import Place, unfinished

#: The names of probes begin so.
PROBE = ".kvtier-probe"


@attrs.frozen
class Access:
    """How files are read and written."""

    direct: bool  #: bypass the page cache
    ring: bool  #: a whole batch at once, with io_uring
    writer: str = ""  #: is part of the names of unfinished files, where others write as well

    @property
    def flags(self) -> int:
        """Flags for `os.open`."""
        return os.O_DIRECT if self.direct else 0


def read_frames(
    home: Folder, places: Sequence[Place], into: Sequence[memoryview], access: Access
) -> list[int | OSError | NoFile]:
    """For each frame the bytes read, or the error.

    0 if there is no file, if it is longer than its view, or if its length is not that of a frame. ``places`` lie under
    ``home``, the folder of a namespace.
    """
    outcomes: list[int | OSError | NoFile] = [0] * len(places)
    with contextlib.ExitStack() as opened:
        whole: list[tuple[int, int, memoryview]] = []  # the frame's number, its file, and where it is read to
        bounces: dict[int, memoryview] = {}
        for i, (place, view) in enumerate(zip(places, into, strict=True)):
            try:
                fd = place.folder(home).open(place.name, os.O_RDONLY | access.flags)
            except (OSError, NoFile) as error:
                outcomes[i] = 0 if is_gone(error) else error.with_traceback(None)  # its frames would keep the views
                continue
            opened.callback(os.close, fd)
            nbytes = os.fstat(fd).st_size
            if 0 < nbytes <= len(view) and not nbytes % FRAME_ALIGNMENT:
                if access.direct and not _aligned(view):
                    bounces[i] = _bounce(nbytes)
                whole.append((i, fd, bounces.get(i, view)[:nbytes]))
        filled = read_files([fd for _, fd, _ in whole], [view for _, _, view in whole], ring=access.ring)
        for (i, _, _), outcome in zip(whole, filled, strict=True):
            outcomes[i] = 0 if is_gone(outcome) else outcome
    for i, bounce in bounces.items():
        if isinstance(count := outcomes[i], int):
            into[i][:count] = bounce[:count]
    return outcomes


def write_unfinished(home: Folder, places: Sequence[Place], frames: Sequence[memoryview], access: Access) -> None:
    """Write all of the frames or none, under temporary names: `publish` or `discard` them afterwards.

    Not synced: a file that a power cut truncates is refused by its length or its checksum, and a cache that waited for
    the disk at every frame would be slower than the recompute it saves.
    """
    try:
        with contextlib.ExitStack() as opened:
            fds = []
            for place in places:
                folder = place.folder(home, make=True)
                fds.append(_new(folder, unfinished(place.name, access.writer), os.O_WRONLY | access.flags))
                opened.callback(os.close, fds[-1])
            bounced = [_bounce_of(frame) if access.direct and not _aligned(frame) else frame for frame in frames]
            write_files(fds, bounced, ring=access.ring)
    except BaseException:
        discard(home, places, access)  # even an open that failed may have made the file
        raise


def publish(home: Folder, place: Place, access: Access) -> None:
    """Give an unfinished file its final name, where it replaces an older frame."""
    folder = place.folder(home)
    folder.rename(unfinished(place.name, access.writer), folder, place.name)


def discard(home: Folder, places: Sequence[Place], access: Access) -> None:
    """Remove unfinished files as far as possible. Raises nothing."""
    for place in places:
        with contextlib.suppress(OSError, BackendError):
            place.folder(home).remove(unfinished(place.name, access.writer))


def probe_direct(folder: Folder) -> None:
    """Write a page with O_DIRECT: on some file systems the open succeeds and the write fails."""
    with _probe(folder, os.O_DIRECT) as fd:
        os.pwritev(fd, [_bounce(FRAME_ALIGNMENT)], 0)


def probe_device(folder: Folder) -> None:
    """Write a page to the folder's device and read it back, bypassing all caches if possible. Raises OSError."""
    try:
        _there_and_back(folder, os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        _there_and_back(folder, 0)


def remove_probes(folder: Folder) -> None:
    """Remove the probes of processes that were killed."""
    for entry in folder.entries():
        if entry.name.startswith(PROBE):
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
    """A new file that is removed afterwards; each has a name of its own."""
    name = f"{PROBE}-{secrets.token_hex(8)}"
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
    """A new file. What already has its name is removed and not written to."""
    try:
        return folder.open(name, flags | os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        folder.remove(name)
        return folder.open(name, flags | os.O_CREAT | os.O_EXCL)


def is_gone(outcome: object) -> bool:
    """Is it the error that there is no such file, or not any more on the server that keeps it?"""
    return isinstance(outcome, OSError) and outcome.errno in (errno.ENOENT, errno.ESTALE)


def _bounce(nbytes: int) -> memoryview:
    """Memory that is aligned for O_DIRECT."""
    return memoryview(mmap.mmap(-1, nbytes))


def _bounce_of(frame: memoryview) -> memoryview:
    bounce = _bounce(len(frame))
    bounce[:] = frame
    return bounce


def _aligned(view: memoryview) -> bool:
    """Can O_DIRECT use the view itself? Slots of an arena qualify; ctypes finds no address of a read-only view."""
    return not view.readonly and ctypes.addressof(ctypes.c_char.from_buffer(view)) % FRAME_ALIGNMENT == 0
