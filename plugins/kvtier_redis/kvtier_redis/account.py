"""The capacity of a store: what all engines together keep on the servers, counted there.

The account has the number of bytes of the frames in the ledger. An engine counts the bytes of a frame before it enters
it, and the engine that takes it out counts them as freed; so two engines that evict at the same time, or one whose
frame is evicted while it writes it, leave no error. A frame is in the ledger before its first part is stored. So a
killed engine leaves an entry without a frame, which is removed when it is the oldest, or too many bytes in the account,
which `SharedSpace` corrects.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from kvtier_core.errors import BackendError
from kvtier_core.storekit.shared_space import Count, SharedSpace
from kvtier_redis.client import Client
from kvtier_redis.link import Deadline, Garbage, ServerError
from kvtier_redis.names import Manifest, Names

_TIME_IS_GOOD = 60.0  # seconds for which the server's clock is not asked again
_PAGE = 4096  # entries in one answer: less than a MiB
_MOST_LISTED = 1 << 17  # entries that an eviction lists: 20 MiB, in about a second
_POLL = 0.01  # seconds between two attempts to get the lock


class Ledger:
    """The frames of all namespaces with their bytes. Raises BackendError. Use it inside `until`.

    An entry is the name of a frame and the manifest of one write of it. All methods may be called on any thread.
    """

    def __init__(self, client: Client, names: Names):
        self._client = client
        self._names = names
        self._taken, self._freed = names.of_space("taken"), names.of_space("freed")  # the counters of `Count`
        self._frames = names.of_space("frames")  # a sorted set of all entries, by the time of their last write
        self._evicting = names.of_space("evicting")  # the lock of the engine that makes room for all
        self._time = 0.0, -_TIME_IS_GOOD  # the server's clock less our monotonic one, and when that was asked
        self._calls = threading.local()  # `SharedSpace` calls on the thread that called it, and knows no deadlines

    @contextlib.contextmanager
    def until(self, deadline: Deadline) -> Iterator[None]:
        """Calls of this thread in the context end by ``deadline``."""
        self._calls.deadline = deadline
        yield

    def enter(self, entries: Sequence[bytes]) -> None:
        """Enter frames as the newest. Count their bytes first."""
        self._call("ZADD", self._frames, *self._timed(entries))

    def renew(self, entries: Sequence[bytes]) -> int:
        """Make them the newest. Returns how many of them are there."""
        renewed: int = self._call("ZADD", self._frames, "XX", "CH", *self._timed(entries))
        return renewed

    def take_out(self, entry: bytes) -> bool:
        """Take an entry out. Returns True if it was there: the caller then counts its bytes as freed."""
        return bool(self._call("ZREM", self._frames, entry))

    def entered_before(self, moment: float) -> list[bytes]:
        """The entries older than ``moment``, in seconds since 1970."""
        return list(self._listed(f"{moment:.6f}"))

    # -- as SharedSpace needs it -------------------------------------------------------------------

    def count(self, *, taken: int = 0, freed: int = 0) -> Count:
        """Two counters that are changed, and read, in one step."""
        commands = [("INCRBY", self._taken, taken), ("INCRBY", self._freed, freed)]
        counters = self._client.at_once(self._calls.deadline, self._frames, commands)
        if not all(isinstance(counter, int) for counter in counters):
            raise Garbage("the account of the store is not a number")
        return Count(*counters)

    @contextlib.contextmanager
    def evicting(self) -> Iterator[None]:
        """The lock expires by itself when its holder is killed. An eviction that takes longer is merely not alone."""
        name, token = self._evicting, secrets.token_hex(8)
        expiry = str(int(1000 * self._calls.deadline.left()) + 1)
        while self._call("SET", name, token, "NX", "PX", expiry) is None:
            time.sleep(min(_POLL, self._calls.deadline.left()))
        try:
            yield
        finally:
            with contextlib.suppress(BackendError):
                if self._call("GET", name) == token.encode():
                    self._call("UNLINK", name)

    def oldest(self) -> Iterator[tuple[bytes, int]]:
        """All entries with their bytes, oldest first."""
        return ((entry, nbytes_in(entry)) for entry in self._listed("+inf"))

    def _listed(self, until: str) -> Iterator[bytes]:
        """Entries up to a time, oldest first, page by page: no answer has room for those of ten million frames.

        A page begins at the last time of the one before, not at a rank: when others take entries out, all ranks change,
        and an entry would be skipped.
        """
        since: bytes | str = "-inf"
        seen: set[bytes] = set()  # of this time
        is_last = False
        while not is_last:
            limit = _PAGE + len(seen)
            words = "ZRANGEBYSCORE", self._frames, since, until, "WITHSCORES", "LIMIT", 0, limit
            answer = self._call(*words)
            if not isinstance(answer, list) or len(answer) % 2:
                raise Garbage("the ledger of the store is not a list")
            page = dict(zip(answer[::2], answer[1::2], strict=True))
            yield from (entry for entry in page if entry not in seen)
            is_last = len(page) < limit
            latest = answer[-1] if answer else since
            seen = {entry for entry, at in page.items() if at == latest}
            since = latest

    def remove(self, entry: bytes) -> bool:
        """Remove a frame, then its entry. A frame that has expired is still in the ledger."""
        name, manifest = frame_in(entry)
        if manifest is not None and self._names.is_frame(name):  # else another program made the entry
            remove_frame(self._client, self._calls.deadline, name, manifest)
        return self.take_out(entry)

    def now(self) -> float:
        """Seconds since 1970 by the server's clock: those of the engines may differ."""
        ahead, asked = self._time
        if time.monotonic() - asked >= _TIME_IS_GOOD:
            seconds, micros = self._call("TIME")
            asked = time.monotonic()
            ahead = int(seconds) + int(micros) / 1e6 - asked
            self._time = ahead, asked
        return time.monotonic() + ahead

    def _timed(self, entries: Sequence[bytes]) -> list[bytes | str]:
        """The entries with the time, as ZADD takes them."""
        now = f"{self.now():.6f}"
        return [word for entry in entries for word in (now, entry)]

    def _call(self, *words: bytes | str | int) -> Any:
        return self._client.call(self._calls.deadline, self._frames, *words)


