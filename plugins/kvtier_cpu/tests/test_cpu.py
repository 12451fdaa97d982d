"""Beyond the laws, for memory: other processes, dead owners, huge pages, too much."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

from kvtier_core.errors import BackendError
from kvtier_core.types import size
from kvtier_cpu import memory_limit as available
from kvtier_cpu import plugin, segment
from kvtier_cpu.config import CpuConfig
from kvtier_cpu.memory_limit import MemoryLimit, memory_limits
from kvtier_testing.samples import PagedBuffer, make_context, make_layout

BLOCKS = 4
LAYOUT = make_layout(blocks=BLOCKS)
OWNER = """
import sys
from kvtier_testing.samples import make_context
from kvtier_cpu.config import CpuConfig
arena = CpuConfig().open(make_context(capacity=1 << 20))
arena.view(1)[:] = bytes([7]) * arena.slot_nbytes
print(arena.handle, flush=True)
sys.stdin.readline()
print(arena.view(0)[5000], flush=True)
sys.stdin.readline()
"""


def open_cpu(capacity=1 << 20, **settings):
    return CpuConfig(**settings).open(make_context(capacity=capacity))


def attach(handle, buffer=None):
    buffer = buffer or PagedBuffer(LAYOUT, BLOCKS, random.Random(0))
    return CpuConfig().attach(handle, buffer.kv_cache())


def why_not(handle):
    with pytest.raises(BackendError) as caught:
        attach(handle)
    return str(caught.value)


def changed(handle, **fields):
    return json.dumps({**json.loads(handle), **fields})


@pytest.fixture
def arena():
    arena = open_cpu()
    yield arena
    arena.close()


@pytest.fixture
def owner():
    """Another process with an arena open; its handle is its first line."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        yield process
        process.kill()


def test_plugin_offers_it():
    assert plugin.kvtier_backends() == [CpuConfig]


# -- other processes -------------------------------------------------------------------------------


def test_two_processes_see_each_other(owner):
    buffer = PagedBuffer(LAYOUT, BLOCKS, random.Random(0))
    mover = attach(owner.stdout.readline(), buffer)
    blocks = list(range(BLOCKS))
    mover.load(1, [1], [[blocks]])
    mover.wait([1])
    assert {byte for layer in range(3) for block in blocks for byte in buffer.page(layer, block)} == {7}
    for block in blocks:
        buffer.put(0, block, bytes([9]) * LAYOUT.groups[0].page_nbytes[0])
    mover.store(2, [[blocks]], [0])
    mover.wait([2])
    owner.stdin.write("look\n")
    owner.stdin.flush()
    assert owner.stdout.readline() == "9\n"
    mover.close()


