"""How much memory may still be taken: by this node, and by the control groups this process is in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from kvtier_core.errors import BackendError
from kvtier_core.types import Nbytes


class MemoryLimit(NamedTuple):
    nbytes: int
    where: str


def must_be_available(nbytes: int) -> None:
    """Too much would not fail at open: the kernel would kill something later."""
    room = min(memory_limits())
    if nbytes > room.nbytes:
        raise BackendError(
            f"cpu: capacity needs {in_mib(nbytes)} of memory and {room.where} has {in_mib(room.nbytes)} available; "
            "lower the capacity",
            retryable=False,
        )


def memory_limits(root: Path = Path("/")) -> Iterator[MemoryLimit]:
    """Each bound on what this process can take."""
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            yield MemoryLimit(int(line.split()[1]) << 10, "this node")
    for line in (root / "proc/self/cgroup").read_text().splitlines():
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


def in_mib(nbytes: int) -> Nbytes:
    """Rounded up: to read, not to compute with."""
    return Nbytes(-(-nbytes >> 20) << 20)


def _limits_of_groups(mount: Path, path: str, limit: str, usage: str, reclaimable: str) -> Iterator[MemoryLimit]:
    """Of a group and its ancestors. A container may see only the inner ones, mounted as if they were the root."""
    group = PurePosixPath(path)
    for name in (group, *group.parents):
        folder = mount / name.relative_to("/")
        try:
            left = int((folder / limit).read_text()) - int((folder / usage).read_text())
            yield MemoryLimit(left + int(_stat(folder)[reclaimable]), f"control group {name}")
        except (OSError, ValueError):  # no such file, or the word max: no bound here
            continue


def _stat(folder: Path) -> Mapping[str, str]:
    return dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
