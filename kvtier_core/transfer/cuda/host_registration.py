"""Page-locks an arena's slots for CUDA in the background, piece by piece on a thread, beginning with the first slot."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

import torch

from kvtier_core.errors import BackendError
from kvtier_core.transfer.io_pool import IOPool, Outcome, run
from kvtier_core.types import Nbytes

#: Approximate bytes registered at a time: meanwhile CUDA blocks every other call of the process.
_PIECE_NBYTES = 256 << 20
_FOREVER = 1e6  # seconds
_PORTABLE_MAPPED = 1 | 2  # cudaHostRegisterPortable, cudaHostRegisterMapped


class Registration(Protocol):
    """Which slots are page-locked. Called on the thread that enqueues the engine's work."""

    def covers(self, slots: Collection[int]) -> bool:
        """Are all of these slots page-locked?"""

    def facts(self) -> Mapping[str, str]:
        """How much is page-locked, in plain words."""

    def close(self) -> None:
        """Unregister all slots. Called when no copy is under way; may be called twice."""


class NoRegistration:
    """For a device that accesses host memory without page-locking."""

    def covers(self, slots: Collection[int]) -> bool:
        return True

    def facts(self) -> Mapping[str, str]:
        return {}

    def close(self) -> None: ...


class HostRegistration:
    """Registers ``slots`` slots of ``slot_nbytes`` from ``address`` on.

    The first piece is registered before the constructor returns, which raises BackendError if that fails; a thread
    registers the rest. A piece is whole slots, so that no copy reaches from one piece into another. ``register`` takes
    an address and bytes, ``unregister`` an address; both raise BackendError. ``piece_nbytes`` is about the size of a
    piece.
    """

    def __init__(
        self,
        address: int,
        slots: int,
        slot_nbytes: int,
        register: Callable[[int, int], object],
        unregister: Callable[[int], object],
        piece_nbytes: int = _PIECE_NBYTES,
    ):
        self._address, self._slots, self._slot_nbytes = address, slots, slot_nbytes
        self._register, self._unregister = register, unregister
        self._per_piece = max(1, piece_nbytes // slot_nbytes)
        self._registered = 0  # slots; after the first piece only the thread changes it
        self._closing = False
        self._problem = ""
        self._register_next()
        self._pool = IOPool("register")
        self._pool.submit_store(self._register_rest, self._note_problem)

    def covers(self, slots: Collection[int]) -> bool:
        return max(slots, default=-1) < self._registered

    def facts(self) -> Mapping[str, str]:
        self._pool.step()
        whole, done = (Nbytes(count * self._slot_nbytes) for count in (self._slots, self._registered))
        return {"page-locked": f"{whole} -> {done}" + (f" ({self._problem})" if self._problem else "")}

    def close(self) -> None:
        self._closing = True
        self._pool.close(_FOREVER)
        self._pool.step()
        for first in range(0, self._registered, self._per_piece):
            run(lambda first=first: self._unregister(self._address + first * self._slot_nbytes))
        self._registered = 0

    def _register_rest(self) -> None:
        """Register the remaining pieces, on the thread."""
        while self._registered < self._slots and not self._closing:
            self._register_next()

    def _register_next(self) -> None:
        first, end = self._registered, min(self._slots, self._registered + self._per_piece)
        self._register(self._address + first * self._slot_nbytes, (end - first) * self._slot_nbytes)
        self._registered = end

    def _note_problem(self, outcome: Outcome) -> None:
        if outcome.error is not None:
            self._problem = str(outcome.error)


def register_with_cuda(address: int, slots: int, slot_nbytes: int, device: torch.device) -> HostRegistration:
    """Registers slots by the engine's own CUDA runtime. Raises BackendError if not even the first piece can be."""
    cudart = torch.cuda.cudart()

    def register(address: int, nbytes: int) -> None:
        torch.cuda.set_device(device)  # the device is set per thread; without this CUDA would initialise another GPU
        error = cudart.cudaHostRegister(address, nbytes, _PORTABLE_MAPPED)
        if int(error):
            raise BackendError(
                f"cannot page-lock {Nbytes(nbytes)} of the arena: {cudart.cudaGetErrorString(error)}; "
                "does `ulimit -l` or the container forbid it?"
            )

    return HostRegistration(address, slots, slot_nbytes, register, cudart.cudaHostUnregister)
