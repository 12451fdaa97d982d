"""The memory of this machine, or of the container, that Linux reports."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def available_memory() -> int:
    """Bytes that can still be allocated here: in the node, or in the container if that is less."""
    left = [number_in(group / "memory.max") - number_in(group / "memory.current") for group in _limited_groups()]
    return min([_of_node("MemAvailable"), *left])


def whole_memory() -> int:
    """Bytes of this node's memory, or of the container's limit if that is less."""
    return min([_of_node("MemTotal"), *filter(None, [container_limit()])])


def container_limit() -> int | None:
    """The memory limit of this process's control groups, in bytes; None if they have no limit."""
    return min((number_in(group / "memory.max") for group in _limited_groups()), default=None)


def _of_node(line: str) -> int:
    """Bytes in this line of /proc/meminfo."""
    lines = dict(line.split(":", 1) for line in text_of("/proc/meminfo").splitlines())
    return int(lines.get(line, "0 kB").split()[0]) << 10


def _limited_groups() -> Iterator[Path]:
    """The control groups (version 2) of this process that limit its memory; a container shows its own as the root."""
    for line in text_of("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        own = PurePosixPath(path)
        for group in (own, *own.parents) if not controllers else ():
            folder = Path("/sys/fs/cgroup") / group.relative_to("/")
            if text_of(folder / "memory.max").strip().isdecimal():
                yield folder


def number_in(file: Path) -> int:
    """The number that a file of the kernel has; 0 if there is none."""
    text = text_of(file).strip()
    return int(text) if text.isdecimal() else 0


def text_of(file: Path | str) -> str:
    """The text of a file of the kernel; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        return Path(file).read_text("utf-8", "replace")
    return ""
