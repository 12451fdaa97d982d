"""The server: one thread that owns all stacks, and a Unix socket on which engines ask it."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import resource
import secrets
import selectors
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import attrs

from kvtier_core.config.model import StackConfig
from kvtier_core.errors import KvtierError
from kvtier_core.forks import ProcessBound
from kvtier_core.outside import LONGEST_PATH, printable
from kvtier_core.storekit import owner_socket
from kvtier_core.telemetry.log_limit import LogLimit
from kvtier_core.types import Namespace
from kvtier_core.work.io_pool import Outcome, Then, Work, run
from kvtier_remote.connection import Closed, Connection, peer_process
from kvtier_remote.protocol import DONE, NAMES, REFUSED, Header, Opened, Opening, ProtocolError, arguments, encode
from kvtier_serve.programs import Programs
from kvtier_serve.quotas import QuotaBook, Quotas
from kvtier_serve.reload import Reload
from kvtier_serve.sessions import Session, Space
from kvtier_serve.spaces import Spaces
from kvtier_serve.tenants import UNBOUNDED, Quota

logger = logging.getLogger("kvtier")

#: Connections that wait in the kernel's queue.
_BACKLOG = 128
#: Seconds between two looks at the stacks when nothing happens: breakers close, calls hang.
_IDLE = 0.1
#: Work of one turn, in bytes of requests, and that of a call besides its arguments. About 2 ms on a slow core.
_WORK, _CALL = 24 << 10, 2 << 10
#: Seconds without accepting, after that has failed: there may be no descriptor left.
_REST = 0.5
#: Open files of this process for each connection that it accepts. That takes two; stores and operators use the others.
_FILES_A_PEER = 4


@attrs.define(eq=False)
class _Peer:
    """A process of an engine that is connected."""

    connection: Connection
    process: int  #: a descriptor that becomes readable when it has ended
    pid: int
    session: Session | None = None  #: of a scheduler side
    attached: Session | None = None  #: whose arenas this worker has mapped
    closed: bool = False
    ended: bool = False  #: has its process ended?
    waits: bool = False  #: for the answer to a call that takes longer than a turn; later calls wait behind it


class Server(ProcessBound):
    """Serves from `open` to `close`. One thread calls every method but `wake` and `stop`."""

    def __init__(self, config: StackConfig, path: Path, quota: Quota = UNBOUNDED, quotas: QuotaBook | None = None):
        """``quota`` is that of each tenant, if there are no other ``quotas``.

        Raises ConfigError, and OSError if the socket is not available.
        """
        self.boot = secrets.randbits(63) | 1
        self.path = path
        self._wake_up = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = False
        self._questions: deque[tuple[Generator[None, None, Any], Future[Any]]] = deque()
        self._peers: set[_Peer] = set()
        self._calling: dict[_Peer, None] = {}  # those that have sent something; the next to be served first
        self.sessions: dict[int, Session] = {}
        self._last_session = 0
        self._accepts_at = 0.0
        self.quotas = quotas or QuotaBook(Quotas(quota))
        self.programs = Programs()
        self.reload: Reload | None = None  #: if it was started from files
        self._most_peers = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _FILES_A_PEER
        self._log = LogLimit(time.monotonic)
        with contextlib.ExitStack() as closing:
            closing.callback(os.close, self._wake_up)
            self.spaces = Spaces(config, self.wake, quota, self.boot, self.quotas.now.key)
            closing.callback(self.spaces.close, 0.0)
            self.quotas.begin(self.spaces)
            self._listener = owner_socket.listen(path, _BACKLOG)
            closing.pop_all()
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_up, selectors.EVENT_READ, self._woken)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    @property
    def connections(self) -> int:
        """The number of processes that are connected."""
        return len(self._peers)

    def wake(self) -> None:
        """Look at the stacks now. Any thread may call this."""
        with contextlib.suppress(OSError):  # it is closed
            os.eventfd_write(self._wake_up, 1)

    def ask(self, work: Callable[[], Any]) -> Future[Any]:
        """Have the owner's thread do something between two calls. Any thread may call this.

        If it is a generator, each of its pieces is done in its own turn. If it is cancelled before its first piece,
        nothing is done.
        """
        future: Future[Any] = Future()
        self._questions.append((_pieces(work), future))
        self.wake()
        return future

    def _do_a_piece(self) -> None:
        pieces, future = self._questions.popleft()
        if not (future.running() or future.set_running_or_notify_cancel()):
            return
        outcome = run(lambda: next(pieces))
        if outcome.error is None:
            self._questions.append((pieces, future))
        elif isinstance(outcome.error, StopIteration):
            future.set_result(outcome.error.value)
        else:
            future.set_exception(outcome.error)

    def stop(self) -> None:
        """End `serve`. Any thread, or a signal handler, may call this."""
        self._stopping = True
        self.wake()

    def serve(self) -> None:
        """Serve until `stop`."""
        while not self._stopping:
            self.turn(_IDLE)

    def turn(self, timeout: float) -> bool:
        """Wait for calls, at most ``timeout`` seconds; answer them and step the stacks. False if there were none.

        A turn does a bounded amount of work. What is left is done in the next ones, with all engines in turn.
        """
        ready = self._selector.select(0.0 if self._calling or self._questions else timeout)
        for key, events in ready:
            if self._selector.get_map().get(key.fd) is key:  # else an event before this one has closed it
                key.data(events)
        work = 0
        while self._calling and work < _WORK:
            peer = next(iter(self._calling))
            del self._calling[peer]
            work += _CALL + self._serve(peer)
        asked = bool(self._questions)
        if asked:
            self._do_a_piece()
        if self.spaces.is_broken:
            self._begin_anew()
        self.spaces.step()
        self._listen_again()
        return bool(ready or work or asked)

    def close(self, timeout: float) -> None:
        """Hang up, end the programs, and give writes under way ``timeout`` seconds. Engines continue without tiers."""
        self.programs.stop()
        self._listener.close()
        self._hang_up_all()
        while self._questions:
            self._do_a_piece()
        self.spaces.close(timeout)
        self._selector.close()
        os.close(self._wake_up)
        self.programs.close()

    def _begin_anew(self) -> None:
        """Forget a memory that is broken, with all engines: they connect and attach again, as to another server."""
        logger.error("kvtier: the memory was truncated or opened to others; everything in memory is lost")
        self._hang_up_all()
        self.boot = secrets.randbits(63) | 1
        self.spaces.begin_anew(self.boot)
        self.quotas.apply(self.quotas.now)

    def _hang_up_all(self) -> None:
        for peer in list(self._peers):
            self._hang_up(peer, "")
            self._forget(peer)
        self.sessions.clear()

    # -- connections -----------------------------------------------------------------------------------

    def _woken(self, events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_up)

    def _accept(self, events: int) -> None:
        if len(self._peers) >= self._most_peers:
            self._rest(f"{self._most_peers} processes are connected, and files are kept for stores")
            return
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            self._rest(error.strerror or str(error))
            return
        with contextlib.ExitStack() as closing:
            closing.callback(sock.close)
            try:
                if whose := owner_socket.stranger(sock):
                    self._warn(f"{whose} was refused", "engines and server run as the same user")
                    return
                process = peer_process(sock)
                closing.callback(os.close, process)
                peer = _Peer(Connection(sock), process, owner_socket.credentials(sock)[0])
            except (OSError, ProtocolError) as error:
                self._warn("a connection was refused", str(error))
                return
            closing.pop_all()
        self._peers.add(peer)
        self._selector.register(peer.connection, selectors.EVENT_READ, lambda events: self._heard(peer, events))
        self._selector.register(process, selectors.EVENT_READ, lambda events: self._ended(peer))

    def _rest(self, why: str) -> None:
        """Stop accepting for a while: the listener stays readable, and this thread would do nothing else."""
        self._warn("no connection is accepted", why)
        self._selector.unregister(self._listener)
        self._accepts_at = time.monotonic() + _REST

    def _warn(self, what: str, why: str) -> None:
        self._log.log(logging.WARNING, "engines", what, why)

    def _listen_again(self) -> None:
        if self._accepts_at and time.monotonic() >= self._accepts_at:
            self._accepts_at = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _heard(self, peer: _Peer, events: int) -> None:
        if events & selectors.EVENT_READ and not peer.waits:
            self._calling[peer] = None
        with self._connected(peer):
            if events & selectors.EVENT_WRITE:
                peer.connection.flush()
            if events & selectors.EVENT_READ and peer.waits:  # to notice its end
                peer.connection.fill()

    def _serve(self, peer: _Peer) -> int:
        """Answer the next call of a process. Returns the length of its arguments."""
        if peer.closed:
            return 0
        body = None
        with self._connected(peer):
            if (message := peer.connection.next()) is not None:
                header, body = message
                self._answer(peer, header, body)
        if peer.ended and (body is None or peer.waits):
            self._bury(peer)
        elif peer.ended:
            self._calling[peer] = None
        return len(body or b"")

    @contextlib.contextmanager
    def _connected(self, peer: _Peer) -> Iterator[None]:
        """Hang up if the connection proves to be unusable; else look at what it has or takes next."""
        try:
            yield
            if peer.closed:
                return
            if not peer.waits and peer.connection.has_message:
                self._calling[peer] = None
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.connection.unsent else 0)
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
            self._warn(f"process {peer.pid} is no longer served", why)
        self._selector.unregister(peer.connection)
        peer.connection.close()
        if peer.session:
            peer.session.hang_up()
            self._end_if_over(peer.session)
        if not peer.attached:
            self._forget(peer)

    def _ended(self, peer: _Peer) -> None:
        """The process has ended. The calls that it had sent are still answered."""
        peer.ended = True
        self._selector.unregister(peer.process)
        if peer.closed or peer.waits:
            self._bury(peer)
        else:
            self._calling[peer] = None

    def _bury(self, peer: _Peer) -> None:
        self._hang_up(peer, "")
        self._detach(peer)
        self._forget(peer)

    def _forget(self, peer: _Peer) -> None:
        if peer in self._peers:
            self._peers.remove(peer)
            if not peer.ended:
                self._selector.unregister(peer.process)
            os.close(peer.process)

    def _detach(self, peer: _Peer) -> None:
        session, peer.attached = peer.attached, None
        if session:
            session.workers.discard(peer)
            self._end_if_over(session)

    def _end_if_over(self, session: Session) -> None:
        if session.is_over and session.number in self.sessions:
            del self.sessions[session.number]
            held = session.held
            self.ask(session.end)
            logger.info("kvtier: session %d of %s has ended; it held %d", session.number, session.name, held)

    # -- calls -----------------------------------------------------------------------------------------

    def _answer(self, peer: _Peer, header: Header, body: bytes) -> None:
        """Every request is answered, even one that is not understood."""
        name = NAMES.get(header.call, "")
        answer = functools.partial(self._reply, peer, header, name)
        long: dict[str, Callable[..., None]] = {"open": self._open, "invalidate_all": self._renew}
        later = long.get(name)
        if later is None:
            answer(run(lambda: self._call(peer, name, header.call)(*arguments(name, body))))
            return
        peer.waits = True
        begun = run(lambda: later(peer, answer, *arguments(name, body)))
        if begun.error is not None:
            answer(begun)

    def _reply(self, peer: _Peer, header: Header, name: str, outcome: Outcome) -> None:
        peer.waits = False
        result, descriptors = outcome.value if name == "attach" and outcome.value else (outcome.value, [])
        answer = run(lambda: encode(result))
        error = outcome.error or answer.error
        if error is not None and not isinstance(error, KvtierError):
            # a bug here, or in a plugin: it costs one call, and not the cache of a node
            logger.error("kvtier: a call from process %d failed", peer.pid, exc_info=error)
            answer = Outcome(encode(f"{type(error).__name__}: {error}"))
        elif error is not None:
            answer = Outcome(encode(str(error)))
        kind = DONE if error is None else REFUSED
        epoch = peer.session.epoch if peer.session else 0
        if not peer.closed:
            with contextlib.suppress(Closed):  # it is gone; its other calls are processed nevertheless
                header = Header(len(answer.value), header.number, kind, epoch, self.boot)
                peer.connection.send(header, answer.value, descriptors)

    def _call(self, peer: _Peer, name: str, number: int) -> Callable[..., Any]:
        own: dict[str, Callable[..., Any]] = {
            "attach": self._attach,
            "attached": lambda peer: None,
            "detach": self._detach,
        }
        if name in own:
            return functools.partial(own[name], peer)
        if not name:
            raise ProtocolError(f"no such call: {number}")
        if peer.session is None:
            raise ProtocolError(f"{name} before open")
        self.spaces.touch(peer.session.space)
        call: Callable[..., Any] = getattr(peer.session, name)
        return call

    def _open(self, peer: _Peer, answer: Then, opening: Opening) -> None:
        if peer.session is not None:
            raise ProtocolError("a connection has one session")
        opening = attrs.evolve(opening, model=printable(opening.model, LONGEST_PATH), engine=printable(opening.engine))

        def opened(outcome: Outcome) -> Opened:
            space = self._space_for(peer, outcome)
            self._last_session += 1
            session = peer.session = self.sessions[self._last_session] = Session(self._last_session, opening, space)
            logger.info("kvtier: session %d: %s, process %d", session.number, session.name, peer.pid)
            return session.opened()

        self.spaces.open(opening, lambda outcome: self._resume(peer, answer, lambda: opened(outcome)))

    def _renew(self, peer: _Peer, answer: Then, namespace: Namespace) -> None:
        if peer.session is None:
            raise ProtocolError("invalidate_all before open")
        session = peer.session

        def renewed(outcome: Outcome) -> Opened:
            if (space := self._space_for(peer, outcome)) is not session.space:
                session.move(space)
            return session.opened()

        self.spaces.renew(session, namespace, lambda outcome: self._resume(peer, answer, lambda: renewed(outcome)))

    def _space_for(self, peer: _Peer, outcome: Outcome) -> Space:
        if outcome.error is not None:
            raise outcome.error
        if peer.closed:
            raise Closed("it has hung up meanwhile")
        space: Space = outcome.value
        self.spaces.touch(space)
        return space

    def _resume(self, peer: _Peer, answer: Then, work: Work) -> None:
        """Answer a call that took longer than a turn, and then those behind it."""
        with self._connected(peer):
            answer(run(work))

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


def try_out(path: Path) -> None:
    """Raise the OSError of a server that cannot listen at ``path``. Nothing is made."""
    owner_socket.listen(path, 1, trial=True).close()


def _pieces(work: Callable[[], Any]) -> Generator[None, None, Any]:
    result = work()
    return (yield from result) if isinstance(result, Generator) else result
