"""Reads frames into the caller's memory: in one request, or in ranges of one version of the object."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from kvtier_core.errors import BackendError
from kvtier_s3.bucket import Bucket, absent, span_of
from kvtier_s3.errors import StoreDown
from kvtier_s3.http import Request, Response

_GONE = {404, 412, 416}  #: deleted, replaced, or shorter than it was


def read_objects(
    bucket: Bucket, names: Sequence[str], into: Sequence[memoryview], part: int
) -> list[int | BackendError]:
    """The bytes of each object; 0 if there is none or if it is longer than its view; or why it cannot be read.

    An object that may be longer than ``part`` is read in ranges of that length.
    """
    firsts = [_First(bucket, name, view, part) for name, view in zip(names, into, strict=True)]
    for first, answer in zip(firsts, bucket.exchange([first.request() for first in firsts]), strict=True):
        first.take(answer)
    rest = [(first, request) for first in firsts for request in first.rest()]
    for (first, _), answer in zip(rest, bucket.exchange([request for _, request in rest]), strict=True):
        first.take_more(answer)
    return [first.outcome for first in firsts]


@attrs.define
class _First:
    """The read of one object, which its first response decides."""

    bucket: Bucket
    name: str
    view: memoryview
    part: int
    outcome: int | BackendError = 0
    etag: str = ""  #: of the version that is read

    def request(self) -> Request:
        if len(self.view) <= self.part:
            return self.bucket.get(self.name, self.view)
        return self.bucket.get(self.name, self.view[: self.part], nbytes=self.part)

    def take(self, answer: Response | StoreDown) -> None:
        if isinstance(answer, Response) and (absent(answer) or answer.status == 416):
            return
        failure = self.bucket.failure(answer)
        if failure is not None:
            self.outcome = failure
        elif len(self.view) <= self.part:
            self.outcome = answer.nbytes if answer.fits else 0
        else:
            self._take_range(answer)

    def rest(self) -> list[Request]:
        """What is still to be read."""
        if not isinstance(self.outcome, int):
            return []
        return [
            self.bucket.get(self.name, self.view[begin:end], begin=begin, nbytes=end - begin, etag=self.etag)
            for begin in range(self.part, self.outcome, self.part)
            for end in [min(begin + self.part, self.outcome)]
        ]

    def take_more(self, answer: Response | StoreDown) -> None:
        if not self.outcome or not isinstance(self.outcome, int):
            return
        failure = self.bucket.failure(answer)
        if failure is not None:
            self.outcome = 0 if isinstance(answer, Response) and answer.status in _GONE else failure
        elif span_of(answer) is None or span_of(answer).total != self.outcome:
            self.outcome = self._odd()

    def _take_range(self, answer: Response) -> None:
        span = span_of(answer)
        self.etag = answer.headers.get("etag", "")
        if span is None or span.begin or span.nbytes != min(self.part, span.total) or not self.etag:
            self.outcome = self._odd()
        else:
            self.outcome = span.total if span.total <= len(self.view) else 0

    def _odd(self) -> BackendError:
        return BackendError(
            f"{self.bucket.where}/{self.name}: the store does not return the range that it was asked for"
        )
