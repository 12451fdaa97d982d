"""The account of a capacity that engines share, kept in the bucket: two counters, and a lock for evictions."""

from __future__ import annotations

import contextlib
import itertools
import json
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime

from kvtier_core.errors import BackendError
from kvtier_core.storekit.shared_space import Count
from kvtier_s3.bucket import Bucket, Found, Listed
from kvtier_s3.errors import Conflict
from kvtier_s3.names import parsed

#: Bytes that an engine takes from the account at a time, so that not every write costs two requests.
QUANTUM = 256 << 20
#: A lock that was seen unchanged for this long was left behind. Evictions end with their call, long before.
_STALE_SECONDS = 60.0
_PAUSE = 0.2  # seconds between two looks at a lock
_REMOVED_AT_ONCE = 32
#: Frames among which an eviction looks for the oldest: a few seconds of requests, however many frames there are.
MOST_LISTED = 1 << 15
_ROOM = 1 << 16  # no counters and no lock are longer


class BucketSpace:
    """The capacity account of a bucket, for `SharedSpace`."""

    def __init__(self, bucket: Bucket, prefix: str, *, ahead: int = 0):
        """An eviction may remove up to ``ahead`` bytes of frames more than it was asked for."""
        self._bucket = bucket
        self._prefix = prefix
        self._ahead = ahead
        self._counters = f"{prefix}/space.json"
        self._lock = f"{prefix}/evicting.json"
        self._seen = ("", 0.0)  # the lock of another user, by its ETag, and since when
        # Of the eviction that holds the lock:
        self._listed: list[Listed] = []
        self._numbers: dict[Listed, int] = {}  # in the listing
        self._removed: dict[Listed, BackendError | None] = {}  # ahead of `remove`, and the errors

    def count(self, *, taken: int = 0, freed: int = 0) -> Count:
        """Add to the counters, by replacing the very version that was read."""
        while True:
            found = self._bucket.fetch(self._counters, _ROOM)
            before = Count(0, 0) if found is None else _count(found)
            after = Count(before.taken + taken, before.freed + freed)
            if after == before or self._replace(self._counters, found, _body(taken=after.taken, freed=after.freed)):
                return after
            self._bucket.calls.pause(_PAUSE)

    @contextlib.contextmanager
    def evicting(self) -> Iterator[None]:
        ours = self._take_lock()
        try:
            yield
            ahead = sum(each.nbytes for each, failure in self._removed.items() if failure is None)
            self.count(freed=ahead)
        finally:
            self._listed, self._numbers, self._removed = [], {}, {}
            held = self._bucket.fetch(self._lock, _ROOM)
            if held is not None and held.body == ours:
                self._bucket.calls.one(self._bucket.delete, self._lock)

    def oldest(self) -> Iterator[tuple[Listed, int]]:
        """The frames of every namespace, by the time of their last write.

        If there are very many, first more than `MOST_LISTED` of them, from random places, sorted; then the others.
        """
        sampled, whole = sample_of(self._bucket, self._prefix, 2 * MOST_LISTED)
        yield from self._note(sorted(sampled, key=_age))
        if not whole:
            seen = {each.name for each in sampled}
            yield from self._note(each for each in frames_in(self._bucket, self._prefix) if each.name not in seen)

    def _note(self, frames: Iterable[Listed]) -> Iterator[tuple[Listed, int]]:
        for each in frames:
            self._numbers[each] = len(self._listed)
            self._listed.append(each)
            yield each, each.nbytes

    def remove(self, place: Listed) -> bool:
        """Delete a frame, and those that come after it in the listing: one request at a time would take too long.

        One that was replaced since it was listed is deleted, too: stores have no condition for that.
        """
        if place not in self._removed:
            batch = self._batch(self._numbers[place])
            failures = self._bucket.calls.at_once(self._bucket.delete, [each.name for each in batch])
            self._removed.update(zip(batch, failures, strict=True))
        failure = self._removed.pop(place)
        if failure is not None:
            raise failure
        return True

    def _batch(self, begin: int) -> Sequence[Listed]:
        """The frames to remove together with the one listed at ``begin``."""
        sizes = itertools.accumulate(each.nbytes for each in self._listed[begin + 1 : begin + _REMOVED_AT_ONCE])
        return self._listed[begin : begin + 1 + sum(nbytes <= self._ahead for nbytes in sizes)]

    def _take_lock(self) -> bytes:
        body = _body()
        while True:
            held = self._bucket.fetch(self._lock, _ROOM)
            if (held is None or self._is_stale(held)) and self._replace(self._lock, held, body):
                return body
            self._bucket.calls.pause(_PAUSE)

    def _is_stale(self, held: Found) -> bool:
        """By the clock of this process: that of the store may differ."""
        etag, since = self._seen
        if etag != held.etag:
            since = time.monotonic()
            self._seen = (held.etag, since)
        return time.monotonic() - since > _STALE_SECONDS

    def _replace(self, name: str, before: Found | None, body: bytes) -> bool:
        """Write an object in place of the version that was read. Returns False if another engine was faster."""
        try:
            self._bucket.calls.one(
                self._bucket.put, name, body, new=before is None, etag="" if before is None else before.etag
            )
        except Conflict:
            now = self._bucket.fetch(name, _ROOM)  # a request whose response was lost is sent again, and meets itself
            return now is not None and now.body == body
        return True


