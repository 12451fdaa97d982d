"""Copies whole chunks to slots and back on two streams, by kvtier's own library."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Protocol

from kvtier_core.transfer.cuda.autotune import Choice
from kvtier_core.transfer.cuda.library import Direction, NativePart


class Copier(Protocol):
    """Enqueues copies and returns at once. Called on the thread that enqueues the engine's work.

    Rows are flat, see `page_lists.Layer`. The caller has checked that all blocks and slots exist.
    """

    def gather(self, rows: Sequence[Sequence[int]], slots: Sequence[int], through: Direction) -> None:
        """Copy pages to slots. Pages are read in the order of ``kernels``, slots written in that of ``bus``."""

    def scatter(self, rows: Sequence[Sequence[int]], slots: Sequence[int], through: Direction) -> None:
        """Copy slots to pages. The pages are there when ``kernels`` has done it."""

    def facts(self) -> Mapping[str, str]:
        """The method of copying, in plain words."""

    def close(self) -> None:
        """Free its resources. Called after all copies have ended."""


class NativeCopier:
    """Copies one ``part`` of chunks, called ``name``, as was chosen for each direction."""

    def __init__(self, name: str, part: NativePart, store: Choice, load: Choice):
        self._name = name
        self._part = part
        self._store, self._load = store, load

    def gather(self, rows: Sequence[Sequence[int]], slots: Sequence[int], through: Direction) -> None:
        self._copy(self._store, True, rows, slots, through)

    def scatter(self, rows: Sequence[Sequence[int]], slots: Sequence[int], through: Direction) -> None:
        self._copy(self._load, False, rows, slots, through)

    def facts(self) -> Mapping[str, str]:
        return {f"stores of {self._name}": str(self._store), f"loads of {self._name}": str(self._load)}

    def close(self) -> None:
        self._part.close()

    def _copy(
        self, choice: Choice, to_slots: bool, rows: Sequence[Sequence[int]], slots: Sequence[int], through: Direction
    ) -> None:
        self._part.copy(choice.method, to_slots, array("i", chain.from_iterable(rows)), array("i", slots), through)
