"""Copies whole pages to slots and back by their addresses, both in host memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

from kvtier_core.interfaces import NO_BLOCK
from kvtier_core.native import extension
from kvtier_core.transfer.page_lists import Layer

_Piece = tuple[int, int, int]  # address of pages, address in a slot, bytes


class PlainCopier:
    """Chunks have ``row`` blocks; the shard of slot 0 begins at address ``shard``, the next ``slot_nbytes`` behind it.

    Whoever calls has seen to it that all blocks and slots exist.
    """

    def __init__(self, layers: Sequence[Layer], row: int, shard: int, slot_nbytes: int):
        self._shard = shard
        self._slot_nbytes = slot_nbytes
        self._layers: dict[tuple[int, int], list[tuple[int, int]]] = {}  # by shape, for which spans are shared
        for base, stride, nbytes, offset in layers:
            self._layers.setdefault((stride, nbytes), []).append((base, offset))

    def gather(self, rows: Sequence[Sequence[int]], slots: Sequence[int]) -> Sequence[int]:
        """Pages to slots. The CRC-32 of each slot's shard if it was summed in the same pass; empty: it was not."""
        for page, place, nbytes in self._pieces(rows, slots):
            ctypes.memmove(place, page, nbytes)
        return ()

    def scatter(self, rows: Sequence[Sequence[int]], slots: Sequence[int]) -> None:
        """Slots to pages."""
        for page, place, nbytes in self._pieces(rows, slots):
            ctypes.memmove(page, place, nbytes)

    def _pieces(self, rows: Sequence[Sequence[int]], slots: Sequence[int]) -> Iterator[_Piece]:
        for row, slot in zip(rows, slots, strict=True):
            shard = self._shard + slot * self._slot_nbytes
            runs = _runs(row)
            singles = [(place, block, 1) for place, block in enumerate(row) if block != NO_BLOCK]
            for (stride, nbytes), layers in self._layers.items():
                spans = [
                    (block * stride, place * nbytes, count * nbytes)
                    for place, block, count in (runs if stride == nbytes else singles)
                ]
                for base, offset in layers:
                    begin = shard + offset
                    for page, place, length in spans:
                        yield base + page, begin + place, length


def _runs(row: Sequence[int]) -> list[tuple[int, int, int]]:
    """Place in the chunk, first block and length of each run of consecutive blocks."""
    runs: list[tuple[int, int, int]] = []
    for place, block in enumerate(row):
        if block == NO_BLOCK:
            continue
        if runs:
            begin, first, count = runs[-1]
            if (place, block) == (begin + count, first + count):
                runs[-1] = (begin, first, count + 1)
                continue
        runs.append((place, block, 1))
    return runs


Copier = getattr(extension, "Copier", PlainCopier)
