"""What the slots of a kept memory hold, so that the next server can take it over if this one is killed.

A file beside the memory. The owner appends a record *before* any process may touch a slot otherwise than the file
allows: whatever is READY, being filled or free is recorded as such. That alone is not trusted: a chunk is adopted only
if its slot holds the frame that the record names, whole (`kept/adoption.py`).

The file begins with `_MAGIC`. Each record is a head (length, CRC-32 of the body, CRC-32 of both; little-endian) and a
body in MessagePack. If the server was killed while it wrote, the last record is cut short. Any other fault makes the
whole file worthless.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import attrs
import msgspec
from msgspec import Struct

from kvtier_core.errors import BackendError
from kvtier_core.frames.checksum import crc32
from kvtier_core.storekit.folder import NoFile
from kvtier_core.storekit.folder_lock import FolderLock
from kvtier_core.types import ChunkKey, Nbytes
from kvtier_remote.protocol import Key, Opening, encode

logger = logging.getLogger("kvtier")

_MAGIC = b"kvtier journal 1\n"
_HEAD = struct.Struct("<II")
_SUM = struct.Struct("<I")
_NAME = "journal"
#: The file is rewritten when it has this many bytes, and this many times as many as when it was new.
_LEAST_NBYTES, _GROWTH = 4 << 20, 4
#: The share of the memory's size that a journal may need in addition, at its longest and while it is rewritten. A
#: record of a chunk has about 100 bytes, and a chunk rarely less than 1 MiB.
_SHARE = 1 / 1024


def room_for_journal(capacity: int) -> Nbytes:
    """Bytes that the journal of a memory needs beside it."""
    return Nbytes(max(2 * _LEAST_NBYTES, int(capacity * _SHARE)))


class JournalError(Exception):
    """A journal that cannot be trusted."""


class Held(Struct, array_like=True):
    """A slot in use."""

    key: Key
    tenant: str
    parent: Key | None = None
    ready: bool = False  #: otherwise it is being filled, or is no longer to be found


class Began(Struct, array_like=True, tag=0):
    """The first record: the memory's file, and the key of the names of tenants."""

    inode: int
    tenants_key: bytes


class Opened(Struct, array_like=True, tag=1):
    """A stack was opened in the memory, or has another namespace."""

    space: int
    slot_nbytes: int
    opening: Opening


class Taken(Struct, array_like=True, tag=2):
    """Slots are not READY: they are about to be filled, or are in use and no longer found."""

    space: int
    slots: dict[int, Held]


class Ready(Struct, array_like=True, tag=3):
    """Slots that were being filled are READY. Each comes with the parent of its chunk."""

    space: int
    parents: dict[int, Key | None]


class Freed(Struct, array_like=True, tag=4):
    """Slots are free."""

    space: int
    slots: list[int]


class Closed(Struct, array_like=True, tag=5):
    """A stack no longer has any of the memory."""

    space: int


Record = Began | Opened | Taken | Ready | Freed | Closed

_decoder = msgspec.msgpack.Decoder(Record)


@attrs.define
class Kept:
    """The part of a memory that one stack has."""

    slot_nbytes: int
    opening: Opening
    slots: dict[int, Held] = attrs.field(factory=dict)


