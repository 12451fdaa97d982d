"""The NUMA nodes of this machine, as reported by the kernel: which memory is near which CPUs and devices."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path

_SYS = Path("/sys")


def nodes(sys: Path = _SYS) -> dict[int, frozenset[int]]:
    """The CPUs of each node that has both CPUs and memory, by number.

    Other nodes are not used for slots: memory without CPUs belongs to a GPU, or is slow.
    """
    folder = sys / "devices/system/node"
    both = _numbers(folder / "has_cpu") & _numbers(folder / "has_memory")
    return {node: _numbers(folder / f"node{node}/cpulist") for node in sorted(both)}


def node_of_gpu(domain: int, bus: int, device: int, sys: Path = _SYS) -> int | None:
    """The node of the GPU with this PCI address; None if it is unknown, or there is only one node."""
    try:
        node = int((sys / f"bus/pci/devices/{domain:04x}:{bus:02x}:{device:02x}.0/numa_node").read_text("ascii"))
    except (OSError, ValueError):
        return None
    known = nodes(sys)
    return node if node in known and len(known) > 1 else None


def node_of_cpus(cpus: Set[int], sys: Path = _SYS) -> int | None:
    """The node that has all of these CPUs; None if no node has them, or there is only one node."""
    known = nodes(sys)
    near = [node for node, own in known.items() if cpus <= own]
    return near[0] if near and len(known) > 1 else None


def _numbers(file: Path) -> frozenset[int]:
    """Read a list in the kernel's format, ``0-3,8``; empty if that fails."""
    try:
        spans = [span.partition("-") for span in file.read_text("ascii").strip().split(",") if span]
        return frozenset(n for first, _, last in spans for n in range(int(first), int(last or first) + 1))
    except (OSError, ValueError):
        return frozenset()
