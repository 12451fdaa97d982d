"""The format of a bundle: a file of frames that share a namespace. Numbers are little-endian.

    head     magic, version, length and checksum of the facts; the facts of the namespace as JSON; zeros to a page
    frames   each as a store keeps it: a header of 4 KiB, then the payload, zeros to a page
    index    magic and number of frames; for each its key, offset and length
    end      offset and checksum of the index, magic

A reader of a stream needs only the frames' own headers. A reader of a file finds all frames by the index.
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self

import attrs

from kvtier_core.errors import BackendError
from kvtier_core.frames.checksum import crc32
from kvtier_core.frames.format import FrameError, Header, inspect, read_header
from kvtier_core.layouts import frame_nbytes
from kvtier_core.storekit.namespaces import FACTS_NBYTES, namespace_of
from kvtier_core.types import FRAME_ALIGNMENT, FRAME_HEADER_NBYTES, KEY_NBYTES, ChunkKey, Namespace

VERSION = 1

_HEAD = struct.Struct("<8sIII")
_INDEX = struct.Struct("<8sQ")
_ENTRY = struct.Struct(f"<{KEY_NBYTES}sQQ")
_END = struct.Struct("<QI8s")
_HEAD_MAGIC, _INDEX_MAGIC, _END_MAGIC = b"kvbundle", b"kvindex\0", b"kvended\0"
#: The shortest frame: a header, and a payload of at least a byte.
_MIN_FRAME_NBYTES = FRAME_HEADER_NBYTES + FRAME_ALIGNMENT
#: Frames of a stream are read in pieces of this many bytes: a length counts only as far as bytes come.
_PIECE_NBYTES = 4 << 20


class Extent(NamedTuple):
    """Where a frame is in a bundle, in bytes."""

    at: int
    nbytes: int


class Writer:
    """Writes a bundle to a stream."""

    def __init__(self, file: BinaryIO, namespace: Namespace):
        self._file = file
        self._head = head_of(namespace)
        self.extents: dict[ChunkKey, Extent] = {}  #: of the frames
        self.end = len(self._head)  #: of the last frame

    def begin(self) -> None:
        """Write the head."""
        self._file.write(self._head)

    def skip(self, key: ChunkKey, nbytes: int) -> None:
        """The next frame is there."""
        self.extents[key] = Extent(self.end, nbytes)
        self.end += nbytes

    def add(self, key: ChunkKey, frame: bytes) -> None:
        """Write a frame."""
        self._file.write(frame)
        self.skip(key, len(frame))

    def finish(self) -> None:
        """Write the index and the end."""
        entries = b"".join(_ENTRY.pack(key, *extent) for key, extent in self.extents.items())
        index = _INDEX.pack(_INDEX_MAGIC, len(self.extents)) + entries
        self._file.write(index + _END.pack(self.end, _checksum_of(self._head, index), _END_MAGIC))
        self._file.flush()


def head_of(namespace: Namespace) -> bytes:
    """The head of a bundle of this namespace."""
    facts = namespace.to_json().encode("ascii")
    head = _HEAD.pack(_HEAD_MAGIC, VERSION, len(facts), crc32(facts)) + facts
    return head + bytes(_padding(len(head)))


def read_head(file: BinaryIO) -> Namespace:
    """The namespace of the bundle that begins here. Reads exactly the head. Raises BackendError and OSError."""
    fields = file.read(_HEAD.size)
    magic, version, nbytes, _ = _HEAD.unpack(fields.ljust(_HEAD.size, b"\0"))
    if magic != _HEAD_MAGIC:
        raise BackendError("not a bundle; create one with kvtier export")
    if version != VERSION:
        raise BackendError(f"a bundle of version {version}; this kvtier reads version {VERSION}")
    facts = file.read(min(nbytes, FACTS_NBYTES))
    namespace = namespace_of(facts)
    if namespace is None or fields + facts + file.read(_padding(_HEAD.size + len(facts))) != head_of(namespace):
        raise BackendError("damaged: its facts")
    return namespace


def frames_of(file: BinaryIO) -> Iterator[tuple[Header, bytes]]:
    """The frames that follow the head, each verified.

    Raises BackendError at the first damage, and if the file ends before the index. Raises OSError.
    """
    count = 0
    while not (page := file.read(FRAME_HEADER_NBYTES)).startswith(_INDEX_MAGIC):
        header = read_header(memoryview(page))
        if isinstance(header, Header):
            page += _read(file, frame_nbytes(header.payload_nbytes) - FRAME_HEADER_NBYTES)
            header = inspect_frame(page)
        if isinstance(header, FrameError):
            raise BackendError(f"damaged or incomplete after {count} frames: {header.value}")
        count += 1
        yield header, page
    if page[: _INDEX.size] != _INDEX.pack(_INDEX_MAGIC, count):
        raise BackendError(f"damaged: {count} frames, and its index has another number")


def inspect_frame(frame: bytes) -> Header | FrameError:
    """As `inspect`, for a frame in memory."""
    return inspect(len(frame), lambda at, nbytes: frame[at : at + nbytes])


def _read(file: BinaryIO, nbytes: int) -> bytes:
    """This many bytes, or fewer at the end of the file."""
    pieces = []
    while nbytes and (piece := file.read(min(nbytes, _PIECE_NBYTES))):
        pieces.append(piece)
        nbytes -= len(piece)
    return b"".join(pieces)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of the system become BackendErrors, and every error names the file."""
    try:
        yield
    except (BackendError, OSError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise BackendError(f"{path}: {why}") from error


@attrs.frozen
class Bundle:
    """An open bundle. Any thread may read from its descriptor."""

    file: BinaryIO
    namespace: Namespace
    extents: Mapping[ChunkKey, Extent]  #: of the frames

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open the bundle at this path, and read its index. Raises BackendError."""
        with naming(path), contextlib.ExitStack() as closing:
            file = closing.enter_context(open(path, "rb", opener=without_waiting))
            must_be_trusted(file)
            namespace = read_head(file)
            bundle = cls(file, namespace, _extents(file, head_of(namespace)))
            closing.pop_all()
            return bundle


def must_be_trusted(file: BinaryIO) -> None:
    """Raise BackendError if users other than root and this one can change the file. Raises OSError."""
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        raise BackendError("not a file")
    if status.st_uid not in (0, os.geteuid()):
        raise BackendError(f"owned by user {status.st_uid}; chown it to root or to the engine's user")
    if status.st_mode & 0o022:
        raise BackendError("others can write to it; run chmod go-w")


def without_waiting(path: str, flags: int) -> int:
    """Opening a pipe would wait for its other end. For files the flag means nothing."""
    return os.open(path, flags | os.O_NONBLOCK)


def _extents(file: BinaryIO, head: bytes) -> dict[ChunkKey, Extent]:
    """Where the frames are, by the index. Raises BackendError and OSError."""
    end = file.seek(0, os.SEEK_END) - _END.size
    file.seek(max(0, end))
    at, checksum, magic = _END.unpack(file.read(_END.size).ljust(_END.size, b"\0"))
    if magic != _END_MAGIC:
        raise BackendError("incomplete: it has no index; repeat the export, or the copy")
    count, rest = divmod(end - at - _INDEX.size, _ENTRY.size)
    if rest or not 0 <= count <= at // _MIN_FRAME_NBYTES:
        raise BackendError("damaged: the place of its index")
    file.seek(at)
    index = file.read(end - at)
    if _checksum_of(head, index) != checksum or index[: _INDEX.size] != _INDEX.pack(_INDEX_MAGIC, count):
        raise BackendError("damaged: its index")
    extents = {ChunkKey(key): Extent(*extent) for key, *extent in _ENTRY.iter_unpack(index[_INDEX.size :])}
    for begin, nbytes in extents.values():
        if begin < len(head) or nbytes < _MIN_FRAME_NBYTES or begin + nbytes > at or (begin | nbytes) % FRAME_ALIGNMENT:
            raise BackendError("damaged: an entry of its index")
    return extents


def _checksum_of(head: bytes, index: bytes) -> int:
    """An index belongs to one head: it cannot be that of a bundle of other facts."""
    return crc32(index, crc32(head))


def _padding(nbytes: int) -> int:
    """The zeros after this many bytes, up to a page."""
    return -nbytes % FRAME_ALIGNMENT
