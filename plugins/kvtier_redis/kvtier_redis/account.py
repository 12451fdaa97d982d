"""The capacity of a store: what all engines keep on the servers together, counted there.

The counter holds the bytes of the frames in the ledger. Whoever enters a frame adds its bytes, and whoever takes it out
subtracts them; so two engines that evict at once, or one that is evicted from while it writes, leave no error. A frame
is in the ledger before its first part is stored. So what a killed engine leaves behind is an entry without a frame,
which goes when it is the oldest, or a counter that is off, which `SharedSpace` corrects.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence

from kvtier_core.errors import BackendError, StoreFull
from kvtier_core.transfer.shared_space import SharedSpace
from kvtier_core.types import Nbytes
from kvtier_redis.client import Client
from kvtier_redis.deadline import Deadline
from kvtier_redis.link import Garbage, ServerError
from kvtier_redis.names import Manifest, Names

_POLL = 0.01  # seconds between two attempts to get the lock


class Ledger:
    """The frames of all namespaces with their bytes, for one call. Raises BackendError.

    An entry is the name of a frame and the manifest of one write of it.
    """

    def __init__(self, client: Client, names: Names, deadline: Deadline):
        self._client = client
        self._names = names
        self._deadline = deadline

    def enter(self, entry: bytes) -> None:
        """Enter a frame as the newest. Who does so adds its bytes."""
        self._call("ZADD", self._names.ledger, _now(), entry)

    def renew(self, entry: bytes) -> bool:
        """Make it the newest. False if it is not there."""
        return bool(self._call("ZADD", self._names.ledger, "XX", "CH", _now(), entry))

    def take_out(self, entry: bytes) -> bool:
        """Who gets True, because it was there, subtracts its bytes."""
        return bool(self._call("ZREM", self._names.ledger, entry))

    def entered_before(self, moment: float) -> list[bytes]:
        """The entries that are older, in seconds since 1970."""
        entries = self._call("ZRANGEBYSCORE", self._names.ledger, "-inf", f"{moment:.6f}")
        return [entry for entry in entries if isinstance(entry, bytes)] if isinstance(entries, list) else []

    # -- as SharedSpace needs it -------------------------------------------------------------------

    def add(self, nbytes: int) -> int:
        """Add to the counter, and return it."""
        taken = self._call("INCRBY", self._names.taken, nbytes)
        if not isinstance(taken, int):
            raise Garbage("the counter of the store is no number")
        return taken

    @contextlib.contextmanager
    def evicting(self) -> Iterator[None]:
        """The lock goes by itself when its holder is killed. An eviction that takes longer is merely not alone."""
        name, token = self._names.evicting, secrets.token_hex(8)
        expiry = str(int(1000 * self._deadline.left()) + 1)
        while self._call("SET", name, token, "NX", "PX", expiry) is None:
            time.sleep(min(_POLL, self._deadline.left()))
        try:
            yield
        finally:
            with contextlib.suppress(BackendError):
                if self._call("GET", name) == token.encode():
                    self._call("UNLINK", name)

    def oldest(self) -> Iterable[tuple[bytes, int]]:
        """All entries with their bytes, oldest first."""
        entries = self._call("ZRANGE", self._names.ledger, 0, -1)
        if not isinstance(entries, list):
            raise Garbage("the ledger of the store is no list")
        return [(entry, nbytes_in(entry)) for entry in entries]

    def remove(self, entry: bytes) -> bool:
        """Remove a frame, then its entry. One that has expired is in the ledger all the same."""
        name, manifest = frame_in(entry)
        if manifest is not None and self._names.is_frame(name):  # else somebody else made the entry
            remove_frame(self._client, self._deadline, name, manifest)
        return self.take_out(entry)

    def _call(self, *words: bytes | str | int) -> object:
        return self._client.call(self._deadline, self._names.ledger, *words)


class Account:
    """The bytes that one call writes or deletes. Raises BackendError."""

    def __init__(self, ledger: Ledger, capacity: int):
        self._ledger = ledger
        self._capacity = Nbytes(capacity)
        self._space = SharedSpace(ledger, capacity)

    def take(self, entries: Sequence[bytes]) -> None:
        """Enter frames that are about to be written. Raises StoreFull if there is no room; then none is entered."""
        nbytes = sum(map(nbytes_in, entries))
        if nbytes > self._capacity:
            raise StoreFull(f"{Nbytes(nbytes)} at once, and the capacity is {self._capacity}", missing=nbytes)
        try:
            for entry in entries:
                self._ledger.enter(entry)
            self._space.take(nbytes)
        except BaseException:
            with contextlib.suppress(BackendError):
                for entry in entries:
                    self._ledger.take_out(entry)
            raise

    def keep(self, entry: bytes) -> bool:
        """A frame was written, and is now the newest. False if it was evicted or replaced meanwhile."""
        return self._ledger.renew(entry)

    def give(self, entry: bytes) -> None:
        """A frame was not written, or was removed or replaced."""
        if self._ledger.take_out(entry):
            self._space.give(nbytes_in(entry))


def entry_of(name: bytes, manifest: Manifest) -> bytes:
    """What the ledger calls a frame: one write of it."""
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
    """Remove what one write has stored; False if the frame has been replaced or removed: then only its parts go."""
    names = manifest.part_names(name)
    is_there = _value(client, deadline, name) == manifest.encode()
    client.call(deadline, name, "UNLINK", *([name] if is_there else []), *names)
    return is_there


def _value(client: Client, deadline: Deadline, name: bytes) -> object:
    try:
        return client.call(deadline, name, "GET", name)
    except ServerError as error:
        if error.code != "WRONGTYPE":  # somebody else keeps something else there
            raise
        return None


def _now() -> str:
    return f"{time.time():.6f}"
