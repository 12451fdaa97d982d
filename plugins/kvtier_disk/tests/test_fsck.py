"""`kvtier fsck disk`, over a folder in which everything is wrong that can be."""

import contextlib
import os
import shutil
import socket
import stat
import struct
import subprocess
import zlib
from pathlib import Path

import attrs
import pytest
from disks import btrfs
from outsiders import TEXTS, assert_tame

from kvtier_core.cli import main
from kvtier_core.encoding.codec import FrameCodec
from kvtier_core.encoding.keyed_seal import KeyedSeal
from kvtier_core.frames.format import seal
from kvtier_core.frames.identity import CodecIdentity
from kvtier_core.relays.sealed_names import SealedNames
from kvtier_core.stack.store_tier.request_log import keys_beside
from kvtier_core.types import FRAME_ALIGNMENT, Nbytes
from kvtier_disk.config import DiskConfig
from kvtier_testing.samples import make_context, make_frame, make_keys, make_namespace

NBYTES = 4 * FRAME_ALIGNMENT
OTHER = CodecIdentity("zip", bytes(range(32)), lossless=True)
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
    seal(memoryview(old), make_namespace().renewed(), OLD, NBYTES - FRAME_ALIGNMENT)
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


def test_fsck_knows_the_policy_state_and_the_log(folder, capsys):
    beside = state, *_, last = keys_beside(make_namespace().digest)
    assert len(set(beside)) == 65
    with contextlib.closing(DiskConfig(path=folder / "store").open(make_context())) as disk:
        disk.write([state, last], [make_frame(state, nbytes=NBYTES), make_frame(last, nbytes=NBYTES)])
    main(["fsck", "disk", "--config", "kvtier.yaml"])
    found = counts(capsys.readouterr().out)
    assert (found["whole"], found["policy"]) == (1, 2)
    main(["fsck", "disk", "--config", "kvtier.yaml", "--repair"])
    found = counts(capsys.readouterr().out)
    assert (found["whole"], found["policy"]) == (1, 2), "they stay"


def test_everything_is_reported(folder, capsys):
    assert main(["fsck", "disk", "--config", "kvtier.yaml"]) == 1
    out = capsys.readouterr().out
    assert counts(out) == {
        "whole": 1,
        "torn": 2,
        "incompatible": 0,
        "foreign": 2,
        "orphaned": 2,
        "unreadable": 0,
    }
    assert "codec: raw: 1\n" in out
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
        ".kvtier-lock",
    }
    assert main(["fsck", "disk", "--config", "kvtier.yaml"]) == 0
    left = counts(capsys.readouterr().out)
    assert left == {"whole": 1, "torn": 0, "incompatible": 0, "foreign": 0, "orphaned": 0, "unreadable": 0}


@pytest.fixture
def taken_over(folder, capsys):
    """Repaired, with a frame of another codec and one of format version 1 beside the whole one; their files."""
    assert main(["fsck", "disk", "--config", "kvtier.yaml", "--repair"]) == 0
    disk = DiskConfig(path=folder / "store").open(make_context())
    frames = [make_frame(key, nbytes=NBYTES) for key in (TORN, OLD)]
    seal(frames[0], make_namespace(), TORN, NBYTES - FRAME_ALIGNMENT, codec=OTHER)
    frames[1][8:10] = (1).to_bytes(2, "little")
    disk.write([TORN, OLD], frames)
    disk.close()
    capsys.readouterr()
    return [next(folder.rglob(f"{key.hex()}.kv")) for key in (TORN, OLD)]


def test_frames_of_other_codecs_and_versions_are_reported_and_left(folder, capsys, taken_over):
    """It is not damaged, and another engine may be able to read it."""
    for arguments in ([], ["--repair"]):
        assert main(["fsck", "disk", "--config", "kvtier.yaml", *arguments]) == 0
        out = capsys.readouterr().out
        other, old = (file.relative_to(folder) for file in taken_over)
        assert f"incompatible: {other}: written with codec {OTHER}; the tier uses raw\n" in out
        assert f"incompatible: {old}: a frame of another format version\n" in out
        assert f"codec: {OTHER}: 1\n" in out
        assert all(file.exists() for file in taken_over)


