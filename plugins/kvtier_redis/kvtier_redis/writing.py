"""One call that writes frames: first their parts, then the manifests by which they are found."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier_core.errors import BackendError, StoreFull
from kvtier_core.types import ChunkKey
from kvtier_redis.account import Account, entry_of, remove_frame
from kvtier_redis.client import Client, Outcomes
from kvtier_redis.frame_io import Transfer, send
from kvtier_redis.link import Deadline, Link, ServerError, command
from kvtier_redis.names import Manifest, frame_name
from kvtier_redis.settings import RedisSettings


class Write:
    """Frames on their way to the servers."""

    def __init__(
        self, home: str, keys: Sequence[ChunkKey], frames: Sequence[memoryview], settings: RedisSettings, timeout: float
    ):
        """``timeout`` is that of the call, in seconds."""
        ttl = settings.ttl
        self._expiry = _expiry(ttl)
        # Parts live a little longer than the manifest that names them: they are written before it, and read after it.
        self._expiry_of_parts = _expiry(ttl and ttl + 2 * timeout)
        self._replaced: dict[int, Manifest | None] = {}
        self._removed: list[bytes] = []  # entries of replaced frames whose parts the server has unlinked
        self._transfers = [
            Transfer(frame_name(home, key), Manifest.new(len(frame), settings.part), memoryview(frame).cast("B"))
            for key, frame in zip(keys, frames, strict=True)
        ]

    @property
    def entries(self) -> list[bytes]:
        """The names of the frames in the ledger."""
        return [entry_of(transfer.name, transfer.manifest) for transfer in self._transfers]

    def store(self, link: Link, numbers: Sequence[int], outcomes: Outcomes) -> None:
        """Store frames on one server. The outcome of each is True or an error."""
        here = {number: self._transfers[number] for number in numbers}
        for transfer in here.values():
            transfer.begin()
        send(link, list(here.values()), self._expiry_of_parts)
        for number in [number for number, transfer in here.items() if not transfer.whole]:
            outcomes[number] = _error(here[number].error, here.pop(number))
        for number, answer in zip(here, self._publish(link, list(here.values())), strict=True):
            outcomes[number] = _error(answer, here[number]) if isinstance(answer, ServerError) else True
            self._replaced[number] = Manifest.decode(answer)
        self._clean_up(link, numbers, outcomes)

    def settle(self, account: Account, client: Client, deadline: Deadline, outcomes: Outcomes) -> None:
        """Account for what has become of the frames. Raises BackendError."""
        entries = self.entries
        stored = [number for number, outcome in enumerate(outcomes) if outcome is True]
        for number, entry in enumerate(entries):
            if outcomes[number] is not True and not self._transfers[number].left:
                account.give(entry)  # what may be on a server stays in the ledger until it is evicted
        for entry in self._removed:
            account.give(entry)
        lost = set(account.keep([entries[number] for number in stored]))
        for number in stored:
            transfer = self._transfers[number]
            if entries[number] in lost:
                if remove_frame(client, deadline, transfer.name, transfer.manifest):
                    outcomes[number] = BackendError("evicted by another engine while it was being written")
                account.give(entries[number])

    def _publish(self, link: Link, transfers: Sequence[Transfer]) -> list[object]:
        """Replace the manifests; returns the former ones, or ServerErrors."""
        answers = link.ask([self._manifest(each, b"GET") for each in transfers])
        for number, answer in enumerate(answers):
            if isinstance(answer, ServerError) and answer.code == "WRONGTYPE":  # what is there is not ours
                (answers[number],) = link.ask([self._manifest(transfers[number])])
        return answers

    def _manifest(self, transfer: Transfer, *words: bytes) -> bytes:
        return command(b"SET", transfer.name, transfer.manifest.encode(), *words, *self._expiry)

    def _clean_up(self, link: Link, numbers: Sequence[int], outcomes: Outcomes) -> None:
        """Unlink the parts of what was replaced, and of what could not be stored."""
        unlinks = {}
        for number in numbers:
            transfer = self._transfers[number]
            manifest = self._replaced.get(number) if outcomes[number] is True else transfer.manifest
            if manifest is not None:
                unlinks[number] = manifest, command(b"UNLINK", *manifest.part_names(transfer.name))
        answers = link.ask([unlink for _, unlink in unlinks.values()])
        for (number, (manifest, _)), answer in zip(unlinks.items(), answers, strict=True):
            transfer = self._transfers[number]
            if not isinstance(answer, ServerError) and manifest is transfer.manifest:
                transfer.left = 0
            elif not isinstance(answer, ServerError):
                self._removed.append(entry_of(transfer.name, manifest))


def _expiry(seconds: float | None) -> list[bytes]:
    """The words of SET that make a value expire."""
    return [] if seconds is None else [b"PX", b"%d" % (seconds * 1000)]


def _error(error: ServerError | None, transfer: Transfer) -> BackendError | None:
    """The error as the tier understands it."""
    if error is not None and error.code == "OOM":
        return StoreFull(str(error), missing=transfer.manifest.nbytes)
    return error
