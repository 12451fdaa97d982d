"""Stores frames in Redis or Valkey, for all engines that name the same server and prefix."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from kvtier_core.errors import BackendError, StoreFull
from kvtier_core.interfaces import Backend, OpenContext, SupportsNamespaces
from kvtier_core.storekit.namespaces import namespace_of
from kvtier_core.types import ChunkKey, Namespace
from kvtier_redis.account import Account, entry_of
from kvtier_redis.client import Client, Outcomes, unless_all_failed
from kvtier_redis.frame_io import Transfer, receive
from kvtier_redis.link import Deadline, Garbage, Link, ServerError, command
from kvtier_redis.names import Manifest, Names, frame_name, get_all
from kvtier_redis.settings import RedisSettings
from kvtier_redis.writing import Write

#: A server that answers with one of these is up, but not for this user, database or client: no engine starts then.
_WRONG_SETTINGS = {"ERR", "NOAUTH", "NOPERM", "WRONGPASS"}


class RedisBackend(Backend, SupportsNamespaces):
    """Each frame as parts and a manifest that names them. `kvtier_redis.settings` explains the settings."""

    shared = True

    def __init__(self, settings: RedisSettings, ctx: OpenContext):
        self._settings = settings
        self._timeout = ctx.timeout
        self._namespace = ctx.namespace
        self._names = Names(settings.prefix)
        self._home = self._names.home(ctx.namespace)
        self._client = Client(settings)
        self._account = Account(self._client, self._names, ctx.capacity) if ctx.capacity else None
        self._trouble = ""  # what failed when it was opened
        try:
            self._tell_namespace()
        except BackendError as error:
            # If a server is down or full, the tier rests, and the other tiers serve the engine.
            self._trouble = str(error)
            if isinstance(error, ServerError) and error.code in _WRONG_SETTINGS:
                self._client.close()
                raise

    # -- calls -------------------------------------------------------------------------------------

    @property
    def used(self) -> int | None:
        return None if self._account is None else self._account.used

    def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        def look(link: Link, numbers: Sequence[int], outcomes: Outcomes) -> None:
            for number, value in zip(numbers, self._values(link, [keys[i] for i in numbers]), strict=True):
                outcomes[number] = value

        outcomes = self._client.serve(Deadline(self._timeout), keys, look)
        return [isinstance(value, bytes) for value in unless_all_failed(outcomes)]

    def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> Sequence[int | BackendError]:
        def fetch(link: Link, numbers: Sequence[int], outcomes: Outcomes) -> None:
            transfers = {}
            for number, value in zip(numbers, self._values(link, [keys[i] for i in numbers]), strict=True):
                manifest = Manifest.decode(value)
                if manifest is None or manifest.nbytes > len(into[number]):
                    outcomes[number] = value if isinstance(value, ServerError) else 0
                else:
                    name = frame_name(self._home, keys[number])
                    transfers[number] = Transfer(name, manifest, into[number][: manifest.nbytes])
            try:
                receive(link, list(transfers.values()))
            finally:  # what was received before the connection broke is whole
                for number, transfer in transfers.items():
                    if transfer.whole or transfer.failed:
                        outcomes[number] = transfer.manifest.nbytes if transfer.whole else transfer.error or 0

        return unless_all_failed(self._client.serve(Deadline(self._timeout), keys, fetch))

    def write(self, keys: Sequence[ChunkKey], frames: Sequence[memoryview]) -> Sequence[BackendError | None]:
        write = Write(self._home, keys, frames, self._settings, self._timeout)
        try:
            outcomes = unless_all_failed(self._write(keys, write, Deadline(self._timeout)))
        except BackendError as error:
            if isinstance(error, StoreFull) or (isinstance(error, ServerError) and error.code == "OOM"):
                raise StoreFull(str(error), missing=sum(map(len, frames))) from error
            raise
        return [None if outcome is True else outcome for outcome in outcomes]

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        deadline = Deadline(self._timeout)
        names = [frame_name(self._home, key) for key in keys]

        def unlink(link: Link, numbers: Sequence[int], outcomes: Outcomes) -> None:
            answers = link.ask([command(b"GETDEL", names[number]) for number in numbers])
            removed = {number: Manifest.decode(answer) for number, answer in zip(numbers, answers, strict=True)}
            there = {number: manifest for number, manifest in removed.items() if manifest is not None}
            unlinks = [command(b"UNLINK", *there[number].part_names(names[number])) for number in there]
            unlinked = dict(zip(there, link.ask(unlinks), strict=True))
            for number, answer in zip(numbers, answers, strict=True):
                refused = [each for each in (answer, unlinked.get(number)) if isinstance(each, ServerError)]
                outcomes[number] = refused[0] if refused else there.get(number, True)

        outcomes = self._client.serve(deadline, keys, unlink)
        if self._account is not None:
            with self._account.until(deadline):
                for name, outcome in zip(names, outcomes, strict=True):
                    if isinstance(outcome, Manifest):
                        self._account.give(entry_of(name, outcome))
        for outcome in outcomes:
            if isinstance(outcome, BackendError):
                raise outcome

    # -- what is there -----------------------------------------------------------------------------

    def namespaces(self) -> Iterator[Namespace]:
        names = self._names.namespaces
        told = self._client.call(Deadline(self._timeout), names, "HGETALL", names)
        found = [namespace_of(text) for text in told[1::2]] if isinstance(told, list) else []
        return iter([each for each in found if each is not None and each != self._namespace])

    def drop_namespace(self) -> None:
        names = self._names.namespaces
        self._client.call(Deadline(self._timeout), names, "HDEL", names, self._namespace.digest.hex())

    def facts(self) -> Mapping[str, str]:
        return {"url": f"{self._settings.url} -> {self._trouble}"} if self._trouble else {}

    def close(self) -> None:
        self._client.close()

    def _write(self, keys: Sequence[ChunkKey], write: Write, deadline: Deadline) -> Outcomes:
        if self._account is None:
            return self._client.serve(deadline, keys, write.store)
        with self._account.until(deadline):
            self._account.take(write.entries)
            outcomes = self._client.serve(deadline, keys, write.store)
            with contextlib.suppress(BackendError):  # the account is off then, as if the engine had been killed
                write.settle(self._account, self._client, deadline, outcomes)
        return outcomes

    def _tell_namespace(self) -> None:
        """Keep the facts of this namespace on the server, for engines of other namespaces."""
        names, digest = self._names.namespaces, self._namespace.digest.hex()
        self._client.call(Deadline(self._timeout), names, "HSETNX", names, digest, self._namespace.to_json())

    def _values(self, link: Link, keys: Sequence[ChunkKey]) -> list[object]:
        """The values under the names of frames, in one round trip: they should be manifests, but may be anything."""
        if self._client.servers.one:
            link.send(get_all(self._home, keys))
            values = link.reply()
            if isinstance(values, ServerError):
                raise values
        else:
            values = link.ask([command(b"GET", frame_name(self._home, key)) for key in keys])
            values = [None if getattr(value, "code", "") == "WRONGTYPE" else value for value in values]
        if not isinstance(values, list) or len(values) != len(keys):
            raise Garbage("unexpected reply from the server")
        return values