def test_frames_of_another_codec_are_removed_if_that_is_asked_for(capsys, taken_over):
    assert main(["fsck", "disk", "--config", "kvtier.yaml", "--remove-incompatible"]) == 0
    assert not any(file.exists() for file in taken_over)
    assert counts(capsys.readouterr().out)["whole"] == 1


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
def test_other_objects_in_place_of_frames_are_reported_and_removed(folder, capsys, kind, where):
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


@pytest.mark.parametrize("text", [text for text in TEXTS.values() if not {"\0", "\ud800"} & set(text)])
def test_the_name_of_a_file_forges_no_line(folder, capsys, text):
    assert main(["fsck", "disk", "--config", "kvtier.yaml", "--repair"]) == 0
    (whole,) = folder.rglob("*.kv")
    whole.with_name(text[:200]).touch()
    capsys.readouterr()
    for arguments in ([], ["--repair"]):
        main(["fsck", "disk", "--config", "kvtier.yaml", *arguments])
        out, err = capsys.readouterr()
        assert text[:5] in out
        assert_tame(*out.split("\n"), *err.split("\n"))
    assert main(["fsck", "disk", "--config", "kvtier.yaml"]) == 0


def test_the_name_of_a_codec_forges_no_line(folder, capsys):
    assert main(["fsck", "disk", "--config", "kvtier.yaml", "--repair"]) == 0
    disk = DiskConfig(path=folder / "store").open(make_context())
    frame = make_frame(TORN, nbytes=NBYTES)
    forged = CodecIdentity("a\nb\33[2J", bytes(range(32)), lossless=True)
    seal(frame, make_namespace(), TORN, NBYTES - FRAME_ALIGNMENT, codec=forged)
    disk.write([TORN], [frame])
    disk.close()
    capsys.readouterr()
    main(["fsck", "disk", "--config", "kvtier.yaml"])
    out = capsys.readouterr().out
    assert "codec a\\nb\\x1b[2J" in out
    assert_tame(*out.split("\n"))


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
        head[188:192] = zlib.crc32(head[:188]).to_bytes(4, "little")
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


def test_unreadable_frames_are_removed(tmp_path, capsys):
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


def test_frames_that_cannot_be_removed_are_reported_and_left(folder, capsys):
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
    assert "store: another engine or tier keeps its frames here" in capsys.readouterr().err
    disk.close()


@pytest.mark.parametrize(
    "arguments, why",
    [
        (["disc", "--config", "kvtier.yaml"], "kvtier.yaml has no tier 'disc' below its arenas; it has: disk"),
        (["heap", "--config", "kvtier.yaml"], "kvtier.yaml has no tier 'heap' below its arenas; it has: disk"),
        (["disk", "--config", "nothing.yaml"], "nothing.yaml"),
    ],
)
def test_folders_that_cannot_be_examined(folder, capsys, arguments, why):
    assert main(["fsck", *arguments]) == 2
    assert why in capsys.readouterr().err


def test_fsck_of_a_missing_folder_fails_and_makes_none(folder, capsys):
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


# -- tiers with a seal_key -----------------------------------------------------------------------------

SALTED, EMPTY = make_keys(2)


@pytest.fixture
def protected(tmp_path, monkeypatch):
    """Makes a store with a frame of a request with a salt and one without; returns the files, in this order."""

    def make(settings, *, encrypt):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("KVTIER_TEST_SEAL", "a secret that is long enough for a key")
        (tmp_path / "kvtier.yaml").write_text(
            "version: 1\ntiers:\n  - {type: heap, capacity: 1MiB}\n"
            f"  - {{type: disk, capacity: 1GiB, path: store, {settings}}}\n"
        )
        context = make_context()
        keyed = KeyedSeal.of("a secret that is long enough for a key", encrypt=encrypt)
        sealed = FrameCodec(context.namespace, context.layout, keyed_seal=keyed)
        disk = DiskConfig(path=tmp_path / "store").open(make_context(namespace=sealed.namespace))
        salts = {SALTED: b"a tenant's", EMPTY: b""}
        frames = [sealed.encode(key, make_frame(key), salt) for key, salt in salts.items()]
        SealedNames(disk, keyed).write(list(salts), frames)
        disk.close()
        return [next((tmp_path / "store").rglob(f"{name.hex()}.kv")) for name in keyed.names(list(salts))]

    return make


