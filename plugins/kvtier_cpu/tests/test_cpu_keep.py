"""Memory that is kept, in a folder without enough room."""

from __future__ import annotations

import os

import attrs
import pytest
from disks import tmpfs

from kvtier_core.errors import BackendError
from kvtier_core.types import Nbytes
from kvtier_cpu import segment
from kvtier_cpu.config import CpuConfig
from kvtier_testing.samples import make_context, make_layout

LAYOUT = make_layout((1024, 3072), 4)
MIB = 1 << 20
CONFIG = CpuConfig(huge_pages="off")


@pytest.fixture
def folder(tmp_path):
    """On a tmpfs of 8 MiB."""
    with tmpfs(tmp_path, 8 * MIB) as small:
        folder = small.folder / "kept"
        folder.mkdir(mode=0o700)
        yield folder


def opened(folder, nbytes, **changes):
    context = attrs.evolve(make_context(layout=LAYOUT, capacity=nbytes), keep=folder)
    return CONFIG.open(attrs.evolve(context, **changes))


def free(folder):
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def test_memory_that_does_not_fit_is_refused_with_the_room_and_nothing_is_allocated(folder):
    before = free(folder)
    with pytest.raises(
        BackendError, match=rf"capacity needs 16MiB in {folder}, but {Nbytes(before)} is available; lower"
    ):
        opened(folder, 16 * MIB)
    assert list(folder.iterdir()) == [] and free(folder) == before


def test_memory_that_is_kept_outlives_a_larger_capacity_that_does_not_fit(folder):
    kept = opened(folder, 4 * MIB)
    kept.view(0)[:4] = b"kept"
    kept.close()
    before = (folder / "memory").stat()
    with pytest.raises(BackendError, match="is available; lower the capacity"):
        opened(folder, 16 * MIB)
    assert (folder / "memory").stat() == before
    again = opened(folder, 4 * MIB)
    assert bytes(again.view(0)[:4]) == b"kept"
    again.close()


def test_another_capacity_may_have_the_room_of_the_former_memory(folder):
    opened(folder, 6 * MIB).close()
    opened(folder, 7 * MIB).close()
    assert 6 * MIB < (folder / "memory").stat().st_size <= 7 * MIB


def test_memory_that_fails_half_way_leaves_nothing_allocated(folder, monkeypatch):
    """Somebody else takes the room between the look and the allocation."""
    allocate, before = segment._allocate, free(folder)

    def others_come_first(file, memory, begin, nbytes):
        allocate(file, memory, begin, nbytes // 2)
        (folder / "others").write_bytes(bytes(free(folder)))
        allocate(file, memory, begin, nbytes)

    monkeypatch.setattr(segment, "_allocate", others_come_first)
    with pytest.raises(BackendError, match="others have taken the space meanwhile; lower the capacity"):
        opened(folder, 6 * MIB)
    (folder / "others").unlink()
    assert list(folder.iterdir()) == [] and free(folder) == before


@pytest.mark.parametrize("nbytes", [0, 4, 6])
def test_what_kvtier_did_not_make_is_neither_used_nor_removed(folder, nbytes):
    others = folder / "memory"
    if nbytes:
        others.write_bytes(b"precious" * (nbytes * MIB // 8))
        others.chmod(0o600)
    else:
        (others / "precious").mkdir(parents=True)
    before = others.stat()
    with pytest.raises(BackendError, match=f"{others}: not a file that kvtier made; name another folder"):
        opened(folder, 6 * MIB)
    assert others.stat() == before
    assert not nbytes or others.read_bytes() == b"precious" * (nbytes * MIB // 8)


@pytest.mark.parametrize("kept", [0, 4, 6])
def test_a_check_changes_nothing(folder, kept):
    if kept:
        opened(folder, kept * MIB).close()
    before = [(each.name, each.stat()) for each in folder.iterdir()], free(folder)
    opened(folder, 6 * MIB, checking=True).close()
    assert ([(each.name, each.stat()) for each in folder.iterdir()], free(folder)) == before
    with pytest.raises(BackendError, match="capacity needs 16MiB"):
        opened(folder, 16 * MIB, checking=True)
