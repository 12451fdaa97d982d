"""Folders: only what kvtier made is closed, changed or removed."""

from __future__ import annotations

import os
import stat

import pytest
from outsiders import TEXTS, assert_tame

from kvtier_core.errors import BackendError
from kvtier_core.storekit.folder import Folder, NoFile, NotOurs, backend_errors


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
    assert [mode(folder) for folder in (made, made / "inner", found)] == [0o6770, 0o2770, 0o2770]
    Folder.at(made, make=True).inner("inner")
    assert [mode(folder) for folder in (made, made / "inner")] == [0o6700, 0o2700]


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


@pytest.mark.parametrize("text", [text for text in TEXTS.values() if not {"\0", "\ud800"} & set(text)])
def test_the_name_of_a_file_that_cannot_be_used_forges_no_line(tmp_path, text):
    (tmp_path / text[:200]).mkdir()
    with pytest.raises(BackendError) as failed, backend_errors(tmp_path):
        (tmp_path / text[:200]).read_bytes()
    assert_tame(str(failed.value), longest=5000)
