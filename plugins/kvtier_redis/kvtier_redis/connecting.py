"""Opens connections with redis-py: TCP, TLS or a Unix socket, logged in. Keeps those that are not in use."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import attrs
import redis
from redis.backoff import NoBackoff
from redis.connection import AbstractConnection
from redis.exceptions import RedisClusterException
from redis.retry import Retry

from kvtier_core.errors import BackendError
from kvtier_core.outside import printable
from kvtier_redis.link import Deadline, Link, ServerError
from kvtier_redis.settings import RedisSettings

_PORT = 6379
#: Number of idle connections to one server that are kept. A tier uses one for each of its threads.
_MOST_IDLE = 64
#: Errors of redis-py for an answer that no Redis gives.
_PUZZLED = (ValueError, TypeError, LookupError, AttributeError, MemoryError)
#: All errors of redis-py.
FAILURES = (redis.RedisError, RedisClusterException, OSError, *_PUZZLED)
#: A call has its deadline, and the tier decides when to ask again.
NO_RETRY = Retry(NoBackoff(), 0)


class Address(NamedTuple):
    """The address of a server."""

    host: str  #: or the path of its Unix socket
    port: int  #: 0 for a Unix socket

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
    """Opens connections as the settings define."""

    login: Mapping[str, str | None] = attrs.field(repr=False)  #: user and password, the password alone, or nothing
    db: int
    tls: Mapping[str, Any]  #: options of TLS for redis-py; empty: no TLS

    @classmethod
    def of(cls, settings: RedisSettings) -> Dialer:
        """Reads the password, and looks for the files of TLS. Raises BackendError."""
        parts = urlsplit(settings.url)
        login: dict[str, str | None] = {}
        if settings.password is not None or settings.username:  # a user may have no password: `nopass`
            password = settings.password.value if settings.password is not None else None
            login = {"username": settings.username or None, "password": password}
        database = "" if parts.scheme == "unix" else parts.path.strip("/")
        return cls(login, int(database or 0), _tls(settings) if parts.scheme == "rediss" else {})

    def options(self, deadline: Deadline) -> dict[str, Any]:
        """Options of every connection, as redis-py names them. Each wait for the server ends by the deadline."""
        left = deadline.left()
        unasked = {"protocol": 2, "driver_info": None}  # no HELLO and no CLIENT SETINFO: an ACL need not allow them
        return {"socket_timeout": left, "socket_connect_timeout": left, **unasked, **self.tls}

    def open(self, address: Address, deadline: Deadline) -> Link:
        """A connection to a server that accepted user and password. Raises BackendError and what is in FAILURES."""
        connection = self._connection(address, deadline)
        try:
            connection.connect()
            return Link(connection, deadline)
        except BaseException:
            connection.disconnect()
            raise

    def _connection(self, address: Address, deadline: Deadline) -> AbstractConnection:
        options = {**self.options(deadline), **self.login, "db": self.db, "retry": NO_RETRY}
        if not address.port:
            # Only a type checker believes that it is abstract: it has no host.
            return redis.UnixDomainSocketConnection(path=address.host, **options)  # type: ignore[abstract]
        kind = redis.SSLConnection if self.tls else redis.Connection
        return kind(host=address.host, port=address.port, socket_keepalive=True, **options)


def _tls(settings: RedisSettings) -> dict[str, Any]:
    files = {"ssl_ca_certs": settings.ca, "ssl_certfile": settings.cert, "ssl_keyfile": settings.key}
    for path in filter(None, files.values()):
        if not path.is_file():
            raise BackendError(f"{path}: file does not exist")
    required = "required" if settings.verify else "none"
    return {**files, "ssl_cert_reqs": required, "ssl_check_hostname": settings.verify}


class Links:
    """Open connections, each in use by one thread at a time. All methods may be called on any thread."""

    def __init__(self, dialer: Dialer):
        self.dialer = dialer
        self._idle: dict[Address, list[Link]] = defaultdict(list)
        self._closed = False
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def borrow(self, address: Address, deadline: Deadline) -> Iterator[Link]:
        """A connection until the end of the context. Raises BackendError for any failure there.

        It is used again if every answer was received, even if it is an error.
        """
        link = None
        try:
            link = self._waiting(address) or self.dialer.open(address, deadline)
            link.deadline = deadline
            yield link
            if link.waiting:
                raise BackendError("no answer was received")
        except BaseException as error:
            if link is not None and isinstance(error, ServerError) and not link.waiting:
                self._give_back(address, link)
            else:
                self._drop(address, link)
            raise named(address, error) from error
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


def named(where: object, error: BaseException) -> BaseException:
    """The error to raise for an error of the connection, of redis-py, or of a peer that cannot be understood."""
    error = _innermost(error)
    code = getattr(error, "status_code", None)  # redis-py takes it from the front of the server's message
    if code or isinstance(error, redis.ResponseError):
        error = ServerError(f"{code} {error}" if code else str(error))
    if isinstance(error, ServerError):
        return ServerError(str(error), where=str(where), code=error.code)
    if isinstance(error, (TimeoutError, redis.TimeoutError)):
        return BackendError(f"{where}: no answer in time")
    if isinstance(error, (BackendError, *FAILURES)):
        return BackendError(f"{where}: {printable(getattr(error, 'strerror', None) or str(error))}")
    return error


def _innermost(error: BaseException) -> BaseException:
    """The cause of an error, without the address and the guesses that redis-py adds."""
    wrappers = (redis.ConnectionError, redis.TimeoutError, RedisClusterException)
    while type(error) in wrappers and (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return error
