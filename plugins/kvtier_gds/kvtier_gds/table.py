"""The table of a slab: which frames are where in it. It alone defines what is there after a restart. Raises OSError.

A record is written when its frame is whole, and cleared before the frame's place is used again. It is within one page,
so that a kill leaves it as it was or as it will be. Its checksum reveals what a power cut did to it, and the checksums
of a frame reveal that it is not the one that the record names.
"""

from __future__ import annotations

import errno
import os
import struct
import zlib
from collections.abc import Iterable
from typing import NamedTuple

from kvtier_core.types import FRAME_ALIGNMENT, KEY_NBYTES, ChunkKey

RECORD_NBYTES = 128
_DIGEST_NBYTES = 32
_MAGIC = b"kvslab1\n"
#: Magic, namespace digest, key, place, length, order; then the checksum of these fields.
_FIELDS = struct.Struct(f"<8s{_DIGEST_NBYTES}s{KEY_NBYTES}sQQQ")
_RECORD = struct.Struct(_FIELDS.format + "I")
_READ_NBYTES = 16384 * RECORD_NBYTES


class Record(NamedTuple):
    """A frame in a slab."""

    namespace: bytes  #: the digest
    key: ChunkKey
    at: int
    nbytes: int
    order: int  #: the later it was written, the larger

    @property
    def end(self) -> int:
        return self.at + self.nbytes

    def packed(self) -> bytes:
        fields = _FIELDS.pack(_MAGIC, self.namespace, self.key, self.at, self.nbytes, self.order)
        return (fields + struct.pack("<I", zlib.crc32(fields))).ljust(RECORD_NBYTES, b"\0")

    @classmethod
    def unpacked(cls, raw: bytes | memoryview, begin: int = 0) -> Record | None:
        """The record that begins there; None if it is not a record, or not that of a possible frame."""
        magic, namespace, key, at, nbytes, order, checksum = _RECORD.unpack_from(raw, begin)
        if magic != _MAGIC or checksum != zlib.crc32(raw[begin : begin + _FIELDS.size]):
            return None
        if not nbytes or at % FRAME_ALIGNMENT or nbytes % FRAME_ALIGNMENT:
            return None
        return cls(namespace, ChunkKey(key), at, nbytes, order)


class Table:
    """A file of records. An entry is a record's number; several threads may use different entries at the same time."""

    def __init__(self, fd: int):
        """``fd`` is open for reading and writing, and stays the caller's."""
        self._fd = fd

    def records(self) -> dict[int, Record]:
        """All records by their entries. An entry without a valid record is free."""
        found: dict[int, Record] = {}
        first = 0
        while raw := os.pread(self._fd, _READ_NBYTES, first * RECORD_NBYTES):
            for i in range(len(raw) // RECORD_NBYTES):
                record = Record.unpacked(raw, i * RECORD_NBYTES)
                if record is not None:
                    found[first + i] = record
            first += -(-len(raw) // RECORD_NBYTES)
        return found

    def put(self, entry: int, record: Record) -> None:
        """Write a record; what it names is found from now on."""
        self._write(entry, record.packed())

    def clear(self, entry: int) -> None:
        """Clear this entry: it no longer names a frame."""
        self._write(entry, bytes(RECORD_NBYTES))

    def _write(self, entry: int, raw: bytes) -> None:
        if os.pwrite(self._fd, raw, entry * RECORD_NBYTES) != RECORD_NBYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def without_overlaps(records: Iterable[tuple[int, Record]], nbytes: int) -> dict[int, Record]:
    """The records within ``nbytes`` that do not overlap, in order of place: of two that overlap, the newer one.

    Only a power cut leaves two, if only part of the table reached the disk.
    """
    kept: list[tuple[int, Record]] = []
    for entry, record in sorted(records, key=lambda pair: pair[1].at):
        if record.end > nbytes:
            continue
        while kept and kept[-1][1].end > record.at and kept[-1][1].order < record.order:
            kept.pop()
        if not kept or kept[-1][1].end <= record.at:
            kept.append((entry, record))
    return dict(kept)
