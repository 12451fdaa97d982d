"""A tier of slabs: spreads frames over the drives, and knows where each is."""

from __future__ import annotations

import contextlib
import itertools
import re
import sys
import threading
import time
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from kvtier_core.errors import BackendError, StoreFull
from kvtier_core.interfaces import Backend, OpenContext, SupportsDirectReads, SupportsListing, SupportsNamespaces
from kvtier_core.storekit.disk_access import FULL, raise_if_store_failed
from kvtier_core.storekit.files import read_files, write_each
from kvtier_core.storekit.folder import Folder, backend_errors
from kvtier_core.storekit.namespaces import read_facts, write_facts
from kvtier_core.types import FRAME_ALIGNMENT, ChunkKey, Location, Namespace
from kvtier_gds.device_reads import gpudirect
from kvtier_gds.reader import handle_of
from kvtier_gds.slab import Extent, Place, Slab
from kvtier_gds.table import Record

#: A file beside a slab with the facts of a namespace that has frames in it.
_FACTS = re.compile(r"kvtier\.([0-9a-f]{64})\.json")
#: Number of frames that workers may read to compare ways of reading, if the slabs hold as many.
_SAMPLES = 256
#: Seconds after which a place that took no frame is tried again, if there is no other: each try costs a frame.
_RETIRED = 60.0


