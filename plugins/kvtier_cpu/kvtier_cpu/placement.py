"""The NUMA nodes on which the pages of an arena are placed.

One thread allocates all of them. By default, the kernel would take each page from the node of the CPU on which this
thread runs, and half of the GPUs of a machine with two sockets would copy across the link between the sockets. So while
the thread allocates the pages of a shard, it prefers the node of the device that copies them. A policy for the mapping
(mbind) would split it into one mapping for each shard of each slot, and a process may have only 65 530.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby, pairwise
from pathlib import Path
from typing import NamedTuple

import attrs

from kvtier_core.interfaces import OpenContext
from kvtier_core.layouts import ChunkLayout
from kvtier_core.transfer import numa
from kvtier_cpu import memory_policy
from kvtier_cpu.memory_policy import MemoryPolicy


class PageRange(NamedTuple):
    """Whole pages side by side, in bytes from the start of the arena."""

    begin: int
    end: int
    node: int | None  #: from whose memory they should come; None: no particular node


def ranges_by_node(
    layout: ChunkLayout, nodes: Sequence[int | None], slots: int, slot_nbytes: int, page_nbytes: int
) -> Iterator[PageRange]:
    """All pages of an arena, each with the node of the shard that it begins in. Neighbours have different nodes.

    ``nodes`` has the node of each shard. A frame's header belongs to the first shard, and what follows the last shard
    belongs to it. Slots are assumed to hold part 0, which every chunk has; shards of other parts begin elsewhere.
    """
    offsets = [0, *(shard.offset for shard in layout.parts[0].shards[1:])]
    starts = (
        (whole_pages(slot * slot_nbytes + offset, page_nbytes), node)
        for slot in range(slots)
        for offset, node in zip(offsets, nodes, strict=True)
    )
    end = (whole_pages(slots * slot_nbytes, page_nbytes), None)
    ranges = (
        PageRange(begin, following, node)
        for (begin, node), (following, _) in pairwise(chain(starts, [end]))
        if begin < following
    )
    for node, neighbours in groupby(ranges, key=lambda each: each.node):
        run = list(neighbours)
        yield PageRange(run[0].begin, run[-1].end, node)


def whole_pages(nbytes: int, page_nbytes: int) -> int:
    """Rounded up."""
    return -(-nbytes // page_nbytes) * page_nbytes


@attrs.frozen
class Placement:
    """The nodes from which the pages of an arena are allocated."""

    layout: ChunkLayout
    slots: int
    slot_nbytes: int
    nodes: tuple[int | None, ...]  #: of each shard
    policies: Mapping[int | None, MemoryPolicy]  #: by node; a node without one is left to the kernel
    effective: str  #: in words

    @property
    def nbytes(self) -> int:
        return self.slots * self.slot_nbytes

    def ranges(self, page_nbytes: int) -> Iterable[PageRange]:
        """All pages of the arena, in order, so that a huge page, too, is on the node of the shard that it begins in."""
        if len({self.policies.get(node) for node in self.nodes}) == 1:
            return [PageRange(0, whole_pages(self.nbytes, page_nbytes), self.nodes[0])]
        return ranges_by_node(self.layout, self.nodes, self.slots, self.slot_nbytes, page_nbytes)

    def on(self, node: int | None) -> contextlib.AbstractContextManager[None]:
        """In this block, the thread allocates memory from this node while it has any left."""
        policy = self.policies.get(node)
        return memory_policy.under(policy) if policy else contextlib.nullcontext()


def choose(asked: str, ctx: OpenContext, slots: int, sys: Path = Path("/sys")) -> Placement:
    """The placement for the setting ``numa: auto|off``, within what the kernel allows; ``sys`` is its /sys.

    Shards whose node is not known are spread over all nodes.
    """
    nodes = ctx.numa_nodes or (None,) * ctx.layout.shards
    wanted = _wanted(nodes, sys) if asked == "auto" else {}
    obstacles = {node: _obstacle(node, policy) for node, policy in wanted.items()}
    policies = {node: policy for node, policy in wanted.items() if not obstacles[node]}
    effective = ", ".join(map(_in_words, policies)) or "off"
    if why := "; ".join(f"{_in_words(node)}: {why}" for node, why in obstacles.items() if why):
        effective += f" ({why})"
    return Placement(ctx.layout, slots, ctx.slot_nbytes, nodes, policies, effective)


def _wanted(nodes: Sequence[int | None], sys: Path) -> dict[int | None, MemoryPolicy]:
    """A policy for each of these nodes, where there is a choice."""
    wanted: dict[int | None, MemoryPolicy] = {}
    for node in sorted({node for node in nodes if node is not None}):
        wanted[node] = memory_policy.preferring(node)
    if None in nodes and len(all_nodes := numa.nodes(sys)) > 1:
        wanted[None] = memory_policy.interleaving(all_nodes)
    return wanted


def _obstacle(node: int | None, policy: MemoryPolicy) -> str:
    """Why a policy cannot be set; empty if it can."""
    try:
        if node is None and not memory_policy.current().is_default:
            return "the process has its own policy"  # set by numactl or vLLM; this code knows nothing better
        with memory_policy.under(policy):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _in_words(node: int | None) -> str:
    return "interleaved" if node is None else f"node {node}"
