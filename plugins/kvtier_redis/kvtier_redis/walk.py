"""Lists everything under a prefix for `kvtier fsck`, and corrects the account of its bytes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import attrs

from kvtier_core.errors import BackendError, Gone
from kvtier_core.interfaces import Stored
from kvtier_core.storekit import shared_space
from kvtier_redis.account import Ledger, entry_of, remove_frame
from kvtier_redis.client import Client
from kvtier_redis.link import Deadline, Garbage, ServerError
from kvtier_redis.names import UNFINISHED, Found, Manifest, Names
from kvtier_redis.settings import RedisSettings

_TIMEOUT = 30.0  # seconds, of each call to a server
_COUNT = 1000  # names that a server looks at in one call


@contextlib.contextmanager
def everything(settings: RedisSettings) -> Iterator[Iterator[Stored]]:
    """All frames, and all parts that no manifest names and no writer can still need. Raises BackendError."""
    with contextlib.closing(Client(settings)) as client:
        yield _Walk(client, Names(settings.prefix)).stored()


def recount(settings: RedisSettings) -> None:
    """Make the ledger match the frames that are there, and the account their bytes. Raises BackendError."""
    with contextlib.closing(Client(settings)) as client:
        walk = _Walk(client, Names(settings.prefix))
        with walk.ledger() as ledger:
            before = ledger.now() - UNFINISHED
        there = {entry_of(found.frame, manifest) for found, manifest in walk.manifests() if manifest is not None}
        with walk.ledger() as ledger:
            missing = there - {entry for entry, _ in ledger.oldest()}
            if missing:
                ledger.enter(sorted(missing))
            for entry in set(ledger.entered_before(before)) - there:
                ledger.take_out(entry)
            shared_space.recount(ledger)


@attrs.frozen
class _Walk:
    client: Client
    names: Names

    @contextlib.contextmanager
    def ledger(self) -> Iterator[Ledger]:
        ledger = Ledger(self.client, self.names)
        with ledger.until(Deadline(_TIMEOUT)):
            yield ledger

    def call(self, name: bytes, *words: bytes | str | int) -> Any:
        return self.client.call(Deadline(_TIMEOUT), name, *words)

    def stored(self) -> Iterator[Stored]:
        for found in self.found():
            if found.write is None:
                yield self.frame(found)
            elif not found.is_recent and not self.is_named(found):
                yield self.thing(found.name, self.length(found.name))

    def manifests(self) -> Iterator[tuple[Found, Manifest | None]]:
        for found in self.found():
            if found.write is None:
                yield found, self.manifest(found.frame)

    def found(self) -> Iterator[Found]:
        """Every name that this tier made, once."""
        seen: set[bytes] = set()
        for address in self.client.servers.all(Deadline(_TIMEOUT)):
            cursor = b"0"
            while True:
                deadline = Deadline(_TIMEOUT)
                with self.client.links.borrow(address, deadline) as link:
                    answer = link.call("SCAN", cursor, "MATCH", f"{self.names.prefix}:*", "COUNT", _COUNT)
                cursor, listed = _page(answer)
                for name in set(listed) - seen:
                    seen.add(name)
                    if (found := self.names.parse(name)) is not None:
                        yield found
                if cursor == b"0":
                    break

    def manifest(self, frame: bytes) -> Manifest | None:
        try:
            return Manifest.decode(self.call(frame, "GET", frame))
        except ServerError:  # there is something else
            return None

    def is_named(self, part: Found) -> bool:
        manifest = self.manifest(part.frame)
        return manifest is not None and manifest.write == part.write

    def length(self, name: bytes) -> int:
        try:
            return int(self.call(name, "STRLEN", name))
        except (ServerError, TypeError, ValueError):
            return 0

    def frame(self, found: Found) -> Stored:
        manifest = self.manifest(found.frame)
        if manifest is None:
            return self.thing(found.frame, self.length(found.frame))
        return Stored(
            where=found.frame.decode(),
            nbytes=manifest.nbytes,
            home=found.home,
            key=found.key,
            read=functools.partial(self.read, found.frame, manifest),
            remove=functools.partial(self.remove, found.frame, manifest),
        )

    def thing(self, name: bytes, nbytes: int) -> Stored:
        """An entry that is not a frame."""
        return Stored(
            where=name.decode(),
            nbytes=nbytes,
            home=None,
            key=None,
            read=lambda offset, count: self.range(name, offset, offset + count),
            remove=lambda: self.call(name, "UNLINK", name),
        )

    def read(self, name: bytes, manifest: Manifest, offset: int, nbytes: int) -> bytes:
        end = min(offset + nbytes, manifest.nbytes)
        pieces = []
        for part, first, last in manifest.parts(name):
            if first < end and last > offset:
                begin, stop = max(offset, first), min(end, last)
                piece = self.range(part, begin - first, stop - first)
                if len(piece) != stop - begin:
                    gone = self.manifest(name) != manifest
                    raise (Gone if gone else BackendError)(f"{name.decode()}: a part of it is gone")
                pieces.append(piece)
        return b"".join(pieces)

    def range(self, name: bytes, begin: int, end: int) -> bytes:
        piece = self.call(name, "GETRANGE", name, begin, end - 1)
        if not isinstance(piece, bytes):
            raise Garbage("unexpected reply from the server")
        return piece

    def remove(self, name: bytes, manifest: Manifest) -> None:
        """Raises Gone if it was replaced or removed meanwhile."""
        is_there = remove_frame(self.client, Deadline(_TIMEOUT), name, manifest)
        with self.ledger() as ledger:
            if ledger.take_out(entry_of(name, manifest)):
                ledger.count(freed=manifest.nbytes)
        if not is_there:
            raise Gone(f"{name.decode()}: replaced or removed meanwhile")


def _page(answer: Any) -> tuple[bytes, list[bytes]]:
    """The next cursor and the names of an answer to SCAN."""
    try:
        cursor, listed = answer
        return bytes(cursor), [bytes(name) for name in listed]
    except (TypeError, ValueError):
        raise Garbage("unexpected reply from the server") from None
