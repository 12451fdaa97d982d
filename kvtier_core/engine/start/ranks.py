"""Merges the reports of an engine's ranks into one layout of chunks for all of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import attrs

from kvtier_core.config.model import StackConfig
from kvtier_core.engine.messages import WorkerReport
from kvtier_core.layouts import ChunkLayout, KVGroup, KVKind, KVStructure


@attrs.frozen
class Ranks:
    """The reports of all ranks, pipeline stage after pipeline stage. Those of one stage have the same layers."""

    reports: Sequence[WorkerReport]
    stages: int = 1

    def disagreement(self) -> str:
        """Why the pages of these workers cannot be moved together; empty if they can."""
        if refusals := [report.refusal for report in self.reports if report.refusal]:
            return refusals[0]
        if any(len(set(self._stage(number))) > 1 for number in range(self.stages)):
            return "the pages of the workers differ"
        alike = {(each.device, each.failure_policy, *map(_without_layers, each.groups)) for each in self._firsts}
        return "" if len(alike) == 1 else "the pages of the pipeline stages differ in more than their layers"

    def as_one(self) -> WorkerReport:
        """The report of an engine whose ranks agree, with the layers and facts of all stages."""
        firsts = self._firsts
        groups = [_joined(groups) for groups in zip(*(report.groups for report in firsts), strict=True)]
        facts = [dict(report.facts) for report in firsts]
        told = [(name, " | ".join(dict.fromkeys(each.get(name, "") for each in facts))) for name in facts[0]]
        replicas = math.gcd(*(report.replicas for report in firsts))
        return attrs.evolve(firsts[0], groups=groups, facts=told, replicas=replicas)

    def in_chunks(self, config: StackConfig) -> tuple[StackConfig, ChunkLayout]:
        """The stack with ``chunk_tokens`` as a number, and the layout of its chunks, if the ranks agree.

        Raises ValueError if no chunk suits all groups.
        """
        whole = self.as_one()
        counts = [tuple(len(group.page_nbytes) for group in report.groups) for report in self._firsts]
        stages = tuple(counts) if self.stages > 1 else ()
        layout = functools.partial(
            ChunkLayout,
            whole.groups,
            ranks=len(self.reports),
            replicas=whole.replicas,
            stages=stages,
            any_ranks=not whole.own_ranks,
        )
        block = math.lcm(*(group.block_tokens for group in whole.groups))
        if config.chunk_tokens == "auto":
            # The engine leaves states only after some blocks: a chunk that ends elsewhere would have none.
            most = block if any(group.kind is KVKind.STATE for group in whole.groups) else None
            reaches = [group.reach for group in whole.groups if group.kind is KVKind.CHUNKED_LOCAL]
            config = config.sized(block, layout(tokens=block).payload_nbytes, most=most, within=reaches)
        return config, layout(tokens=int(config.chunk_tokens))

    def numa_nodes(self, layout: ChunkLayout) -> tuple[int | None, ...]:
        """The NUMA node of each shard of this layout; None unless all ranks that copy it have the same."""
        nodes = [report.numa_node for report in self.reports]
        alike = [set(nodes[rank : rank + layout.replicas]) for rank in range(0, layout.ranks, layout.replicas)]
        return tuple(each.pop() if len(each) == 1 else None for each in alike)

    @property
    def _firsts(self) -> list[WorkerReport]:
        """The report of one rank of each stage."""
        return [self._stage(number)[0] for number in range(self.stages)]

    def _stage(self, number: int) -> Sequence[WorkerReport]:
        ranks = len(self.reports) // self.stages
        return self.reports[number * ranks : (number + 1) * ranks]


def _without_layers(group: KVGroup) -> KVGroup:
    """The properties of a group that all stages must share."""
    return attrs.evolve(group, page_nbytes=(), dtype="", structure=KVStructure.OPAQUE, elements=(), depths=())


def _joined(groups: Sequence[KVGroup]) -> KVGroup:
    """A group with its layers of all stages."""
    with_layers = [group for group in groups if group.page_nbytes]
    structures = {group.structure for group in with_layers}
    elements = {group.elements for group in with_layers}
    depths = [depth for group in with_layers for depth in group.depths] if all(g.depths for g in with_layers) else []
    return attrs.evolve(
        groups[0],
        page_nbytes=[nbytes for group in groups for nbytes in group.page_nbytes],
        dtype=" ".join(sorted({dtype for group in groups for dtype in group.dtype.split()})),
        structure=structures.pop() if len(structures) == 1 else KVStructure.OPAQUE,
        elements=elements.pop() if len(elements) == 1 else (),
        depths=depths,
    )
