"""One file per frame in a folder."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator, Mapping, Sequence

from kvtier_core.errors import BackendError, StoreFull
from kvtier_core.interfaces import Backend, OpenContext
from kvtier_core.types import ChunkKey, Namespace, Nbytes
from kvtier_disk.config import DiskConfig
from kvtier_disk.files import (
    discard,
    probe_device,
    publish,
    read_frames,
    write_unfinished,
)
from kvtier_disk.folder import Folder, NoFile
from kvtier_disk.folder_lock import FolderLock
from kvtier_disk.frames import (
    Found,
    Place,
    everything_of,
    home_of,
    homes,
    place_of,
    put_aside,
    set_aside,
)
from kvtier_disk.namespaces import make_home, read_facts
from kvtier_disk.opening import effective_access, sweep
from kvtier_disk.space_account import SpaceAccount, free_of

#: What no second attempt changes; everything else (full, busy, stale, I/O error) may pass.
_LASTING = {
    errno.EACCES,
    errno.EFBIG,
    errno.EINVAL,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
}

#: What the file of one frame may be to blame for, if the device still answers. Anything else is everybody's trouble.
_OF_ONE_FRAME = {
    errno.EACCES,
    errno.EBADMSG,  # its checksum in the filesystem is wrong
    errno.EILSEQ,  # so is what protects it in the device
    errno.EIO,
    errno.ELOOP,
    errno.ENODATA,  # a bad sector
    errno.ENOTDIR,
    errno.EPERM,
    errno.EREMOTEIO,
    errno.EUCLEAN,  # the filesystem's own structures are damaged
}

_FULL = {errno.ENOSPC, errno.EDQUOT}


class DiskBackend(Backend):
    def __init__(self, config: DiskConfig, ctx: OpenContext):
        self._config = config
        self._namespace = ctx.namespace
        self._name = home_of(ctx.namespace)
        self._capacity = ctx.capacity
        self._longest = ctx.max_frame_nbytes or ctx.capacity
        self._lock = FolderLock(config.path)
        with self._errors():
            root = self._lock.take()
            try:
                make_home(root, ctx.namespace)  # at once, so that in a sticky folder nobody else is first
                others = sweep(root, self._name, self._fits)
                used = sum(found.nbytes for found in [*others, *self._frames(root)])
                self._space = SpaceAccount(
                    ctx.capacity - used, ((found.place, found.nbytes) for found in others), self._remove_other
                )
                self._access = effective_access(config, root)
            except BaseException:
                self._lock.release()
                raise

    def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        with self._errors():
            home = self._home(self._lock.folder())
            return [home is not None and place_of(key).nbytes(home) > 0 for key in keys]

    def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> Sequence[int | BackendError]:
        with self._errors():
            home = self._home(root := self._lock.folder())
            if root is None or home is None:
                return [0] * len(keys)
            return self._told_apart(root, keys, read_frames(home, list(map(place_of, keys)), into, self._access))

    def write(self, keys: Sequence[ChunkKey], frames: Sequence[memoryview]) -> None:
        with self._errors():
            root = self._lock.folder_again()
            home = self._home(root) or make_home(root, self._namespace)
            self._check_free(root, sum(map(len, frames)))
            self._write(home, list(map(place_of, keys)), frames)

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        with self._errors():
            home = self._home(self._lock.folder())
            if home is not None:
                self._each(keys, lambda key: self._remove(home, place_of(key)))

    def quarantine(self, keys: Sequence[ChunkKey]) -> None:
        """Damaged frames are moved aside as long as there is room for them, and count as others' from then on."""
        with self._errors():
            home = self._home(root := self._lock.folder())
            if root is not None and home is not None:
                self._each(keys, lambda key: self._quarantine(root, home, key))

    def scan(self) -> Iterator[tuple[ChunkKey, int]]:
        with self._errors():
            root = self._lock.folder()
            found = [] if root is None else sorted(self._frames(root))
            return iter([(each.key, each.nbytes) for each in found])

    def namespaces(self) -> Iterator[Namespace]:
        with self._errors():
            root = self._lock.folder()
            others = [] if root is None else [home for home in homes(root) if home != self._name]
            return iter([facts for home in others if (facts := read_facts(root, home)) is not None])

    def facts(self) -> Mapping[str, str]:
        return {
            "direct": f"{self._config.direct} -> {'on' if self._access.direct else 'off'}",
            "io": f"{self._config.io} -> {'io_uring' if self._access.ring else 'calls'}",
        }

    def close(self) -> None:
        with self._errors():
            self._lock.release()

    def _home(self, root: Folder | None) -> Folder | None:
        """The folder of this namespace's frames; None if it was removed."""
        try:
            return root and root.inner(self._name)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _told_apart(
        self, root: Folder, keys: Sequence[ChunkKey], outcomes: Sequence[int | OSError | NoFile]
    ) -> list[int | BackendError]:
        """Is a failure a frame's own, or the store's? That of the store is raised."""
        failures = [outcome for outcome in outcomes if isinstance(outcome, OSError)]
        for failure in failures:
            if failure.errno not in _OF_ONE_FRAME:
                raise failure
        if failures:
            try:
                probe_device(root)
            except OSError:
                raise failures[0] from None
        return [
            self._of_one_frame(key, outcome) if isinstance(outcome, OSError) else outcome
            for key, outcome in zip(keys, outcomes, strict=True)
        ]

    def _of_one_frame(self, key: ChunkKey, failure: OSError) -> BackendError:
        return BackendError(f"{place_of(key).under(self._config.path / self._name)}: {failure.strerror}")

    def _write(self, home: Folder, places: Sequence[Place], frames: Sequence[memoryview]) -> None:
        growths = [len(frame) - self._nbytes(home, place) for place, frame in zip(places, frames, strict=True)]
        self._space.take(sum(growths))
        published = 0
        try:
            write_unfinished(home, places, frames, self._access)
            for place in places:
                publish(home, place)
                published += 1
        except OSError as error:
            discard(home, places[published:])
            self._space.give(sum(growths[published:]))
            if error.errno in _FULL:
                raise StoreFull(f"{self._config.path}: {error.strerror}", missing=sum(map(len, frames))) from error
            raise

    def _remove(self, home: Folder, place: Place) -> None:
        nbytes = self._nbytes(home, place)
        place.remove(home)
        self._space.give(nbytes)

    def _quarantine(self, root: Folder, home: Folder, key: ChunkKey) -> None:
        nbytes = self._nbytes(home, place_of(key))
        if nbytes and self._aside_nbytes(root) + nbytes <= self._config.quarantine:
            with contextlib.suppress(OSError):
                self._space.leave(put_aside(root, self._name, key), nbytes)
                return
        self._remove(home, place_of(key))

    def _each(self, keys: Sequence[ChunkKey], act: Callable[[ChunkKey], None]) -> None:
        """What fails for one key keeps no other; then the first failure is raised."""
        failures = []
        for key in keys:
            try:
                act(key)
            except OSError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def _frames(self, root: Folder) -> list[Found]:
        """Of this namespace."""
        found = [found for _, found in everything_of(root, self._name)]
        return [each for each in found if each is not None and self._fits(each)]

    def _fits(self, found: Found) -> bool:
        """Can a frame be as long? A file full of holes may lock any length."""
        return found.nbytes <= (self._longest if found.home == self._name else self._capacity)

    def _nbytes(self, home: Folder, place: Place) -> int:
        """That the frame there takes."""
        return min(place.nbytes(home), self._longest)

    def _remove_other(self, place: Place) -> None:
        if (root := self._lock.folder()) is not None:
            place.remove(root)

    def _aside_nbytes(self, root: Folder) -> int:
        """Of the damaged frames that are kept."""
        return sum(found.nbytes for found in set_aside(root))

    def _check_free(self, root: Folder, nbytes: int) -> None:
        free = free_of(root)
        if free - nbytes < self._config.min_free:
            raise StoreFull(
                f"{self._config.path}: {Nbytes(nbytes)} to write and {Nbytes(free)} free, "
                f"of which min_free keeps {self._config.min_free}",
                missing=self._config.min_free + nbytes - free,
            )

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            why = f"{error.filename or self._config.path}: {error.strerror}"
            raise BackendError(why, retryable=error.errno not in _LASTING) from error
