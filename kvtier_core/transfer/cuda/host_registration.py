"""Page-locks an arena's slots for CUDA in the background, piece by piece on a thread, beginning with the first slot."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Mapping

import attrs

from kvtier_core.errors import BackendError
from kvtier_core.transfer.io_pool import IOPool, Outcome, run
from kvtier_core.types import Nbytes

#: Bytes that are page-locked at a time. Meanwhile the driver holds a lock that launches need: some 3 ms for 32 MiB, at
#: the 0.1 s a GB that others have measured. A multiple of every size of pages that a kernel may have.
PIECE_NBYTES = 32 << 20
#: After each piece the thread leaves the driver to the engine for so many times as long as the piece took.
_PAUSE = 1.0
_FOREVER = 1e6  # seconds


@attrs.frozen
class Pieces:
    """What is page-locked of ``nbytes`` from ``address`` on: all, or of every ``stride`` bytes the first few."""

    address: int
    nbytes: int
    piece_nbytes: int = PIECE_NBYTES  #: of one piece
    stride: int = PIECE_NBYTES  #: from the beginning of a piece to that of the next

    def nbytes_in(self, nbytes: int) -> Nbytes:
        """How much of the first ``nbytes`` is page-locked."""
        before, rest = divmod(min(nbytes, self.nbytes), self.stride)
        return Nbytes(before * self.piece_nbytes + min(rest, self.piece_nbytes))


class HostRegistration:
    """Page-locks pieces of memory, one after the other.

    Those that begin in the first ``at_once`` bytes are locked before the constructor returns, which raises BackendError
    if that fails; a thread locks the others. ``lock`` takes an address and bytes, ``unlock`` an address; both raise
    BackendError. No page of the system is in two pieces. Methods are called on the thread that enqueues the engine's
    work.
    """

    def __init__(
        self,
        pieces: Pieces,
        lock: Callable[[int, int], object],
        unlock: Callable[[int], object],
        at_once: int = 1,
        pause: Callable[[float], object] = time.sleep,
    ):
        self.movers = 0  #: that use it, see `share`
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
        self._pool.submit_store(self._lock_rest, self._note_problem)

    def facts(self) -> Mapping[str, str]:
        """How much is page-locked, in plain words."""
        self._pool.step()
        whole, done = (self._pieces.nbytes_in(nbytes) for nbytes in (self._pieces.nbytes, self.end - self.base))
        return {"page-locked": f"{whole} -> {done}" + (f" ({self._problem})" if self._problem else "")}

    def close(self) -> None:
        """Unlock all. Called when no copy is under way; may be called twice."""
        self._closing = True
        self._pool.close(_FOREVER)
        self._pool.step()
        self._unlock_all()

    def _lock_rest(self) -> None:
        """Lock the remaining pieces, on the thread."""
        while self.end < self._whole and not self._closing:
            begun = time.monotonic()
            self._lock_next()
            self._pause(_PAUSE * (time.monotonic() - begun))

    def _lock_next(self) -> None:
        self._lock(self.end, min(self._whole - self.end, self._pieces.piece_nbytes))
        self.end = min(self._whole, self.end + self.stride)

    def _unlock_all(self) -> None:
        for begin in range(self.base, self.end, self.stride):
            run(lambda begin=begin: self._unlock(begin))
        self.end = self.base

    def _note_problem(self, outcome: Outcome) -> None:
        if outcome.error is not None:
            self._problem = str(outcome.error)


#: No memory of a process can be registered twice.
_shared: dict[Pieces, HostRegistration] = {}


def share(
    pieces: Pieces, at_once: int, lock: Callable[[int, int], object], unlock: Callable[[int], object]
) -> HostRegistration:
    """The registration of these pieces for one more mover of this process, which gives it back with `release`.

    Raises BackendError if not even those in the first ``at_once`` bytes can be page-locked.
    """
    registration = _shared.get(pieces) or HostRegistration(pieces, lock, unlock, at_once)
    _shared[pieces] = registration
    registration.movers += 1
    return registration


def release(registration: HostRegistration) -> None:
    """A mover's copies have ended and it needs the memory no more. What nobody needs is unlocked."""
    registration.movers -= 1
    if registration.movers:
        return
    for key in [key for key, each in _shared.items() if each is registration]:
        del _shared[key]
    registration.close()
