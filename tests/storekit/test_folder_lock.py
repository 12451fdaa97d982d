"""A folder is locked for one process, and by nobody else who can reach it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil

import pytest
from opened import kubelet_opens

from kvtier_core.errors import BackendError
from kvtier_core.storekit.folder_lock import FolderLock

TAKEN = "another engine or tier keeps its frames here"
LOCK = ".kvtier-lock"


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "folder"


@pytest.fixture
def lock(folder):
    lock = FolderLock(folder)
    yield lock
    lock.release()


@contextlib.contextmanager
def locked_by_a_reader(path, flags=0):
    """What whoever may open it can do for as long as it lives."""
    fd = os.open(path, os.O_RDONLY | flags)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


def uses(folder):
    lock = FolderLock(folder)
    lock.take()
    lock.release()


def is_refused(call):
    with pytest.raises(BackendError, match=TAKEN):
        call()


def test_one_process_has_a_folder_at_a_time(folder, lock):
    lock.take()
    for call in (FolderLock(folder).take, FolderLock(folder).try_out, FolderLock(folder, looking=True).take):
        is_refused(call)
    lock.release()
    FolderLock(folder).try_out()
    uses(folder)


def test_who_may_read_a_folder_locks_nobody_out(folder):
    folder.mkdir(mode=0o755)
    with locked_by_a_reader(folder, os.O_DIRECTORY):
        uses(folder)
        assert not (folder / LOCK).stat().st_mode & 0o077


def test_a_look_locks_a_folder_as_it_is(folder):
    folder.mkdir()
    looking = FolderLock(folder, looking=True)
    looking.take()
    looking.release()
    FolderLock(folder).try_out()
    assert os.listdir(folder) == []


def test_a_lock_that_was_opened_to_others_is_begun_anew(folder):
    uses(folder)
    kubelet_opens(folder)
    with locked_by_a_reader(folder / LOCK):
        uses(folder)
    assert not (folder / LOCK).stat().st_mode & 0o077


def test_a_process_that_uses_its_folder_keeps_it_when_it_is_opened_to_others(folder, lock):
    held = lock.take()
    kubelet_opens(folder)
    assert lock.folder() is held
    for _ in range(2):
        is_refused(FolderLock(folder).take)
        assert lock.folder() is held


def test_a_process_that_has_not_seen_its_folder_opened_stops_when_another_takes_it(folder, lock):
    lock.take()
    kubelet_opens(folder)
    other = FolderLock(folder)
    other.take()
    for _ in range(2):
        is_refused(lock.folder)
    other.release()
    is_refused(lock.folder)


def test_a_lock_that_was_removed_is_made_again(folder, lock):
    held = lock.take()
    (folder / LOCK).unlink()
    assert lock.folder() is held
    is_refused(FolderLock(folder).take)
    shutil.rmtree(folder)
    assert lock.folder() is None
    lock.folder_again()
    is_refused(FolderLock(folder).take)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file away")
def test_another_users_file_is_no_lock(folder):
    folder.mkdir()
    (folder / LOCK).write_bytes(b"precious")
    os.chown(folder / LOCK, 12345, 12345)
    with locked_by_a_reader(folder / LOCK):
        uses(folder)
    (aside,) = [each for each in folder.iterdir() if each.name != LOCK]
    assert aside.read_bytes() == b"precious"
