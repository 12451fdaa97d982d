"""Splits batches of chunks by bytes, by a condition, and into groups that share a call."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvtier_core.errors import ContractError
from kvtier_core.types import ChunkKey

#: Frames are moved in groups of about this size: small frames share a call, large ones share the threads.
_GROUP_NBYTES = 4 << 20


def as_many(answers: Sequence, keys: Sequence[ChunkKey]) -> Sequence:
    """The answers. Raises ContractError unless there is one per key."""
    if len(answers) != len(keys):
        raise ContractError(f"{len(answers)} answers for {len(keys)} keys")
    return list(answers)


def leading(items: Sequence, room: int, nbytes: Callable[..., int]) -> list:
    """The leading items that fit in ``room`` bytes."""
    ends = itertools.accumulate(map(nbytes, items))
    return [item for item, end in zip(items, ends, strict=True) if end <= room]


def in_groups(items: Sequence, nbytes: Callable[..., int]) -> Iterator[list]:
    """The items in runs of about `_GROUP_NBYTES`."""
    group, total = [], 0
    for item in items:
        group.append(item)
        total += nbytes(item)
        if total >= _GROUP_NBYTES:
            yield group
            group, total = [], 0
    if group:
        yield group


def leading_run(items: Iterable[ChunkKey], holds: Callable[[ChunkKey], bool]) -> list[ChunkKey]:
    """The items before the first for which ``holds`` is false."""
    return list(itertools.takewhile(holds, items))
