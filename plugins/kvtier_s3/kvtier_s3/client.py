"""Many requests at once, on the thread that asks. Each is tried again while that may help and the call has time."""

from __future__ import annotations

import contextlib
import heapq
import math
import random
import selectors
import ssl
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence

import attrs

from kvtier_core.errors import BackendError
from kvtier_s3.errors import StoreDown, Untrusted
from kvtier_s3.http import Connection, Endpoint, HttpError, Request, Response, Steps
from kvtier_s3.signing import Signer

_AGAIN = {429, 500, 502, 503, 504}  #: the store may well answer otherwise the next time
_ATTEMPTS = 5
_FIRST_PAUSE, _LAST_PAUSE = 0.05, 1.0  # seconds; each pause is random, and twice as long as the one before at most


class Client:
    """Speaks to one store over kept connections. May be used on several threads."""

    def __init__(self, endpoint: Endpoint, signer: Signer, width: int):
        """``width`` requests of one `exchange` are in flight at a time."""
        self.endpoint = endpoint
        self.width = width
        self._signer = signer
        self._idle: deque[Connection] = deque()
        self._closed = False
        self._local = threading.local()

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """What this thread asks for inside ends after so many seconds."""
        outer = self._deadline
        self._local.deadline = min(outer, time.monotonic() + seconds)
        try:
            yield
        finally:
            self._local.deadline = outer

    @property
    def remaining(self) -> float:
        """Seconds that this thread's call may still take."""
        return max(0.0, self._deadline - time.monotonic())

    def exchange(self, requests: Sequence[Request]) -> list[Response | StoreDown]:
        """The response to each request, or why there is none. Raises BackendError if nothing can be asked."""
        if self._closed:
            raise BackendError(f"{self.endpoint.authority}: the tier is closed")
        if not requests:
            return []
        with selectors.DefaultSelector() as selector:
            return _Exchange(self, selector, requests, self._deadline).run()

    def pause(self, seconds: float) -> None:
        """Wait for at most so many seconds, at random. Raises StoreDown if the call's time is up."""
        if time.monotonic() + seconds > self._deadline:
            raise StoreDown(f"{self.endpoint.authority}: not done in time")
        time.sleep(random.uniform(0, seconds))

    def close(self) -> None:
        """Close the connections. No exchange is under way."""
        self._closed = True
        self.forget_idle()

    def head_of(self, request: Request) -> bytes:
        """The request line and the signed headers, as they are sent. Raises BackendError."""
        target = f"{request.path}?{request.query}" if request.query else request.path
        headers = self._signer.signed(request, self.endpoint.authority)
        lines = [f"{request.method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        if request.body or request.method in ("PUT", "POST"):
            lines.append(f"content-length: {len(request.body)}")
        return "\r\n".join([*lines, "\r\n"]).encode()

    def connection(self) -> Connection:
        """An idle connection, or a new one."""
        with contextlib.suppress(IndexError):
            while True:
                connection = self._idle.pop()
                if connection.silent():
                    return connection
                connection.close()
        return Connection(self.endpoint)

    def keep(self, connection: Connection) -> None:
        """Use the connection for another request if possible."""
        if connection.open and not self._closed:
            self._idle.append(connection)
        else:
            connection.close()

    def forget_idle(self) -> None:
        """Close the connections that nobody uses now."""
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().close()

    @property
    def _deadline(self) -> float:
        return getattr(self._local, "deadline", math.inf)


@attrs.define(eq=False)
class _Talk:
    """One attempt at one request."""

    number: int
    connection: Connection
    steps: Steps[Response]
    waits_for: int = 0


class _Exchange:
    """The requests of one call, driven to their ends."""

    def __init__(self, client: Client, selector: selectors.BaseSelector, requests: Sequence[Request], deadline: float):
        self._client = client
        self._selector = selector
        self._requests = requests
        self._deadline = deadline
        self._due = [(0.0, number) for number in range(len(requests))]  # a heap: when, and which request
        self._attempts = [0] * len(requests)
        self._talks: set[_Talk] = set()
        self._answers: list[Response | StoreDown | None] = [None] * len(requests)

    def run(self) -> list[Response | StoreDown]:
        try:
            while (self._due or self._talks) and (now := time.monotonic()) < self._deadline:
                self._begin(now)  # may end some, too
                for ready, _ in self._selector.select(self._patience()):
                    self._advance(ready.data)
        finally:
            for talk in self._talks:
                talk.steps.close()
                talk.connection.close()
        late = StoreDown(f"{self._client.endpoint.authority}: no answer in time")
        return [answer or late for answer in self._answers]

    def _begin(self, now: float) -> None:
        while self._due and self._due[0][0] <= now and len(self._talks) < self._client.width:
            _, number = heapq.heappop(self._due)
            request = self._requests[number]
            head, connection = self._client.head_of(request), self._client.connection()
            talk = _Talk(number, connection, connection.exchange(head, request))
            self._talks.add(talk)
            self._advance(talk)

    def _patience(self) -> float | None:
        """Seconds until something is to be done even if no connection is ready; None: whenever one is."""
        if not self._due and not self._talks:
            return 0.0
        waiting = self._due and len(self._talks) < self._client.width
        until = min(self._due[0][0], self._deadline) if waiting else self._deadline
        return None if until == math.inf else max(0.0, until - time.monotonic())

    def _advance(self, talk: _Talk) -> None:
        try:
            waits_for = next(talk.steps)
        except StopIteration as ended:
            self._end(talk)
            self._take(talk, ended.value)
        except (OSError, HttpError) as error:
            self._end(talk)
            self._fail(talk, error)
        else:
            if not talk.waits_for:
                self._selector.register(talk.connection, waits_for, talk)
            elif talk.waits_for != waits_for:
                self._selector.modify(talk.connection, waits_for, talk)
            talk.waits_for = waits_for

    def _end(self, talk: _Talk) -> None:
        self._talks.remove(talk)
        if talk.waits_for:
            self._selector.unregister(talk.connection)

    def _take(self, talk: _Talk, response: Response) -> None:
        self._client.keep(talk.connection)
        if response.status not in _AGAIN or not self._again(talk.number):
            self._answers[talk.number] = response

    def _fail(self, talk: _Talk, error: Exception) -> None:
        talk.connection.close()
        why = f"{self._client.endpoint.authority}: {getattr(error, 'strerror', None) or error}"
        if isinstance(error, ssl.SSLCertVerificationError):
            self._answers[talk.number] = Untrusted(why)
        elif (
            talk.connection.reused
        ):  # the store may have closed it since: that is no failure, and true of the others too
            self._client.forget_idle()
            heapq.heappush(self._due, (0.0, talk.number))
        elif not self._again(talk.number):
            self._answers[talk.number] = StoreDown(why)

    def _again(self, number: int) -> bool:
        """Try the request again after a while, if it has not been tried too often."""
        self._attempts[number] += 1
        if self._attempts[number] == _ATTEMPTS:
            return False
        longest = min(_LAST_PAUSE, _FIRST_PAUSE * 2 ** self._attempts[number])
        heapq.heappush(self._due, (time.monotonic() + random.uniform(0, longest), number))
        return True
