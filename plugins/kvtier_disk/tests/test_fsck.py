"""`kvtier fsck disk`, over a folder in which everything is wrong that can be."""

import pytest

from kvtier_core import frame
from kvtier_core.cli import main
from kvtier_core.testing.samples import make_context, make_frame, make_keys, make_namespace
from kvtier_core.types import PAGE_NBYTES
from kvtier_disk.config import DiskConfig

NBYTES = 4 * PAGE_NBYTES
WHOLE, TORN, SWAPPED, OLD, CUT, ASIDE = KEYS = make_keys(6)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kvtier.yaml").write_text(
        "version: 1\ntiers:\n  - {type: heap, capacity: 1MiB}\n  - {type: disk, capacity: 1GiB, path: store}\n"
    )
    disk = DiskConfig(path=tmp_path / "store").open(make_context())
    disk.write(KEYS, [make_frame(key, nbytes=NBYTES) for key in KEYS])
    files = {key: next((tmp_path / "store").rglob(f"{key.hex()}.kv")) for key in KEYS}
    spoiled = bytearray(files[TORN].read_bytes())
    spoiled[-1] ^= 1
    files[TORN].write_bytes(spoiled)
    files[SWAPPED].write_bytes(files[WHOLE].read_bytes())
    old = bytearray(files[OLD].read_bytes())
    frame.seal(memoryview(old), make_namespace().renewed(), OLD, NBYTES - PAGE_NBYTES)
    files[OLD].write_bytes(old)
    files[CUT].write_bytes(files[CUT].read_bytes()[:5000])
    spoiled = bytearray(files[ASIDE].read_bytes())
    spoiled[5000] ^= 1
    files[ASIDE].write_bytes(spoiled)
    disk.quarantine([ASIDE])
    files[WHOLE].with_suffix(".tmp").write_bytes(b"never finished")
    disk.close()
    return tmp_path


def counts(out):
    rows = [line.split() for line in out.splitlines() if ":" not in line]
    return {row[0]: int(row[1]) for row in rows}


def test_everything_is_told(folder, capsys):
    assert main(["fsck", "disk", "--config", "kvtier.yaml"]) == 1
    out = capsys.readouterr().out
    assert counts(out) == {"whole": 1, "torn": 2, "foreign": 2, "orphaned": 2, "unreadable": 0}
    for key, told in (
        (TORN, "torn: {}: the checksum does not match"),
        (SWAPPED, "orphaned: {}: a frame of another key"),
        (OLD, "orphaned: {}: a frame of another namespace or epoch"),
        (CUT, "foreign: {}: not a frame by its name, place and length"),
    ):
        (file,) = folder.rglob(f"{key.hex()}.kv")
        assert told.format(file.relative_to(folder)) in out.splitlines()


def test_repair_leaves_what_is_whole(folder, capsys):
    assert main(["fsck", "disk", "--config", "kvtier.yaml", "--repair"]) == 0
    assert capsys.readouterr().out.count(": removed\n") == 6
    assert {file.name for file in folder.rglob("store/**/*") if file.is_file()} == {
        f"{WHOLE.hex()}.kv",
        "namespace.json",
    }
    assert main(["fsck", "disk", "--config", "kvtier.yaml"]) == 0
    assert counts(capsys.readouterr().out) == {"whole": 1, "torn": 0, "foreign": 0, "orphaned": 0, "unreadable": 0}


def test_a_folder_in_use_is_left_alone(folder, capsys):
    disk = DiskConfig(path=folder / "store").open(make_context())
    assert main(["fsck", "disk", "--config", "kvtier.yaml", "--repair"]) == 2
    assert "store: another live process keeps its frames here" in capsys.readouterr().err
    disk.close()


@pytest.mark.parametrize(
    "arguments, why",
    [
        (["disc", "--config", "kvtier.yaml"], "kvtier.yaml has no tier 'disc' below its arenas; it has: disk"),
        (["heap", "--config", "kvtier.yaml"], "kvtier.yaml has no tier 'heap' below its arenas; it has: disk"),
        (["disk", "--config", "nothing.yaml"], "nothing.yaml"),
    ],
)
def test_what_cannot_be_looked_at(folder, capsys, arguments, why):
    assert main(["fsck", *arguments]) == 2
    assert why in capsys.readouterr().err


def test_no_folder(folder, capsys):
    (folder / "kvtier.yaml").write_text(
        "version: 1\ntiers:\n  - {type: heap, capacity: 1MiB}\n  - {type: disk, capacity: 1GiB, path: nowhere}\n"
    )
    assert main(["fsck", "disk", "--config", "kvtier.yaml"]) == 2
    assert "nowhere: no such folder" in capsys.readouterr().err
    assert not (folder / "nowhere").exists()