class Journal:
    """The records of one memory, and what follows from them. The owner's thread calls every method."""

    def __init__(self, path: Path, tenants_key: bytes):
        """Locks the folder; `begin` reads what is there. Raises OSError and BackendError.

        ``tenants_key`` is for a memory of which nothing is known.
        """
        self.path = path
        self.tenants_key = tenants_key
        self.spaces: dict[int, Kept] = {}
        self._lock = FolderLock(path)
        self._folder = self._lock.take()
        self._file: int | None = None
        self._inode = 0
        self._nbytes = self._new_nbytes = 0

    def begin(self, inode: int) -> bool:
        """Read the records of the memory in the file ``inode`` into `spaces`, and record its changes from now on.

        False if the contents of its slots are not known. Then nothing is recorded before `resume`: the next server must
        not take them for free. Raises OSError; BackendError if the file is not in the locked folder, for then another
        server may have that memory.
        """
        if inode not in [entry.inode() for entry in self._folder.entries()]:
            raise BackendError(f"{self.path}: not the folder that was locked; nothing in it is used")
        self._inode = inode
        try:
            with open(self._folder.open(_NAME, os.O_RDONLY), "rb") as file:
                self._replay(_records(file.read()), inode)
        except FileNotFoundError:
            return False  # the memory is new, or its journal could not be written
        except (JournalError, NoFile) as error:
            logger.warning("kvtier: the content of the memory in %s is unknown: %s", self.path, error)
            self.forget()
            return False
        self.resume()
        return True

    def _replay(self, records: Iterator[Record], inode: int) -> None:
        try:
            began = next(records, None)
            if not isinstance(began, Began) or began.inode != inode:
                raise JournalError("its journal belongs to a different memory file")
            for record in records:
                self._apply(record)
        except (KeyError, TypeError) as error:
            raise JournalError(f"its journal contradicts itself: {error!r}") from error
        self.tenants_key = began.tenants_key

    def _apply(self, record: Record) -> None:
        match record:
            case Opened(space, slot_nbytes, opening):
                slots = self.spaces[space].slots if space in self.spaces else {}
                self.spaces[space] = Kept(slot_nbytes, opening, slots)
            case Taken(space, slots):
                self.spaces[space].slots.update(slots)
            case Ready(space, parents):
                for slot, parent in parents.items():
                    held = self.spaces[space].slots[slot]
                    held.parent, held.ready = parent, True
            case Freed(space, slots):
                for slot in slots:
                    del self.spaces[space].slots[slot]
            case Closed(space):
                del self.spaces[space]

    def add(self, record: Record) -> None:
        """Append a record. If that fails, the journal is removed: the next server must not trust it."""
        self._apply(record)
        if self._file is None:
            return
        try:
            self._append(self._file, record)
            if self._nbytes > max(_LEAST_NBYTES, _GROWTH * self._new_nbytes):
                self.resume()
        except OSError as error:
            self._fail(error)

    def compact(self) -> None:
        """Keep only records of the present state. Fails as `add` does."""
        if self._file is None:
            return
        try:
            self.resume()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        logger.error("kvtier: the memory in %s will not outlive this server: %s", self.path, error.strerror)
        self._end()

    def _append(self, file: int, record: Record) -> None:
        body = encode(record)
        head = _HEAD.pack(len(body), crc32(body))
        message = head + _SUM.pack(crc32(head)) + body
        if os.write(file, message) < len(message):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._nbytes += len(message)

    def resume(self) -> None:
        """Replace the file with a summary of all records: `spaces`. All other slots are free. Raises OSError."""
        new = f"{_NAME}.new"
        self._folder.remove_made(new)
        file = self._folder.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            self._nbytes = os.write(file, _MAGIC)
            for record in self._summary():
                self._append(file, record)
            self._folder.rename(new, self._folder, _NAME)
        except BaseException:
            os.close(file)
            raise
        if self._file is not None:
            os.close(self._file)
        self._file, self._new_nbytes = file, self._nbytes

    def _summary(self) -> Iterator[Record]:
        yield Began(self._inode, self.tenants_key)
        for space, kept in self.spaces.items():
            yield Opened(space, kept.slot_nbytes, kept.opening)
            yield Taken(space, kept.slots)

    def forget(self) -> None:
        """Forget all that is known, and record nothing before `resume`."""
        self.spaces.clear()
        self._end()

    def _end(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self._folder.remove_made(_NAME)

    def close(self) -> None:
        """Record nothing more, and unlock the folder. May be called twice."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self._lock.release()


def _records(journal: bytes) -> Iterator[Record]:
    """The records of a file. Raises JournalError."""
    if not journal.startswith(_MAGIC):
        raise JournalError("its journal is of another release")
    at = len(_MAGIC)
    while len(journal) - at >= _HEAD.size + _SUM.size:
        head = journal[at : at + _HEAD.size]
        (checksum,) = _SUM.unpack_from(journal, at + _HEAD.size)
        if crc32(head) != checksum:
            raise JournalError("its journal is damaged")
        nbytes, checksum = _HEAD.unpack(head)
        at += _HEAD.size + _SUM.size
        body = journal[at : at + nbytes]
        if len(body) < nbytes:
            return
        if crc32(body) != checksum:
            raise JournalError("its journal is damaged")
        try:
            yield _decoder.decode(body)
        except (msgspec.DecodeError, ValueError, TypeError) as error:
            raise JournalError(f"its journal is of another release: {error}") from error
        at += nbytes


@attrs.frozen
class Keeper:
    """Records what one stack does with the slots of a memory."""

    journal: Journal
    space: int
    slot_nbytes: int

    def opened(self, opening: Opening) -> None:
        """Record that the stack has this namespace from now on."""
        self.journal.add(Opened(self.space, self.slot_nbytes, opening))

    def closed(self) -> None:
        """Record that it no longer has any of the memory."""
        self.journal.add(Closed(self.space))

    def taken(self, slots: Mapping[int, tuple[ChunkKey, str]]) -> None:
        """Record that these are not READY; each comes with the key of its chunk, and the tenant."""
        self.journal.add(Taken(self.space, {slot: Held(*held) for slot, held in slots.items()}))

    def ready(self, parents: Mapping[int, ChunkKey | None]) -> None:
        """Record that these are READY; each comes with the parent of its chunk."""
        self.journal.add(Ready(self.space, dict(parents)))

    def freed(self, slots: Sequence[int]) -> None:
        """Record that these are free."""
        self.journal.add(Freed(self.space, list(slots)))

    def forget_erased(self) -> None:
        """Slots that were erased are free: no record names their chunks any more."""
        self.journal.compact()