def frames_in(bucket: Bucket, prefix: str) -> Iterator[Listed]:
    """Every frame of every namespace, in no order. Raises BackendError."""
    for home in bucket.homes(prefix):
        yield from _frames(prefix, bucket.list(f"{prefix}/{home}"))


def sample_of(bucket: Bucket, prefix: str, most: int) -> tuple[list[Listed], bool]:
    """Frames of all namespaces, in no order, and whether these are all: more than half of ``most`` if they are not.

    Raises BackendError.
    """
    folders = [f"{prefix}/{home}" for home in bucket.homes(prefix)]
    frames: dict[str, list[Listed]] = {}
    whole: dict[str, bool] = {}

    def draw(folder: str, most: int) -> None:
        listed, whole[folder] = bucket.sample(folder, most)
        frames[folder] = list(_frames(prefix, listed))

    for folder in folders:
        draw(folder, most // len(folders))
    for folder in folders:  # large ones get what small ones have left over
        if not whole[folder] and sum(map(len, frames.values())) <= most // 2:
            draw(folder, most)
    return list(itertools.chain.from_iterable(frames.values())), all(whole.values())


def _frames(prefix: str, listed: Iterable[Listed]) -> Iterator[Listed]:
    return (each for each in listed if parsed(prefix, each.name, each.nbytes))


def conditions_hold(bucket: Bucket, prefix: str) -> bool:
    """Does the store write only where a condition of the request allows it? Raises BackendError."""
    name = f"{prefix}/probe-{secrets.token_hex(8)}"
    etag = bucket.calls.one(bucket.put, name, b"1")
    try:
        refused = bucket.calls.at_once(
            lambda how: bucket.put(name, b"2", **how), [{"new": True}, {"etag": '"00000000000000000000000000000000"'}]
        )
        (allowed,) = bucket.calls.at_once(lambda etag: bucket.put(name, b"3", etag=etag), [etag])
        return all(isinstance(each, Conflict) for each in refused) and not isinstance(allowed, BackendError)
    finally:
        bucket.calls.one(bucket.delete, name)


def _body(**fields: int) -> bytes:
    """A JSON object that was never written before."""
    return json.dumps({**fields, "written": secrets.token_hex(16)}).encode()


def _count(found: Found) -> Count:
    """The counters; 0 if they cannot be read, as if they had been removed."""
    try:
        fields = json.loads(bytes(found.body))
        return Count(int(fields["taken"]), int(fields["freed"]))
    except (ValueError, TypeError, KeyError, RecursionError):
        return Count(0, 0)


def _age(frame: Listed) -> tuple[datetime, str]:
    return frame.modified, frame.name