class Account(Ledger):
    """The bytes that this engine writes or deletes, in the ledger of all."""

    def __init__(self, client: Client, names: Names, capacity: int):
        super().__init__(client, names)
        self._space = SharedSpace(self, capacity, most_listed=_MOST_LISTED)

    @property
    def used(self) -> int | None:
        """Bytes of all frames in the ledger, as last reported."""
        return self._space.used

    def take(self, entries: Sequence[bytes]) -> None:
        """Count and enter frames that are about to be written. Raises StoreFull if there is no room for all."""
        if entries:
            self._space.take(sum(map(nbytes_in, entries)))
            self.enter(entries)

    def keep(self, entries: Sequence[bytes]) -> Sequence[bytes]:
        """Make frames that were written the newest. Returns those that were evicted or replaced meanwhile.

        These are counted and entered again: the caller removes them, and gives them back when they are gone.
        """
        if not entries or self.renew(entries) == len(entries):
            return []
        lost = [entry for entry in entries if not self.renew([entry])]
        if lost:
            self.count(taken=sum(map(nbytes_in, lost)))
            self.enter(lost)
        return lost

    def give(self, entry: bytes) -> None:
        """Give back a frame that was not written, or was removed or replaced."""
        if self.take_out(entry):
            self._space.give(nbytes_in(entry))


def entry_of(name: bytes, manifest: Manifest) -> bytes:
    """The name of a frame in the ledger: that of one write of it."""
    return b"%b %b" % (name, manifest.encode())


def frame_in(entry: bytes) -> tuple[bytes, Manifest | None]:
    """The name of a frame, and its manifest if there is one in the entry."""
    name, _, encoded = entry.partition(b" ")
    return name, Manifest.decode(encoded)


def nbytes_in(entry: bytes) -> int:
    """The bytes of a frame in the ledger."""
    _, manifest = frame_in(entry)
    return manifest.nbytes if manifest is not None else 0


def remove_frame(client: Client, deadline: Deadline, name: bytes, manifest: Manifest) -> bool:
    """Remove what one write stored; False if the frame was replaced or removed: then only its parts are removed."""
    names = manifest.part_names(name)
    is_there = _value(client, deadline, name) == manifest.encode()
    client.call(deadline, name, "UNLINK", *([name] if is_there else []), *names)
    return is_there


def _value(client: Client, deadline: Deadline, name: bytes) -> object:
    try:
        return client.call(deadline, name, "GET", name)
    except ServerError as error:
        if error.code != "WRONGTYPE":  # another program keeps something else there
            raise
        return None
