"""Strangers on the same machine: a slab is a file of this user's alone, in a folder where nobody else makes one."""

from __future__ import annotations

import os

import pytest
from slabs import files_of, open_slabs, whole, write

from kvtier_core.errors import BackendError
from kvtier_testing.samples import make_key

KEY = make_key(0)
STRANGER = 12345

only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may act as another user")
each_file = pytest.mark.parametrize("name", ["kvtier.slab", "kvtier.table"])
each_name = pytest.mark.parametrize(
    "name", ["kvtier.slab", "kvtier.table", ".kvtier-lock", ".kvtier-probe-0", f"kvtier.{64 * '0'}.json"]
)


@pytest.fixture
def folder(tmp_path):
    """Open to all, and sticky, as /tmp is."""
    folder = tmp_path / "kv"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def plant(folder, name):
    """A stranger makes that file there before the tier does, and may write to it for ever."""
    where = os.open(folder, os.O_RDONLY)
    os.seteuid(STRANGER)
    try:
        fd = os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600, dir_fd=where)
        os.fchmod(fd, 0o666)
    finally:
        os.seteuid(0)
        os.close(where)
    return fd


@only_root
@each_file
def test_a_sticky_folder_is_refused_whatever_a_stranger_put_there(folder, name):
    """Nobody else may replace files in it, but anybody may make those that the tier has not made yet."""
    planted = plant(folder, name)
    with pytest.raises(BackendError, match=f"{folder}: others can write to it; name a folder in it"):
        open_slabs(folder)
    assert os.listdir(folder) == [name]
    assert os.fstat(planted).st_size == 0
    os.close(planted)


@only_root
@each_name
def test_a_strangers_file_is_not_adopted_when_the_folder_is_closed_to_others(folder, name):
    """It stays, under another name."""
    planted = plant(folder, name)
    folder.chmod(0o700)
    for _ in range(2):
        backend = open_slabs(folder)
        write(backend, KEY)
        assert whole(backend, KEY)
        backend.close()
    status = os.fstat(planted)
    assert (status.st_size, status.st_nlink) == (0, 1)
    os.close(planted)


def another_name(path, _):
    os.link(path.parent / "precious", path)


def open_to_others(path, mode):
    path.touch()
    path.chmod(mode)


@each_file
@pytest.mark.parametrize(
    ("spoil", "mode", "why"),
    [
        (another_name, 0, "the file has another hard link"),
        (open_to_others, 0o660, "others can read or write it; remove the file"),
        (open_to_others, 0o604, "others can read or write it; remove the file"),
        (lambda path, mode: os.mkfifo(path, mode), 0o600, "a pipe where a file is expected"),
    ],
    ids=["linked", "writable", "readable", "pipe"],
)
def test_a_file_that_is_not_the_tiers_alone_is_refused_untouched(tmp_path, name, spoil, mode, why):
    (tmp_path / "precious").write_bytes(b"not the tier's")
    (tmp_path / "precious").chmod(0o600)
    spoil(tmp_path / name, mode)
    with pytest.raises(BackendError, match=f"{tmp_path}/{name}: {why}"):
        open_slabs(tmp_path)
    assert (tmp_path / "precious").read_bytes() == b"not the tier's"


def test_a_worker_reads_no_slab_that_others_may_write_to(tmp_path):
    backend = open_slabs(tmp_path, mode="gds")
    write(backend, KEY)
    files_of(backend).close()
    (tmp_path / "kvtier.slab").chmod(0o602)
    with pytest.raises(BackendError, match="others can read or write it"):
        files_of(backend)
    backend.close()
