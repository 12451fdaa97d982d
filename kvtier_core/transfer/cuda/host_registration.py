"""Page-locks an arena's slots for CUDA in the background, piece by piece on a thread, from the first slot on."""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Callable, Mapping

import attrs

from kvtier_core.errors import BackendError
from kvtier_core.forks import ProcessBound
from kvtier_core.transfer.io_pool import IOPool, run
from kvtier_core.types import Nbytes

#: Bytes that are page-locked at a time. Meanwhile the driver holds a lock that launches need: 2 ms for 32 MiB on an
#: H100. A multiple of every page size of the kernel.
PIECE_NBYTES = 32 << 20
#: After each piece the thread pauses for this many times as long as the piece took, for the engine to use the driver.
_PAUSE = 1.0
#: Seconds until a piece that could not be locked is tried again, the first time and at most.
_FIRST_RETRY, _LAST_RETRY = 0.1, 10.0
_RETRY_STEP = 0.1  #: seconds between checks for closing meanwhile
_FOREVER = 1e6  # seconds

logger = logging.getLogger("kvtier")


@attrs.frozen
class Pieces:
    """The ranges to page-lock in ``nbytes`` from ``address`` on: all, or the first bytes of each ``stride``."""

    address: int
    nbytes: int
    piece_nbytes: int = PIECE_NBYTES  #: of one piece
    stride: int = PIECE_NBYTES  #: from one piece to the next

    def nbytes_in(self, nbytes: int) -> Nbytes:
        """How much of the first ``nbytes`` is to be page-locked."""
        before, rest = divmod(min(nbytes, self.nbytes), self.stride)
        return Nbytes(before * self.piece_nbytes + min(rest, self.piece_nbytes))


class HostRegistration(ProcessBound):
    """Page-locks pieces of memory, one after the other.

    The constructor locks the pieces that begin in the first ``at_once`` bytes, and raises BackendError if that fails; a
    thread locks the others, and retries after failures. ``lock`` takes an address and a length, ``unlock`` an address;
    both raise BackendError. No page of the system is in two pieces. Methods are called on the thread that enqueues the
    engine's work.
    """

    def __init__(
        self,
        pieces: Pieces,
        lock: Callable[[int, int], object],
        unlock: Callable[[int], object],
        at_once: int = 1,
        pause: Callable[[float], object] = time.sleep,
    ):
        self.movers = 0  #: number that use it, see `share`
        self.base = pieces.address // mmap.PAGESIZE * mmap.PAGESIZE  #: where the first piece begins
        self.stride = pieces.stride
        self._pieces = pieces
        self._whole = -(-(pieces.address + pieces.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._lock, self._unlock, self._pause = lock, unlock, pause
        self.end = self.base  #: where the next piece begins; after the first one only the thread changes it
        self._closing = False
        self._problem = ""
        try:
            while self.end < min(self._whole, pieces.address + at_once):
                self._lock_next()
        except BackendError:
            self._unlock_all()
            raise
        self._pool = IOPool("page-lock")
        self._pool.submit_store(self._lock_rest, lambda outcome: None)

    def facts(self) -> Mapping[str, str]:
        """How much is page-locked, in plain words."""
        whole, done = (self._pieces.nbytes_in(nbytes) for nbytes in (self._pieces.nbytes, self.end - self.base))
        return {"page-locked": f"{whole} -> {done}" + (f" ({self._problem})" if self._problem else "")}

    def close(self) -> None:
        """Unlock everything. Called when no copy is under way; may be called twice."""
        self._closing = True
        self._pool.close(_FOREVER)
        self._pool.step()
        self._unlock_all()

    def _lock_rest(self) -> None:
        """Lock the remaining pieces, on the thread."""
        retry = _FIRST_RETRY
        while self.end < self._whole and not self._closing:
            begun = time.monotonic()
            error = run(self._lock_next).error
            if error is None:
                retry, self._problem = _FIRST_RETRY, ""
                self._pause(_PAUSE * (time.monotonic() - begun))
                continue
            if not self._problem:
                said = f"{self.facts()['page-locked']}: what is not locked is not used; it is tried again: {error}"
                logger.warning("kvtier: memory cannot be page-locked: %s", said)
            self._problem = str(error)
            for _ in range(round(retry / _RETRY_STEP)):
                if not self._closing:
                    self._pause(_RETRY_STEP)
            retry = min(_LAST_RETRY, 2 * retry)
        if not self._closing:
            logger.info("kvtier: page-locking has ended: %s", self.facts()["page-locked"])

    def _lock_next(self) -> None:
        self._lock(self.end, min(self._whole - self.end, self._pieces.piece_nbytes))
        self.end = min(self._whole, self.end + self.stride)

    def _unlock_all(self) -> None:
        for begin in range(self.base, self.end, self.stride):
            run(lambda begin=begin: self._unlock(begin))
        self.end = self.base


#: A process cannot register the same memory twice.
_shared: dict[Pieces, HostRegistration] = {}


def share(
    pieces: Pieces, at_once: int, lock: Callable[[int, int], object], unlock: Callable[[int], object]
) -> HostRegistration:
    """The registration of these pieces, for one more mover of this process. `release` follows.

    Raises BackendError if the pieces in the first ``at_once`` bytes cannot be page-locked.
    """
    registration = _shared.get(pieces) or HostRegistration(pieces, lock, unlock, at_once)
    _shared[pieces] = registration
    registration.movers += 1
    return registration


def release(registration: HostRegistration) -> None:
    """A mover's copies have ended and it no longer needs the memory. Unlock it if no mover does."""
    registration.movers -= 1
    if registration.movers:
        return
    for key in [key for key, each in _shared.items() if each is registration]:
        del _shared[key]
    registration.close()
