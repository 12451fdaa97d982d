"""Folders that kubelet opens to the group of a pod."""

from __future__ import annotations

import stat

import pytest

from kvtier_core.storekit.folder import Folder, NotOurs, is_ours


def test_a_folder_that_is_open_to_a_group_is_closed_when_it_is_taken_and_by_no_question(tmp_path):
    tmp_path.chmod(0o2770)
    assert not is_ours(tmp_path)
    with pytest.raises(NotOurs):
        Folder.at(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o2770
    Folder.at(tmp_path, make=True)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o2700
    assert is_ours(tmp_path)
