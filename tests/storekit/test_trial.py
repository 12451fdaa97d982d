"""A folder of a check, whatever is done with it, stays as it is."""

from __future__ import annotations

import contextlib
import os

import pytest
from opened import kubelet_opens

from kvtier_core.errors import BackendError
from kvtier_core.storekit.folder import Folder
from kvtier_core.storekit.trial import TrialFolder, nameless


def opens_new(folder):
    os.close(folder.open("new", os.O_RDWR | os.O_CREAT))
    file = folder.open("newest", os.O_RDWR | os.O_CREAT | os.O_EXCL)
    os.write(file, b"written")
    os.close(file)


def opens_made(folder):
    file = folder.open("made", os.O_RDWR | os.O_CREAT)
    with contextlib.suppress(OSError):
        os.write(file, b"written")
    os.close(file)


CALLS = {
    "at": lambda folder: TrialFolder.at(folder.path, make=True),
    "at, new": lambda folder: TrialFolder.at(folder.path / "new/inner", make=True),
    "clear_opened": lambda folder: folder.clear_opened(),
    "entries": lambda folder: folder.entries(),
    "inner": lambda folder: folder.inner("inner", make=True),
    "inner, a file": lambda folder: folder.inner("made", make=True),
    "inner, new": lambda folder: opens_new(folder.inner("new", make=True)),
    "open": opens_made,
    "open, new": opens_new,
    "remove": lambda folder: folder.remove("made"),
    "remove_empty": lambda folder: folder.remove_empty("inner"),
    "remove_made": lambda folder: folder.remove_made("made"),
    "rename": lambda folder: folder.rename("made", folder, "renamed"),
    "status": lambda folder: folder.status("made"),
}


def test_every_method_of_a_folder_is_tried():
    methods = {name for name, value in vars(Folder).items() if callable(getattr(value, "__func__", value))}
    assert {name for name in methods if not name.startswith("_")} == {name.partition(",")[0] for name in CALLS}


@pytest.mark.parametrize("opened", [False, True], ids=["its own", "opened to a group"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_nothing_changes_in_a_trial(tmp_path, call, opened):
    path = tmp_path / "folder"
    made = Folder.at(path, make=True)
    made.inner("inner", make=True)
    os.close(made.open("made", os.O_RDWR | os.O_CREAT))
    (path / "made").write_bytes(b"precious")
    if opened:
        kubelet_opens(path)
    before = seen(tmp_path)
    with contextlib.suppress(BackendError):
        call(TrialFolder.at(path, make=True))
    assert seen(tmp_path) == before


def test_a_file_without_a_name_is_in_no_folder(tmp_path):
    file = nameless(tmp_path, os.O_RDWR)
    os.write(file, b"written")
    assert not os.listdir(tmp_path)
    os.close(file)


def seen(folder):
    """Each file and folder with its owner, mode and bytes."""
    return {
        path: (path.stat().st_uid, path.stat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in (folder, *folder.rglob("*"))
    }
