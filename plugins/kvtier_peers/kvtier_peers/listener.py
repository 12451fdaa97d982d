"""Shows the frames of this process to other nodes: a thread that listens, and one for each connection.

Nothing is pinned. A slot may be used again while its frame is sent, so the table is looked at once more when all of the
frame has been copied: if it does not show the same view any more, the other side is told to forget what it got.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping

from kvtier_core.errors import BackendError
from kvtier_core.transfer.io_pool import run_aside
from kvtier_core.types import ChunkKey
from kvtier_peers.link import Door, Link
from kvtier_peers.settings import Address

logger = logging.getLogger("kvtier")

#: Connections at a time, those that have not proved anything yet included: each engine of a large fleet has a few.
_MOST_CONNECTIONS = 1024
#: Connections that wait to be accepted.
_BACKLOG = 128
#: Seconds after a connection that could not be accepted: there may be no descriptor for the next one.
_REST = 0.01

#: The frames that the stack of one namespace shows.
Sealed = Mapping[ChunkKey, memoryview]

_listeners: dict[Address, Listener] = {}  # of this process: stacks of several namespaces share one
_lock = threading.Lock()


def listen(address: Address, door: Door, sealed: Sealed) -> Listener:
    """Show these frames, of the door's namespace, at ``address``. `Listener.hide` follows. Raises BackendError."""
    with _lock:
        listener = _listeners.get(address)
        if listener is None:
            listener = _listeners[address] = Listener(address, door)
        listener.tables.append((door.namespace, sealed))
        return listener


class Listener:
    """Use `listen`."""

    def __init__(self, address: Address, door: Door):
        self.tables: list[tuple[bytes, Sealed]] = []  #: each of a namespace
        self._address = address
        self.door = door
        self._links: set[Link] = set()
        self._accepted: set[socket.socket] = set()  # that are not closed
        self._looks: set[object] = set()  # one for each thread that looks at a frame
        self._changed = threading.Condition()  # of that
        self._ended = False
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
        self._accepting = run_aside(self._accept, "peers-listen")

    def hide(self, sealed: Sealed) -> None:
        """Show these frames no longer. Returns when no thread looks at one. The last stack closes the listener."""
        with _lock:
            self.tables = [table for table in self.tables if table[1] is not sealed]
            if not self.tables and not self._ended:
                del _listeners[self._address]
                self._close()
        with self._changed:
            before = set(self._looks)
            self._changed.wait_for(lambda: before.isdisjoint(self._looks))

    def _close(self) -> None:
        """End all threads. Each closes its own socket: the number of a closed one may soon be that of another."""
        self._ended = True
        self._sock.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        for link in list(self._links):
            link.hang_up()

    # -- on threads --------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._ended:
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
                while self.tables:
                    self._answer(link, namespace)
            except (EOFError, OSError, BackendError) as error:
                logger.debug("kvtier: peers: a connection ended: %s", error)

    def _answer(self, link: Link, namespace: bytes) -> None:
        keys, most = link.question()
        if most is None:
            link.send(bytes(self._find(namespace, key) is not None for key in keys))
            return
        for key, nbytes in zip(keys, most, strict=True):
            with self._look():
                frame = self._find(namespace, key)
                if frame is None or len(frame) > nbytes:
                    link.show(None)
                else:
                    link.show(frame)
                    link.showed(self._find(namespace, key) is frame)
        link.end()

    def _find(self, namespace: bytes, key: ChunkKey) -> memoryview | None:
        found = (sealed.get(key) for each, sealed in self.tables if each == namespace)
        return next((frame for frame in found if frame is not None), None)

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
