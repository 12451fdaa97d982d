"""Page-locks an arena's slots for CUDA in the background, piece by piece on a thread, from the first slot on."""

from __future__ import annotations

import functools
import logging
import mmap
import threading
import time
from collections.abc import Callable, Mapping

import attrs

from kvtier_core.errors import BackendError
from kvtier_core.forks import ProcessBound
from kvtier_core.types import Nbytes
from kvtier_core.work.io_pool import run, run_aside

#: Bytes that are page-locked at a time. Meanwhile the driver holds a lock that launches need: 2 ms for 32 MiB on an
#: H100. A multiple of every page size of the kernel.
PIECE_NBYTES = 32 << 20
#: After each piece a thread pauses for this many times as long as the piece took, for the engine to use the driver.
_PAUSE = 1.0
#: Seconds until a piece that could not be locked is tried again, the first time and at most.
_FIRST_RETRY, _LAST_RETRY = 0.1, 10.0

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


def page_tables(nbytes: int) -> Nbytes:
    """GPU memory for the page tables of page-locked memory: 8 bytes for 4 KiB, as measured with 8 GiB on an H100."""
    return Nbytes(nbytes // 512)


class HostRegistration(ProcessBound):
    """Page-locks pieces of memory, one after the other.

    The constructor locks the pieces that begin in the first ``at_once`` bytes, and raises BackendError if that fails; a
    thread locks the others, and retries after failures. ``lock`` takes an address and a length, ``unlock`` an address;
    both raise BackendError. ``keep`` is referenced until all is unlocked: the memory must stay mapped. No page of the
    system is in two pieces. Methods are called on the thread that enqueues the engine's work.
    """

    def __init__(
        self,
        pieces: Pieces,
        lock: Callable[[int, int], object],
        unlock: Callable[[int], object],
        at_once: int = 1,
        keep: object = None,
        pause: Callable[[float], object] | None = None,
    ):
        self.movers = 0  #: number that use it, see `share`
        self.base = pieces.address // mmap.PAGESIZE * mmap.PAGESIZE  #: address of the first piece
        self.stride = pieces.stride
        self.pieces = pieces
        self._whole = -(-(pieces.address + pieces.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._lock, self._unlock, self._keep = lock, unlock, keep
        self.end = self.base  #: address of the next piece; after the first one only the thread changes it
        self._closing = threading.Event()
        self._pause = pause or self._closing.wait
        self._problem = ""
        try:
            while self.end < min(self._whole, pieces.address + at_once):
                self._lock_next()
        except BackendError:
            self._unlock_all()
            raise
        self._locking = run_aside(self._lock_rest, "page-lock")

    def facts(self) -> Mapping[str, str]:
        """How much is page-locked, in plain words."""
        whole, done = (self.pieces.nbytes_in(nbytes) for nbytes in (self.pieces.nbytes, self.end - self.base))
        locked = f"{whole} -> {done}" + (f" ({self._problem})" if self._problem else "")
        return {"page-locked": locked, "GPU memory for page-locking": f"about {page_tables(whole)}"}

    def close(self) -> threading.Thread:
        """Unlock everything, on a thread of its own. Called once, when no copy is under way.

        The engine goes on meanwhile, and the process does not end before: 512 GiB are 16 000 calls of the driver.
        """
        self._closing.set()
        return run_aside(self._end_locking, "unlock", daemon=False)

    def _lock_rest(self) -> None:
        """Lock the remaining pieces, on the thread."""
        retry = _FIRST_RETRY
        while self.end < self._whole and not self._closing.is_set():
            begun = time.monotonic()
            error = run(self._lock_next).error
            if error is None:
                retry, self._problem = _FIRST_RETRY, ""
                self._pause(_PAUSE * (time.monotonic() - begun))
                continue
            if not self._problem:
                said = f"{self.facts()['page-locked']}: unlocked memory is not used; retrying: {error}"
                logger.warning("kvtier: cannot page-lock memory: %s", said)
            self._problem = str(error)
            self._pause(retry)
            retry = min(_LAST_RETRY, 2 * retry)
        if not self._closing.is_set():
            logger.info("kvtier: page-locking has finished: %s", self.facts()["page-locked"])

    def _end_locking(self) -> None:
        self._locking.join()
        self._unlock_all()

    def _lock_next(self) -> None:
        self._lock(self.end, min(self._whole - self.end, self.pieces.piece_nbytes))
        self.end = min(self._whole, self.end + self.stride)

    def _unlock_all(self) -> None:
        for begin in range(self.base, self.end, self.stride):
            begun = time.monotonic()
            run(functools.partial(self._unlock, begin))
            time.sleep(_PAUSE * (time.monotonic() - begun))
        self.end, self._keep = self.base, None


#: A process cannot register the same memory twice.
_shared: dict[Pieces, HostRegistration] = {}
_unlocking: dict[Pieces, threading.Thread] = {}


def share(
    pieces: Pieces, at_once: int, lock: Callable[[int, int], object], unlock: Callable[[int], object], keep: object
) -> HostRegistration:
    """The registration of these pieces, for one more mover of this process. `release` follows.

    Raises BackendError if the pieces in the first ``at_once`` bytes cannot be page-locked.
    """
    if pieces in _unlocking:
        _unlocking.pop(pieces).join()
    registration = _shared.get(pieces) or HostRegistration(pieces, lock, unlock, at_once, keep)
    _shared[pieces] = registration
    registration.movers += 1
    return registration


def release(registration: HostRegistration) -> None:
    """A mover's copies have ended and it no longer needs the memory. Unlock it if no mover does."""
    registration.movers -= 1
    if not registration.movers:
        del _shared[registration.pieces]
        _unlocking[registration.pieces] = registration.close()
