"""Reads and writes whole frames as files, bypassing the page cache if asked to. Raises OSError."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence

import attrs

from kvtier_core.errors import BackendError
from kvtier_core.storekit.disk_access import new_file
from kvtier_core.storekit.files import read_files, write_files
from kvtier_core.storekit.folder import Folder, NoFile, why_no_file
from kvtier_core.types import FRAME_ALIGNMENT
from kvtier_disk.frames import Place, unfinished


@attrs.frozen
class Access:
    """How files are read and written."""

    direct: bool  #: bypass the page cache
    ring: bool  #: a whole batch at once, with io_uring
    writer: str = ""  #: part of the names of unfinished files, where others also write

    @property
    def flags(self) -> int:
        return os.O_DIRECT if self.direct else 0


def read_frames(
    home: Folder, places: Sequence[Place], into: Sequence[memoryview], access: Access
) -> list[int | OSError | NoFile]:
    """For each frame, the number of bytes read, or the error.

    0 if there is no file, if it is longer than its view, or if its length is not that of a frame. ``places`` are below
    ``home``, the folder of a namespace.
    """
    outcomes: list[int | OSError | NoFile] = [0] * len(places)
    with contextlib.ExitStack() as opened:
        whole: list[tuple[int, int, memoryview]] = []  # the frame's number, its file, and where it is read to
        for i, (place, view) in enumerate(zip(places, into, strict=True)):
            try:
                fd = place.folder(home).open(place.name, os.O_RDONLY | access.flags)
            except (OSError, NoFile) as error:
                outcomes[i] = 0 if is_gone(error) else error.with_traceback(None)  # its traceback would keep the views
                continue
            opened.callback(os.close, fd)
            nbytes = os.fstat(fd).st_size
            if 0 < nbytes <= len(view) and not nbytes % FRAME_ALIGNMENT:
                whole.append((i, fd, view[:nbytes]))
        filled = read_files(
            [fd for _, fd, _ in whole], [view for _, _, view in whole], ring=access.ring, direct=access.direct
        )
        for (i, fd, _), outcome in zip(whole, filled, strict=True):
            # What was open to others for a moment could be theirs.
            why = why_no_file(os.fstat(fd)) if isinstance(outcome, int) else ""
            refused = NoFile(f"{places[i].under(home.path)}: {why}") if why else outcome
            outcomes[i] = 0 if is_gone(outcome) else refused
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
                fds.append(_new_file(home, _unfinished(place, access), os.O_WRONLY | access.flags))
                opened.callback(os.close, fds[-1])
            write_files(fds, frames, ring=access.ring, direct=access.direct)
    except BaseException:
        discard(home, places, access)  # even an open that failed may have made the file
        raise


def _new_file(home: Folder, place: Place, flags: int) -> int:
    while True:
        try:
            return new_file(place.folder(home, make=True), place.name, flags)
        except FileNotFoundError:  # its folder was empty, and removed by another thread or process
            if not os.fstat(home.fd).st_nlink:
                raise


def _unfinished(place: Place, access: Access) -> Place:
    return attrs.evolve(place, name=unfinished(place.name, access.writer))


def publish(home: Folder, place: Place, access: Access) -> None:
    """Give an unfinished file its final name, where it replaces an older frame."""
    folder = place.folder(home)
    folder.rename(_unfinished(place, access).name, folder, place.name)


def discard(home: Folder, places: Sequence[Place], access: Access) -> None:
    """Try to remove unfinished files. Raises nothing."""
    for place in places:
        with contextlib.suppress(OSError, BackendError):
            _unfinished(place, access).remove(home)


def is_gone(outcome: object) -> bool:
    """Is it the error for a file that does not exist, or no longer exists on the server that keeps it?"""
    return isinstance(outcome, OSError) and outcome.errno in (errno.ENOENT, errno.ESTALE)
