"""Shows the frames of this process to other nodes: a thread that listens, one that keeps the digests, and one for each
connection.

Nothing is pinned in memory. A slot may be used again while its frame is sent, so the table is looked at once more when
all of the frame has been copied: if it does not show the same view any more, the other side is told to forget what it
got. A frame that only a store has is read from there first.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence

import attrs

from kvtier_core.errors import BackendError
from kvtier_core.interfaces import StoredFrames
from kvtier_core.transfer.io_pool import run_aside
from kvtier_core.types import ChunkKey
from kvtier_peers.digest import Digest, Memory, Source
from kvtier_peers.link import TRIED, TRIED_NBYTES, Door, Following, Link
from kvtier_peers.settings import Address

logger = logging.getLogger("kvtier")

#: Connections at a time, those that have not proved anything yet included: each engine of a large fleet has a few.
_MOST_CONNECTIONS = 1024
#: Connections that wait to be accepted.
_BACKLOG = 128
#: Seconds after a connection that could not be accepted: there may be no descriptor for the next one.
_REST = 0.01

#: Seconds between two looks at what is shown: what comes or goes is told by then. Longer if there are many connections,
#: so that no more than so many messages a second leave this node, at some 50 µs each; and so long that looking takes
#: at most so much of the time: 2.5 ms for 32 768 chunks.
_PACE, _MOST_MESSAGES, _LOOKING = 0.05, 1000.0, 0.05
#: Seconds that a question about changes may wait: then the other side hears that this one is there.
_LONGEST_WAIT = 60.0

_ZEROS = memoryview(bytes(TRIED_NBYTES))


@attrs.frozen(eq=False)
class Shown:
    """The frames that the stack of one namespace shows."""

    namespace: bytes
    sealed: Mapping[ChunkKey, memoryview]  #: in memory
    stored: Sequence[StoredFrames]  #: in stores; may grow
    _memory: Memory = attrs.field(init=False, default=attrs.Factory(lambda self: Memory(self.sealed), takes_self=True))

    @property
    def sources(self) -> list[Source]:
        """What their digest is made of."""
        return [self._memory, *self.stored]


_listeners: dict[Address, Listener] = {}  # of this process: stacks of several namespaces share one
_lock = threading.Lock()
os.register_at_fork(after_in_child=_listeners.clear)  # a fork has none of their threads


def listen(address: Address, door: Door, shown: Shown) -> Listener:
    """Show these frames at ``address``. `Listener.hide` follows. Raises BackendError."""
    with _lock:
        listener = _listeners.get(address)
        if listener is None:
            listener = _listeners[address] = Listener(address, door)
        listener.shown.append(shown)
        return listener


class Listener:
    """Use `listen`."""

    def __init__(self, address: Address, door: Door):
        self.shown: list[Shown] = []
        self._address = address
        self.door = door
        self._links: set[Link] = set()
        self._accepted: set[socket.socket] = set()  # that are not closed
        self._looks: set[object] = set()  # one for each thread that looks at a frame
        self._changed = threading.Condition()  # of that
        self._ended = threading.Event()
        self._digests: weakref.WeakValueDictionary[bytes, Digest] = weakref.WeakValueDictionary()  # that are followed
        try:
            family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
            self._sock = socket.create_server(address, family=family, backlog=_BACKLOG)
        except OSError as error:  # of `create_server`, whose text has the address, too
            why = os.strerror(error.errno) if error.errno else error
            raise BackendError(f"{address}: {why}; each engine of a machine needs a port") from error
        try:
            if not door.opens_to(self._sock.getsockname()[0]):
                raise BackendError(f"{address}: frames are shown beyond loopback only with a token or TLS")
        except BackendError:
            self._sock.close()
            raise
        self._threads = [run_aside(self._accept, "peers-listen"), run_aside(self._look_again, "peers-look")]

    def hide(self, shown: Shown) -> None:
        """Show these frames no longer. Returns when no thread looks at one. The last stack closes the listener."""
        with _lock:
            self.shown = [each for each in self.shown if each is not shown]
            if not self.shown and not self._ended.is_set():
                del _listeners[self._address]
                self._close()
        with self._changed:
            before = set(self._looks)
            self._changed.wait_for(lambda: before.isdisjoint(self._looks))

    def _close(self) -> None:
        """End all threads. Each closes its own socket: the number of a closed one may soon be that of another."""
        self._ended.set()
        self._sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for link in list(self._links):
            link.hang_up()
        for digest in list(self._digests.values()):
            digest.end()

    # -- on threads --------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                sock, _ = self._sock.accept()
            except OSError:
                time.sleep(_REST)
                continue
            if len(self._accepted) >= _MOST_CONNECTIONS:
                sock.close()
            else:
                self._accepted.add(sock)
                run_aside(functools.partial(self._serve, sock), "peer")
        self._sock.close()

    def _serve(self, sock: socket.socket) -> None:
        """Answer one node until it hangs up, or fails."""
        with contextlib.ExitStack() as closing:
            closing.callback(self._accepted.discard, sock)
            try:
                link, namespace = self.door.admit(sock)
                closing.callback(link.close)
                self._links.add(link)
                closing.callback(self._links.discard, link)
                digest = self._digest(namespace)
                while self.shown:
                    self._answer(link, digest)
            except (EOFError, OSError, BackendError) as error:
                logger.debug("kvtier: peers: a connection ended: %s", error)

    def _answer(self, link: Link, digest: Digest) -> None:
        question, namespace = link.question(), digest.namespace
        if isinstance(question, Following):
            link.tell(digest.since(question.version, min(question.within, _LONGEST_WAIT)))
            return
        for key, nbytes in zip(question.keys, question.most, strict=True):
            with self._look():
                frame = self._find(namespace, key)
                if frame is not None and len(frame) <= nbytes:
                    link.show(frame)
                    link.showed(self._find(namespace, key) is frame)
                    continue
            self._show_stored(link, namespace, key, nbytes)
        link.end()

    def _show_stored(self, link: Link, namespace: bytes, key: ChunkKey, nbytes: int) -> None:
        """Answer with a frame of a store; with none if no store has it, or if it is longer than ``nbytes``."""
        for stored in [each for shown in self._of(namespace) for each in shown.stored]:
            with stored.frame(key) as frame:
                if frame is not None and len(frame) <= nbytes:
                    link.show(frame)
                    link.showed(True)
                    return
        link.show(None)

    def _look_again(self) -> None:
        wait = pace(0, 0)
        while not self._ended.wait(wait):
            begun = time.monotonic()
            for digest in list(self._digests.values()):
                digest.look()
            wait = pace(len(self._accepted), time.monotonic() - begun)

    def _digest(self, namespace: bytes) -> Digest:
        """That of all who follow this namespace."""
        with self._changed:
            digest = self._digests.get(namespace)
            if digest is None:
                digest = self._digests[namespace] = Digest(namespace, lambda: self._sources(namespace))
            return digest

    def _sources(self, namespace: bytes) -> list[Source]:
        return [source for shown in self._of(namespace) for source in shown.sources]

    def _find(self, namespace: bytes, key: ChunkKey) -> memoryview | None:
        """A frame in memory."""
        found = (shown.sealed.get(key) for shown in self._of(namespace))
        return next((frame for frame in found if frame is not None), _ZEROS if key == TRIED else None)

    def _of(self, namespace: bytes) -> list[Shown]:
        return [shown for shown in self.shown if shown.namespace == namespace]

    @contextlib.contextmanager
    def _look(self) -> Iterator[None]:
        """The memory of what is found in the context stays until its end."""
        look = object()
        with self._changed:
            self._looks.add(look)
        try:
            yield
        finally:
            with self._changed:
                self._looks.remove(look)
                self._changed.notify_all()


def pace(connections: int, looked: float) -> float:
    """Seconds between two looks, with so many connections, where one takes ``looked`` seconds."""
    return max(_PACE, connections / _MOST_MESSAGES, looked / _LOOKING)
