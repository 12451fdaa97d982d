"""Another node: the connections to it, and when it is left alone."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Sequence

from kvtier_core.errors import BackendError
from kvtier_core.transfer.io_pool import run_aside
from kvtier_core.types import ChunkKey
from kvtier_peers.digest import Copy, Fingerprint
from kvtier_peers.link import TRIED, TRIED_NBYTES, VERSION, Door, Link, failure
from kvtier_peers.settings import Address

logger = logging.getLogger("kvtier")

#: Seconds for which a peer is left alone when it has failed: twice as long each time, and no longer than this.
_REST, _LONGEST_REST = 1.0, 60.0
#: Seconds after which a peer says that nothing has changed; one that does not is left alone.
_SILENCE = 5.0
#: Weight of the last read in the mean of what a byte takes.
_NEWEST = 0.25


class Peer:
    """All methods may be called on any thread. What fails on a connection counts against the peer."""

    def __init__(self, address: Address, door: Door, own: bytes):
        """``own`` is the number of this node."""
        self.address = address
        self.seconds_per_byte = 0.0  #: of late; 0 until something was read from it
        self.state = "not met yet"  #: for people
        self._door = door
        self._own = own
        self._idle: list[Link] = []
        self._lock = threading.Lock()
        self._copy = Copy()  # of its digest
        self._followed: Link | None = None  # that which it is followed on
        self._boot = b""  # whose digest that is
        self._connected = False  # has it shown its digest, and not failed since?
        self._connecting = False
        self._closed = False
        self._failures = 0
        self._rests_until = 0.0

    def is_there(self) -> bool:
        """May it be read from? If not it is connected to meanwhile, unless it is left alone: nobody waits for that."""
        with self._lock:
            if not (self._connected or self._connecting or self._closed) and time.monotonic() >= self._rests_until:
                self._connecting = True
                run_aside(self._connect, "peers-connect")
            return self._connected

    def shown(self, wanted: set[Fingerprint]) -> set[Fingerprint]:
        """Which of these it shows, or seems to, by its digest."""
        return self._copy.shown(wanted)

    def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview], ends: float) -> Iterator[int]:
        """For each key the bytes of its frame, when it has been received; 0 if the peer has it no more.

        Raises BackendError.
        """
        begun, total = time.monotonic(), 0
        link = self._link(ends)
        with self._watched(link):
            link.request(keys, list(map(len, into)))
        for view in into:
            with self._watched(link):
                nbytes = link.frame(view)
            total += nbytes
            yield nbytes
        self._give_back(link)
        if total:
            taken = (time.monotonic() - begun) / total
            self.seconds_per_byte += (taken - self.seconds_per_byte) * (_NEWEST if self.seconds_per_byte else 1)

    def trial(self, ends: float) -> str:
        """How fast it answers, for people; or why it does not."""
        empty, frame = memoryview(b""), memoryview(bytearray(TRIED_NBYTES))
        try:
            seconds = []
            for into in (empty, empty, frame):  # the first one may connect, the second is a mere answer
                begun = time.monotonic()
                (nbytes,) = self.read([TRIED], [into], ends)
                seconds.append(time.monotonic() - begun)
        except BackendError:
            return self.state
        return f"answers in {seconds[1] * 1e3:.2f} ms, sends {nbytes / seconds[2] / 1e9:.2f} GB/s, protocol {VERSION}"

    def close(self) -> None:
        """Close the connections that are not in use; the others when they are given back."""
        with self._lock:
            self._closed, self._connected = True, False
            self._hang_up()

    def _link(self, ends: float) -> Link:
        with self._lock:
            link = self._idle.pop() if self._idle else None
        if link is None:
            try:
                link, boot = self._door.enter(self.address, ends)
                if boot != self._boot:
                    link.close()
                    raise BackendError(f"{self.address}: it is another one, and has not shown yet what it has")
            except BackendError as error:
                self._failed(error)
                raise
        link.ends = ends
        return link

    @contextlib.contextmanager
    def _watched(self, link: Link) -> Iterator[None]:
        """A connection on which a call fails is closed."""
        try:
            yield
        except (OSError, BackendError) as error:
            link.close()
            told = failure(self.address, error)
            self._failed(told)
            raise told from error

    def _connect(self) -> None:
        """On a thread of its own: follow what it shows, until it fails or is closed."""
        try:
            link, boot = self._door.enter(self.address, time.monotonic() + _REST)
        except BackendError as error:
            self._failed(error)
            return
        if boot == self._own:  # whose memory is nearer
            link.close()
            self.close()
            self.state = "this node"
            return
        with self._lock:
            self._followed = None if self._closed else link
        try:
            self._follow(link, boot)
            link.close()
        except (OSError, BackendError) as error:
            link.close()
            if self._followed is link:  # has nobody else noticed?
                self._failed(failure(self.address, error))

    def _follow(self, link: Link, boot: bytes) -> None:
        """Until it fails. Each connection begins with all of the digest, which is of no use when it has ended."""
        copy = Copy()
        copy.apply(link.follow(0, _SILENCE))
        with self._lock:
            if self._followed is not link:
                return
            self._connected, self._connecting, self._failures = True, False, 0
            self._boot, self._copy = boot, copy
            self.state = "shows its frames"
        logger.info("kvtier: peers: %s shows its frames", self.address)
        while self._followed is link:
            copy.apply(link.follow(copy.version, _SILENCE))

    def _failed(self, error: BackendError) -> None:
        with self._lock:
            is_new = not self._failures
            self._connected = self._connecting = False
            self._rests_until = time.monotonic() + min(_REST * 2**self._failures, _LONGEST_REST)
            self._failures += 1
            self.state = str(error).removeprefix(f"{self.address}: ")
            self._hang_up()
        if is_new:
            logger.warning("kvtier: peers: %s; it is left alone for a while", error)

    def _hang_up(self) -> None:
        """With the lock."""
        while self._idle:
            self._idle.pop().close()
        if self._followed:
            self._followed.hang_up()
        self._followed = None

    def _give_back(self, link: Link) -> None:
        with self._lock:
            if self._connected:
                self._idle.append(link)
                return
        link.close()
