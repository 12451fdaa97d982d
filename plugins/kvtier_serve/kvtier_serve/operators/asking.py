"""What an operator asks of a running server: at its Unix socket, or at an address, with its token."""

from __future__ import annotations

import functools
import http.client
import json
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvtier_core.errors import BackendError
from kvtier_core.outside import LONGEST_PATH, printable

#: Seconds that a server may take for an answer. After two, it reports by itself that it cannot answer.
PATIENCE = 9.0
#: The most bytes of an answer.
_LONGEST = 256 << 20
_BESIDE = "is kvtier serve running, as this user? Pass the server's socket with --socket"

_Connect = Callable[[float], socket.socket]


class RunningServer:
    """A running server, as its operator. Threads may ask at the same time."""

    def __init__(
        self,
        name: str,
        connect: _Connect,
        *,
        host: str = "localhost",
        token: str = "",
        patience: float = PATIENCE,
        hint: str = "",
    ):
        """``connect`` opens a connection with this time-out in seconds; ``hint`` is for who gets no answer."""
        self.name = name
        self._host = host
        self._connect = connect
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._patience = patience
        self._hint = hint

    @classmethod
    def at_socket(cls, path: Path) -> RunningServer:
        """The one whose operators' socket this is."""
        return cls(str(path), functools.partial(_connect_to_socket, path), hint=f"; {_BESIDE}")

    @classmethod
    def at_address(
        cls, name: str, host: str, address: tuple[str, int], tls: ssl.SSLContext | None, *, token: str, patience: float
    ) -> RunningServer:
        """The one at this IP address and port; with TLS, its certificate is for ``host``."""
        connect = functools.partial(_connect_to_address, host, address, tls)
        return cls(name, connect, host=name, token=token, patience=patience)

    def look(self) -> dict[str, Any]:
        """The status, with the tenants. Raises BackendError."""
        return {**self.ask("GET", "/status"), "tenants": self.ask("GET", "/tenants")}

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """The server's answer. Raises BackendError if there is none, or if it refuses."""
        connection = _Connection(self._host, self._connect, self._patience)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), self._headers)
            with connection.getresponse() as answer:  # which may have taken the socket over
                is_known = answer.status != http.HTTPStatus.NOT_FOUND
                told = _printable(json.loads(answer.read(_LONGEST))) if is_known else {}
        except TimeoutError as error:
            raise BackendError(
                f"{self.name}: no answer within {self._patience:g} s: the server is stopped or hanging"
            ) from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            why = printable(str(error), LONGEST_PATH)
            raise BackendError(f"{self.name}: no server answers: {why}{self._hint}") from error
        finally:
            connection.close()
        if not is_known:
            raise BackendError(f"{self.name}: the server does not know {method} {path}; it may be of another release")
        if answer.status != http.HTTPStatus.OK:
            reason = told.get("error") if isinstance(told, dict) else None
            raise BackendError(f"{self.name}: {reason or f'status {answer.status}'}")
        return told


def _printable(told: Any) -> Any:
    """An answer with text that a terminal may show."""
    if isinstance(told, dict):
        return {printable(name, LONGEST_PATH): _printable(value) for name, value in told.items()}
    if isinstance(told, list):
        return [_printable(each) for each in told]
    return printable(told, LONGEST_PATH) if isinstance(told, str) else told


def host_and_port(address: str) -> tuple[str, int]:
    """Of an address that is written as HOST:PORT or [::1]:PORT. Raises ValueError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 1 << 16:
        raise ValueError(f"{address!r} is not an address; write one such as 127.0.0.1:8100")
    return host.strip("[]"), int(port)


class _Connection(http.client.HTTPConnection):
    def __init__(self, host: str, connect: _Connect, patience: float):
        super().__init__(host, timeout=patience)
        self._connect = connect

    def connect(self) -> None:
        assert self.timeout is not None
        self.sock = self._connect(self.timeout)


def _connect_to_socket(path: Path, patience: float) -> socket.socket:
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connected.settimeout(patience)
        connected.connect(str(path))
    except BaseException:
        connected.close()
        raise
    return connected


def _connect_to_address(
    host: str, address: tuple[str, int], tls: ssl.SSLContext | None, patience: float
) -> socket.socket:
    connected = socket.create_connection(address, patience)
    return tls.wrap_socket(connected, server_hostname=host) if tls else connected