def fsck(capsys, *arguments):
    status = main(["fsck", "disk", "--config", "kvtier.yaml", *arguments])
    return status, capsys.readouterr().out


def forge(file):
    """Another payload, with checksums that fit."""
    frame = bytearray(file.read_bytes())
    frame[FRAME_ALIGNMENT] ^= 1
    (nbytes,) = struct.unpack_from("<Q", frame, 12)
    checksum = zlib.crc32(frame[FRAME_ALIGNMENT : FRAME_ALIGNMENT + nbytes])
    struct.pack_into("<II", frame, 180, checksum, checksum)
    struct.pack_into("<I", frame, 188, zlib.crc32(frame[:188]))
    file.write_bytes(frame)


MAC = "seal_key: env:KVTIER_TEST_SEAL"
AES = "seal_key: env:KVTIER_TEST_SEAL, encrypt: true"


def test_a_seal_is_checked(capsys, protected):
    salted, _ = protected(MAC, encrypt=False)
    status, out = fsck(capsys)
    assert (status, counts(out)["whole"]) == (0, 2)
    assert "not checked" not in out
    forge(salted)
    status, out = fsck(capsys)
    assert (status, counts(out)["torn"]) == (1, 1)
    assert f"torn: {salted.relative_to(Path.cwd())}: the seal does not match" in out
    assert fsck(capsys, "--repair")[0] == 0
    assert not salted.exists()


def test_a_seal_that_cannot_be_checked_is_reported_and_not_called_damage(capsys, protected, monkeypatch):
    files = protected(MAC, encrypt=False)
    monkeypatch.delenv("KVTIER_TEST_SEAL")
    status, out = fsck(capsys, "--repair")
    assert (status, counts(out)["whole"]) == (0, 2)
    assert "seals not checked: 2: the environment variable KVTIER_TEST_SEAL is not set for this process\n" in out
    assert all(file.exists() for file in files)


def test_without_its_salt_an_encrypted_frame_cannot_be_checked(capsys, protected):
    files = protected(AES, encrypt=True)
    status, out = fsck(capsys, "--repair")
    assert (status, counts(out)["whole"]) == (0, 2)
    assert "seals not checked: 1: they are encrypted with a salt, or forged\n" in out
    assert all(file.exists() for file in files)


@pytest.mark.parametrize(
    ("wrote", "reads"),
    [(MAC, AES), (MAC, "threads: 1"), (AES, MAC), (MAC, "seal_key: env:KVTIER_TEST_OTHER")],
)
def test_frames_that_are_sealed_otherwise_are_left(capsys, protected, monkeypatch, wrote, reads):
    monkeypatch.setenv("KVTIER_TEST_OTHER", "another secret that is long enough, too")
    protected(wrote, encrypt=wrote == AES)
    files = protected(reads, encrypt=wrote == AES)
    status, out = fsck(capsys, "--repair")
    assert (status, counts(out)["incompatible"]) == (0, 2)
    assert out.count("a frame of another seal key, or of none\n") == 2
    assert all(file.exists() for file in files)


def test_damage_under_a_seal_is_damage(capsys, protected, monkeypatch):
    """Whether the secret is at hand or not: the checksums tell."""
    salted, empty = protected(AES, encrypt=True)
    for file, place in ((salted, FRAME_ALIGNMENT), (empty, 192)):
        frame = bytearray(file.read_bytes())
        frame[place] ^= 1
        file.write_bytes(frame)
    assert counts(fsck(capsys)[1])["torn"] == 2
    monkeypatch.delenv("KVTIER_TEST_SEAL")
    assert counts(fsck(capsys)[1])["torn"] == 2
