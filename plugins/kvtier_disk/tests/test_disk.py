"""Beyond the laws, for disks: its folder, its room, and disks that fail."""

import contextlib
import errno
import multiprocessing
import os
import re
import resource
import shutil
import signal
import stat
import subprocess
from concurrent.futures import ThreadPoolExecutor

import attrs
import pytest
from patience import HANG

from kvtier_core.errors import BackendError
from kvtier_core.frames.format import FrameError, verify
from kvtier_core.storekit import disk_access
from kvtier_core.types import FRAME_ALIGNMENT, Nbytes
from kvtier_disk import plugin
from kvtier_disk.config import DiskConfig
from kvtier_testing.samples import Poisoned, make_context, make_frame, make_key, make_keys, make_namespace

NBYTES = 4 * FRAME_ALIGNMENT


def open_disk(path, *, model="tiny", capacity=1 << 30, longest=0, min_free=0, quarantine=0, **settings):
    ctx = make_context(namespace=make_namespace(model), capacity=capacity)
    ctx = attrs.evolve(ctx, max_frame_nbytes=Nbytes(longest))
    return DiskConfig(path=path, min_free=Nbytes(min_free), quarantine=Nbytes(quarantine), **settings).open(ctx)


def write(backend, *keys):
    backend.write(keys, [make_frame(key, nbytes=NBYTES) for key in keys])


def read(backend, key):
    into = memoryview(bytearray(NBYTES))
    (count,) = backend.read([key], [into])
    return bytes(into[:count])


def files(path):
    """All, but those that hold the facts of namespaces, and the lock."""
    beside = "namespace.json", ".kvtier-lock"
    return sorted(found for found in path.rglob("*") if found.is_file() and found.name not in beside)


def file_of(path, key, model="tiny"):
    name = key.hex()
    return path / make_namespace(model).digest.hex()[:16] / name[:2] / f"{name}.kv"


def total(path):
    return sum(file.stat().st_size for file in files(path))


