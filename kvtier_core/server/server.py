"""The server: one thread that owns all stacks, and a Unix socket on which engines ask it."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import selectors
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import attrs

from kvtier_core.config.model import StackConfig
from kvtier_core.errors import KvtierError
from kvtier_core.forks import ProcessBound
from kvtier_core.server.connection import Closed, Connection, credentials, peer_process
from kvtier_core.server.protocol import DONE, NAMES, REFUSED, Header, Opened, Opening, ProtocolError, arguments, encode
from kvtier_core.server.sessions import Session
from kvtier_core.server.spaces import Spaces
from kvtier_core.server.tenants import UNBOUNDED, Quota
from kvtier_core.storekit import owner_socket
from kvtier_core.transfer.io_pool import run
from kvtier_core.types import Namespace

logger = logging.getLogger("kvtier")

T = TypeVar("T")

#: Connections that wait in the kernel's queue.
_BACKLOG = 128
#: Seconds between two looks at the stacks when nothing happens: breakers close, calls hang.
_IDLE = 0.1
#: Seconds without accepting, after that has failed: there may be no descriptor left.
_REST = 0.5


@attrs.define(eq=False)
class _Peer:
    """A process of an engine that is connected."""

    connection: Connection
    process: int  #: a descriptor that becomes readable when it has ended
    pid: int
    session: Session | None = None  #: of a scheduler side
    attached: Session | None = None  #: whose arenas this worker has mapped
    closed: bool = False


class Server(ProcessBound):
    """Serves from `open` to `close`. One thread calls every method but `wake` and `stop`."""

    def __init__(self, config: StackConfig, path: Path, quota: Quota = UNBOUNDED):
        """``quota`` is that of each tenant. Raises ConfigError, and OSError if the socket cannot be had."""
        self.boot = secrets.randbits(63) | 1
        self.path = path
        self._wake_up = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = False
        self._questions: deque[Callable[[], None]] = deque()
        self._peers: set[_Peer] = set()
        self.sessions: dict[int, Session] = {}
        self._last_session = 0
        self._accepts_at = 0.0
        with contextlib.ExitStack() as closing:
            closing.callback(os.close, self._wake_up)
            self.spaces = Spaces(config, self.wake, quota, self.boot)
            closing.callback(self.spaces.close, 0.0)
            self._listener = owner_socket.listen(path, _BACKLOG)
            closing.pop_all()
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_up, selectors.EVENT_READ, self._woken)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def wake(self) -> None:
        """Look at the stacks now. Any thread may call this."""
        with contextlib.suppress(OSError):  # it is closed
            os.eventfd_write(self._wake_up, 1)

    def ask(self, work: Callable[[], T]) -> Future[T]:
        """Have the owner's thread do something between two calls. Any thread may call this."""
        future: Future[T] = Future()

        def answer() -> None:
            outcome = run(work)
            if not future.set_running_or_notify_cancel():
                return
            if outcome.error is not None:
                future.set_exception(outcome.error)
            else:
                future.set_result(outcome.value)

        self._questions.append(answer)
        self.wake()
        return future

    def stop(self) -> None:
        """End `serve`. Any thread, or a signal handler, may call this."""
        self._stopping = True
        self.wake()

    def serve(self) -> None:
        """Serve until `stop`."""
        while not self._stopping:
            self.turn(_IDLE)

    def turn(self, timeout: float) -> bool:
        """Wait for calls, at most ``timeout`` seconds; answer them and step the stacks. False if there were none."""
        ready = self._selector.select(timeout)
        for key, events in ready:
            key.data(events)
        while self._questions:
            self._questions.popleft()()
        self.spaces.step()
        self._listen_again()
        return bool(ready)

    def close(self, timeout: float) -> None:
        """Hang up, and give writes under way ``timeout`` seconds. Engines go on without the tiers."""
        self._listener.close()
        for peer in list(self._peers):
            self._hang_up(peer, "")
            self._forget(peer)
        self.spaces.close(timeout)
        self._selector.close()
        os.close(self._wake_up)

    # -- connections -----------------------------------------------------------------------------------

    def _woken(self, events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_up)

    def _accept(self, events: int) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # it stays readable: without a rest this thread would do nothing else
            logger.warning("kvtier: no connection can be accepted: %s", error.strerror)
            self._selector.unregister(self._listener)
            self._accepts_at = time.monotonic() + _REST
            return
        with contextlib.ExitStack() as closing:
            closing.callback(sock.close)
            try:
                pid, user, _ = credentials(sock)
                if user != os.getuid():
                    line = "kvtier: process %d of user %d was refused; engines and server run as the same user"
                    logger.warning(line, pid, user)
                    return
                process = peer_process(sock)
                closing.callback(os.close, process)
                peer = _Peer(Connection(sock), process, pid)
            except (OSError, ProtocolError) as error:
                logger.warning("kvtier: a connection was refused: %s", error)
                return
            closing.pop_all()
        self._peers.add(peer)
        self._selector.register(peer.connection, selectors.EVENT_READ, lambda events: self._serve(peer, events))
        self._selector.register(process, selectors.EVENT_READ, lambda events: self._ended(peer))

    def _listen_again(self) -> None:
        if self._accepts_at and time.monotonic() >= self._accepts_at:
            self._accepts_at = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _serve(self, peer: _Peer, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                peer.connection.flush()
            if events & selectors.EVENT_READ:
                for header, body in peer.connection.receive():
                    self._answer(peer, header, body)
            if not peer.closed:
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.connection.has_unsent else 0)
                if self._selector.get_key(peer.connection).events != wanted:
                    self._selector.modify(peer.connection, wanted, self._selector.get_key(peer.connection).data)
        except Closed:
            self._hang_up(peer, "")
        except ProtocolError as error:
            self._hang_up(peer, str(error))

    def _hang_up(self, peer: _Peer, why: str) -> None:
        """Close a connection. What its process may still touch stays as it is until the process has ended."""
        if peer.closed:
            return
        peer.closed = True
        if why:
            logger.warning("kvtier: process %d is not served any more: %s", peer.pid, why)
        self._selector.unregister(peer.connection)
        peer.connection.close()
        if peer.session:
            peer.session.hang_up()
            self._end_if_over(peer.session)
        if not peer.attached:
            self._forget(peer)

    def _ended(self, peer: _Peer) -> None:
        """The process has ended. The calls that it had sent are still answered."""
        if not peer.closed:
            self._serve(peer, selectors.EVENT_READ)
        self._hang_up(peer, "")
        self._detach(peer)
        self._forget(peer)

    def _forget(self, peer: _Peer) -> None:
        if peer in self._peers:
            self._peers.remove(peer)
            self._selector.unregister(peer.process)
            os.close(peer.process)

    def _detach(self, peer: _Peer) -> None:
        session, peer.attached = peer.attached, None
        if session:
            session.workers.discard(peer)
            self._end_if_over(session)

    def _end_if_over(self, session: Session) -> None:
        if session.is_over and self.sessions.pop(session.number, None):
            held = session.held
            session.end()
            logger.info("kvtier: session %d of %s has ended; it held %d", session.number, session.name, held)

    # -- calls -----------------------------------------------------------------------------------------

    def _answer(self, peer: _Peer, header: Header, body: bytes) -> None:
        """Every request gets an answer, also one that is not understood."""
        descriptors: list[int] = []
        try:
            name = NAMES.get(header.call, "")
            if not name:
                raise ProtocolError(f"there is no call {header.call}")
            result = self._call(peer, name)(*arguments(name, body))
            if name == "attach":
                result, descriptors = result
            kind, answer = DONE, encode(result)
        except KvtierError as error:
            kind, answer = REFUSED, encode(str(error))
        except Exception as error:  # a bug of ours, or of a plugin: it costs one call, and not the cache of a node
            logger.exception("kvtier: a call of process %d failed", peer.pid)
            kind, answer = REFUSED, encode(f"{type(error).__name__}: {error}")
        epoch = peer.session.epoch if peer.session else 0
        with contextlib.suppress(Closed):  # it is gone; its other calls are processed nevertheless
            peer.connection.send(Header(len(answer), header.number, kind, epoch, self.boot), answer, descriptors)

    def _call(self, peer: _Peer, name: str) -> Callable[..., Any]:
        own = {
            "open": self._open,
            "invalidate_all": self._renew,
            "attach": self._attach,
            "attached": lambda peer: None,
            "detach": self._detach,
        }.get(name)
        if own is not None:
            return functools.partial(own, peer)
        if peer.session is None:
            raise ProtocolError(f"{name} before open")
        return getattr(peer.session, name)

    def _open(self, peer: _Peer, opening: Opening) -> Opened:
        if peer.session is not None:
            raise ProtocolError("a connection has one session")
        space = self.spaces.open(opening)
        self._last_session += 1
        session = peer.session = self.sessions[self._last_session] = Session(self._last_session, opening, space)
        logger.info("kvtier: session %d: %s, process %d", session.number, session.name, peer.pid)
        return session.opened()

    def _renew(self, peer: _Peer, namespace: Namespace) -> Opened:
        if peer.session is None:
            raise ProtocolError("invalidate_all before open")
        self.spaces.renew(peer.session, namespace)
        return peer.session.opened()

    def _attach(self, peer: _Peer, number: int, arena: int, rank: int) -> tuple[tuple[int, int], list[int]]:
        session = self.sessions.get(number)
        if session is None or not 0 <= arena < len(self.spaces.memories):
            raise ProtocolError(f"session {number} has ended, or has no arena {arena}")
        if peer.attached not in (None, session):
            raise ProtocolError("a connection attaches the arenas of one session")
        peer.attached = session
        session.workers.add(peer)
        logger.info("kvtier: session %d: rank %d, process %d, has arena %d", number, rank, peer.pid, arena)
        memory = self.spaces.memories[arena]
        return (self.boot if memory.journal else 0, memory.nbytes), [memory.backend.descriptor]