class GdsBackend(Backend, SupportsListing, SupportsNamespaces, SupportsDirectReads):
    """Frames in slabs that this process locks. `kvtier_gds.config` explains the settings.

    The lock guards what is known of the slabs; no call waits for a disk under it.
    """

    def __init__(self, paths: Sequence[Path], ctx: OpenContext, *, mode: str, direct: str, io: str):
        self._asked = {"mode": mode, "direct": direct, "io": io}
        self._paths = ", ".join(map(str, paths))
        self._namespace = ctx.namespace
        self._lock = threading.Lock()
        # Frames by the numbers of their places: to make and collect a million objects would take seconds at the start.
        self._held: dict[ChunkKey, int] = {}  # our frames
        self._others: list[int] = []  # frames of other namespaces, oldest last
        self._at, self._lengths = array("Q"), array("Q")  # of the frame in each place
        self._retired: list[tuple[float, Place]] = []  # places that took no frame, and when they were set aside
        self._slabs: list[Slab] = []
        self._frame_nbytes = frame_nbytes = ctx.layout.frame_nbytes
        with contextlib.ExitStack() as undoing:
            undoing.callback(self.close)
            for path, nbytes in zip(paths, _divided(ctx.capacity, len(paths), frame_nbytes), strict=True):
                with backend_errors(path):
                    self._slabs.append(Slab(path, nbytes, frame_nbytes, direct=direct, io=io, checking=ctx.checking))
            with backend_errors(Path(self._paths)):
                others = self._recover(ctx.max_frame_nbytes or sys.maxsize)
                for slab in self._slabs:
                    _keep_facts(slab.folder, self._namespace, others)
            undoing.pop_all()
        self._direct = any(slab.direct for slab in self._slabs)
        self._ring = any(slab.ring for slab in self._slabs)

    def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        return [key in self._held for key in keys]

    def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> Sequence[int | BackendError]:
        with self._errors():
            outcomes: list[int | BackendError] = [0] * len(keys)
            whole: list[tuple[int, Place]] = []  # the number of a frame that is here and fits, and its place
            for i, (key, view) in enumerate(zip(keys, into, strict=True)):
                place = self._place_of(key)
                if place is not None and place.nbytes <= len(view):
                    whole.append((i, place))
            places = [place for _, place in whole]
            found = self._read(places, [into[i][: place.nbytes] for i, place in whole])
            for (i, place), outcome in zip(whole, found, strict=True):
                if isinstance(outcome, OSError):
                    outcomes[i] = _of_place(place, outcome)
                elif outcome == place.nbytes:
                    outcomes[i] = outcome
            return outcomes

    def write(self, keys: Sequence[ChunkKey], frames: Sequence[memoryview]) -> Sequence[BackendError | None] | None:
        self.delete(keys)
        with self._errors():
            places = self._reserve([len(frame) for frame in frames])
            unused = dict(enumerate(places))
            try:
                failures = write_each(
                    [place.slab.fd for place in places],
                    frames,
                    ring=self._ring,
                    direct=self._direct,
                    at=[place.at for place in places],
                )
                self._must_answer(places, failures)
                self._must_be_ours()
                for i, (key, place) in enumerate(zip(keys, places, strict=True)):
                    if failures[i] is None:
                        failures[i] = self._publish(key, place)
                    if failures[i] is None:
                        del unused[i]
                self._must_answer(places, failures)
                self._retire([unused.pop(i) for i in list(unused)])
            except OSError as error:
                if error.errno in FULL:
                    raise StoreFull(f"{self._paths}: {error.strerror}", missing=sum(map(len, frames))) from error
                raise
            finally:
                self._release(list(unused.values()))
            return [_of_place(place, error) if error else None for place, error in zip(places, failures, strict=True)]

    remains = "frames that were evicted before lie in the slabs until their places are used again"

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        self._delete(keys, lambda place: place.slab.clear(place))

    def erase(self, keys: Sequence[ChunkKey]) -> None:
        self._delete(keys, lambda place: place.slab.erase(place))

    def _delete(self, keys: Sequence[ChunkKey], remove: Callable[[Place], None]) -> None:
        with self._errors():
            failures: list[OSError] = []
            for key in keys:
                place = self._place_of(key)
                if place is None:
                    continue
                try:
                    remove(place)
                except OSError as error:  # it stays, and so do its bytes; the others are deleted
                    failures.append(error)
                    continue
                del self._held[key]
                self._release([place])
            if failures:
                raise failures[0]

    def scan(self) -> Iterator[tuple[ChunkKey, int]]:
        held = self._held.copy()
        return zip(held, map(self._lengths.__getitem__, held.values()), strict=True)

    def namespaces(self) -> Iterator[Namespace]:
        with self._errors():
            found = [each for slab in self._slabs for each in _other_namespaces(slab.folder, self._namespace)]
            return iter(dict.fromkeys(found))

    def drop_namespace(self) -> None:
        """Nothing is left: the facts of a namespace without frames are removed when the next engine opens the tier."""

    def reader_handle(self) -> str:
        if self._asked["mode"] == "bounce":
            return ""
        places = map(self._place, itertools.islice(self._held.values(), _SAMPLES))
        samples = [Extent(self._slabs.index(place.slab), place.at, place.nbytes) for place in places]
        return handle_of(self._slabs, samples, device_only=self._asked["mode"] == "auto")

    def locate(self, keys: Sequence[ChunkKey]) -> Sequence[Location | None]:
        places = [self._place_of(key) for key in keys]
        return [
            Location((self._slabs.index(place.slab), place.at), place.nbytes) if place else None for place in places
        ]

    def facts(self) -> Mapping[str, str]:
        return {
            "mode": self._asked["mode"],
            **({"GPUDirect Storage": gpudirect()} if self._asked["mode"] != "bounce" else {}),
            "direct": f"{self._asked['direct']} -> {self._on(slab.direct for slab in self._slabs)}",
            "io": f"{self._asked['io']} -> {'io_uring' if self._ring else 'calls'}",
            "preallocated": self._on(slab.preallocated for slab in self._slabs),
        }

    def close(self) -> None:
        slabs, self._slabs = self._slabs, []
        self._held.clear()
        for slab in slabs:
            slab.close()

    def _recover(self, longest: int) -> set[bytes]:
        """Index the frames in the slabs, oldest first. Returns the digests of other namespaces. Raises OSError."""
        tables = [slab.take_found() for slab in self._slabs]
        found = np.concatenate(tables)
        numbers = np.concatenate([table["entry"] * len(tables) + i for i, table in enumerate(tables)])
        columns = np.zeros((2, int(numbers.max(initial=-1)) + 1), "<u8")
        columns[:, numbers] = found["at"], found["nbytes"]
        self._at, self._lengths = (array("Q", column.tobytes()) for column in columns)
        oldest_first = np.argsort(found["order"], kind="stable")
        self._order = int(found["order"].max(initial=0)) + 1
        is_ours = found["namespace"] == np.void(self._namespace.digest)
        ours, others = oldest_first[is_ours[oldest_first]], oldest_first[~is_ours[oldest_first]]
        self._others = numbers[others][::-1].tolist()
        usable = ours[found["nbytes"][ours] <= longest]
        keys, places = found["key"][usable].tolist(), numbers[usable].tolist()
        self._held = dict(zip(keys, places, strict=True))
        if len(self._held) < len(ours):  # some are too long, or older frames of a key
            newest = set(self._held.values())
            self._held = {key: place for key, place in zip(keys, places, strict=True) if place in newest}
            for number in numbers[ours][::-1].tolist():
                if number not in newest:
                    self._drop(number)
        return set(found["namespace"][others].tolist())

    def _drop(self, number: int) -> None:
        """The frame in this place is no longer found, and the place is free."""
        place = self._place(number)
        place.slab.clear(place)
        self._release([place])

    def _place(self, number: int) -> Place:
        entry, slab = divmod(number, len(self._slabs))
        return Place(self._slabs[slab], entry, self._at[number], self._lengths[number])

    def _place_of(self, key: ChunkKey) -> Place | None:
        """The place of our frame with this key, if there is one."""
        number = self._held.get(key)
        return None if number is None else self._place(number)

    def _read(self, places: Sequence[Place], into: Sequence[memoryview]) -> Sequence[int | OSError]:
        """The outcome of each read. Raises the OSError of a drive that does not answer."""
        fds, at = [place.slab.fd for place in places], [place.at for place in places]
        outcomes = read_files(fds, into, ring=self._ring, direct=self._direct, at=at)
        self._must_answer(places, outcomes)
        self._must_be_ours()
        return outcomes

    def _must_answer(self, places: Sequence[Place], outcomes: Sequence[object]) -> None:
        """Raise the OSError of a drive that fails as a whole, not only at single places."""
        for slab in self._slabs:
            its = [outcome for place, outcome in zip(places, outcomes, strict=True) if place.slab is slab]
            raise_if_store_failed(its, slab.folder)

    def _must_be_ours(self) -> None:
        """Raise NoFile if others could have written what was read, or can change what was written."""
        for slab in self._slabs:
            slab.must_be_ours()

    def _reserve(self, lengths: Sequence[int]) -> list[Place]:
        """Places for frames of these lengths. Frames of other namespaces make room, the oldest first."""
        places: list[Place] = []
        try:
            for nbytes in lengths:
                while (place := self._reserve_one(nbytes)) is None:
                    if not self._try_retired_again():
                        self._remove_oldest_other(sum(lengths))
                places.append(place)
        except BaseException:
            self._release(places)
            raise
        return places

    def _reserve_one(self, nbytes: int) -> Place | None:
        """A place on the slab with the most room, so that all drives have equal work.

        But a frame that is shorter than most is placed where it does not cost the place of a longer one.
        """

        def cost(slab: Slab) -> tuple[int, int]:
            usual = self._frame_nbytes
            return slab.free // usual - (slab.free - nbytes) // usual, -slab.free

        with self._lock:
            slabs = sorted(self._slabs, key=cost)
            return next((place for slab in slabs if (place := slab.reserve(nbytes)) is not None), None)

    def _remove_oldest_other(self, nbytes: int) -> None:
        with self._lock:
            if not self._others:
                raise StoreFull(f"{self._paths}: no {nbytes} contiguous bytes are free", missing=nbytes)
            oldest = self._others.pop()
        try:
            self._drop(oldest)
        except OSError:
            with self._lock:
                self._others.append(oldest)
            raise

    def _publish(self, key: ChunkKey, place: Place) -> OSError | None:
        """Make the frame findable, after a restart too. Returns the error if its record cannot be written."""
        with self._lock:
            order, self._order = self._order, self._order + 1
        try:
            place.slab.publish(place, Record(self._namespace.digest, key, place.at, place.nbytes, order))
        except OSError as error:
            return error.with_traceback(None)
        number = place.entry * len(self._slabs) + self._slabs.index(place.slab)
        with self._lock:
            for column, value in ((self._at, place.at), (self._lengths, place.nbytes)):
                column.extend([0] * (number + 1 - len(column)))
                column[number] = value
        self._held[key] = number
        return None

    def _retire(self, places: Sequence[Place]) -> None:
        """The drive answers, but did not accept what was written to these places."""
        with self._lock:
            self._retired += [(time.monotonic(), place) for place in places]

    def _try_retired_again(self) -> bool:
        """Use places that were retired some time ago: the drive may have recovered. False if none is due."""
        until = time.monotonic() - _RETIRED
        with self._lock:
            due = [place for since, place in self._retired if since <= until]
            self._retired = [(since, place) for since, place in self._retired if since > until]
        self._release(due)
        return bool(due)

    def _release(self, places: Sequence[Place]) -> None:
        with self._lock:
            for place in places:
                place.slab.release(place)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        if not self._slabs:
            raise BackendError(f"{self._paths}: the tier is closed")
        with backend_errors(Path(self._paths)):
            yield

    def _on(self, each: Iterator[bool]) -> str:
        yes = sum(each)
        return {0: "off", len(self._slabs): "on"}.get(yes, f"on for {yes} of {len(self._slabs)} paths")


