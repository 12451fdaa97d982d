"""`kvtier fsck disk` over a folder that engines use meanwhile."""

from __future__ import annotations

import os
import time

import pytest
from test_disk import NBYTES, file_of
from test_shared_capacity import stored, used
from test_shared_disk import open_shared

from kvtier_core.cli import main
from kvtier_core.errors import Gone
from kvtier_core.types import Nbytes
from kvtier_disk.config import DiskConfig
from kvtier_testing.samples import make_frame, make_keys

WHOLE, TORN, MORE = KEYS = make_keys(3)
FSCK = ["fsck", "disk", "--config", "kvtier.yaml"]
DAY = 24 * 3600
CAPACITY = 100 * NBYTES


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "store"


@pytest.fixture(params=[0, CAPACITY], ids=["unbounded", "bounded"])
def engine(path, request):
    """A live engine of the folder, with three frames, of which one is torn."""
    capacity = f", capacity: {request.param}B" if request.param else ""
    (path.parent / "kvtier.yaml").write_text(
        "version: 1\ntiers:\n  - {type: heap, capacity: 1MiB}\n"
        f"  - {{type: disk, path: store, shared: true{capacity}}}\n"
    )
    engine = open_shared(path, capacity=request.param)
    put(engine, *KEYS)
    spoiled = bytearray(file_of(path, TORN).read_bytes())
    spoiled[-1] ^= 1
    file_of(path, TORN).write_bytes(spoiled)
    yield engine
    engine.close()


def put(engine, *keys):
    engine.write(keys, [make_frame(key, nbytes=NBYTES) for key in keys])


def make_old(file):
    before = time.time() - DAY - 60
    os.utime(file, (before, before))


def test_fsck_works_beside_live_engines(path, engine, capsys):
    assert main(FSCK) == 1
    assert "torn: store/" in capsys.readouterr().out
    assert main([*FSCK, "--repair"]) == 0
    assert engine.contains(KEYS) == [True, False, True]
    put(engine, TORN)
    assert main(FSCK) == 0


def test_an_unfinished_write_is_not_damage(path, engine, capsys):
    assert main([*FSCK, "--repair"]) == 0
    capsys.readouterr()
    shard = file_of(path, WHOLE).parent
    young = [shard / f"{MORE.hex()}.host-7-0123456789abcdef.tmp", shard / ".nfs00000001", path / ".kvtier-probe-1"]
    for file in young:
        file.write_bytes(b"unfinished")
    for arguments in ([], ["--repair"]):
        assert main([*FSCK, *arguments]) == 0
        assert "unfinished" not in capsys.readouterr().out
    assert all(file.exists() for file in young)


def test_abandoned_writes_are_reported_and_removed(path, engine, capsys):
    assert main([*FSCK, "--repair"]) == 0
    capsys.readouterr()
    shard = file_of(path, WHOLE).parent
    abandoned = [shard / f"{MORE.hex()}.host-7-0123456789abcdef.tmp", path / ".kvtier-probe-1"]
    for file in abandoned:
        file.write_bytes(b"unfinished")
        make_old(file)
    assert main(FSCK) == 1
    out = capsys.readouterr().out
    assert all(f"foreign: {file.relative_to(path.parent)}: not a frame" in out for file in abandoned)
    assert main([*FSCK, "--repair"]) == 0
    assert not any(file.exists() for file in abandoned)


@pytest.mark.parametrize("engine", [CAPACITY], indirect=True)
def test_a_repair_corrects_the_account(path, engine):
    put(engine, *make_keys(20))
    for key in make_keys(20)[10:]:
        file_of(path, key).unlink()  # as an operator does
    abandoned = file_of(path, WHOLE).with_suffix(".host-7-0123456789abcdef.tmp")
    abandoned.write_bytes(bytes(NBYTES))
    make_old(abandoned)
    assert used(path) == 20 * NBYTES
    assert main(FSCK) == 1
    assert used(path) == 20 * NBYTES, "without --repair nothing changes"
    assert main([*FSCK, "--repair"]) == 0
    assert used(path) == stored(path) == 10 * NBYTES


@pytest.mark.parametrize("engine", [0], indirect=True)
def test_a_folder_without_a_capacity_gets_no_account(path, engine):
    assert main([*FSCK, "--repair"]) == 0
    assert (path / ".kvtier-shared").read_bytes() == b""


@pytest.mark.parametrize("change", ["removed", "replaced"])
def test_entries_that_change_during_the_check_are_passed_over(path, engine, change):
    with DiskConfig(path=path, shared=True, min_free=Nbytes(0)).walk() as found:
        stored = {each.key: each for each in found}
    file_of(path, TORN).unlink()
    if change == "replaced":
        put(engine, TORN)
    for use in (lambda: stored[TORN].read(0, 100), stored[TORN].remove):
        with pytest.raises(Gone):
            use()
    assert engine.contains([TORN]) == [change == "replaced"]
    assert stored[WHOLE].read(0, NBYTES) == make_frame(WHOLE, nbytes=NBYTES)


@pytest.mark.parametrize("engine", [0], indirect=True)
def test_a_frame_that_is_written_again_while_it_is_read_is_passed_over(path, engine, capsys, monkeypatch):
    """The bytes that were read may be of two frames."""
    torn, pread = file_of(path, TORN).stat().st_ino, os.pread

    def read_and_replaced(fd, *arguments):
        found = pread(fd, *arguments)
        if os.fstat(fd).st_ino == torn:
            put(engine, TORN)
        return found

    monkeypatch.setattr(os, "pread", read_and_replaced)
    assert main([*FSCK, "--repair"]) == 0
    assert "torn:" not in capsys.readouterr().out
    assert engine.contains([TORN]) == [True]


def test_an_engine_that_does_not_say_that_it_is_shared_is_refused(path, engine, capsys):
    (path.parent / "kvtier.yaml").write_text(
        "version: 1\ntiers:\n  - {type: heap, capacity: 1MiB}\n  - {type: disk, path: store, capacity: 1GiB}\n"
    )
    assert main([*FSCK, "--repair"]) == 2
    assert "several engines share this folder" in capsys.readouterr().err
    assert file_of(path, TORN).exists()


def test_fsck_of_a_missing_folder_fails_and_makes_none(path, engine, capsys):
    file = path.parent / "kvtier.yaml"
    file.write_text(file.read_text().replace("store", "nowhere"))
    assert main(FSCK) == 2
    assert "nowhere: no such folder" in capsys.readouterr().err
    assert not (path.parent / "nowhere").exists()
