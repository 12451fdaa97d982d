"""The servers of a fleet, all asked at once. Nothing is kept: what an answer says has just been asked."""

from __future__ import annotations

import functools
import math
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

import msgspec

from kvtier_core.config.model import UNIX
from kvtier_core.errors import BackendError, ContractError
from kvtier_core.work.io_pool import run_aside
from kvtier_fleet.settings import FleetSettings
from kvtier_serve.operators.asking import RunningServer, host_and_port
from kvtier_serve.operators.forms import AllQuotas

T = TypeVar("T")

#: Servers that are asked at a time.
_AT_ONCE = 64


class Answers(NamedTuple):
    """What the servers said, by their names; and why others said nothing."""

    told: dict[str, Any]
    silent: dict[str, BackendError]

    def plain(self) -> dict[str, Any]:
        """The same in types that JSON has."""
        silent = {name: str(error) for name, error in self.silent.items()}
        return {"servers": msgspec.to_builtins(self.told), "silent": silent}


class Fleet:
    """The servers of the settings, as their operator. Threads may ask at the same time."""

    def __init__(self, settings: FleetSettings):
        """Raises BackendError if the authority of TLS cannot be read."""
        self.settings = settings
        self._tls = _trusting(settings.ca) if settings.ca else None

    def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, form: Any = Any, on: Sequence[str] = ()
    ) -> Answers:
        """Ask all servers, or those whose names are in ``on``. Answers are of this ``form``."""

        def asked(server: RunningServer) -> Any:
            return of_form(form, server.ask(method, path, None if body is None else dict(body)), server.name)

        return self.each(asked, on)

    def share(self, path: str, quota: Mapping[str, Any], on: Sequence[str] = ()) -> Answers:
        """Give each server an equal share of a quota, as `QuotaOf` or `ModelQuota` has it.

        Servers that do not answer count, too: the sum of what is set never exceeds the quota.
        """
        there = self.ask("GET", "/health", on=on)
        shares = len(there.told) + len(there.silent) or 1
        share = {kind: quota.get(kind) and quota[kind] // shares for kind in ("soft", "hard")}
        found = self.ask("PUT", path, {**quota, **share}, AllQuotas, on)
        return Answers(found.told, {**there.silent, **found.silent})

    def each(self, ask: Callable[[RunningServer], T], on: Sequence[str] = ()) -> Answers:
        """What each server answers. Raises BackendError if a name in ``on`` is that of no server."""
        entries = [*self.settings.servers, *self._in_file()]
        found, silent = self._at_once({entry: functools.partial(self._servers, entry) for entry in entries})
        servers = {server.name: server for several in found.values() for server in several}
        if on:
            if unknown := sorted({*on} - {*entries, *servers}):
                raise BackendError(f"{', '.join(unknown)}: no server of this fleet; it has {', '.join(servers)}")
            chosen = {server.name for entry in on for server in found.get(entry, ())} | {*on}
            servers = {name: server for name, server in servers.items() if name in chosen}
            silent = {entry: error for entry, error in silent.items() if entry in on}
        told, unanswered = self._at_once({name: functools.partial(ask, each) for name, each in servers.items()})
        return Answers(told, {**silent, **unanswered})

    def _servers(self, entry: str) -> list[RunningServer]:
        """The servers behind an entry; each has an address of its own. Raises BackendError.

        The IPv6 addresses of a name that has others are those of the same servers.
        """
        if entry.startswith(UNIX):
            return [RunningServer.at_socket(Path(entry.removeprefix(UNIX)))]
        try:
            host, port = host_and_port(entry)
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, ValueError) as error:
            raise BackendError(f"{entry}: {getattr(error, 'strerror', None) or error}") from error
        families = {family for family, *_ in found}
        family = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
        addresses = sorted({(str(at[0]), int(at[1])) for of, *_, at in found if of == family})
        return [self._server(entry, host, address, alone=len(addresses) == 1) for address in addresses]

    def _server(self, entry: str, host: str, address: tuple[str, int], *, alone: bool) -> RunningServer:
        from kvtier_serve.operators.access import token_of  # loads a web framework, which --help does not need

        ip, port = address
        name = entry if alone else f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"
        try:
            token = self.settings.token.value if self.settings.token else token_of(ip)
        except (ContractError, OSError) as error:
            raise BackendError(f"{entry}: {error}") from error
        return RunningServer.at_address(
            name, host, address, self._tls, token=token, patience=float(self.settings.patience)
        )

    def _in_file(self) -> list[str]:
        """The servers in the file. Raises BackendError."""
        file = self.settings.file
        if file is None:
            return []
        try:
            lines = [each.partition("#")[0].strip() for each in file.read_text("utf-8").splitlines()]
        except (OSError, ValueError) as error:
            raise BackendError(f"cannot read {file}: {error}") from error
        return list(filter(None, lines))

    def _at_once(self, calls: Mapping[str, Callable[[], T]]) -> tuple[dict[str, T], dict[str, BackendError]]:
        """The results of calls that are made on threads, and the errors of others, by name and in their order."""
        waiting: SimpleQueue[tuple[str, Callable[[], T]]] = SimpleQueue()
        for call in calls.items():
            waiting.put(call)
        results: dict[str, T | BackendError] = {}

        def work() -> None:
            while True:
                try:
                    name, call = waiting.get_nowait()
                except Empty:
                    return
                try:
                    results[name] = call()
                except BackendError as error:
                    results[name] = error

        threads = [run_aside(work, f"fleet-{number}") for number in range(min(len(calls), _AT_ONCE))]
        patience = float(self.settings.patience)
        deadline = time.monotonic() + patience * math.ceil(len(calls) / _AT_ONCE)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        ended = {**results}
        found: dict[str, T] = {}
        errors: dict[str, BackendError] = {}
        for name in calls:
            result = ended.get(name, BackendError(f"{name}: no answer within {patience:g} s"))
            if isinstance(result, BackendError):
                errors[name] = result
            else:
                found[name] = result
        return found, errors


def of_form(form: Any, told: Any, name: str) -> Any:
    try:
        return msgspec.convert(told, form)
    except msgspec.ValidationError as error:
        why = f"the answer cannot be read: {error}; the server may be of another release"
        raise BackendError(f"{name}: {why}") from error


def _trusting(authority: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=str(authority))
    except OSError as error:
        raise BackendError(f"cannot use the authority {authority}: {error}") from error
