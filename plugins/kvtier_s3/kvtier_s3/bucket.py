"""A bucket, and the requests to it."""

from __future__ import annotations

import contextlib
import math
import secrets
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

import attrs
import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from kvtier_core.errors import BackendError
from kvtier_core.storekit.namespaces import is_home
from kvtier_s3.calls import Calls
from kvtier_s3.errors import Absent, error_of

if TYPE_CHECKING:
    from obstore import GetOptions, PutMode

_DIGITS = "0123456789abcdef"
_PAGE = 1000  # names in one answer, of a listing
_KEPT = 16  # buffers between two requests, as many as a tier's threads use at a time


@attrs.frozen
class Listed:
    """An object in a listing."""

    name: str
    nbytes: int
    modified: datetime
    etag: str


@attrs.frozen
class Found:
    """An object, or a part of it, as it was read."""

    nbytes: int  #: of the whole object
    etag: str
    body: memoryview  #: empty if the object has more bytes than there was room for
    meta: Mapping[str, str]


class _Copies:
    """Copies of request bodies, in memory that is used again: the pages of fresh memory cost more than the copy.

    A request that is given up may be sent from its buffer for a moment longer, so it never uses the arena's memory.

    All methods may be called on any thread.
    """

    def __init__(self) -> None:
        self._free: deque[bytearray] = deque(maxlen=_KEPT)

    @contextlib.contextmanager
    def of(self, body: bytes | memoryview) -> Iterator[bytearray]:
        """A copy for one request. It is used again if the request was answered well, and dropped if anything failed."""
        copy = self._taken(len(body))
        copy[:] = body
        yield copy
        self._free.append(copy)

    def _taken(self, nbytes: int) -> bytearray:
        with contextlib.suppress(IndexError):
            buffer = self._free.pop()
            if len(buffer) == nbytes:
                return buffer
        return bytearray(nbytes)


