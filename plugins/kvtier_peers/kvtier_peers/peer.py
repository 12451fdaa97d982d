"""Another node: the connections to it, and when it is left alone."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Iterator, Sequence

from kvtier_core.errors import BackendError
from kvtier_core.types import ChunkKey
from kvtier_peers.link import TRIED, TRIED_NBYTES, VERSION, Door, Link, failure
from kvtier_peers.settings import Address
from kvtier_peers.table import DigestTable
from kvtier_peers.threads import started

logger = logging.getLogger("kvtier")

#: Seconds for which a peer is left alone after a failure: twice as long each time, up to the second number.
_REST, _LONGEST_REST = 1.0, 60.0
#: Seconds after which a peer reports that nothing has changed; one that does not is left alone.
_SILENCE = 5.0
#: Weight of the last read in the mean time per byte; and seconds without a read after which only half of the mean
#: counts, so that a link that was slow is tried again.
_NEWEST, _FORGETS = 0.25, 60.0
#: Seconds between two questions for changes, even if each is answered immediately.
_PACE = 0.02


class Peer:
    """All methods may be called on any thread. Failures of a connection count against the peer."""

    def __init__(self, address: Address, door: Door, own: bytes, digests: DigestTable[Peer]):
        """``own`` is the number of this node."""
        self.address = address
        self.state = "not met yet"  #: for people
        self._door = door
        self._own = own
        self._idle: list[Link] = []
        self._lock = threading.Lock()
        self._seconds, self._nbytes, self._read_at = 0.0, 0.0, 0.0  # means of recent reads, and when the last one ended
        self._digests = digests
        self._followed: Link | None = None  # on which its digest comes
        self._number: int | None = None  # for that digest
        self._boot = b""  # whose digest that is
        self._connected = False  # has it shown its digest, and not failed since?
        self._connecting = False
        self._closed = False
        self._failures = 0
        self._rests_until = 0.0

    def is_there(self) -> bool:
        """May it be read from? If not, a connection begins, unless it is left alone; no caller waits for that."""
        with self._lock:
            if not (self._connected or self._connecting or self._closed) and time.monotonic() >= self._rests_until:
                self._rests_until = time.monotonic() + _REST
                self._connecting = started(self._connect, "peers-connect") is not None
            return self._connected

    def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview], ends: float) -> Iterator[int]:
        """For each key, the bytes of its frame, once that is received; 0 if the peer no longer has it.

        Raises BackendError.
        """
        begun, total = time.monotonic(), 0
        try:
            link = self._link(ends)
            with self._watched(link):
                link.request(keys, list(map(len, into)))
            for view in into:
                with self._watched(link):
                    nbytes = link.frame(view)
                total += nbytes
                yield nbytes
            self._give_back(link)
        finally:
            self._read_at = time.monotonic()
            self._seconds += _NEWEST * (self._read_at - begun - self._seconds)
            self._nbytes += _NEWEST * (total - self._nbytes)

    def seconds_per_byte(self) -> float:
        """A recent mean; 0 if it was not read from. Reads that bring nothing cost, too."""
        believed = math.exp2((self._read_at - time.monotonic()) / _FORGETS)
        return believed * self._seconds / max(1.0, self._nbytes)

    def blame(self) -> None:
        """Count a damaged frame that it sent as a failure."""
        self._failed(BackendError(f"{self.address}: it sent a damaged frame"))

    def trial(self, ends: float) -> str:
        """How fast it answers, for people; or why it does not."""
        empty, frame = memoryview(b""), memoryview(bytearray(TRIED_NBYTES))
        try:
            seconds = []
            for into in (empty, empty, frame):  # the first may connect, the second only answers
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
                    raise BackendError(
                        f"{self.address}: it is a different engine that has not yet announced its chunks"
                    )
            except BackendError as error:
                self._failed(error)
                raise
        link.until(ends)
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
        """On its own thread: follow what it shows, until it fails or is closed."""
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
            if self._followed is link:  # has no other thread noticed?
                self._failed(failure(self.address, error))

    def _follow(self, link: Link, boot: bytes) -> None:
        """Until it fails. Each connection begins with the whole digest, which is useless once it has ended."""
        changes = link.follow(0, _SILENCE)
        with self._lock:
            if self._followed is not link:
                return
            number = self._number = self._digests.enter(self)
        version = self._digests.apply(number, changes)
        with self._lock:
            if self._followed is not link:
                return
            self._connected, self._connecting, self._failures = True, False, 0
            self._boot = boot
            self.state = "shares its frames"
        logger.info("kvtier: peers: %s shares its frames", self.address)
        while self._followed is link:
            begun = time.monotonic()
            version = self._digests.apply(number, link.follow(version, _SILENCE))
            time.sleep(max(0.0, begun + _PACE - time.monotonic()))

    def _failed(self, error: BackendError) -> None:
        with self._lock:
            is_new = not self._failures
            self._connected = self._connecting = False
            self._rests_until = time.monotonic() + min(_REST * 2**self._failures, _LONGEST_REST)
            self._failures += 1
            self.state = str(error).removeprefix(f"{self.address}: ")
            self._hang_up()
        if is_new:
            logger.warning("kvtier: peers: %s; it is not asked for a while", error)

    def _hang_up(self) -> None:
        """Call it with the lock held."""
        while self._idle:
            self._idle.pop().close()
        followed, self._followed = self._followed, None
        if followed:
            followed.hang_up()
        number, self._number = self._number, None
        if number is not None:
            self._digests.leave(number)

    def _give_back(self, link: Link) -> None:
        with self._lock:
            if self._connected:
                self._idle.append(link)
                return
        link.close()
