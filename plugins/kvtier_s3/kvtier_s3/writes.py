"""Writes frames: each new frame in one request; frames that are there already are not written again."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import secrets
from collections.abc import Iterator, Sequence

import attrs

from kvtier_core.errors import BackendError, StoreFull
from kvtier_core.types import FRAME_HEADER_NBYTES, ChunkKey
from kvtier_s3.bucket import Bucket
from kvtier_s3.errors import Absent, Conflict, NoConditions, StoreDown, Unanswered
from kvtier_s3.names import Names

_HEADER = "kvtier-header"
_WRITE = "kvtier-write"
_md5 = functools.partial(hashlib.md5, usedforsecurity=False)


@attrs.define
class Write:
    """The write of one frame."""

    key: ChunkKey
    name: str
    frame: memoryview
    error: BackendError | None = None
    growth: int = 0  #: by how many bytes the store has grown, or may have if it did not answer
    nonce: str = attrs.field(factory=lambda: secrets.token_hex(8))  #: of this write alone

    @property
    def meta(self) -> dict[str, str]:
        """Identifies the frame, by its header, which has the checksum of its payload; and this one write of it."""
        return {_HEADER: hashlib.sha256(self.frame[:FRAME_HEADER_NBYTES]).hexdigest()[:32], _WRITE: self.nonce}

    @contextlib.contextmanager
    def growing(self, nbytes: int) -> Iterator[None]:
        """The store is asked to grow: it may have grown, unless it refuses."""
        self.growth = max(nbytes, 0)
        try:
            yield
        except (Conflict, NoConditions, StoreFull):
            self.growth = 0
            raise
        except StoreDown as error:
            self.growth = self.growth if isinstance(error, Unanswered) else 0
            raise
        self.growth = nbytes


class Writer:
    """Writes for one namespace. May be used on several threads."""

    def __init__(self, bucket: Bucket, names: Names, *, part: int, requests: int):
        """Longer frames than ``part`` are written in parts; ``requests`` are in flight at a time."""
        self._bucket = bucket
        self._names = names
        self._part = part
        self._requests = requests
        self._conditions = True  # until the store reports that it has none
        self._digests = True  # until an ETag turns out not to be a digest: where a key of KMS encrypts
        self._suspects: set[ChunkKey] = set()

    def suspect(self, keys: Sequence[ChunkKey]) -> None:
        """Replace what is there when these keys are written next, whatever it seems to be."""
        self._suspects.update(keys)

    def write(self, keys: Sequence[ChunkKey], frames: Sequence[memoryview]) -> list[Write]:
        """Store each frame, and return the outcomes."""
        writes = [Write(key, self._names.frame(key), frame) for key, frame in zip(keys, frames, strict=True)]
        long = sum(len(frame) > self._part for frame in frames)
        width = max(1, self._requests // max(1, long))  # parts of each that are in flight
        answers = self._bucket.calls.at_once(self._write, writes, [width] * len(writes))
        for write, answer in zip(writes, answers, strict=True):
            write.error = answer if isinstance(answer, BackendError) else None
        self._suspects.difference_update(each.key for each in writes if each.error is None)
        return writes

    async def _write(self, write: Write, width: int) -> None:
        suspect = write.key in self._suspects
        if self._conditions and not suspect and len(write.frame) <= self._part and await self._put_new(write):
            return
        before = await self._size_of_other(write, suspect)
        if before is None:
            return
        with write.growing(len(write.frame) - before):
            if len(write.frame) <= self._part:
                etag = await self._bucket.put(write.name, write.frame, meta=write.meta)
            else:
                etag = await self._bucket.upload(write.name, write.frame, part=self._part, width=width, meta=write.meta)
        if before == len(write.frame) and etag.strip('"') != _digest(write.frame, self._part):
            self._digests = False

    async def _size_of_other(self, write: Write, suspect: bool) -> int | None:
        """The bytes of what is there in place of this frame; None if it is this frame."""
        try:
            found = await self._bucket.head(write.name)
        except Absent:
            return 0
        if found.meta.get(_WRITE) == write.nonce:  # stored, not answered, and sent again
            write.growth = len(write.frame)
            return None
        same = not suspect and found.nbytes == len(write.frame) and found.meta.get(_HEADER) == write.meta[_HEADER]
        if same and (not self._digests or found.etag.strip('"') == _digest(write.frame, self._part)):
            return None
        return found.nbytes

    async def _put_new(self, write: Write) -> bool:
        """Of engines with the same prompt, only one stores its frames. Returns False if something is there."""
        try:
            with write.growing(len(write.frame)):
                await self._bucket.put(write.name, write.frame, new=True, meta=write.meta)
        except Conflict:
            return False
        except NoConditions:
            self._conditions = False
            return False
        return True


def _digest(frame: memoryview, part: int) -> str:
    """The ETag of an object as `Writer` writes it."""
    if len(frame) <= part:
        return _md5(frame).hexdigest()
    digests = [_md5(frame[begin : begin + part]).digest() for begin in range(0, len(frame), part)]
    return f"{_md5(b''.join(digests)).hexdigest()}-{len(digests)}"
