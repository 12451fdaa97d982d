"""`kvtier fsck disk`, over a folder in which everything is wrong that can be."""

import os
import shutil
import socket
import stat
import subprocess
from pathlib import Path

import attrs
import pytest

from kvtier_core.cli import main
from kvtier_core.frames import format as frame
from kvtier_core.testing.disks import btrfs
from kvtier_core.testing.samples import make_context, make_frame, make_keys, make_namespace
from kvtier_core.types import FRAME_ALIGNMENT, Nbytes
from kvtier_disk.config import DiskConfig

NBYTES = 4 * FRAME_ALIGNMENT
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
    frame.seal(memoryview(old), make_namespace().renewed(), OLD, NBYTES - FRAME_ALIGNMENT)
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


def plant(kind, path):
    match kind:
        case "folder":
            path.mkdir()
            (path / "file").touch()
        case "link":
            path.symlink_to(path.parents[2] / "namespace.json")
        case "pipe":
            os.mkfifo(path)
        case "socket":
            where = os.open(path.parent, os.O_RDONLY)
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(f"/proc/self/fd/{where}/{path.name}")  # the name itself may be too long
            os.close(where)
        case "device" if not os.geteuid():
            os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))
        case "device":
            pytest.skip("only root may make a device")
        case "holes":
            path.touch()
            os.truncate(path, 4 << 40)


NO_FOLDERS = ["link", "pipe", "socket", "device", "holes"]


@pytest.mark.parametrize(
    ("kind", "where"), [("folder", "frame"), *((kind, where) for kind in NO_FOLDERS for where in ("frame", "shard"))]
)
def test_what_stands_for_a_frame_is_told_and_removed(folder, capsys, kind, where):
    assert main(["fsck", "disk", "--config", "kvtier.yaml", "--repair"]) == 0
    (whole,) = folder.rglob("*.kv")
    if where == "frame":
        planted = whole.with_name(f"{whole.stem[:2]}{'0' * 62}.kv")
    else:
        planted = whole.parents[1] / next(name for name in ("00", "01") if name != whole.parent.name)
        shutil.rmtree(planted, ignore_errors=True)
    plant(kind, planted)
    capsys.readouterr()
    assert main(["fsck", "disk", "--config", "kvtier.yaml"]) == 1
    assert f"foreign: {planted.relative_to(folder)}: " in capsys.readouterr().out
    assert os.path.lexists(planted)
    assert main(["fsck", "disk", "--config", "kvtier.yaml", "--repair"]) == 0
    assert not os.path.lexists(planted)
    assert main(["fsck", "disk", "--config", "kvtier.yaml"]) == 0
    assert [file.name for file in folder.rglob("*.kv")] == [whole.name]


@pytest.fixture
def asked(monkeypatch):
    """How many bytes each read of a file asked for."""
    asked, pread = [], os.pread
    monkeypatch.setattr(os, "pread", lambda fd, nbytes, at: asked.append(nbytes) or pread(fd, nbytes, at))
    return asked


def test_a_large_frame_is_read_in_pieces(folder, capsys, asked):
    """One that says of itself that it is as long as its file, which is nearly all holes."""
    whole = next(folder.rglob(f"{WHOLE.hex()}.kv"))
    nbytes = 300 << 20
    os.truncate(whole, nbytes)
    with open(whole, "r+b") as file:
        head = bytearray(file.read(FRAME_ALIGNMENT))
        head[12:20] = (nbytes - FRAME_ALIGNMENT).to_bytes(8, "little")
        file.seek(0)
        file.write(head)
    assert main(["fsck", "disk", "--config", "kvtier.yaml"]) == 1
    assert f"torn: {whole.relative_to(folder)}: the checksum does not match" in capsys.readouterr().out
    assert sum(asked) > nbytes and max(asked) <= 4 << 20


def test_a_frame_that_is_longer_than_it_says_is_not_read(folder, capsys, asked):
    whole = next(folder.rglob(f"{WHOLE.hex()}.kv"))
    os.truncate(whole, 1 << 30)
    assert main(["fsck", "disk", "--config", "kvtier.yaml"]) == 1
    assert f"torn: {whole.relative_to(folder)}: a payload of another length" in capsys.readouterr().out
    assert sum(asked) < 1 << 20


def test_what_cannot_be_read_is_removed(tmp_path, capsys):
    with btrfs(tmp_path, 128 << 20) as disk:
        store, file = disk.folder / "store", tmp_path / "kvtier.yaml"
        tiers = f"[{{type: heap, capacity: 1MiB}}, {{type: disk, capacity: 1GiB, path: {store}}}]"
        file.write_text(f"version: 1\ntiers: {tiers}\n")
        tier = DiskConfig(path=store, min_free=Nbytes(0)).open(make_context(capacity=1 << 30))
        tier.write(KEYS, [make_frame(key, nbytes=NBYTES) for key in KEYS])
        tier.close()
        bad = next(store.rglob(f"{TORN.hex()}.kv"))
        disk.spoil(bad)
        assert main(["fsck", "disk", "--config", str(file)]) == 1
        assert f"unreadable: {bad}: Input/output error\n" in capsys.readouterr().out
        assert main(["fsck", "disk", "--config", str(file), "--repair"]) == 0
        assert not bad.exists()
        assert len(list(store.rglob("*.kv"))) == len(KEYS) - 1


def test_what_cannot_be_removed_is_told_and_left(folder, capsys):
    torn = next(folder.rglob(f"{TORN.hex()}.kv"))
    done = subprocess.run(["chattr", "+i", str(torn)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot be made immutable: {done.stderr.strip()}")
    try:
        assert main(["fsck", "disk", "--config", "kvtier.yaml", "--repair"]) == 1
        told = capsys.readouterr()
        assert told.err == f"{torn.relative_to(folder)}: Operation not permitted\n"
        assert told.out.count(": removed\n") == 5, "and the others are removed"
    finally:
        subprocess.run(["chattr", "-i", str(torn)], check=True)


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


def test_the_folders_of_several_engines_are_looked_at_too(tmp_path):
    disk = DiskConfig(path=tmp_path / "store")
    for replica in (0, 1):
        engine = disk.open(attrs.evolve(make_context(), replica=replica, replicas=2))
        engine.write([KEYS[replica]], [make_frame(KEYS[replica], nbytes=NBYTES)])
        engine.close()
    with disk.walk() as found:
        assert sorted((each.key, Path(each.where).parents[2].name) for each in found) == sorted(
            (KEYS[replica], f"replica-{replica}") for replica in (0, 1)
        )


def test_an_engine_alone_leaves_the_folders_of_several_alone(tmp_path):
    disk = DiskConfig(path=tmp_path)
    engines = [disk.open(attrs.evolve(make_context(), replica=replica, replicas=2)) for replica in (0, 1)]
    for engine in engines:
        engine.write([WHOLE], [make_frame(WHOLE, nbytes=NBYTES)])
    alone = disk.open(make_context())
    assert list(alone.scan()) == []
    alone.close()
    assert [list(engine.contains([WHOLE])) for engine in engines] == [[True], [True]]
    for engine in engines:
        engine.close()
