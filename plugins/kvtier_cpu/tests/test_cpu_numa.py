"""On which NUMA node slots are. This machine may have one node: then what it is asked for is seen, and what it gets."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import mmap
import os
from collections import Counter
from itertools import pairwise
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_core.errors import BackendError
from kvtier_core.interfaces import OpenContext
from kvtier_core.layouts import ChunkLayout, KVKind
from kvtier_core.transfer import numa
from kvtier_cpu import memory_policy, segment
from kvtier_cpu.config import CpuConfig
from kvtier_cpu.memory_policy import MemoryPolicy, current, interleaving, preferring, under
from kvtier_cpu.placement import PageRange, choose, ranges_by_node
from kvtier_testing.samples import make_context, make_group, make_layout

TWO_RANKS = make_layout(ranks=2)  # whose shards are of 43008 bytes, and no whole pages
NODES = sorted(numa.nodes()) or [0]
NOWHERE = 1000  # a node that no machine has
NOT_THERE = os.strerror(errno.EINVAL)


def refused() -> str:
    """Why this kernel has no memory policies for us, as in a container without CAP_SYS_NICE; empty if it has."""
    try:
        with under(preferring(0)):
            return ""
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOSYS):
            raise
        return f"no memory policy: {error.strerror}"


placed = pytest.mark.skipif(bool(refused()), reason=refused())


@pytest.fixture(autouse=True)
def no_policy():
    """An engine that ran in this process before may have left one."""
    with contextlib.nullcontext() if refused() else under(MemoryPolicy(0)):
        yield


def context(*nodes: int | None, layout: ChunkLayout = TWO_RANKS, capacity: int = 4 << 20) -> OpenContext:
    return attrs.evolve(make_context(layout=layout, capacity=capacity), numa_nodes=nodes)


@pytest.fixture
def two_nodes(tmp_path):
    """The /sys of a machine with two nodes."""
    folder = tmp_path / "devices/system/node"
    for name in ("has_cpu", "has_memory"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("0-1\n")
    return tmp_path


# -- which pages belong to which node ----------------------------------------------------------------


def page_by_page(layout, nodes, slots, page_nbytes):
    """The node of each page: of the last shard that begins before it, or with it."""
    shards = layout.parts[0].shards
    found = []
    for begin in range(0, slots * layout.frame_nbytes, page_nbytes):
        inside = begin % layout.frame_nbytes
        found.append(nodes[max(i for i, shard in enumerate(shards) if i == 0 or shard.offset <= inside)])
    return found


@given(
    nodes=st.lists(st.sampled_from([None, 0, 1, 5]), min_size=1, max_size=8),
    pages=st.lists(st.integers(1, 3000), min_size=1, max_size=3),
    slots=st.integers(1, 12),
    page_nbytes=st.sampled_from([4096, 16384, 65536]),
)
def test_each_page_is_on_the_node_of_the_shard_it_begins_in(nodes, pages, slots, page_nbytes):
    layout = make_layout(pages, ranks=len(nodes))
    ranges = list(ranges_by_node(layout, nodes, slots, layout.frame_nbytes, page_nbytes))
    spread = [each.node for each in ranges for _ in range(each.begin, each.end, page_nbytes)]
    assert spread == page_by_page(layout, nodes, slots, page_nbytes)
    assert [ranges[0].begin, *(each.end for each in ranges[:-1])] == [each.begin for each in ranges]
    assert all(each.begin < each.end for each in ranges)
    assert all(one.node != other.node for one, other in pairwise(ranges))


def test_ranks_on_two_nodes_have_two_ranges_a_slot():
    layout = make_layout((4096,), blocks=4, ranks=4)  # a header and four shards of 16 KiB
    assert list(ranges_by_node(layout, (0, 0, 1, 1), 2, layout.frame_nbytes, 4096)) == [
        PageRange(0, 36 << 10, 0),
        PageRange(36 << 10, 68 << 10, 1),
        PageRange(68 << 10, 104 << 10, 0),
        PageRange(104 << 10, 136 << 10, 1),
    ]


def test_shards_of_the_part_that_every_chunk_has_decide():
    """A recurrent state has a frame of its own, whose shards begin elsewhere."""
    state = make_group((60_000,), name="state", kind=KVKind.STATE)
    layout = ChunkLayout([make_group((4096,)), state], 16, ranks=2)
    first = layout.parts[0].shards[1].offset
    assert first == 8192 < layout.parts[1].shards[1].offset
    assert next(iter(ranges_by_node(layout, (0, 1), 1, layout.frame_nbytes, 4096))).end == first


def test_ranks_with_the_same_bytes_share_a_node():
    layout = make_layout((4096,), blocks=4, ranks=4, replicas=2)
    assert len(list(ranges_by_node(layout, (0, 1), 1, layout.frame_nbytes, 4096))) == 2


# -- what is chosen ----------------------------------------------------------------------------------


@placed
def test_nodes_that_are_known_are_preferred():
    assert choose("auto", context(0, 0), 4).policies == {0: preferring(0)}
    assert choose("auto", context(0, 0), 4).effective == "node 0"


@placed
def test_shards_of_unknown_nodes_are_spread(two_nodes):
    placement = choose("auto", context(), 4, two_nodes)
    assert (placement.policies, placement.effective) == ({None: interleaving({0, 1})}, "interleaved")
    placement = choose("auto", context(0, None), 4, two_nodes)
    assert (placement.policies.keys(), placement.effective) == ({0, None}, "node 0, interleaved")


def test_a_machine_with_one_node_is_left_alone(two_nodes):
    for name in ("has_cpu", "has_memory"):
        (two_nodes / "devices/system/node" / name).write_text("0\n")
    placement = choose("auto", context(), 4, two_nodes)
    assert (placement.policies, placement.effective) == ({}, "off")


def test_the_kernel_is_not_called_without_a_setting(two_nodes, monkeypatch):
    def called(*args):
        raise AssertionError(args)

    monkeypatch.setattr(memory_policy, "_call", called)
    placement = choose("off", context(0, 1), 4, two_nodes)
    assert (placement.policies, placement.effective) == ({}, "off")
    assert list(placement.ranges(4096)) == [PageRange(0, placement.nbytes, 0)]
    with placement.on(0):
        pass


@placed
def test_a_policy_of_the_process_gives_way_to_what_is_known_alone(two_nodes):
    with under(interleaving({0})):
        assert choose("auto", context(0, 0), 4, two_nodes).effective == "node 0"
        assert choose("auto", context(), 4, two_nodes).effective == (
            "off (interleaved: the process has its own policy)"
        )


@placed
def test_a_node_that_is_not_there_is_reported_and_the_others_are_used():
    placement = choose("auto", context(0, NOWHERE), 4)
    assert placement.policies.keys() == {0}
    assert placement.effective == f"node 0 (node {NOWHERE}: {NOT_THERE})"


@pytest.mark.parametrize("refusal", [errno.EPERM, errno.ENOSYS])
def test_a_kernel_that_refuses_is_reported_and_nothing_else_changes(monkeypatch, refusal):
    """As in a container without CAP_SYS_NICE."""

    def refuse(*args):
        raise OSError(refusal, os.strerror(refusal))

    monkeypatch.setattr(memory_policy, "_call", refuse)
    arena = CpuConfig(huge_pages="off").open(context(0, 1))
    why = os.strerror(refusal)
    assert arena.facts()["numa"] == f"auto -> off (node 0: {why}; node 1: {why})"
    arena.view(arena.slots - 1)[:4] = b"kept"
    arena.close()


def test_another_kind_of_machine_is_one_that_refuses(monkeypatch):
    monkeypatch.setattr(memory_policy, "_NUMBERS", {})
    assert choose("auto", context(0, 0), 4).effective == f"off (node 0: {os.strerror(errno.ENOSYS)})"


# -- what is done ------------------------------------------------------------------------------------


@placed
def test_the_thread_has_its_former_policy_afterwards():
    before = current()
    with under(interleaving({0})):
        mine = current()
        assert mine == interleaving({0})
        with under(preferring(0)):
            assert current() == preferring(0)
        assert current() == mine
        with pytest.raises(ZeroDivisionError), under(preferring(0)):
            raise ZeroDivisionError
        assert current() == mine
        with pytest.raises(OSError, match=NOT_THERE), under(preferring(NOWHERE)):
            pass
        assert current() == mine
    assert current() == before


@pytest.fixture
def seen(monkeypatch):
    """The policy under which each range of the memory was allocated: begin, bytes, policy."""
    allocated: list[tuple[int, int, MemoryPolicy]] = []
    populate = segment._populate

    def watched(memory, begin, nbytes):
        allocated.append((begin, nbytes, current()))
        populate(memory, begin, nbytes)

    monkeypatch.setattr(segment, "_populate", watched)
    return allocated


@placed
def test_each_shard_is_allocated_under_the_policy_of_its_node(seen):
    """The rank of an unknown node has the thread's own, here another one than the default."""
    with under(interleaving({0})):
        arena = CpuConfig(huge_pages="off").open(context(0, NOWHERE))
        assert current() == interleaving({0})
    wanted = ranges_by_node(TWO_RANKS, (preferring(0), interleaving({0})), arena.slots, TWO_RANKS.frame_nbytes, 4096)
    assert seen == [(begin, end - begin, policy) for begin, end, policy in wanted]
    assert len(seen) == 2 * arena.slots
    arena.close()


