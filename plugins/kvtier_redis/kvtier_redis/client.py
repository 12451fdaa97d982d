"""Calls to the servers: each key is served by the server that has it, and a failure of one leaves the others alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvtier_core.errors import BackendError
from kvtier_core.types import ChunkKey
from kvtier_redis.connecting import Dialer, Links
from kvtier_redis.link import Deadline, Garbage, Link, ServerError, command, unless_refused
from kvtier_redis.servers import servers_of
from kvtier_redis.settings import RedisSettings

#: The outcome for each key, as the caller defines it, or a BackendError; _NOTHING: none yet.
Outcomes = list[Any]
_NOTHING = object()
#: Serves keys of one server, by their numbers: it sets an outcome for each, and may raise BackendError midway.
Work = Callable[[Link, Sequence[int], Outcomes], None]


class Client:
    """Raises BackendError and nothing else. All methods may be called on any thread."""

    def __init__(self, settings: RedisSettings):
        dialer = Dialer.of(settings)
        self.links = Links(dialer)
        self.servers = servers_of(settings, dialer)

    def close(self) -> None:
        """May be called twice."""
        self.links.close()

    def call(self, deadline: Deadline, name: bytes, *words: bytes | str | int) -> Any:
        """The answer to a command from the server that has the value ``name``. Also raises ServerError."""
        return self._at(deadline, name, [command(*words)])[0]

    def at_once(self, deadline: Deadline, name: bytes, commands: Sequence[Sequence[bytes | str | int]]) -> list[Any]:
        """The answers to several commands, which the server executes with no other between. Raises ServerError, too."""
        wrapped = [command(b"MULTI"), *(command(*words) for words in commands), command(b"EXEC")]
        answers = self._at(deadline, name, wrapped)[-1]
        if not isinstance(answers, list) or len(answers) != len(commands):
            raise Garbage("unexpected reply from the server")
        return unless_refused(answers)

    def _at(self, deadline: Deadline, name: bytes, commands: Sequence[bytes]) -> list[Any]:
        try:
            return self._try(deadline, name, commands)
        except ServerError as error:
            if not error.elsewhere:
                raise
        return self._try(deadline, name, commands)

    def _try(self, deadline: Deadline, name: bytes, commands: Sequence[bytes]) -> list[Any]:
        """The answers. Raises the first ServerError among them."""
        address = self.servers.of(name, deadline)
        try:
            with self.links.borrow(address, deadline) as link:
                return unless_refused(link.ask(commands))
        except BackendError as error:
            self._doubt(error)
            raise

    def _doubt(self, outcome: object) -> None:
        """Ask again which server has which keys, if this failure may have to do with that."""
        says_nothing = isinstance(outcome, ServerError) and not outcome.of_the_server
        if isinstance(outcome, BackendError) and not says_nothing:
            self.servers.distrust()

    def serve(self, deadline: Deadline, keys: Sequence[ChunkKey], work: Work) -> Outcomes:
        """The outcome of each key; a BackendError if its server could not serve it. Raises nothing.

        A key that has moved to another server is tried there once.
        """
        outcomes: Outcomes = [_NOTHING] * len(keys)
        self._serve(deadline, keys, range(len(keys)), work, outcomes)
        if ServerError in set(map(type, outcomes)):
            moved = [i for i, failure in enumerate(outcomes) if isinstance(failure, ServerError) and failure.elsewhere]
            for failure in outcomes:
                self._doubt(failure)
            for number in moved:
                outcomes[number] = _NOTHING
            self._serve(deadline, keys, moved, work, outcomes)
        return outcomes

    def _serve(
        self, deadline: Deadline, keys: Sequence[ChunkKey], todo: Sequence[int], work: Work, outcomes: Outcomes
    ) -> None:
        try:
            groups = self.servers.group([keys[number] for number in todo], deadline)
        except BackendError as error:
            _fill(outcomes, todo, error)
            return
        for served, (address, members) in enumerate(groups.items()):
            numbers = [todo[member] for member in members]
            try:
                # A server that hangs leaves time for the others.
                with self.links.borrow(address, deadline.share(len(groups) - served)) as link:
                    work(link, numbers, outcomes)
            except BackendError as error:
                self._doubt(error)
                _fill(outcomes, numbers, error)
        if sum(map(len, groups.values())) < len(todo):
            _fill(outcomes, todo, BackendError("no node of the cluster serves the slot of this key; see CLUSTER INFO"))


def unless_all_failed(outcomes: Outcomes) -> Outcomes:
    """The outcomes. Raises the first if all are BackendErrors: then the store fails, not the keys."""
    if outcomes and all(isinstance(outcome, BackendError) for outcome in outcomes):
        raise outcomes[0]
    return outcomes


def _fill(outcomes: Outcomes, numbers: Sequence[int], error: BackendError) -> None:
    for number in numbers:
        if outcomes[number] is _NOTHING:
            outcomes[number] = error
