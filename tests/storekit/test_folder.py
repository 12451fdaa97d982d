"""Folders: only what kvtier made is closed, changed or removed."""

from __future__ import annotations

import os
import stat

import pytest
from opened import kubelet_opens
from outsiders import TEXTS, assert_tame

from kvtier_core.errors import BackendError
from kvtier_core.storekit.folder import Folder, NoFile, NotOurs, backend_errors

STRANGER = 12345


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_only_a_folder_that_kvtier_made_is_closed_and_only_when_it_is_opened(tmp_path):
    made, found = tmp_path / "made", tmp_path / "found"
    Folder.at(made, make=True).inner("inner", make=True)
    found.mkdir(mode=0o700)
    for folder in (made, made / "inner", found):
        folder.chmod(mode(folder) | 0o2770)
    for path in (made, found):
        with pytest.raises(NotOurs):
            Folder.at(path)
    assert Folder.at(made, looking=True).inner("inner").entries() == []
    assert Folder.at(made, make=True, looking=True).inner("inner").entries() == []
    for looking in (False, True):
        with pytest.raises(NotOurs):
            Folder.at(found, make=True, looking=looking)
    assert [mode(folder) for folder in (made, made / "inner", found)] == [0o6770, 0o6770, 0o2770]
    Folder.at(made, make=True).inner("inner")
    assert [mode(folder) for folder in (made, made / "inner")] == [0o6700, 0o6700]


def test_a_folder_in_the_place_of_a_file_keeps_its_contents(tmp_path):
    (tmp_path / "name" / "precious").mkdir(parents=True)
    (tmp_path / "inner").write_bytes(b"precious")
    folder = Folder.at(tmp_path)
    assert folder.remove("name")
    folder.inner("inner", make=True)
    aside, file = sorted(path for path in tmp_path.iterdir() if "aside" in path.name)[::-1]
    assert os.listdir(aside) == ["precious"] and file.read_bytes() == b"precious"
    assert not folder.remove(aside.name) and aside.exists()


def test_only_a_file_with_the_mark_is_removed_as_kvtiers(tmp_path):
    folder = Folder.at(tmp_path)
    fd = folder.open("made", os.O_RDWR | os.O_CREAT, marked=True)
    os.write(fd, b"content")
    os.close(fd)
    (tmp_path / "made").chmod(0o1660)
    (tmp_path / "found").write_bytes(b"precious")
    (tmp_path / "link").symlink_to("found")
    for name in ("found", "link"):
        with pytest.raises(NoFile, match="not a file that kvtier made"):
            folder.remove_made(name)
    for name in ("made", "missing"):
        folder.remove_made(name)
    assert sorted(os.listdir(tmp_path)) == ["found", "link"]


def test_what_kvtier_made_before_a_folder_was_opened_is_removed_and_nothing_else(tmp_path):
    folder = Folder.at(tmp_path / "made", make=True)
    for home in (
        folder,
        folder.inner("inner", make=True),
        folder.inner("emptied", make=True).inner("in it", make=True),
    ):
        for name in ("made", "made too"):
            os.close(home.open(name, os.O_RDWR | os.O_CREAT))
    made = tmp_path / "made"
    (made / "inner" / "found").write_bytes(b"precious")
    (made / "found").mkdir()
    (made / "found" / "file").write_bytes(b"precious")
    kubelet_opens(made)
    folder = Folder.at(made, make=True)
    os.close(folder.inner("later", make=True).open("made", os.O_RDWR | os.O_CREAT))
    folder.clear_opened()
    assert sorted(str(path.relative_to(made)) for path in made.rglob("*") if path.is_file()) == [
        "found/file",
        "inner/found",
        "later/made",
    ]
    assert sorted(os.listdir(made)) == ["found", "inner", "later"]


def test_a_folder_that_cannot_be_closed_again_is_refused(tmp_path, monkeypatch):
    """On file systems of others `chmod` may have no effect."""
    made = tmp_path / "made"
    Folder.at(made, make=True).inner("inner", make=True)
    kubelet_opens(made)
    with monkeypatch.context() as patched:
        patched.setattr(os, "chmod", lambda *_, **__: None)
        with pytest.raises(NotOurs, match="others can write to it"):
            Folder.at(made, make=True)
    folder = Folder.at(made, make=True)
    monkeypatch.setattr(os, "chmod", lambda *_, **__: None)
    with pytest.raises(NotOurs, match="others can write to it"):
        folder.inner("inner", make=True)


def test_a_name_that_another_users_file_has_is_free(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root may give a file away")
    (tmp_path / "file").write_bytes(b"precious")
    (tmp_path / "folder").mkdir()
    (tmp_path / "replaced").write_bytes(b"precious")
    (tmp_path / "removed").write_bytes(b"precious")
    for path in tmp_path.iterdir():
        os.chown(path, STRANGER, STRANGER)
    folder = Folder.at(tmp_path)
    os.close(folder.open("file", os.O_RDWR | os.O_CREAT))
    folder.inner("folder", make=True)
    os.close(folder.open("new", os.O_RDWR | os.O_CREAT))
    folder.rename("new", folder, "replaced")
    assert folder.remove("removed")
    for _ in range(2):
        theirs = [path for path in tmp_path.iterdir() if path.stat().st_uid == STRANGER]
        assert [path.read_bytes() for path in theirs if path.is_file()] == [b"precious"] * 3 and len(theirs) == 4
        assert not any(folder.remove(path.name) for path in theirs)


@pytest.mark.parametrize("text", [text for text in TEXTS.values() if not {"\0", "\ud800"} & set(text)])
def test_the_name_of_a_file_that_cannot_be_used_forges_no_line(tmp_path, text):
    (tmp_path / text[:200]).mkdir()
    with pytest.raises(BackendError) as failed, backend_errors(tmp_path):
        (tmp_path / text[:200]).read_bytes()
    assert_tame(str(failed.value), longest=5000)
