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
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier_core.types import FRAME_ALIGNMENT, KEY_NBYTES, ChunkKey

RECORD_NBYTES = 128
_DIGEST_NBYTES = 32
_MAGIC = b"kvslab1\n"
#: Magic, namespace digest, key, place, length, order; then the checksum of these fields.
_FIELDS = struct.Struct(f"<8s{_DIGEST_NBYTES}s{KEY_NBYTES}sQQQ")
_NAMED = [
    ("namespace", f"V{_DIGEST_NBYTES}"),
    ("key", f"V{KEY_NBYTES}"),
    ("at", "<u8"),
    ("nbytes", "<u8"),
    ("order", "<u8"),
]
_RECORD = np.dtype([("magic", "V8"), *_NAMED, ("checksum", "<u4"), ("unused", "V28")])
_READ_NBYTES = 16384 * RECORD_NBYTES

#: Frames in columns: the entry of each in the table, and the fields of its `Record`. A million in objects take seconds.
_FOUND = np.dtype([("entry", "<i8"), *_NAMED])
Found = npt.NDArray[np.void]


class Record(NamedTuple):
    """A frame in a slab."""

    namespace: bytes  #: the digest
    key: ChunkKey
    at: int
    nbytes: int
    order: int  #: the later it was written, the larger

    def packed(self) -> bytes:
        fields = _FIELDS.pack(_MAGIC, self.namespace, self.key, self.at, self.nbytes, self.order)
        return (fields + struct.pack("<I", zlib.crc32(fields))).ljust(RECORD_NBYTES, b"\0")


class Table:
    """A file of records. An entry is a record's number; several threads may use different entries at the same time."""

    def __init__(self, fd: int):
        """``fd`` is open for reading and writing, and stays the caller's."""
        self._fd = fd

    def records(self) -> Found:
        """All records, in order of their entries. An entry without a valid record is free."""
        found = [np.empty(0, _FOUND)]
        first = 0
        while raw := os.pread(self._fd, _READ_NBYTES, first * RECORD_NBYTES):
            found.append(_valid(raw[: len(raw) // RECORD_NBYTES * RECORD_NBYTES], first))
            first += -(-len(raw) // RECORD_NBYTES)
        return np.concatenate(found)

    def put(self, entry: int, record: Record) -> None:
        """Write a record; what it names is found from now on."""
        self._write(entry, record.packed())

    def clear(self, entry: int) -> None:
        """Clear this entry: it no longer names a frame."""
        self._write(entry, bytes(RECORD_NBYTES))

    def _write(self, entry: int, raw: bytes) -> None:
        if os.pwrite(self._fd, raw, entry * RECORD_NBYTES) != RECORD_NBYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _valid(raw: bytes, first: int) -> Found:
    """The frames of records from the entry ``first`` on, without what is no record, or not that of a possible frame."""
    records = np.frombuffer(raw, _RECORD)
    possible = (records["nbytes"] > 0) & (records["nbytes"] % FRAME_ALIGNMENT == 0)
    possible &= (records["magic"] == np.void(_MAGIC)) & (records["at"] % FRAME_ALIGNMENT == 0)
    numbers = np.flatnonzero(possible)
    checksums = [zlib.crc32(raw[begin : begin + _FIELDS.size]) for begin in (numbers * RECORD_NBYTES).tolist()]
    numbers = numbers[records["checksum"][numbers] == np.array(checksums, "<u4")]
    found = np.empty(len(numbers), _FOUND)
    found["entry"] = first + numbers
    for name in Record._fields:
        found[name] = records[name][numbers]
    return found


def without_overlaps(found: Found, nbytes: int) -> Found:
    """The frames within ``nbytes`` that do not overlap, in order of place: of two that overlap, the newer one.

    Only a power cut leaves two, if only part of the table reached the disk.
    """
    within = (found["nbytes"] <= nbytes) & (found["at"] <= nbytes - found["nbytes"])
    by_place = np.argsort(found["at"], kind="stable")
    found = found[by_place[within[by_place]]]
    ends = found["at"] + found["nbytes"]
    if (ends[:-1] <= found["at"][1:]).all():
        return found
    kept: list[int] = []
    at, end, order = found["at"].tolist(), ends.tolist(), found["order"].tolist()
    for i in range(len(found)):
        while kept and end[kept[-1]] > at[i] and order[kept[-1]] < order[i]:
            kept.pop()
        if not kept or end[kept[-1]] <= at[i]:
            kept.append(i)
    return found[kept]


def gaps(found: Found, nbytes: int) -> list[tuple[int, int]]:
    """Where each free extent of ``nbytes`` begins and ends; ``found`` are the frames from `without_overlaps`."""
    between = np.zeros((len(found) + 1, 2), "<u8")
    between[1:, 0], between[:-1, 1], between[-1, 1] = found["at"] + found["nbytes"], found["at"], nbytes
    return [(begin, end) for begin, end in between[between[:, 0] < between[:, 1]].tolist()]