@attrs.frozen
class Bucket:
    """Asks a store. Coroutines run in `Calls.at_once`; other methods may be called on any thread.

    All raise BackendError: Absent where there is no such object, Conflict where a condition does not hold.
    """

    where: str  #: for people: ``s3://NAME``
    calls: Calls
    _store: S3Store = attrs.field(repr=False)
    _copies: _Copies = attrs.field(factory=_Copies, init=False, eq=False, repr=False)

    async def head(self, name: str) -> Found:
        async with self._asking():
            found = await obstore.get_async(self._store, name, options={"head": True})
        return Found(found.meta["size"], found.meta["e_tag"] or "", memoryview(b""), found.attributes)

    async def get(self, name: str, room: int, *, begin: int = 0, nbytes: int | None = None, etag: str = "") -> Found:
        """Read an object, or ``nbytes`` of it from ``begin`` on; only if it is still the version with this ETag.

        An object with more than ``room`` bytes is not read.
        """
        options: GetOptions = {}
        if nbytes is not None:
            options["range"] = (begin, begin + nbytes)
        if etag:
            options["if_match"] = etag
        async with self._asking():
            found = await obstore.get_async(self._store, name, options=options)
            total, (first, end) = found.meta["size"], found.range
            body = memoryview(await found.bytes_async() if total <= room else b"")
        if total <= room and (first != begin or len(body) != end - begin):
            raise BackendError(f"{self.where}/{name}: the store did not return what was requested")
        return Found(total, found.meta["e_tag"] or "", body, found.attributes)

    async def put(
        self,
        name: str,
        body: bytes | memoryview,
        *,
        new: bool = False,
        etag: str = "",
        meta: dict[str, str] | None = None,
    ) -> str:
        """Write an object in one request: ``new`` only where there is none, ``etag`` only in place of that version.

        Returns the ETag of what was written.
        """
        mode: PutMode = "create" if new else {"e_tag": etag} if etag else "overwrite"
        async with self._asking(len(body)):
            with self._copies.of(body) as copy:
                put = obstore.put_async(self._store, name, copy, mode=mode, attributes=meta, use_multipart=False)
                return (await put)["e_tag"] or ""

    async def upload(self, name: str, body: memoryview, *, part: int, width: int, meta: dict[str, str]) -> str:
        """Write an object in parts of this length, ``width`` at a time. Returns the ETag of what was written."""
        async with self._asking(len(body)), contextlib.aclosing(_copies(body, part)) as copies:
            put = obstore.put_async(
                self._store, name, copies, attributes=meta, use_multipart=True, chunk_size=part, max_concurrency=width
            )
            return (await put)["e_tag"] or ""

    async def delete(self, name: str) -> None:
        """Remove an object, if it is there."""
        async with self._asking():
            await obstore.delete_async(self._store, name)

    def fetch(self, name: str, room: int) -> Found | None:
        """A small object; None if there is none."""
        try:
            return self.calls.one(self.get, name, room)
        except Absent:
            return None

    def list(self, folder: str) -> Sequence[Listed]:
        """All objects in a folder and below, in no order. Many are listed in parallel, by their first hex digit."""
        few = self.calls.one(self._list, folder, f"{folder}/", f"{folder}0", most=_PAGE)
        if len(few) < _PAGE:
            return few
        ends = [f"{folder}/{digit}" for digit in _DIGITS[1:]]
        return _joined(self.calls.at_once(self._list, [folder] * 16, [f"{folder}/", *ends], [*ends, f"{folder}0"]))

    def sample(self, folder: str, most: int) -> tuple[Sequence[Listed], bool]:
        """About ``most`` objects in a folder and below, from random places; and whether these are all."""
        few = self.calls.one(self._list, folder, f"{folder}/", f"{folder}0", most=_PAGE)
        if len(few) < _PAGE:
            return few, True
        ends = [f"{folder}/{digit}" for digit in _DIGITS[1:]] + [f"{folder}0"]
        each = max(1, most // 16)
        windows = self.calls.at_once(self._window, [folder] * 16, _DIGITS, ends, [each] * 16)
        listed = _joined(windows)
        return listed, all(not isinstance(window, BackendError) and len(window) < each for window in windows)

    async def _window(self, folder: str, digit: str, end: str, most: int) -> Sequence[Listed]:
        """At most ``most`` objects whose names begin with this digit, from a random one on."""
        drawn = secrets.token_hex(4)
        start = f"{folder}/{digit}{drawn[0]}/{digit}{drawn}"  # as frames are named
        listed = await self._list(folder, start, end, most)
        if len(listed) == most:
            return listed
        return [*listed, *(await self._list(folder, f"{folder}/{digit}", start, most - len(listed)))]

    def homes(self, prefix: str) -> Sequence[str]:
        """The names of the folders of namespaces in this one."""
        return self.calls.one(self._homes, prefix)

    async def _homes(self, prefix: str) -> Sequence[str]:
        async with self._asking():
            found = await obstore.list_with_delimiter_async(self._store, prefix)
        return [name for each in found["common_prefixes"] if is_home(name := each.removeprefix(f"{prefix}/"))]

    async def _list(self, folder: str, after: str, last: str, most: float = math.inf) -> Sequence[Listed]:
        listed: list[Listed] = []
        async with self._asking():
            async for page in obstore.list(self._store, folder, offset=after, chunk_size=_PAGE):
                for each in page:
                    if each["path"] > last or len(listed) == most:
                        return listed
                    listed.append(Listed(each["path"], each["size"], each["last_modified"], each["e_tag"] or ""))
        return listed

    @contextlib.asynccontextmanager
    async def _asking(self, nbytes: int = 0) -> AsyncIterator[None]:
        """Waits for the turn of a request; errors of obstore become this plugin's. ``nbytes`` are written."""
        failure = None
        async with self.calls.gate:
            try:
                yield
            except (BaseError, OSError, ValueError, NotImplementedError) as error:
                failure = error_of(error, self.where, nbytes)
        if failure is not None:
            raise failure  # here, so that it has no context: that may quote what signs a request


def _joined(answers: Sequence[Sequence[Listed] | BackendError]) -> Sequence[Listed]:
    """All that was listed. Raises BackendError if some could not be."""
    listed: list[Listed] = []
    for answer in answers:
        if isinstance(answer, BackendError):
            raise answer
        listed += answer
    return listed


async def _copies(body: memoryview, part: int) -> AsyncGenerator[bytes, None]:
    """Made in this thread's loop, so that nothing reads the body when the call has ended."""
    for begin in range(0, len(body), part):
        yield bytes(body[begin : begin + part])
