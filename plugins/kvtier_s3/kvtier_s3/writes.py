"""Writes frames: those that are new in one request each, and those that are there already not again."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Sequence

import attrs

from kvtier_core.errors import BackendError
from kvtier_core.types import FRAME_ALIGNMENT, ChunkKey
from kvtier_s3.bucket import Bucket, xml_text
from kvtier_s3.errors import StoreDown, code_of, error_of
from kvtier_s3.http import Response
from kvtier_s3.names import Names

_META = "x-amz-meta-kvtier-header"
_CONFLICTS = {409, 412}
_md5 = functools.partial(hashlib.md5, usedforsecurity=False)
#: Of the time that is left, while parts are uploaded. The rest is for giving them up.
_FOR_PARTS = 0.9


@attrs.define
class Write:
    """The write of one frame."""

    key: ChunkKey
    name: str
    frame: memoryview
    ended: bool = False
    error: BackendError | None = None
    growth: int = 0  #: by how many bytes the store has grown
    replaces: int = 0  #: bytes of the object that was there before

    @property
    def meta(self) -> dict[str, str]:
        """Tells one frame from another where ETags do not: a header has the checksum of its payload."""
        return {_META: hashlib.sha256(self.frame[:FRAME_ALIGNMENT]).hexdigest()[:32]}

    def end(self, error: BackendError | None = None, growth: int = 0) -> None:
        self.ended, self.error, self.growth = True, error and error.with_traceback(None), growth


class Writer:
    """Writes for one namespace. May be used on several threads."""

    def __init__(self, bucket: Bucket, names: Names, part: int):
        self._bucket = bucket
        self._names = names
        self._part = part
        self._conditions = True  # until the store says that it knows none
        self._suspects: set[ChunkKey] = set()

    def suspect(self, keys: Sequence[ChunkKey]) -> None:
        """Replace what is there when these keys are written next, whatever it seems to be."""
        self._suspects.update(keys)

    def write(self, keys: Sequence[ChunkKey], frames: Sequence[memoryview]) -> list[Write]:
        """Store each frame, and say what became of it."""
        writes = [Write(key, self._names.frame(key), frame) for key, frame in zip(keys, frames, strict=True)]
        self._put_new([each for each in writes if self._may_be_new(each)])
        self._compare([each for each in writes if not each.ended])
        self._put([each for each in writes if not each.ended and len(each.frame) <= self._part])
        for write in writes:
            if not write.ended:
                self._upload(write)
        self._suspects.difference_update(each.key for each in writes if each.error is None)
        return writes

    def _may_be_new(self, write: Write) -> bool:
        return self._conditions and len(write.frame) <= self._part and write.key not in self._suspects

    def _put_new(self, writes: Sequence[Write]) -> None:
        """Of engines with the same prompt only one sends its frames to the end of the way."""
        requests = [self._bucket.put(each.name, each.frame, new=True, meta=each.meta) for each in writes]
        for write, answer in zip(writes, self._bucket.exchange(requests), strict=True):
            if isinstance(answer, Response) and _refuses_conditions(answer):
                self._conditions = False
            elif not (isinstance(answer, Response) and answer.status in _CONFLICTS):
                self._take(write, answer)

    def _compare(self, writes: Sequence[Write]) -> None:
        answers = self._bucket.exchange([self._bucket.head(each.name) for each in writes])
        for write, answer in zip(writes, answers, strict=True):
            if isinstance(answer, Response) and answer.status == 404:
                continue
            failure = self._bucket.failure(answer)
            if failure is not None:
                write.end(failure)
            elif write.key not in self._suspects and _same(write, answer, self._part):
                write.end()
            else:
                write.replaces = answer.nbytes

    def _put(self, writes: Sequence[Write]) -> None:
        requests = [self._bucket.put(each.name, each.frame, meta=each.meta) for each in writes]
        for write, answer in zip(writes, self._bucket.exchange(requests), strict=True):
            self._take(write, answer)

    def _take(self, write: Write, answer: Response | StoreDown) -> None:
        failure = self._bucket.failure(answer, len(write.frame))
        write.end(failure, 0 if failure else len(write.frame) - write.replaces)

    def _upload(self, write: Write) -> None:
        bucket = self._bucket
        try:
            upload = xml_text(bucket.must(bucket.begin_upload(write.name, write.meta)), "UploadId")
            try:
                self._upload_parts(write, upload)
            except BackendError:
                with contextlib.suppress(BackendError):
                    bucket.ask(bucket.abort_upload(write.name, upload))
                raise
        except BackendError as error:
            write.end(error)
        else:
            write.end(growth=len(write.frame) - write.replaces)

    def _upload_parts(self, write: Write, upload: str) -> None:
        bucket, frame = self._bucket, write.frame
        parts = [frame[begin : begin + self._part] for begin in range(0, len(frame), self._part)]
        requests = [bucket.upload(write.name, upload, number, part) for number, part in enumerate(parts, 1)]
        with bucket.client.within(bucket.client.remaining * _FOR_PARTS):
            answers = bucket.exchange(requests)
        for failure in (bucket.failure(answer, len(frame)) for answer in answers):
            if failure is not None:
                raise failure
        etags = [answer.headers.get("etag", "") for answer in answers]
        ended = bucket.must(bucket.end_upload(write.name, upload, etags))
        if code_of(ended):  # the store begins to answer before it knows
            raise error_of(ended, bucket.where, len(frame))


def _refuses_conditions(answer: Response) -> bool:
    return answer.status == 501 or code_of(answer) == "NotImplemented"


def _same(write: Write, answer: Response, part: int) -> bool:
    """Is the object that the store has the frame that is to be written?

    An ETag is the MD5 of what was written, except where a key of KMS encrypts it.
    """
    told = answer.headers
    if answer.nbytes != len(write.frame) or told.get(_META) != write.meta[_META]:
        return False
    if told.get("x-amz-server-side-encryption", "").startswith("aws:kms"):
        return True
    return told.get("etag", "").strip('"') == _etag(write.frame, part)


def _etag(frame: memoryview, part: int) -> str:
    """Of an object that is written as `Writer` does."""
    if len(frame) <= part:
        return _md5(frame).hexdigest()
    digests = [_md5(frame[begin : begin + part]).digest() for begin in range(0, len(frame), part)]
    return f"{_md5(b''.join(digests)).hexdigest()}-{len(digests)}"
