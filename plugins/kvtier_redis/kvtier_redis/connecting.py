"""Opens connections: TCP, TLS or a Unix socket, then AUTH and SELECT. Keeps those that are not in use."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import urlsplit

import attrs

from kvtier_core.errors import BackendError
from kvtier_redis.deadline import Deadline
from kvtier_redis.link import Link, ServerError
from kvtier_redis.settings import RedisSettings

_PORT = 6379
#: Idle connections to one server that are kept. A tier uses one for each of its threads.
_MOST_IDLE = 64


class Address(NamedTuple):
    """Of a server."""

    host: str  #: or the path of its Unix socket
    port: int  #: 0: it is a Unix socket

    def __str__(self) -> str:
        return f"{self.host}:{self.port}" if self.port else self.host


def address_in(url: str) -> Address:
    """The server that a url of the settings names."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return Address(parts.path, 0)
    return Address(parts.hostname or "127.0.0.1", parts.port or _PORT)


@attrs.frozen
class Dialer:
    """Opens connections as the settings say."""

    login: tuple[str, ...] = attrs.field(repr=False)  #: user and password, the password alone, or nothing
    db: int
    tls: ssl.SSLContext | None

    @classmethod
    def of(cls, settings: RedisSettings) -> Dialer:
        """Reads the password and the files of TLS. Raises BackendError."""
        parts = urlsplit(settings.url)
        login = () if settings.password is None else (*filter(None, [settings.username]), settings.password.value)
        database = "" if parts.scheme == "unix" else parts.path.strip("/")
        return cls(login, int(database or 0), _tls(settings) if parts.scheme == "rediss" else None)

    def open(self, address: Address, deadline: Deadline, *, log_in: bool = True) -> Link:
        """A connection to a server that accepted user and password. Raises BackendError and OSError."""
        link = Link(self._socket(address, deadline), deadline)
        try:
            if log_in:
                self.log_in(link)
        except BaseException:
            link.close()
            raise
        return link

    def log_in(self, link: Link) -> None:
        """Say who this is, and choose the database. Raises BackendError and OSError."""
        if self.login:
            link.call("AUTH", *self.login)
        if self.db:
            link.call("SELECT", self.db)

    def _socket(self, address: Address, deadline: Deadline) -> socket.socket:
        sock = _connected(address, deadline)
        try:
            if address.port:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if self.tls is not None:
                sock.settimeout(deadline.left())
                sock = self.tls.wrap_socket(sock, server_hostname=address.host)
        except BaseException:
            sock.close()
            raise
        return sock


def _connected(address: Address, deadline: Deadline) -> socket.socket:
    """A socket that is connected to one of the addresses that the host has."""
    if address.port:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        places = [(family, place) for family, _, _, _, place in found]
    else:
        places = [(socket.AF_UNIX, address.host)]
    failure: OSError | None = None
    for family, place in places:
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(deadline.left())
            sock.connect(place)
        except BaseException as error:
            sock.close()
            if not isinstance(error, OSError):
                raise
            failure = error
        else:
            return sock
    raise failure or OSError("the host has no address")


def _tls(settings: RedisSettings) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=settings.ca)
        if settings.cert is not None:
            context.load_cert_chain(settings.cert, settings.key)
    except OSError as error:  # of ssl, too
        named = ", ".join(str(path) for path in (settings.ca, settings.cert, settings.key) if path is not None)
        raise BackendError(f"{named}: {error.strerror or error}") from error
    if not settings.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


class Links:
    """Open connections, each in use by one thread at a time. All methods may be called on any thread."""

    def __init__(self, dialer: Dialer):
        self.dialer = dialer
        self._idle: dict[Address, list[Link]] = defaultdict(list)
        self._closed = False
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def borrow(self, address: Address, deadline: Deadline) -> Iterator[Link]:
        """A connection until the end of the context. Raises BackendError for whatever fails there.

        It is used again if every answer was received, be it an error.
        """
        link = None
        try:
            link = self._waiting(address) or self.dialer.open(address, deadline)
            link.deadline = deadline
            yield link
            if link.waiting:
                raise BackendError("an answer was not received")
        except BaseException as error:
            if link is not None and isinstance(error, ServerError) and not link.waiting:
                self._give_back(address, link)
            else:
                self._drop(address, link)
            raise _named(address, error) from error
        self._give_back(address, link)

    def close(self) -> None:
        """Close all that are not in use; the others when they are given back. May be called twice."""
        with self._lock:
            self._closed = True
            idle = [link for links in self._idle.values() for link in links]
            self._idle.clear()
        for link in idle:
            link.close()

    def _waiting(self, address: Address) -> Link | None:
        while True:
            with self._lock:
                if self._closed:
                    raise BackendError("the tier is closed")
                links = self._idle[address]
                if not links:
                    return None
                link = links.pop()
            if not link.is_stale:
                return link
            link.close()

    def _give_back(self, address: Address, link: Link) -> None:
        with self._lock:
            if not self._closed and len(self._idle[address]) < _MOST_IDLE:
                self._idle[address].append(link)
                return
        link.close()

    def _drop(self, address: Address, link: Link | None) -> None:
        """Close a connection on which something failed, and the idle ones to the same server: they may be dead, too."""
        with self._lock:
            idle = self._idle.pop(address, [])
        for each in filter(None, [link, *idle]):
            each.close()


def _named(address: Address, error: BaseException) -> BaseException:
    """What to raise for an error: of the connection, or of a peer that cannot be understood."""
    if isinstance(error, TimeoutError):
        return BackendError(f"{address}: no answer in time")
    if isinstance(error, OSError):
        return BackendError(f"{address}: {error.strerror or error}")
    if isinstance(error, ServerError):
        return ServerError(str(error), where=str(address), code=error.code)
    if isinstance(error, BackendError):
        return BackendError(f"{address}: {error}")
    return error
