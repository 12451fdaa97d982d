"""Shows the frames of this process to other nodes: a thread that listens, one that keeps the digests, and one for each
connection.

Nothing is pinned in memory. A slot may be used again while its frame is sent, so the table is checked again when all of
the frame has been copied: if it no longer shows the same view, the other side is told to discard what it received. A
frame that only a store has is read from there first.
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
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import attrs

from kvtier_core.errors import BackendError
from kvtier_core.interfaces import StoredFrames
from kvtier_core.types import ChunkKey
from kvtier_core.work.io_pool import run_aside
from kvtier_peers.digest import Digest, Memory, Source
from kvtier_peers.link import TRIED, TRIED_NBYTES, Door, Following, Link
from kvtier_peers.settings import Address
from kvtier_peers.threads import started

logger = logging.getLogger("kvtier")

#: The most connections at a time, each with a thread: each engine of a large fleet has a few. And the most of them that
#: may be of strangers, which have not proved anything yet.
_MOST_CONNECTIONS, _MOST_STRANGERS = 1024, 128
#: Seconds for which a refused connection keeps its place, so that strangers cost at most 128 proofs a second.
_PENALTY = 1.0
#: The most reasons for refusals that are logged.
_MOST_CAUSES = 16
#: Connections that wait to be accepted.
_BACKLOG = 128
#: Seconds to pause when a connection could not be accepted: there may be no descriptor for the next one.
_REST = 0.01

#: Seconds between two looks at what is shown: changes are reported by then. Longer if there are many connections, so
#: that at most this number of messages a second leave this node, at about 50 µs each; and so long that looking takes at
#: most this share of the time: 2.5 ms for 32 768 chunks.
_PACE, _MOST_MESSAGES, _LOOKING = 0.05, 1000.0, 0.05
#: Seconds that a question about changes may wait: then an answer shows the other side that this one is there.
_LONGEST_WAIT = 60.0

_ZEROS = memoryview(bytes(TRIED_NBYTES))


@attrs.frozen(eq=False)
class Shown:
    """The frames that the stack of one namespace shows."""

    namespace: bytes
    sealed: Mapping[ChunkKey, memoryview]  #: in memory
    stored: Sequence[StoredFrames]  #: in stores; may grow
    copied: deque[ChunkKey]  #: grows by each frame in memory that a peer has copied
    _memory: Memory = attrs.field(init=False, default=attrs.Factory(lambda self: Memory(self.sealed), takes_self=True))

    @property
    def sources(self) -> list[Source]:
        """The sources of their digest."""
        return [self._memory, *self.stored]


_listeners: dict[Address, Listener] = {}  # of this process: stacks of several namespaces share one
_lock = threading.Lock()
os.register_at_fork(after_in_child=_listeners.clear)  # a fork has none of their threads


def listen(address: Address, door: Door, shown: Shown) -> Listener:
    """Show these frames at ``address``. Call `Listener.hide` at the end. Raises BackendError."""
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
        self._links: dict[Link, bytes] = {}  # and the namespace of the other side
        self._causes: set[str] = set()  # of refusals, that are logged
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
            raise BackendError(f"{address}: {why}; each engine on a machine needs its own port") from error
        try:
            if not door.opens_to(self._sock.getsockname()[0]):
                raise BackendError(f"{address}: sharing frames beyond loopback needs a token or TLS")
        except BackendError:
            self._sock.close()
            raise
        self._threads: list[threading.Thread] = []
        try:
            for work, name in ((self._accept, "peers-listen"), (self._look_again, "peers-look")):
                self._threads.append(run_aside(work, name))
        except RuntimeError as error:
            self._close()
            self._sock.close()
            raise BackendError(f"{address}: {error}; raise the process limit") from error

    def hide(self, shown: Shown) -> None:
        """Stop showing these frames. Returns when no thread looks at any. The last stack closes the listener."""
        with _lock:
            self.shown = [each for each in self.shown if each is not shown]
            if not self.shown and not self._ended.is_set():
                del _listeners[self._address]
                self._close()
        if not self._of(shown.namespace):
            for link, namespace in list(self._links.items()):
                if namespace == shown.namespace:
                    link.hang_up()
        with self._changed:
            before = set(self._looks)
            self._changed.wait_for(lambda: before.isdisjoint(self._looks))

    def _close(self) -> None:
        """End all threads. Each closes its own socket: the number of a closed one may soon be used again."""
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
                sock, address = self._sock.accept()
            except OSError:
                time.sleep(_REST)
                continue
            strangers = len(self._accepted) - len(self._links)
            if len(self._accepted) >= _MOST_CONNECTIONS or strangers >= _MOST_STRANGERS:
                sock.close()
                continue
            self._accepted.add(sock)
            if not started(functools.partial(self._serve, sock, address[0]), "peer"):
                self._accepted.discard(sock)
                sock.close()
        self._sock.close()

    def _serve(self, sock: socket.socket, host: str) -> None:
        """Answer one node until it hangs up, or fails."""
        with contextlib.ExitStack() as closing:
            closing.callback(self._accepted.discard, sock)
            try:
                link, namespace = self.door.admit(sock)
            except (OSError, BackendError) as error:
                self._not_let_in(host, str(error))
                return
            closing.callback(link.close)
            try:
                self._links[link] = namespace
                closing.callback(self._links.pop, link)
                digest = self._digest(namespace)
                while self.shown:
                    self._answer(link, digest)
            except (EOFError, OSError, BackendError) as error:
                logger.debug("kvtier: peers: a connection ended: %s", error)

    def _not_let_in(self, host: str, why: str) -> None:
        if why not in self._causes and len(self._causes) < _MOST_CAUSES:
            self._causes.add(why)
            logger.warning("kvtier: peers: %s is refused: %s; logged once", host, why.removeprefix("it: "))
        self._ended.wait(_PENALTY)

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
                    is_whole = self._find(namespace, key) is frame
                    link.showed(is_whole)
                    if is_whole:
                        for shown in self._of(namespace):
                            shown.copied.append(key)
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
        """The digest for all who follow this namespace."""
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
        """Keep the memory of what is found in the context until its end."""
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
    """Seconds between two looks, with ``connections`` connections, if one look takes ``looked`` seconds."""
    return max(_PACE, connections / _MOST_MESSAGES, looked / _LOOKING)