def holders(inode):
    """Processes that map the segment: while there is one, its memory is taken."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            maps = (process / "maps").read_text().splitlines()
        except OSError:  # it ended while we looked
            continue
        if any(f" {inode} " in line and "memfd:kvtier" in line for line in maps):
            found.add(int(process.name))
    return found


def test_a_killed_owner_leaves_nothing_behind(owner):
    handle = owner.stdout.readline()
    inode = json.loads(handle)["inode"]
    buffer = PagedBuffer(LAYOUT, BLOCKS, random.Random(0))
    mover = attach(handle, buffer)  # which keeps no hold of it
    assert holders(inode) == {owner.pid, os.getpid()}
    owner.kill()
    owner.wait()
    assert holders(inode) == {os.getpid()}
    mover.load(1, [1], [[list(range(BLOCKS))]])
    mover.wait([1])
    assert [ended.ok for ended in mover.finished()] == [True], "a worker that outlives the owner reads what it mapped"
    mover.close()
    assert holders(inode) == set()
    assert inode not in [entry.inode() for entry in os.scandir("/dev/shm")]


def test_a_dead_owner_is_not_reached(owner):
    handle = owner.stdout.readline()
    owner.kill()
    owner.wait()
    assert why_not(handle) == f"cannot reach the arena of process {owner.pid}: it is gone, or has closed it"


def test_a_closed_arena_is_not_reached():
    arena = open_cpu()
    arena.close()
    assert "is gone, or has closed it" in why_not(arena.handle)


@pytest.mark.parametrize("field", ["device", "inode", "nbytes"])
def test_another_file_at_its_path_is_not_mapped(field, arena):
    """The pid may be another process's by now, the fd another file's."""
    address = json.loads(arena.handle)
    handle = changed(arena.handle, **{field: address[field] + 4096})
    path = f"/proc/{address['pid']}/fd/{address['fd']}"
    assert why_not(handle) == f"{path} is no longer the arena it was: its owner is gone"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_another_user_is_refused(arena):
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.setuid(65534)
        try:
            attach(arena.handle)
        except BackendError as error:
            os.write(writer, str(error).encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with open(reader) as said:
        assert said.read() == (
            f"cannot reach the arena of process {os.getpid()}: it runs as another user, or /proc hides it"
        )


@pytest.mark.parametrize("change", [lambda fd: os.ftruncate(fd, 0), lambda fd: os.ftruncate(fd, 1 << 24)])
def test_no_process_that_has_it_changes_its_length(owner, change):
    """The next access would end the others, or read what is not there."""
    address = json.loads(owner.stdout.readline())
    with open(f"/proc/{address['pid']}/fd/{address['fd']}", "r+b") as file, pytest.raises(PermissionError):
        change(file.fileno())
    owner.stdin.write("look\n")
    owner.stdin.flush()
    assert owner.stdout.readline() == "0\n"


def test_a_view_outlives_close():
    arena = open_cpu()
    view = arena.view(0)
    arena.close()
    view[:4] = b"kept"
    assert view[:4] == b"kept"


# -- too much --------------------------------------------------------------------------------------


def test_no_room_for_one_slot():
    with pytest.raises(BackendError) as caught:
        open_cpu(capacity=4096)
    assert str(caught.value) == "cpu: capacity 4KiB is smaller than one chunk (48KiB); increase it"


def test_more_than_there_is(monkeypatch):
    monkeypatch.setattr(
        available,
        "memory_limits",
        lambda: [MemoryLimit(9 << 30, "this node"), MemoryLimit(3 << 20, "control group /a")],
    )
    with pytest.raises(BackendError) as caught:
        open_cpu(capacity=1 << 30)
    assert str(caught.value) == (
        "cpu: capacity needs 1GiB of memory, but control group /a has 3MiB available; lower the capacity"
    )


def test_more_than_any_node_has():
    with pytest.raises(BackendError, match="^cpu: capacity needs .* of memory, but .* available; lower the capacity$"):
        open_cpu(capacity=1 << 60)


def write_files(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_rooms_of_unified_groups(tmp_path):
    write_files(
        tmp_path,
        {
            "proc/meminfo": "MemTotal: 100 kB\nMemAvailable: 50 kB\n",
            "proc/self/cgroup": "0::/pod/engine\n",
            "sys/fs/cgroup/pod/memory.max": "90000\n",
            "sys/fs/cgroup/pod/memory.current": "80000\n",
            "sys/fs/cgroup/pod/memory.stat": "anon 1\ninactive_file 5000\n",
            "sys/fs/cgroup/pod/engine/memory.max": "max\n",
            "sys/fs/cgroup/pod/engine/memory.current": "70000\n",
        },
    )
    assert list(memory_limits(tmp_path)) == [MemoryLimit(51200, "this node"), MemoryLimit(15000, "control group /pod")]


def test_rooms_of_a_memory_controller(tmp_path):
    """In a container: the path is the node's, the mount shows only the container's own group."""
    write_files(
        tmp_path,
        {
            "proc/meminfo": "MemAvailable: 50 kB\n",
            "proc/self/cgroup": "4:cpu:/docker/1\n3:memory:/docker/1\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "90000\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "80000\n",
            "sys/fs/cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 7\n",
        },
    )
    assert list(memory_limits(tmp_path)) == [MemoryLimit(51200, "this node"), MemoryLimit(10007, "control group /")]


# -- pages -----------------------------------------------------------------------------------------


@pytest.fixture
def no_hugetlb(monkeypatch):
    monkeypatch.setattr(os, "MFD_HUGETLB", 1 << 30)  # a flag that no kernel knows


@pytest.fixture
def shmem_enabled(monkeypatch, tmp_path, no_hugetlb):
    def choose(choice):
        words = ["always", "within_size", "advise", "never", "deny", "force"]
        file = tmp_path / "shmem_enabled"
        file.write_text(" ".join(f"[{word}]" if word == choice else word for word in words))
        monkeypatch.setattr(segment, "_SHMEM_ENABLED", file)
        return file

    return choose


@pytest.mark.parametrize(
    "asked, choice, got",
    [
        ("auto", "never", "auto -> off"),
        ("auto", "advise", "auto -> transparent"),
        ("on", "always", "on -> transparent"),
        ("off", "always", "off -> off"),
    ],
)
def test_pages_asked_for_and_got(shmem_enabled, asked, choice, got):
    shmem_enabled(choice)
    arena = open_cpu(huge_pages=asked)
    assert arena.facts()["huge_pages"] == got
    arena.close()


def test_huge_pages_that_must_be_cannot_be(shmem_enabled):
    file = shmem_enabled("never")
    with pytest.raises(BackendError) as caught:
        open_cpu(capacity=64 << 20, huge_pages="on")
    assert str(caught.value) == (
        "cpu: huge_pages is on, but 64MiB of huge pages are not reserved (vm.nr_hugepages) and "
        f"{file} is never; huge_pages: auto uses ordinary pages"
    )


def reserved_huge_pages():
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(meminfo.get("HugePages_Free", "0")) - int(meminfo.get("HugePages_Rsvd", "0"))


@pytest.mark.skipif(reserved_huge_pages() < 2, reason="no huge pages are reserved (vm.nr_hugepages)")
def test_reserved_huge_pages():
    arena = open_cpu(huge_pages="on")
    assert arena.facts()["huge_pages"] == "on -> hugetlb"
    assert arena.slots * arena.slot_nbytes <= 1 << 20
    attach(arena.handle).close()
    arena.close()


def test_an_old_kernel_allocates_in_another_way(monkeypatch):
    monkeypatch.setattr(segment, "_MADV_POPULATE_WRITE", 4711)
    monkeypatch.setattr(segment, "_PIECE", 8192)
    arena = open_cpu(huge_pages="off")
    arena.view(0)[:4] = b"kept"
    mover = attach(arena.handle)
    assert arena.view(0)[:4] == b"kept"
    mover.close()
    arena.close()


def test_memory_that_the_kernel_refuses(monkeypatch):
    def refuse(memory, begin, nbytes):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(segment, "_populate", refuse)
    with pytest.raises(BackendError) as caught:
        open_cpu(capacity=1 << 20)
    frame = make_layout().frame_nbytes
    of_slots = size((1 << 20) // frame * frame)
    why = "shared memory: Cannot allocate memory; lower the capacity"
    assert str(caught.value) == f"cpu: cannot allocate {of_slots} of {why}"


def test_memory_is_present_at_open():
    arena = open_cpu(capacity=64 << 20, huge_pages="off")
    inode = str(json.loads(arena.handle)["inode"])
    smaps = Path("/proc/self/smaps").read_text().split("VmFlags")
    mapping = next(entry for entry in smaps if "memfd:kvtier" in entry and f" {inode} " in entry)
    assert f"Rss: {arena.slots * arena.slot_nbytes >> 10} kB" in " ".join(mapping.split())
    arena.close()


# -- other devices ---------------------------------------------------------------------------------


def test_a_gpu_that_is_not_there_is_refused(arena):
    kv_cache = attrs.evolve(PagedBuffer(LAYOUT, BLOCKS, random.Random(0)).kv_cache(), device="cuda:0")
    with pytest.raises(BackendError, match="^no CUDA driver: |^CUDA cannot |^libkvtier_cuda.so was not built: "):
        CpuConfig().attach(arena.handle, kv_cache)
