"""Copies whole chunks to slots and back on two streams, by kvtier's own library."""

from __future__ import annotations

from array import array
from collections.abc import Mapping

from kvtier_core.transfer.cuda.autotune import Choice
from kvtier_core.transfer.cuda.checksums import StoreChecksums
from kvtier_core.transfer.cuda.library import Direction, NativePart, Sums


class Copier:
    """Copies one ``part`` of chunks, called ``name``, as was chosen for each direction.

    Both methods enqueue and return at once, on the thread that enqueues the engine's work. ``blocks`` are the block ids
    of all chunks of a job, see `page_lists.CheckedJob`, and ``slots`` a slot for each; the caller has checked that all
    of them exist. Raise BackendError, perhaps half-way.
    """

    def __init__(self, name: str, part: NativePart, store: Choice, load: Choice, checksums: StoreChecksums):
        self._name = name
        self._part = part
        self._store, self._load = store, load
        self.checksums = checksums  #: of what `gather` copies, and what is told of packed shards

    def gather(self, blocks: array[int], slots: array[int], through: Direction, sums: Sums | None = None) -> None:
        """Copy pages to slots: pages are read in the order of ``kernels``, slots written in that of ``bus``.

        ``sums``: see `NativePart.copy`.
        """
        self._part.copy(self._store.method, True, blocks, slots, through, sums)

    def scatter(self, blocks: array[int], slots: array[int], through: Direction, sums: Sums | None = None) -> None:
        """Copy slots to pages, which are there when ``kernels`` has done it. ``sums``: see `NativePart.copy`."""
        self._part.copy(self._load.method, False, blocks, slots, through, sums)

    def facts(self) -> Mapping[str, str]:
        """How copies are made, in plain words."""
        return {
            f"stores of {self._name}": str(self._store),
            f"checksums of {self._name}": self.checksums.fact,
            f"loads of {self._name}": str(self._load),
        }

    def close(self) -> None:
        """Free its resources. Called after all copies have ended."""
        self._part.close()