@placed
def test_one_node_is_one_range_in_pieces(seen, monkeypatch):
    monkeypatch.setattr(segment, "_PIECE", 1 << 20)
    arena = CpuConfig(huge_pages="off").open(context(0, 0))
    assert [(begin, policy) for begin, _, policy in seen] == [(mib << 20, preferring(0)) for mib in range(4)]
    assert sum(nbytes for _, nbytes, _ in seen) == arena.slots * arena.slot_nbytes
    arena.close()


@placed
def test_a_failure_half_way_leaves_the_thread_as_it_was(monkeypatch):
    def fail(memory, begin, nbytes):
        if begin:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(segment, "_populate", fail)
    before = current()
    with pytest.raises(BackendError, match="^cpu: cannot allocate 3.95MiB of shared memory: Cannot allocate memory"):
        CpuConfig(huge_pages="off").open(context(0, NOWHERE))
    assert current() == before


def nodes_of_pages(arena) -> list[int]:
    """The node of each page; a negative number is an error, -2 that the page is not there."""
    inode = str(json.loads(arena.handle)["inode"])
    maps = Path("/proc/self/maps").read_text().splitlines()
    (mapping,) = [line for line in maps if f" {inode} " in line and "memfd:kvtier" in line]
    begin = int(mapping.partition("-")[0], 16)
    pages = range(begin, begin + arena.slots * arena.slot_nbytes, mmap.PAGESIZE)
    found = (ctypes.c_int * len(pages))()
    move_pages = {"x86_64": 279, "aarch64": 239}[os.uname().machine]
    libc = ctypes.CDLL(None)
    assert not libc.syscall(move_pages, 0, len(pages), (ctypes.c_void_p * len(pages))(*pages), None, found, 0)
    return list(found)


@placed
@pytest.mark.parametrize("nodes", [(NODES[0], NODES[-1]), (NODES[-1], NODES[0]), (NODES[-1], NODES[-1])])
def test_every_page_is_on_the_node_of_its_shard(nodes):
    arena = CpuConfig(huge_pages="off").open(context(*nodes))
    assert nodes_of_pages(arena) == page_by_page(TWO_RANKS, nodes, arena.slots, mmap.PAGESIZE)
    arena.close()


@placed
@pytest.mark.skipif(len(NODES) == 1, reason="this machine has one NUMA node")
def test_pages_of_no_particular_node_are_on_all():
    arena = CpuConfig(huge_pages="off").open(context())
    counts = Counter(nodes_of_pages(arena))
    assert counts.keys() == set(NODES)
    assert max(counts.values()) - min(counts.values()) <= 1
    arena.close()
