"""What a stack of tiers depends on in this machine: memory, limits, huge pages, io_uring."""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs

from kvtier_core import native
from kvtier_core.storekit.files import ring_works
from kvtier_core.types import size
from kvtier_doctor.memory import available_memory, container_limit, number_in, text_of

#: A server with many connections and a disk tier may run out of descriptors if it has fewer.
_FEW_FILES = 4096


@attrs.frozen
class Fact:
    """A property of the machine; ``advice`` is empty if it is as it should be."""

    name: str
    value: str
    advice: str = ""


def facts() -> Iterator[Fact]:
    """All of them."""
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


def _limit(kind: int, shown: Callable[[int], str]) -> str:
    soft, _ = resource.getrlimit(kind)
    return "unlimited" if soft == resource.RLIM_INFINITY else shown(soft)


def _huge_pages() -> str:
    pools = Path("/sys/kernel/mm/hugepages")
    counts = {
        pool.name.removeprefix("hugepages-"): number_in(pool / "nr_hugepages") for pool in sorted(pools.glob("*"))
    }
    reserved = [f"{count} of {size}" for size, count in counts.items() if count]
    return ", ".join(reserved) or "none reserved"


def _chosen(file: str) -> str:
    """The word in brackets: ``always [madvise] never``."""
    return text_of(file).partition("[")[2].partition("]")[0] or "unknown"
