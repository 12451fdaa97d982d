"""Stores each frame as an object in a bucket."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence

from kvtier_core.errors import BackendError, StoreFull
from kvtier_core.interfaces import Backend, SupportsNamespaces
from kvtier_core.storekit.namespaces import FACTS, FACTS_NBYTES, namespace_of
from kvtier_core.storekit.shared_space import SharedSpace
from kvtier_core.types import ChunkKey, Namespace
from kvtier_s3.bucket import Bucket
from kvtier_s3.errors import Absent, Conflict, raise_if_store_is_down
from kvtier_s3.names import Names
from kvtier_s3.writes import Write, Writer

_MOST_NAMESPACES = 64  # whose facts are read


class S3Backend(Backend, SupportsNamespaces):
    """Frames as objects. `kvtier_s3.settings` explains the settings."""

    shared = True

    def __init__(
        self,
        bucket: Bucket,
        names: Names,
        writer: Writer,
        space: SharedSpace | None,
        *,
        part: int,
        timeout: float,
        facts: Mapping[str, str],
    ):
        self._bucket = bucket
        self._names = names
        self._writer = writer
        self._space = space
        self._part = part
        self._timeout = timeout
        self._facts = facts

    @property
    def used(self) -> int | None:
        return None if self._space is None else self._space.used

    def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        with self._bucket.calls.within(self._timeout):
            return [nbytes > 0 for nbytes in self._lengths(keys)]

    def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> Sequence[int | BackendError]:
        names = [self._names.frame(key) for key in keys]

        async def read(name: str, view: memoryview) -> int:
            return await _read(self._bucket, name, view, self._part)

        with self._bucket.calls.within(self._timeout):
            outcomes = self._bucket.calls.at_once(read, names, into)
        raise_if_store_is_down(outcomes)
        return outcomes

    def write(self, keys: Sequence[ChunkKey], frames: Sequence[memoryview]) -> Sequence[BackendError | None] | None:
        with self._bucket.calls.within(self._timeout):
            errors = [each.error for each in self._write(keys, frames)]
        raise_if_store_is_down(errors)
        for error in errors:
            if isinstance(error, StoreFull):
                raise error
        return errors if any(errors) else None

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        names = [self._names.frame(key) for key in keys]
        with self._bucket.calls.within(self._timeout):
            held = self._lengths(keys) if self._space is not None else [0] * len(keys)
            failures = self._bucket.calls.at_once(self._bucket.delete, names)
            if self._space is not None:
                gone = zip(held, failures, strict=True)
                self._space.give(sum(nbytes for nbytes, failure in gone if failure is None))
        for failure in filter(None, failures):
            raise failure

    def quarantine(self, keys: Sequence[ChunkKey]) -> None:
        self._writer.suspect(keys)

    def namespaces(self) -> Iterator[Namespace]:
        bucket, prefix = self._bucket, self._names.prefix
        with bucket.calls.within(self._timeout):
            homes = [home for home in bucket.homes(prefix) if home != self._names.home][:_MOST_NAMESPACES]
            names = [f"{prefix}/{home}/{FACTS}" for home in homes]
            answers = bucket.calls.at_once(bucket.get, names, [FACTS_NBYTES] * len(names))
        read = [(home, each) for home, each in zip(homes, answers, strict=True) if not isinstance(each, BackendError)]
        found = (namespace_of(bytes(answer.body), home) for home, answer in read)
        return iter([namespace for namespace in found if namespace is not None])

    def drop_namespace(self) -> None:
        with self._bucket.calls.within(self._timeout):
            self._bucket.calls.one(self._bucket.delete, self._names.facts)

    def facts(self) -> Mapping[str, str]:
        return self._facts

    def close(self) -> None:
        try:
            if self._space is not None:
                with self._bucket.calls.within(self._timeout):
                    self._space.close()
        finally:
            self._bucket.calls.close()

    def _lengths(self, keys: Sequence[ChunkKey]) -> list[int]:
        """The bytes of each key's frame; 0 if there is none, or if the store cannot tell. Raises BackendError."""
        answers = self._bucket.calls.at_once(self._bucket.head, [self._names.frame(key) for key in keys])
        raise_if_store_is_down(answers)
        return [0 if isinstance(each, BackendError) else each.nbytes for each in answers]

    def _write(self, keys: Sequence[ChunkKey], frames: Sequence[memoryview]) -> list[Write]:
        if self._space is None:
            return self._writer.write(keys, frames)
        taken = sum(map(len, frames))
        self._space.take(taken)
        writes = self._writer.write(keys, frames)  # raises only if the process ends: then the bytes stay taken
        self._space.give(taken - sum(each.growth for each in writes))
        return writes


async def _read(bucket: Bucket, name: str, view: memoryview, part: int) -> int:
    """Read an object. Returns its bytes; 0 if it is missing, or longer than its view. Raises BackendError.

    An object that may be longer than ``part`` is read in ranges of that length, of one version.
    """
    try:
        return await _read_version(bucket, name, view, part)
    except (Absent, Conflict):  # deleted, replaced, or shorter than it was
        return 0


async def _read_version(bucket: Bucket, name: str, view: memoryview, part: int) -> int:
    first = await bucket.get(name, len(view), nbytes=part if len(view) > part else None)
    if not first.body:
        return 0
    view[: len(first.body)] = first.body
    begins = range(len(first.body), first.nbytes, part)
    if begins and (len(first.body) != part or not first.etag):
        raise BackendError(f"{bucket.where}/{name}: the store did not return the requested range")

    async def read_range(begin: int) -> None:
        nbytes = min(part, first.nbytes - begin)
        more = await bucket.get(name, len(view), begin=begin, nbytes=nbytes, etag=first.etag)
        if more.nbytes != first.nbytes or len(more.body) != nbytes:
            raise BackendError(f"{bucket.where}/{name}: the store did not return the requested range")
        view[begin : begin + nbytes] = more.body

    # Wait for all, whatever happens to one: nothing may be written into the view afterwards.
    for failure in await asyncio.gather(*map(read_range, begins), return_exceptions=True):
        if failure is not None:
            raise failure
    return first.nbytes
