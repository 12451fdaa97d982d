"""Reads frames into the caller's memory: in one request, or in ranges of one version of the object."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvtier_core.errors import BackendError
from kvtier_s3.bucket import Bucket
from kvtier_s3.errors import Absent, Conflict


def read_objects(
    bucket: Bucket, names: Sequence[str], into: Sequence[memoryview], part: int
) -> list[int | BackendError]:
    """The bytes of each object; 0 if there is none or if it is longer than its view; or why it cannot be read.

    An object that may be longer than ``part`` is read in ranges of that length.
    """

    async def read(name: str, view: memoryview) -> int:
        try:
            return await _read(bucket, name, view, part)
        except (Absent, Conflict):  # deleted, replaced, or shorter than it was
            return 0

    return bucket.calls.at_once(read, names, into)


async def _read(bucket: Bucket, name: str, view: memoryview, part: int) -> int:
    first = await bucket.get(name, len(view), nbytes=part if len(view) > part else None)
    if not first.body:
        return 0
    view[: len(first.body)] = first.body
    begins = range(len(first.body), first.nbytes, part)
    if begins and (len(first.body) != part or not first.etag):
        raise BackendError(f"{bucket.where}/{name}: the store does not return the range that it was asked for")

    async def read_range(begin: int) -> None:
        nbytes = min(part, first.nbytes - begin)
        more = await bucket.get(name, len(view), begin=begin, nbytes=nbytes, etag=first.etag)
        if more.nbytes != first.nbytes or len(more.body) != nbytes:
            raise BackendError(f"{bucket.where}/{name}: the store does not return the range that it was asked for")
        view[begin : begin + nbytes] = more.body

    # All are waited for, whatever becomes of one: nothing may be written into the view afterwards.
    for failure in await asyncio.gather(*map(read_range, begins), return_exceptions=True):
        if failure is not None:
            raise failure
    return first.nbytes
