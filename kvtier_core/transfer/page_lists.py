"""Are the numbers of a job those of pages and slots? Addresses are computed from them, and nobody checks those."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import index

from kvtier_core.errors import ContractError
from kvtier_core.interfaces import NO_BLOCK, PagedKVCache, PageList

#: Of each layer in the order of a shard: address of block 0, bytes from block to block, bytes of a page, offset in the
#: shard of its first page. The others follow it side by side, one for each place in a chunk.
Layer = tuple[int, int, int, int]


def check_table(table: PagedKVCache, slot_nbytes: int) -> None:
    """Raises ContractError unless the pages of the table are those of its layout."""
    layout = table.layout
    if tuple(run.nbytes for run in table.layers) != layout.page_nbytes:
        raise ContractError(f"pages of {[run.nbytes for run in table.layers]} bytes for {list(layout.page_nbytes)}")
    if any(run.stride < run.nbytes for run in table.layers):
        raise ContractError("pages of a layer overlap: a stride is less than its nbytes")
    if not 0 <= table.rank < layout.ranks:
        raise ContractError(f"rank {table.rank} is not one of {layout.ranks}")
    if slot_nbytes != layout.frame_nbytes:
        raise ContractError(f"slots of {slot_nbytes} bytes for frames of {layout.frame_nbytes}")


def checked(
    table: PagedKVCache, slots: int, pages: PageList, wanted: Sequence[int]
) -> tuple[list[list[int]], list[int]]:
    """The rows of blocks and the wanted of ``slots`` slots, as plain ints. Raises ContractError."""
    if len(pages) != len(wanted):
        raise ContractError(f"{len(pages)} chunks of pages for {len(wanted)} slots")
    rows, numbers = [list(map(index, row)) for row in pages], list(map(index, wanted))
    for row, slot in zip(rows, numbers, strict=True):
        if not 0 <= slot < slots:
            raise ContractError(f"slot {slot} is not one of {slots}")
        if len(row) != table.layout.blocks:
            raise ContractError(f"{len(row)} block ids for a chunk of {table.layout.blocks}")
        if min(row) < NO_BLOCK or max(row) >= table.blocks:
            raise ContractError(f"block ids {row} are not all NO_BLOCK or one of {table.blocks}")
    return rows, numbers


def layers_of(table: PagedKVCache) -> Iterator[Layer]:
    offset = 0
    for run in table.layers:
        yield run.base, run.stride, run.nbytes, offset
        offset += run.nbytes * table.layout.blocks
