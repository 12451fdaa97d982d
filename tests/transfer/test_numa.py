"""What the kernel's /sys says of NUMA nodes, from small trees of such files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvtier_core.transfer import numa

#: Two sockets; node 2 is the memory of a GPU, node 3 has CPUs and no memory.
FILES = {
    "devices/system/node/has_cpu": "0-1,3\n",
    "devices/system/node/has_memory": "0-2\n",
    "devices/system/node/node0/cpulist": "0-3,8-11\n",
    "devices/system/node/node1/cpulist": "4-7,12\n",
    "devices/system/node/node2/cpulist": "\n",
    "devices/system/node/node3/cpulist": "13\n",
    "bus/pci/devices/0000:0a:00.0/numa_node": "1\n",
    "bus/pci/devices/0000:0b:00.0/numa_node": "-1\n",
    "bus/pci/devices/0000:0c:00.0/numa_node": "2\n",
    "bus/pci/devices/10de:01:1f.0/numa_node": "0\n",
}


@pytest.fixture
def sys(tmp_path):
    return tree(tmp_path, FILES)


def tree(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_nodes_have_cpus_and_memory(sys):
    assert numa.nodes(sys) == {0: {0, 1, 2, 3, 8, 9, 10, 11}, 1: {4, 5, 6, 7, 12}}


@pytest.mark.parametrize(
    "address, node",
    [
        ((0, 0x0A, 0), 1),
        ((0x10DE, 1, 0x1F), 0),
        ((0, 0x0B, 0), None),  # a virtual machine that does not know
        ((0, 0x0C, 0), None),  # slots do not belong into the memory of a GPU
        ((0, 0x0D, 0), None),
    ],
)
def test_a_gpu_is_found_by_its_address(sys, address, node):
    assert numa.node_of_gpu(*address, sys) == node


@pytest.mark.parametrize("cpus, node", [({4, 12}, 1), ({0}, 0), ({3, 4}, None), ({13}, None), ({99}, None)])
def test_a_process_is_where_all_its_cpus_are(sys, cpus, node):
    assert numa.node_of_cpus(cpus, sys) == node


def test_one_node_is_no_choice(sys):
    (sys / "devices/system/node/has_memory").write_text("0\n")
    assert numa.nodes(sys).keys() == {0}
    assert numa.node_of_cpus({0}, sys) is None
    assert numa.node_of_gpu(0x10DE, 1, 0x1F, sys) is None


@pytest.mark.parametrize("text", ["", "nonsense", "0-x"])
def test_unreadable_nodes_are_unknown(sys, text):
    (sys / "devices/system/node/has_cpu").write_text(text)
    (sys / "bus/pci/devices/0000:0a:00.0/numa_node").write_text(text)
    assert numa.nodes(sys) == {}
    assert numa.node_of_cpus({0}, sys) is None
    assert numa.node_of_gpu(0, 0x0A, 0, sys) is None
    assert numa.nodes(sys / "nowhere") == {}


def test_the_nodes_of_this_machine_have_our_cpus():
    known = numa.nodes()
    if not known:
        pytest.skip("the kernel tells nothing of nodes here")
    assert os.sched_getaffinity(0) <= frozenset().union(*known.values())
