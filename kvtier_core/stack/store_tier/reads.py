"""Reads frames from a store into arena slots: in groups, verified on the threads, sorted by outcome."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence

from kvtier_core.encoding.codec import FrameCodec
from kvtier_core.errors import BackendError
from kvtier_core.interfaces import Backend
from kvtier_core.stack.batches import as_many, in_groups
from kvtier_core.stack.load_choice import StoreSpeed
from kvtier_core.stack.store_tier.calls import Call, Calls
from kvtier_core.stack.store_tier.deletes import Deletes
from kvtier_core.stack.store_tier.frame_table import Use
from kvtier_core.stack.store_tier.remote_lookup import RemoteLookup
from kvtier_core.types import ChunkKey, EventKind, FrameRead, ReadStatus

#: ``arrived(good, bad)``: the views of ``good`` hold verified frames.
Arrived = Callable[[Sequence[ChunkKey], Sequence[ChunkKey]], None]

_Read = tuple[ChunkKey, memoryview]


class Reads:
    """The reads of one store tier."""

    def __init__(self, calls: Calls, *, deletes: Deletes, remote: RemoteLookup, speed: StoreSpeed):
        self.inflight_nbytes = 0  #: of slots that reads are filling
        self._calls = calls
        self._table = calls.table
        self._health = calls.health
        self._backend = calls.backend
        self._deletes = deletes
        self._remote = remote
        self._speed = speed

    def begin(
        self, wanted: Sequence[_Read], codec: FrameCodec, arrived: Arrived, salts: Mapping[ChunkKey, bytes]
    ) -> None:
        """Begin to fill views with verified raw frames. ``salts`` maps chunks to the salts of their requests, if any.

        ``arrived(good, bad)`` is called once per group, with each of its keys in one of the two.
        """
        groups = list(in_groups(wanted, lambda pair: len(pair[1])))
        if groups:
            self._speed.begin(len(groups), self._calls.clock())
        for group in groups:
            self.inflight_nbytes += _nbytes(group)
            self._calls.run(
                [key for key, _ in group],
                Use.READING,
                self._health.reads,
                functools.partial(read_frames, self._backend, codec, group, salts),
                functools.partial(self._arrive, group, arrived),
                load=True,
            )

    def _arrive(self, wanted: Sequence[_Read], arrived: Arrived, call: Call) -> None:
        keys = [key for key, _ in wanted]
        nbytes = _nbytes(wanted)
        self.inflight_nbytes -= nbytes
        self._speed.end(nbytes if call.error is None else 0, call.ended)
        found: dict[ReadStatus, list[ChunkKey]] = {status: [] for status in ReadStatus}
        stored = 0  # bytes of the frames in the store
        for key, read in zip(keys, call.value or (), strict=call.error is None):  # no outcomes after an error
            if key in self._table.invalidated:
                continue
            found[read.status].append(key)
            stored += read.nbytes
            if read.status.event is not None:
                self._health.report(read.status.event, [key], why=read.why)
        if verified := found[ReadStatus.VERIFIED]:
            self._health.report(EventKind.READ, verified, nbytes=stored, seconds=call.seconds)
        self._deletes.delete_invalidated(keys)
        self.drop(found)
        good = set(verified)
        arrived(verified, [key for key in keys if key not in good])

    def drop(self, found: Mapping[ReadStatus, Sequence[ChunkKey]]) -> None:
        """Remove from the index frames that were not served. Incompatible ones stay in the store."""
        incompatible = found[ReadStatus.INCOMPATIBLE]
        if self._backend.shared:
            self._remote.unusable.add([*found[ReadStatus.CORRUPT], *incompatible])
            self._remote.absent.add([*found[ReadStatus.MISSING], *found[ReadStatus.IO_ERROR]])
            self._table.index.remove([*found[ReadStatus.IO_ERROR], *incompatible])
        else:
            self._table.make_incompatible(incompatible)
        self._deletes.discard(found[ReadStatus.MISSING], found[ReadStatus.CORRUPT])


def _nbytes(wanted: Sequence[_Read]) -> int:
    return sum(len(view) for _, view in wanted)


def read_frames(
    backend: Backend, codec: FrameCodec, wanted: Sequence[_Read], salts: Mapping[ChunkKey, bytes]
) -> list[FrameRead]:
    """Read frames, verify them and decode them into slots, on a thread. Raises errors of the store as a whole.

    A damaged frame of a shared store is read once more: another peer may have it whole, or its writer has replaced it.
    """
    reads = _read(backend, codec, wanted, salts)
    damaged = [number for number, read in enumerate(reads) if read.status is ReadStatus.CORRUPT]
    if damaged and backend.shared:
        with contextlib.suppress(BackendError):
            backend.quarantine([wanted[number][0] for number in damaged])
            again = _read(backend, codec, [wanted[number] for number in damaged], salts)
            for number, read in zip(damaged, again, strict=True):
                if read.status is ReadStatus.VERIFIED:
                    reads[number] = read
    return reads


def _read(
    backend: Backend, codec: FrameCodec, wanted: Sequence[_Read], salts: Mapping[ChunkKey, bytes]
) -> list[FrameRead]:
    keys = [key for key, _ in wanted]
    buffers = [codec.read_buffer(slot) for _, slot in wanted]
    counts = as_many(backend.read(keys, buffers), keys)
    # In a shared store one key may fail because a server is down; in a private store the frame is lost.
    failed = ReadStatus.IO_ERROR if backend.shared else ReadStatus.CORRUPT
    reads = [
        FrameRead(failed, str(count))
        if isinstance(count, BackendError)
        else _decode(codec, key, buffer, count, slot, salts.get(key, b""))
        for (key, slot), buffer, count in zip(wanted, buffers, counts, strict=True)
    ]
    codec.was_read(buffers)
    return reads


def _decode(
    codec: FrameCodec, key: ChunkKey, buffer: memoryview, count: int, slot: memoryview, salt: bytes
) -> FrameRead:
    if count == 0:
        return FrameRead(ReadStatus.MISSING)
    error = codec.decode_verified(key, buffer, count, slot, salt)
    return FrameRead(ReadStatus.VERIFIED, nbytes=count) if error is None else error.as_read()
