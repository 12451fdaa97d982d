"""The properties of this machine that Linux reports: memory, limits, huge pages, io_uring."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

import attrs

from kvtier_core import native
from kvtier_core.storekit.files import ring_works
from kvtier_core.types import size

#: A server with many connections and a disk tier may run out of descriptors if it has fewer.
_FEW_FILES = 4096


@attrs.frozen
class Fact:
    """A property of the machine; ``advice`` is empty if it is as it should be."""

    name: str
    value: str
    advice: str = ""


def facts() -> Iterator[Fact]:
    """The properties of a machine that a stack of tiers depends on."""
    yield Fact("kernel", platform.release())
    yield Fact("page size", size(os.sysconf("SC_PAGE_SIZE")))
    yield Fact("native code", native.describe(), "" if native.extension else "run pip install . with a compiler")
    yield Fact("memory available", size(available_memory()))
    limit = container_limit()
    yield Fact("container memory limit", "none" if limit is None else size(limit))
    yield Fact("locked memory (ulimit -l)", _limit(resource.RLIMIT_MEMLOCK, size))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < _FEW_FILES
    yield Fact(
        "open files (ulimit -n)", _limit(resource.RLIMIT_NOFILE, str), "raise it: ulimit -n 65536" if few else ""
    )
    yield Fact("huge pages", _huge_pages())
    yield Fact("transparent huge pages for shared memory", _chosen("/sys/kernel/mm/transparent_hugepage/shmem_enabled"))
    why = "plain calls are used; io_uring needs kernel 5.6 or later and a container that allows it"
    yield Fact("io_uring", "works" if ring_works() else "does not work", "" if ring_works() else why)


def available_memory() -> int:
    """Bytes that can still be allocated here: in the node, or in the container if that is less."""
    left = [_number(group / "memory.max") - _number(group / "memory.current") for group in _limited_groups()]
    return min([_of_node("MemAvailable"), *left])


def whole_memory() -> int:
    """Bytes of this node's memory, or of the container's limit if that is less."""
    return min([_of_node("MemTotal"), *filter(None, [container_limit()])])


def container_limit() -> int | None:
    """The memory limit of this process's control groups, in bytes; None if they have no limit."""
    return min((_number(group / "memory.max") for group in _limited_groups()), default=None)


def _of_node(line: str) -> int:
    """Bytes in this line of /proc/meminfo."""
    lines = dict(line.split(":", 1) for line in _read("/proc/meminfo").splitlines())
    return int(lines.get(line, "0 kB").split()[0]) << 10


def _limited_groups() -> Iterator[Path]:
    """The control groups (version 2) of this process that limit its memory; a container shows its own as the root."""
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        own = PurePosixPath(path)
        for group in (own, *own.parents) if not controllers else ():
            folder = Path("/sys/fs/cgroup") / group.relative_to("/")
            if _read(folder / "memory.max").strip().isdecimal():
                yield folder


def _limit(kind: int, shown: Callable[[int], str]) -> str:
    soft, _ = resource.getrlimit(kind)
    return "unlimited" if soft == resource.RLIM_INFINITY else shown(soft)


def _huge_pages() -> str:
    pools = Path("/sys/kernel/mm/hugepages")
    counts = {pool.name.removeprefix("hugepages-"): _number(pool / "nr_hugepages") for pool in sorted(pools.glob("*"))}
    reserved = [f"{count} of {size}" for size, count in counts.items() if count]
    return ", ".join(reserved) or "none reserved"


def _chosen(file: str) -> str:
    """The word in brackets: ``always [madvise] never``."""
    return _read(file).partition("[")[2].partition("]")[0] or "unknown"


def _number(file: Path) -> int:
    text = _read(file).strip()
    return int(text) if text.isdecimal() else 0


def _read(file: Path | str) -> str:
    with contextlib.suppress(OSError):
        return Path(file).read_text("utf-8", "replace")
    return ""
