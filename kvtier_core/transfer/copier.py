"""Copies whole pages to slots and back by their addresses, both in host memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

from kvtier_core.frames.checksum import crc32
from kvtier_core.interfaces import NO_BLOCK
from kvtier_core.native import choose
from kvtier_core.transfer.packing import plain_pack, plain_unpack
from kvtier_core.transfer.page_lists import Layer
from kvtier_core.work.buffers import address_of

_Piece = tuple[int, int, int]  # address of pages, address in a slot, bytes


class PlainCopier:
    """Copies in Python if the extension is not compiled; `_native.Copier` is tested against it.

    ``shard`` is the address of this rank's shard in slot 0; the shard of the next slot is ``slot_nbytes`` further on.
    Unless ``packed_nbytes`` is 0, shards are packed and have that many bytes. Each row holds the block ids of one
    chunk, or NO_BLOCK, group after group. The caller has checked that every block and slot exists, and keeps the memory
    alive. Any thread may call, several at the same time.
    """

    def __init__(self, layers: Sequence[Layer], shard: int, slot_nbytes: int, packed_nbytes: int = 0):
        self._shard = shard
        self._slot_nbytes = slot_nbytes
        self._packed_nbytes = packed_nbytes
        self._pages_nbytes = 0  # of a chunk
        # By group and page shape: such layers share their spans.
        self._layers: dict[tuple[int, int], dict[tuple[int, int], list[tuple[int, int]]]] = {}
        for base, stride, nbytes, offset, first, blocks in layers:
            self._pages_nbytes += nbytes * blocks
            shapes = self._layers.setdefault((first, first + blocks), {})
            shapes.setdefault((stride, nbytes), []).append((base, offset))

    def gather(self, rows: Sequence[Sequence[int]], slots: Sequence[int]) -> Sequence[int | None]:
        """Copy pages to slots.

        Returns the CRC-32 of each slot's shard, including the bytes for NO_BLOCK, if it was computed in the same pass;
        otherwise nothing. It is always computed for packed shards, and None if the pages do not fit.
        """
        checksums: list[int | None] = []
        for row, slot in zip(rows, slots, strict=True):
            pages = bytearray(self._pages_nbytes) if self._packed_nbytes else None
            for page, place, nbytes in self._pieces(row, address_of(pages) if pages else self._address(slot)):
                ctypes.memmove(place, page, nbytes)
            if pages:
                shard = self._packed(slot)
                used = plain_pack(memoryview(pages), shard)
                shard[used:] = bytes(len(shard) - used)
                checksums.append(crc32(shard) if used else None)
        return checksums

    def scatter(self, rows: Sequence[Sequence[int]], slots: Sequence[int]) -> bool:
        """Copy slots to pages. Returns False if a packed shard is damaged."""
        whole = True
        for row, slot in zip(rows, slots, strict=True):
            pages = bytearray(self._pages_nbytes) if self._packed_nbytes else None
            if pages and not plain_unpack(self._packed(slot), memoryview(pages)):
                whole = False
                continue
            for page, place, nbytes in self._pieces(row, address_of(pages) if pages else self._address(slot)):
                ctypes.memmove(page, place, nbytes)
        return whole

    def _address(self, slot: int) -> int:
        return self._shard + slot * self._slot_nbytes

    def _packed(self, slot: int) -> memoryview:
        return memoryview((ctypes.c_ubyte * self._packed_nbytes).from_address(self._address(slot))).cast("B")

    def _pieces(self, row: Sequence[int], shard: int) -> Iterator[_Piece]:
        """The pages of a chunk, and their places in an unpacked shard at this address."""
        for (first, end), shapes in self._layers.items():
            runs = _runs(row[first:end])
            singles = [(place, block, 1) for place, block in enumerate(row[first:end]) if block != NO_BLOCK]
            for (stride, nbytes), layers in shapes.items():
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


Copier = choose("Copier", PlainCopier)
