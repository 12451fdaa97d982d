"""Where the processes of an engine meet, when another account was there first."""

from __future__ import annotations

import os
import re

import pytest

from kvtier_core.errors import BackendError
from kvtier_core.storekit.user_folders import runtime_folder, user_secret

STRANGER = 12345
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may act as another user")


@pytest.fixture
def tmp(tmp_path, monkeypatch):
    """The folder for temporary files, open to all; there is no XDG_RUNTIME_DIR."""
    tmp = tmp_path / "tmp"
    tmp.mkdir()
    tmp.chmod(0o1777)
    monkeypatch.setattr("tempfile.tempdir", str(tmp))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home/.cache"))
    return tmp


def squat(tmp):
    """Another account makes the folder of that name first, and lets everybody in."""
    where = os.open(tmp, os.O_RDONLY)
    user = os.geteuid()
    os.seteuid(STRANGER)
    try:
        os.mkdir(f"kvtier-{user}", dir_fd=where)
        os.chmod(f"kvtier-{user}", 0o777, dir_fd=where)
    finally:
        os.seteuid(user)
        os.close(where)


def test_the_runtime_folder_is_with_temporary_files(tmp, tmp_path):
    folder = runtime_folder()
    assert (folder, folder.stat().st_mode & 0o777) == (tmp / f"kvtier-{os.geteuid()}", 0o700)
    assert not (tmp_path / "home").exists()


@only_root
def test_where_a_stranger_has_its_name_it_is_with_caches(tmp, tmp_path):
    squat(tmp)
    folder = runtime_folder()
    assert (folder, folder.stat().st_mode & 0o777) == (tmp_path / "home/.cache/kvtier/run", 0o700)
    assert runtime_folder() == folder
    assert list((tmp / "kvtier-0").iterdir()) == []


@only_root
def test_without_either_the_error_says_what_to_set_and_that_helps(tmp, tmp_path, monkeypatch):
    squat(tmp)
    (tmp_path / "home").write_text("no folder")
    said = (
        f"{tmp}/kvtier-0 and {tmp_path}/home/.cache/kvtier/run: cannot be created, or is not private to this user; set "
        "XDG_RUNTIME_DIR, for the engine and for kvtier's commands, to a folder of this user with mode 0700"
    )
    with pytest.raises(PermissionError, match=re.escape(said)):
        runtime_folder()
    (tmp_path / "mine").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "mine"))
    assert runtime_folder() == tmp_path / "mine/kvtier"


def test_without_a_home_there_is_no_folder_of_caches(tmp, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.chdir(tmp)
    (tmp / f"kvtier-{os.geteuid()}").write_text("no folder")
    with pytest.raises(PermissionError, match=f"^{tmp}/kvtier-{os.geteuid()}: cannot be created"):
        runtime_folder()
    assert not (tmp / "relative").exists()


def test_all_processes_of_a_user_share_a_secret_that_no_other_user_reads(tmp):
    found = {user_secret("peers"), user_secret("peers")}
    assert len(found) == 1 and len(found.pop()) == 43
    assert (runtime_folder() / "peers.secret").stat().st_mode & 0o777 == 0o600
    assert user_secret("operators") != user_secret("peers")


def test_a_secret_that_others_could_have_read_is_not_used(tmp):
    user_secret("peers")
    (runtime_folder() / "peers.secret").chmod(0o644)
    with pytest.raises(BackendError, match="others can read or write it"):
        user_secret("peers")