@contextlib.contextmanager
def immutable(file):
    """Nobody may change, rename or remove it. Skips the test where that cannot be."""
    done = subprocess.run(["chattr", "+i", str(file)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot be made immutable: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", str(file)], check=True)


@pytest.fixture
def mounted(tmp_path):
    """Mounts a small filesystem of some type at a folder; skips where that is not allowed."""
    folder = tmp_path / "mounted"
    folder.mkdir()

    def mount(kind, options=""):
        asked = ["mount", "-t", kind, "-o", f"mode=700,{options}".rstrip(","), kind, str(folder)]
        done = subprocess.run(asked, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"cannot mount {kind}: {done.stderr.strip()}")
        return folder

    if os.geteuid() or not shutil.which("mount"):
        pytest.skip("only root may mount")
    yield mount
    subprocess.run(["umount", "-l", str(folder)], capture_output=True)


def test_the_plugin_offers_the_disk():
    assert plugin.kvtier_backends() == [DiskConfig]


# -- the folder ------------------------------------------------------------------------------------


def test_names_come_from_keys_and_no_other_user_may_look(tmp_path):
    key = make_key(0)
    disk = open_disk(tmp_path / "kv")
    write(disk, key)
    home = make_namespace().digest.hex()[:16]
    (file,) = files(tmp_path / "kv")
    assert file == tmp_path / "kv" / home / key.hex()[:2] / f"{key.hex()}.kv"
    assert stat.S_IMODE((tmp_path / "kv" / home / "namespace.json").stat().st_mode) == 0o1600
    assert stat.S_IMODE(file.stat().st_mode) == 0o1600
    assert [stat.S_IMODE(parent.stat().st_mode) for parent in list(file.parents)[:3]] == [0o4700] * 3
    disk.close()


def test_a_folder_belongs_to_one_engine(tmp_path):
    disk = open_disk(tmp_path)
    with pytest.raises(BackendError, match=re.escape(f"{tmp_path}: another engine or tier")):
        open_disk(tmp_path)
    disk.close()
    open_disk(tmp_path).close()


def test_a_forked_child_does_not_keep_the_folder(tmp_path):
    disk = open_disk(tmp_path)
    child = os.fork()
    if not child:
        signal.pause()
    try:
        disk.close()
        open_disk(tmp_path).close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _hold(path, started):
    open_disk(path)
    started.send("open")
    signal.pause()


def test_a_killed_engine_leaves_the_folder_free(tmp_path):
    ours, theirs = multiprocessing.Pipe()
    holder = multiprocessing.get_context("spawn").Process(target=_hold, args=(tmp_path, theirs), daemon=True)
    holder.start()
    assert ours.poll(60)
    with pytest.raises(BackendError, match="another engine or tier"):
        open_disk(tmp_path)
    holder.kill()
    holder.join()
    open_disk(tmp_path).close()


def _die_half_way(path, key, direct):
    disk = open_disk(path, direct=direct, io="calls")
    pwritev = os.pwritev

    def half(fd, views, at):
        pwritev(fd, [views[0][: len(views[0]) // 2]], at)
        os.kill(os.getpid(), signal.SIGKILL)

    os.pwritev = half
    write(disk, key)


@pytest.mark.parametrize("direct", ["auto", "off"])
def test_a_writer_that_dies_half_way_leaves_nothing_under_the_name(tmp_path, direct):
    key = make_key(0)
    open_disk(tmp_path).close()
    writer = multiprocessing.get_context("spawn").Process(target=_die_half_way, args=(tmp_path, key, direct))
    writer.start()
    writer.join(HANG)
    assert writer.exitcode == -signal.SIGKILL
    (left,) = files(tmp_path)
    assert left.suffix == ".tmp"
    disk = open_disk(tmp_path)
    assert list(disk.contains([key])) == [False] and list(disk.scan()) == [] and files(tmp_path) == []
    disk.close()


def test_open_removes_what_is_no_frame(tmp_path):
    disk = open_disk(tmp_path)
    write(disk, *make_keys(2))
    disk.close()
    whole, other = files(tmp_path)
    os.truncate(other, FRAME_ALIGNMENT + 1)
    whole.with_suffix(".tmp").write_bytes(bytes(FRAME_ALIGNMENT))
    (whole.parent / "notes.kv").write_bytes(bytes(FRAME_ALIGNMENT))
    (tmp_path / "README").write_text("not ours, and not in the way")
    disk = open_disk(tmp_path)
    assert [(key.hex(), nbytes) for key, nbytes in disk.scan()] == [(whole.stem, NBYTES)]
    assert files(tmp_path) == sorted([whole, tmp_path / "README"])
    disk.close()


def test_open_leaves_alone_what_kvtier_has_not_made(tmp_path):
    """A folder named by mistake may have names like those of namespaces: of build ids, commits, caches."""
    (tmp_path / "0123456789abcdef").write_text("a file")
    (tmp_path / "fedcba9876543210/ab/cd").mkdir(parents=True)
    (tmp_path / "0000000000000000/00").mkdir(parents=True)
    (tmp_path / "fedcba9876543210/ab/notes").write_text("a note")
    (tmp_path / "fedcba9876543210/ab" / f"{make_keys(1)[0].hex()}.kv").write_bytes(bytes(FRAME_ALIGNMENT))
    (tmp_path / "fedcba9876543210/namespace.json").write_text("{}")
    (tmp_path / "1111111111111111").symlink_to("fedcba9876543210")
    before = sorted(tmp_path.rglob("*"))
    disk = open_disk(tmp_path)
    write(disk, *make_keys(2))
    disk.close()
    open_disk(tmp_path, capacity=2 * NBYTES).close()
    assert set(before) <= set(tmp_path.rglob("*"))
    assert (tmp_path / "fedcba9876543210/ab/notes").read_text() == "a note"


@pytest.mark.parametrize("torn", ["", "{", None], ids=["empty", "cut", "missing"])
def test_a_namespace_without_facts_is_known_by_its_mark(tmp_path, torn):
    """As a full disk or a power cut leaves it: its frames count, and what is no frame leaves."""
    disk = open_disk(tmp_path, model="theirs")
    write(disk, *make_keys(2))
    disk.close()
    facts_in(tmp_path, "theirs").unlink() if torn is None else facts_in(tmp_path, "theirs").write_text(torn)
    garbage = file_of(tmp_path, make_keys(1)[0], "theirs").with_suffix(".tmp")
    garbage.write_bytes(bytes(FRAME_ALIGNMENT))
    disk = open_disk(tmp_path, model="ours", capacity=3 * NBYTES)
    write(disk, *make_keys(2))
    assert total(tmp_path) == 3 * NBYTES
    assert not garbage.exists()
    disk.close()


def test_a_file_of_impossible_length_is_no_frame(tmp_path):
    """It has holes and takes no room at all. Neither is it found, nor does any frame leave for it."""
    keys = make_keys(4)
    disk = open_disk(tmp_path, model="theirs")
    write(disk, *keys[:3])
    disk.close()
    disk = open_disk(tmp_path, model="ours", quarantine=NBYTES)
    write(disk, *keys)
    disk.quarantine(keys[3:])
    disk.close()
    for file in (
        file_of(tmp_path, keys[0], "theirs"),
        file_of(tmp_path, keys[0], "ours"),
        *tmp_path.glob("quarantine/*"),
    ):
        os.truncate(file, 4 << 40)
    disk = open_disk(tmp_path, model="ours", capacity=8 * NBYTES, longest=NBYTES)
    assert sorted(key for key, _ in disk.scan()) == sorted(keys[1:3])
    assert [file.stat().st_size for file in files(tmp_path)] == [NBYTES] * 4
    os.truncate(file_of(tmp_path, keys[1], "ours"), 4 << 40)
    assert read(disk, keys[1]) == b""
    disk.delete(keys[1:2])
    for key in keys:
        write(disk, key)
    assert total(tmp_path) <= 8 * NBYTES
    disk.close()


def test_only_frames_count_against_the_capacity_of_others(tmp_path):
    disk = open_disk(tmp_path, model="theirs")
    write(disk, *make_keys(2))
    disk.close()
    assert [len(files(tmp_path)), len(list(tmp_path.rglob("*.json")))] == [2, 1]
    open_disk(tmp_path, model="ours", capacity=2 * NBYTES).close()
    assert len(files(tmp_path)) == 2


# -- namespaces ------------------------------------------------------------------------------------


def facts_in(path, model):
    return path / make_namespace(model).digest.hex()[:16] / "namespace.json"


def test_the_namespaces_of_others_are_reported(tmp_path):
    for model in ("first", "second", "without frames"):
        disk = open_disk(tmp_path, model=model)
        if model != "without frames":
            write(disk, make_key(0))
        disk.close()
    disk = open_disk(tmp_path, model="ours")
    told = sorted(disk.namespaces(), key=lambda namespace: namespace.facts)
    assert told == [make_namespace("first"), make_namespace("second")]
    assert not facts_in(tmp_path, "without frames").parent.exists()
    disk.close()


@pytest.mark.parametrize(
    "odd",
    [
        b"",
        b"{",
        b"{}",
        b'{"model": 7}',
        b'{"model": "another"}',
        b'[["model", "theirs"]]',
        b"7",
        b"[" * 100_000,
        b"\xff\xfe",
        b" " * (2 << 20),
    ],
    ids=range(10),
)
def test_odd_facts_are_passed_over(tmp_path, odd):
    disk = open_disk(tmp_path, model="theirs")
    write(disk, make_key(0))
    disk.close()
    facts_in(tmp_path, "theirs").write_bytes(odd)
    disk = open_disk(tmp_path, model="ours")
    assert list(disk.namespaces()) == []
    assert len(files(tmp_path)) == 1
    disk.close()


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_facts_that_are_no_file_are_passed_over(tmp_path, kind):
    disk = open_disk(tmp_path, model="theirs")
    write(disk, make_key(0))
    disk.close()
    facts = facts_in(tmp_path, "theirs")
    facts.rename(tmp_path / "facts")
    make = {"link": lambda: facts.symlink_to(tmp_path / "facts"), "pipe": lambda: os.mkfifo(facts)}
    make.get(kind, facts.mkdir)()
    for model in ("ours", "theirs"):
        disk = open_disk(tmp_path, model=model)
        assert list(disk.namespaces()) == []
        disk.close()
    assert facts.read_bytes() == (tmp_path / "facts").read_bytes() and not facts.is_symlink(), "written anew"


def test_open_removes_what_a_kill_left_of_the_probe(tmp_path):
    child = os.fork()
    if not child:
        os.pwritev = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        try:
            open_disk(tmp_path, direct="auto")
        finally:
            os._exit(1)
    os.waitpid(child, 0)
    assert files(tmp_path) != []
    open_disk(tmp_path, direct="off").close()
    assert files(tmp_path) == []


def test_a_damaged_file_is_a_miss_or_a_frame_that_check_refuses(tmp_path):
    for direct in ("off", "auto"):
        disk = open_disk(tmp_path, direct=direct)
        key = make_key(0)
        write(disk, key)
        (file,) = files(tmp_path)
        os.truncate(file, 2 * FRAME_ALIGNMENT)
        assert verify(memoryview(read(disk, key)), make_namespace(), key) is FrameError.SHORT
        for nbytes in (FRAME_ALIGNMENT + 7, 0):
            os.truncate(file, nbytes)
            assert read(disk, key) == b""
        disk.close()


@pytest.mark.parametrize("gone", ["kv", "kv/*", "kv/*/??"])
def test_a_removed_folder_is_made_again(tmp_path, gone):
    path = tmp_path / "kv"
    disk = open_disk(path)
    write(disk, *make_keys(4))
    for found in tmp_path.glob(gone):
        shutil.rmtree(found) if found.is_dir() else found.unlink()
    assert [read(disk, key) for key in make_keys(4)] == [b""] * 4
    assert not any(disk.contains(make_keys(4)))
    disk.delete(make_keys(4))
    write(disk, *make_keys(4))
    assert all(disk.contains(make_keys(4)))
    with pytest.raises(BackendError, match="another engine or tier"):
        open_disk(path)
    disk.close()


def test_where_the_folder_cannot_be(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(BackendError, match="file: not a folder"):
        open_disk(tmp_path / "file")
    with pytest.raises(BackendError, match="Not a directory"):
        open_disk(tmp_path / "file" / "kv")


def test_a_link_is_refused(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(BackendError, match="link: a link; name the folder itself"):
        open_disk(tmp_path / "link")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a folder away")
def test_a_folder_of_another_user_is_refused(tmp_path):
    (tmp_path / "kv").mkdir(mode=0o700)
    os.chown(tmp_path / "kv", 12345, 12345)
    with pytest.raises(BackendError, match="kv: owned by user 12345; kvtier uses only folders of its own user"):
        open_disk(tmp_path / "kv")


def test_a_folder_that_others_may_write_to_is_refused(tmp_path):
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv").chmod(0o770)
    with pytest.raises(BackendError, match="others can write to it; run chmod go-w"):
        open_disk(tmp_path / "kv")


def test_a_folder_that_cannot_be_written(mounted):
    folder = mounted("tmpfs", "size=1m,ro")
    with pytest.raises(BackendError, match="Read-only file system"):
        open_disk(folder)


# -- quarantine ------------------------------------------------------------------------------------


def test_damaged_frames_are_kept_aside_until_there_are_too_many(tmp_path):
    disk = open_disk(tmp_path, quarantine=2 * NBYTES)
    keys = make_keys(3)
    write(disk, *keys)
    disk.quarantine(keys)
    assert list(disk.contains(keys)) == [False] * 3
    assert len(files(tmp_path / "quarantine")) == 2
    disk.quarantine(keys)  # nothing left: no error
    disk.close()


def test_quarantined_frames_count_and_leave_when_room_is_needed(tmp_path):
    keys = make_keys(4)
    disk = open_disk(tmp_path, capacity=3 * NBYTES, quarantine=2 * NBYTES)
    write(disk, *keys[:3])
    disk.quarantine(keys[:2])
    write(disk, keys[3])  # a third of one's own and two aside are full: the first that went aside leaves
    assert total(tmp_path) == 3 * NBYTES
    disk.close()
    disk = open_disk(tmp_path, capacity=2 * NBYTES)
    assert [key for key, _ in disk.scan()] == [keys[2], keys[3]]
    assert total(tmp_path) == 2 * NBYTES
    disk.close()


# -- room ------------------------------------------------------------------------------------------


def test_frames_of_others_leave_at_open_oldest_first(tmp_path):
    keys = make_keys(6)
    disk = open_disk(tmp_path, model="theirs")
    write(disk, *keys)
    disk.close()
    for i, key in enumerate(keys):
        os.utime(file_of(tmp_path, key, "theirs"), (i, i))
    open_disk(tmp_path, model="ours", capacity=4 * NBYTES).close()
    disk = open_disk(tmp_path, model="theirs")
    assert [key for key, _ in disk.scan()] == keys[2:]
    disk.close()


def test_frames_of_others_leave_only_for_what_has_no_room(tmp_path):
    theirs, ours = make_keys(8)[:4], make_keys(8)[4:]
    disk = open_disk(tmp_path, model="theirs")
    write(disk, *theirs)
    disk.close()
    disk = open_disk(tmp_path, model="ours", capacity=6 * NBYTES)
    for key, files_expected in zip(ours, (5, 6, 6, 6), strict=True):
        write(disk, key)
        assert len(files(tmp_path)) == files_expected
    disk.delete(ours[:1])
    write(disk, ours[0])
    write(disk, ours[0])
    assert len(files(tmp_path)) == 6, "what was deleted or replaced is room again"
    disk.close()


def test_min_free_keeps_reads_going(tmp_path):
    disk = open_disk(tmp_path)
    write(disk, make_key(0))
    disk.close()
    disk = open_disk(tmp_path, min_free=1 << 60)
    with pytest.raises(BackendError, match=r"16KiB to write, [\d.]+\w+ free, of which min_free reserves 1024PiB"):
        write(disk, make_key(1))
    assert read(disk, make_key(0)) == make_frame(make_key(0), nbytes=NBYTES)
    assert list(disk.contains(make_keys(2))) == [True, False]
    disk.close()


# -- disks that fail -------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", ["off", "auto"])
@pytest.mark.parametrize("limit", [f"size={16 * NBYTES + FRAME_ALIGNMENT}", "nr_inodes=32"])
def test_a_full_disk_keeps_what_it_has(mounted, monkeypatch, direct, limit):
    folder = mounted("tmpfs", limit)
    disk = open_disk(folder, direct=direct)
    # Space that was free when it was asked for may be gone when it is used.
    monkeypatch.setattr("kvtier_disk.folder_backend.free_of", lambda folder: 1 << 60)
    written = []
    with pytest.raises(BackendError, match="No space left on device"):
        for key in make_keys(32):
            write(disk, key)
            written.append(key)
    assert len(written) >= 10
    assert [file.suffix for file in files(folder)] == [".kv"] * len(written)
    assert all(read(disk, key) == make_frame(key, nbytes=NBYTES) for key in written)
    disk.delete(written[:1])
    write(disk, written[0])
    disk.close()


def test_a_folder_of_frames_leaves_with_the_last_of_them(mounted):
    """It takes an inode, and a file system may have no other."""
    folder = mounted("tmpfs", "nr_inodes=32")
    disk = open_disk(folder, direct="off")
    keys = {key[:1]: key for key in make_keys(100)}  # each has a folder of its own
    written = []
    with pytest.raises(BackendError, match="No space left on device"):
        for key in list(keys.values()):
            write(disk, key)
            written.append(key)
    for key in list(keys.values())[len(written) :]:
        disk.delete(written[:1])
        write(disk, key)
        written = [*written[1:], key]
    assert {file.parent.name for file in files(folder)} == {key.hex()[:2] for key in written}
    disk.close()


def test_a_folder_of_frames_leaves_beside_writes_to_it(tmp_path):
    disk = open_disk(tmp_path, direct="off")
    first, second = [key for key in make_keys(5000) if key[0] == 0][:2]

    def writes_and_deletes(key):
        for _ in range(300):
            write(disk, key)
            assert read(disk, key) == make_frame(key, nbytes=NBYTES)
            disk.delete([key])

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(writes_and_deletes, key) for key in (first, second)]:
            done.result()
    disk.close()


def test_a_file_that_may_not_grow_is_a_lasting_error(tmp_path):
    disk = open_disk(tmp_path, direct="off")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * FRAME_ALIGNMENT, before[1]))
    try:
        with pytest.raises(BackendError, match="File too large"):
            write(disk, make_key(0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert files(tmp_path) == []
    disk.close()


def test_a_vanished_mount(mounted):
    folder = mounted("tmpfs", "size=1m")
    disk = open_disk(folder)
    write(disk, make_key(0))
    subprocess.run(["umount", "-l", str(folder)], check=True)
    for use in (read, write):  # nothing is written where the mount was
        with pytest.raises(BackendError, match="not on the file system that was opened; is it mounted"):
            use(disk, make_key(0))
    assert list(folder.iterdir()) == []
    folder.rmdir()
    folder.touch()
    for use in (read, write):
        with pytest.raises(BackendError, match="Not a directory"):
            use(disk, make_key(0))
    disk.close()
    folder.unlink()
    folder.mkdir()


def test_an_io_error_is_a_backend_error(tmp_path, monkeypatch):
    """Simulated; test_disk_trouble.py has disks that fail in earnest."""

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    disk = open_disk(tmp_path, io="calls")
    write(disk, make_key(0))
    with monkeypatch.context() as broken:
        broken.setattr(os, "preadv", fail)
        broken.setattr(os, "pwritev", fail)
        for use in (lambda: read(disk, make_key(0)), lambda: write(disk, make_key(1))):
            with pytest.raises(BackendError, match=re.escape(f"{tmp_path}: Input/output error")):
                use()
    assert len(files(tmp_path)) == 1
    assert read(disk, make_key(0)) == make_frame(make_key(0), nbytes=NBYTES)
    disk.close()


def test_short_transfers_go_on(tmp_path, monkeypatch):
    """A kernel may move less than it was asked for; simulated, one page at a time."""
    preadv, pwritev = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:FRAME_ALIGNMENT]], at))
    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: pwritev(fd, [views[0][:FRAME_ALIGNMENT]], at))
    disk = open_disk(tmp_path, io="calls")
    write(disk, make_key(0))
    assert read(disk, make_key(0)) == make_frame(make_key(0), nbytes=NBYTES)
    disk.close()


# -- past the page cache ---------------------------------------------------------------------------


@pytest.mark.parametrize("direct", ["auto", "on"])
def test_direct_where_the_filesystem_can(mounted, direct):
    disk = open_disk(mounted("tmpfs", "size=1m"), direct=direct)
    effective = disk.facts()["direct"]
    disk.close()
    if effective == "auto -> off":
        pytest.skip("this kernel's tmpfs has no O_DIRECT")
    assert effective == f"{direct} -> on"


def test_direct_where_the_filesystem_cannot(mounted):
    folder = mounted("ramfs")
    disk = open_disk(folder, direct="auto")
    assert disk.facts() == {
        "path": str(folder / f"kvtier-{os.geteuid()}"),
        "direct": "auto -> off",
        "io": "auto -> calls",
    }
    disk.close()
    with pytest.raises(BackendError, match="direct is on, but writes cannot bypass the page cache"):
        open_disk(folder, direct="on")
    open_disk(folder, direct="off").close()
    assert files(folder) == []


def test_direct_off_is_off(tmp_path):
    disk = open_disk(tmp_path, direct="off")
    assert disk.facts() == {"path": str(tmp_path), "direct": "off -> off", "io": "auto -> calls"}
    disk.close()


# -- a batch at once -------------------------------------------------------------------------------


@pytest.mark.parametrize("io", ["io_uring", "calls"])
@pytest.mark.parametrize("direct", ["auto", "off"])
def test_a_batch_comes_back_however_it_is_moved(tmp_path, io, direct):
    disk = open_disk(tmp_path, io=io, direct=direct)
    assert disk.facts()["io"] == f"{io} -> {io}"
    keys = [make_key(i) for i in range(40)]  # more than are under way at once
    frames = [make_frame(key, nbytes=NBYTES) for key in keys]
    disk.write(keys, frames)
    into = [Poisoned(NBYTES) for _ in range(41)]
    assert disk.read([make_key(99), *keys], [each.view for each in into]) == [0] + [NBYTES] * 40
    assert [each.view for each in into[1:]] == frames
    disk.close()


@pytest.mark.parametrize("io", ["io_uring", "calls"])
def test_of_a_batch_that_fails_nothing_unfinished_is_left(tmp_path, io):
    """The file of the second of three cannot be replaced."""
    disk = open_disk(tmp_path, io=io)
    keys = [make_key(i) for i in range(3)]
    write(disk, keys[1])
    (file,) = files(tmp_path)
    with immutable(file):
        with pytest.raises(BackendError, match="Operation not permitted"):
            disk.write(keys, [make_frame(key, nbytes=NBYTES) for key in keys])
        whole = [key for key, found in zip(keys, disk.contains(keys), strict=True) if found]
        assert [each.stat().st_size for each in files(tmp_path)] == [NBYTES] * len(whole)
    disk.write(keys, [make_frame(key, nbytes=NBYTES) for key in keys])
    assert all(read(disk, key) == make_frame(key, nbytes=NBYTES) for key in keys)
    disk.close()


def test_without_a_ring_calls_do(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_access, "ring_works", lambda: False)
    disk = open_disk(tmp_path)
    assert disk.facts()["io"] == "auto -> calls"
    disk.close()
    with pytest.raises(BackendError, match="io is io_uring, which is not available"):
        open_disk(tmp_path, io="io_uring")
    open_disk(tmp_path).close()


def test_read_only_frames_are_written_too(tmp_path):
    disk = open_disk(tmp_path)
    key = make_key(0)
    disk.write([key], [make_frame(key, nbytes=NBYTES).toreadonly()])
    into = Poisoned(NBYTES)
    assert list(disk.read([key], [into.view])) == [NBYTES]
    assert into.view == make_frame(key, nbytes=NBYTES)
    disk.close()
