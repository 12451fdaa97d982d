"""Page-locking of an arena behind the engine's back: piece after piece, on a thread, from the first slot on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

import torch

from kvtier_core.errors import BackendError
from kvtier_core.transfer.io_pool import IOPool, Outcome, run
from kvtier_core.types import Nbytes

#: What is locked at a time, about: CUDA lets nobody else in meanwhile.
_PIECE = 256 << 20
_FOREVER = 1e6  # seconds
_PORTABLE_MAPPED = 1 | 2  # cudaHostRegisterPortable, cudaHostRegisterMapped


class Lock(Protocol):
    def covers(self, slots: Collection[int]) -> bool: ...
    def facts(self) -> Mapping[str, str]: ...
    def close(self) -> None: ...


class NoLock:
    """Where the device reads host memory as it is."""

    def covers(self, slots: Collection[int]) -> bool:
        return True

    def facts(self) -> Mapping[str, str]:
        return {}

    def close(self) -> None: ...


class HostRegistration:
    """Raises BackendError if not even the first piece can be locked.

    A piece is whole slots, so that no copy ever reaches from one piece into another. ``register`` and ``unregister``
    take an address (and bytes) and raise BackendError.
    """

    def __init__(
        self,
        address: int,
        slots: int,
        slot_nbytes: int,
        register: Callable[[int, int], object],
        unregister: Callable[[int], object],
        piece_nbytes: int = _PIECE,
    ):
        self._address, self._slots, self._slot_nbytes = address, slots, slot_nbytes
        self._register, self._unregister = register, unregister
        self._per_piece = max(1, piece_nbytes // slot_nbytes)
        self._locked = 0  # slots; after the first piece the thread's alone to change
        self._closing = False
        self._problem = ""
        self._lock_next()
        self._pool = IOPool("lock")
        self._pool.submit_store(self._lock_rest, self._ended)

    def covers(self, slots: Collection[int]) -> bool:
        return max(slots, default=-1) < self._locked

    def facts(self) -> Mapping[str, str]:
        self._pool.step()
        whole, done = (Nbytes(count * self._slot_nbytes) for count in (self._slots, self._locked))
        return {"page-locked": f"{whole} -> {done}" + (f" ({self._problem})" if self._problem else "")}

    def close(self) -> None:
        """May be called twice. Nobody copies any more."""
        self._closing = True
        self._pool.close(_FOREVER)
        self._pool.step()
        for first in range(0, self._locked, self._per_piece):
            run(lambda first=first: self._unregister(self._address + first * self._slot_nbytes))
        self._locked = 0

    def _lock_rest(self) -> None:
        """On the thread."""
        while self._locked < self._slots and not self._closing:
            self._lock_next()

    def _lock_next(self) -> None:
        first, end = self._locked, min(self._slots, self._locked + self._per_piece)
        self._register(self._address + first * self._slot_nbytes, (end - first) * self._slot_nbytes)
        self._locked = end

    def _ended(self, outcome: Outcome) -> None:
        if outcome.error is not None:
            self._problem = str(outcome.error)


def cuda_lock(address: int, slots: int, slot_nbytes: int, device: torch.device) -> HostRegistration:
    cudart = torch.cuda.cudart()  # the engine's own runtime

    def register(address: int, nbytes: int) -> None:
        torch.cuda.set_device(device)  # of this thread, which else would wake up another GPU
        error = cudart.cudaHostRegister(address, nbytes, _PORTABLE_MAPPED)
        if int(error):
            raise BackendError(
                f"cannot page-lock {Nbytes(nbytes)} of the arena: {cudart.cudaGetErrorString(error)}; "
                "does `ulimit -l` or the container forbid it?",
                retryable=False,
            )

    return HostRegistration(address, slots, slot_nbytes, register, cudart.cudaHostUnregister)
