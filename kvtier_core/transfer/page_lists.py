"""Checks the block ids and slots of a job before addresses are computed from them: the copiers check nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from operator import index
from typing import NamedTuple

import attrs

from kvtier_core.errors import ContractError
from kvtier_core.interfaces import NO_BLOCK, PagedKVCache, PageList
from kvtier_core.layouts import Part


class Layer(NamedTuple):
    """One layer as a copier sees it. A copier receives the block ids of a chunk in one flat row, group after group."""

    base: int  #: address of the page of block 0
    stride: int  #: bytes from one page to the next
    nbytes: int  #: bytes of a page
    offset: int  #: bytes from the start of the shard to the layer's first page; the others follow contiguously
    first: int  #: index of its group's first block id in the row
    blocks: int  #: number of its block ids


def check_cache(cache: PagedKVCache, slot_nbytes: int) -> None:
    """Raises ContractError unless the pages and the rank are those of the layout, and its frames fit the slots."""
    layout = cache.layout
    if not 0 <= cache.rank < layout.ranks:
        raise ContractError(f"rank {cache.rank} is not one of {layout.ranks} ranks")
    expected = list(chain(*layout.pages_of(cache.rank)))
    if [run.nbytes for run in cache.layers] != expected:
        raise ContractError(f"expected pages of {expected} bytes, got {[run.nbytes for run in cache.layers]}")
    if any(run.stride < run.nbytes for run in cache.layers):
        raise ContractError("pages of a layer overlap: a stride is less than its nbytes")
    if slot_nbytes != layout.frame_nbytes:
        raise ContractError(f"expected slots of {layout.frame_nbytes} bytes, got {slot_nbytes}")


@attrs.frozen
class CheckedJob:
    """A job whose blocks and slots all exist."""

    part: Part  #: that its slots hold
    blocks: list[int]  #: the block ids, by chunk and group
    slots: list[int]

    @property
    def rows(self) -> list[list[int]]:
        """The block ids of each chunk."""
        width = sum(self.part.blocks)
        return [self.blocks[begin : begin + width] for begin in range(0, len(self.blocks), width)]

    def only(self, places: Sequence[int]) -> CheckedJob:
        """The job with only the chunks at these indices."""
        rows = self.rows
        return CheckedJob(
            self.part,
            list(chain.from_iterable(rows[place] for place in places)),
            [self.slots[place] for place in places],
        )


def check_job(cache: PagedKVCache, slots: int, pages: PageList, wanted: Sequence[int]) -> CheckedJob:
    """Check a job for the slots ``wanted`` in an arena of ``slots`` slots.

    Raises ContractError unless every block and every slot exists, and each chunk has the block ids of one part of the
    layout.
    """
    if len(pages) != len(wanted):
        raise ContractError(f"expected pages of {len(wanted)} chunks, got {len(pages)}")
    part = _part_of(cache, pages[0]) if pages else cache.layout.parts[0]
    # All together: a job may have ten thousand chunks, and the engine waits.
    numbers, blocks = list(map(index, wanted)), list(map(index, chain.from_iterable(chain.from_iterable(pages))))
    good = {tuple(map(len, chunk)) for chunk in pages} <= {part.blocks}
    if numbers and not (good and _within(numbers, 0, slots) and _within(blocks, NO_BLOCK, cache.blocks)):
        wrong = (_wrong(cache, slots, part, chunk, slot) for chunk, slot in zip(pages, numbers, strict=True))
        raise ContractError(next(filter(None, wrong)))
    return CheckedJob(part, blocks, numbers)


def _within(numbers: Sequence[int], first: int, end: int) -> bool:
    return first <= min(numbers) and max(numbers) < end


def _wrong(cache: PagedKVCache, slots: int, part: Part, chunk: Sequence[Sequence[int]], slot: int) -> str:
    """The fault of one chunk of a job; empty if there is none."""
    if not 0 <= slot < slots:
        return f"slot {slot} is not one of {slots}"
    if tuple(map(len, chunk)) != part.blocks:
        return _wrong_lengths(cache, part, chunk)
    row = list(chain(*chunk))
    within = _within(row, NO_BLOCK, cache.blocks)
    return "" if within else f"block ids {row} are not all NO_BLOCK or one of {cache.blocks}"


def _part_of(cache: PagedKVCache, chunk: Sequence[Sequence[int]]) -> Part:
    """The part with exactly the groups of which a chunk has block ids; the first part if there is none."""
    groups = tuple(number for number, row in enumerate(chunk) if row)
    return next((part for part in cache.layout.parts if part.groups == groups), cache.layout.parts[0])


def _wrong_lengths(cache: PagedKVCache, part: Part, chunk: Sequence[Sequence[int]]) -> str:
    groups = cache.layout.groups
    if len(chunk) != len(groups):
        return f"block ids of {len(chunk)} groups for a layout of {len(groups)}"
    return "; ".join(
        f"{len(row)} block ids for a chunk of {count} ({group.name})"
        for group, row, count in zip(groups, chunk, part.blocks, strict=True)
        if len(row) != count
    )


def layers_of(cache: PagedKVCache, part: Part) -> Iterator[Layer]:
    """The layers of a part that this rank has, in the order of its shard."""
    firsts = list(accumulate(part.blocks, initial=0))
    for place in part.shard_of(cache.rank).layers:
        run = cache.layers[place.layer]
        yield Layer(run.base, run.stride, run.nbytes, place.offset, firsts[place.group], place.blocks)
