"""How much memory may still be allocated: on this node, and in the control groups of this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from kvtier_core.errors import BackendError
from kvtier_core.types import size


class MemoryLimit(NamedTuple):
    """A bound on what this process can allocate."""

    nbytes: int  #: still available
    where: str  #: what sets the bound, in words


def must_be_available(nbytes: int) -> None:
    """Raise BackendError if ``nbytes`` bytes are not available.

    Without this check the allocation would succeed, and the kernel would kill a process later.
    """
    limit = min(memory_limits())
    if nbytes > limit.nbytes:
        raise BackendError(
            f"cpu: capacity needs {size(nbytes)} of memory, but {limit.where} has {size(limit.nbytes)} available; "
            "lower the capacity"
        )


def memory_limits(root: Path = Path("/")) -> Iterator[MemoryLimit]:
    """Every bound on what this process can allocate. Reads the kernel's files below ``root``."""
    for line in (root / "proc/meminfo").read_text("ascii").splitlines():
        if line.startswith("MemAvailable:"):
            yield MemoryLimit(int(line.split()[1]) << 10, "this node")
    for line in (root / "proc/self/cgroup").read_text("utf-8", "surrogateescape").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _limits_of_groups(root / "sys/fs/cgroup", path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            yield from _limits_of_groups(
                root / "sys/fs/cgroup/memory",
                path,
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )


def _limits_of_groups(mount: Path, path: str, limit: str, usage: str, reclaimable: str) -> Iterator[MemoryLimit]:
    """The bounds of a group and its ancestors.

    A container may show only the inner groups, mounted as if they were the root.
    """
    group = PurePosixPath(path)
    for name in (group, *group.parents):
        folder = mount / name.relative_to("/")
        try:
            left = int((folder / limit).read_text("ascii")) - int((folder / usage).read_text("ascii"))
            yield MemoryLimit(left + int(_stat(folder)[reclaimable]), f"control group {name}")
        except (OSError, ValueError):  # no such file, or the word "max": this group sets no bound
            continue


def _stat(folder: Path) -> Mapping[str, str]:
    return dict(line.split() for line in (folder / "memory.stat").read_text("ascii").splitlines())