def _of_place(place: Place, error: OSError) -> BackendError:
    return BackendError(f"{place.slab.path}: at {place.at}: {error.strerror}")


def _divided(capacity: int, slabs: int, frame_nbytes: int) -> list[int]:
    """The bytes of each slab: as many whole frames in all as the capacity has room for, and the rest in the first."""
    frames, rest = divmod(capacity, frame_nbytes)
    shares = [(frames // slabs + (i < frames % slabs)) * frame_nbytes for i in range(slabs)]
    shares[0] += rest // FRAME_ALIGNMENT * FRAME_ALIGNMENT
    return shares


def _keep_facts(folder: Folder, ours: Namespace, others: Collection[bytes]) -> None:
    """Write the facts of our namespace unless the disk is full, and remove those of all but these other digests."""
    for name, digest in list(_facts_in(folder)):
        if digest not in others and digest != ours.digest:
            folder.remove(name)
    name = f"kvtier.{ours.digest.hex()}.json"
    if read_facts(folder, name) != ours:
        with contextlib.suppress(OSError):
            write_facts(folder, name, ours, "kvtier.json.tmp")


def _other_namespaces(folder: Folder, ours: Namespace) -> Iterator[Namespace]:
    """The namespaces whose facts are here, except ours."""
    for name, digest in _facts_in(folder):
        namespace = read_facts(folder, name)
        if namespace is not None and namespace.digest == digest != ours.digest:
            yield namespace


def _facts_in(folder: Folder) -> Iterator[tuple[str, bytes]]:
    """Name and digest of each file of facts."""
    for name in sorted(entry.name for entry in folder.entries()):
        if match := _FACTS.fullmatch(name):
            yield name, bytes.fromhex(match[1])
