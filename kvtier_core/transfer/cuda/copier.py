"""Copies whole chunks to slots and back on two streams, with kvtier's own library."""

from __future__ import annotations

from array import array
from collections.abc import Mapping

from kvtier_core.transfer.cuda.autotune import Choice
from kvtier_core.transfer.cuda.checksums import StoreChecksums
from kvtier_core.transfer.cuda.library import Direction, NativePart, Sums


class Copier:
    """Copies the part ``name`` of chunks with the method chosen for each direction.

    Both methods enqueue and return immediately, on the thread that enqueues the engine's work. ``blocks`` holds the
    block ids of all chunks of a job, see `page_lists.CheckedJob`, and ``slots`` a slot for each; the caller has checked
    that all of them exist. Both raise BackendError, possibly after a part of the job.
    """

    def __init__(self, name: str, part: NativePart, store: Choice, load: Choice, checksums: StoreChecksums):
        self._name = name
        self._part = part
        self._store, self._load = store, load
        self.checksums = checksums  #: of the shards that `gather` copies, with the flags of packed ones

    def gather(self, blocks: array[int], slots: array[int], through: Direction, sums: Sums | None = None) -> None:
        """Copy pages to slots: ``kernels`` orders the reads of pages, ``bus`` the writes of slots.

        ``sums``: see `NativePart.copy`.
        """
        self._part.copy(self._store.method, True, blocks, slots, through, sums)

    def scatter(self, blocks: array[int], slots: array[int], through: Direction, sums: Sums | None = None) -> None:
        """Copy slots to pages, finally on ``kernels``. ``sums``: see `NativePart.copy`."""
        self._part.copy(self._load.method, False, blocks, slots, through, sums)

    def facts(self) -> Mapping[str, str]:
        """How copies are made, in plain words."""
        return {
            f"stores of {self._name}": str(self._store),
            f"checksums of {self._name}": self.checksums.fact,
            f"loads of {self._name}": str(self._load),
        }
