"""One folder that several engines use at once: nobody cleans it, and a key that fails fails alone."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess

import attrs
import pytest
from disks import tmpfs
from patience import HANG
from test_disk import NBYTES, file_of, files, read, write

from kvtier_core.config.load import load_config
from kvtier_core.config.registry import Registry
from kvtier_core.errors import BackendError, ConfigError, StoreFull
from kvtier_core.types import FRAME_ALIGNMENT, Nbytes, Seconds
from kvtier_disk import files as disk_files
from kvtier_disk import plugin
from kvtier_disk.config import DiskConfig
from kvtier_testing.samples import make_context, make_frame, make_keys, make_namespace

KEYS = FIRST, SECOND, THIRD = make_keys(3)


def open_shared(path, *, capacity=0, model="tiny", timeout=HANG, longest=0, **settings):
    ctx = make_context(namespace=make_namespace(model), capacity=capacity)
    ctx = attrs.evolve(ctx, timeout=Seconds(timeout), max_frame_nbytes=Nbytes(longest))
    return DiskConfig(path=path, shared=True, **{"min_free": Nbytes(0), **settings}).open(ctx)


def open_own(path):
    return DiskConfig(path=path, min_free=Nbytes(0)).open(make_context())


def whole(*keys):
    return [make_frame(key, nbytes=NBYTES) for key in keys]


def read_all(backend, keys):
    """For each key its bytes, or the error."""
    into = [memoryview(bytearray(NBYTES)) for _ in keys]
    counts = backend.read(keys, into)
    return [each if isinstance(each, BackendError) else view[:each] for each, view in zip(counts, into, strict=True)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "kv"


@pytest.fixture
def engine(path):
    """Opens the folder for one more engine; all are closed afterwards."""
    opened = []

    def engine(where=path, **settings):
        opened.append(open_shared(where, **settings))
        return opened[-1]

    yield engine
    for each in opened:
        each.close()


# -- one folder ------------------------------------------------------------------------------------


def configured(**settings):
    disk = {"type": "disk", "path": "/kv", **settings}
    tiers = [{"type": "heap", "capacity": "1MiB"}, disk]
    return load_config({"version": 1, "tiers": tiers}, Registry.of(plugin)).tiers[1]


def test_a_shared_folder_needs_no_capacity():
    tier = configured(shared=True)
    assert tier.config.shared and tier.capacity is None
    with pytest.raises(ConfigError, match="'capacity' is missing; only a shared tier may omit it"):
        configured(shared=False)


def test_replicas_use_one_folder(path):
    contexts = [attrs.evolve(make_context(), replica=replica, replicas=2) for replica in range(2)]
    engines = [DiskConfig(path=path, shared=True, min_free=Nbytes(0)).open(ctx) for ctx in contexts]
    write(engines[0], FIRST)
    assert read_all(engines[1], [FIRST]) == whole(FIRST)
    assert not list(path.glob("replica-*"))
    for each in engines:
        each.close()


def test_an_open_removes_nothing(path, engine):
    """Not even what is no frame: it may be another engine's that is not finished."""
    other = engine(model="other")
    write(other, *KEYS)
    shard = file_of(path, FIRST, "other").parent
    for name in ("odd.kv", f"{FIRST.hex()}.another-host-7-0123456789abcdef.tmp"):
        (shard / name).write_bytes(b"odd")
    (path / ".kvtier-probe-of-another").touch()
    before = {file: file.stat().st_mtime_ns for file in path.rglob("*") if file.is_file()}
    engine(capacity=NBYTES)
    assert before.items() <= {file: file.stat().st_mtime_ns for file in path.rglob("*") if file.is_file()}.items()


def test_an_unfinished_file_tells_whose_it_is(path, engine, monkeypatch):
    monkeypatch.setattr(disk_files, "write_files", lambda *_, **__: names.extend(os.listdir(file.parent)))
    file, names = file_of(path, FIRST), []
    for each in (engine(), engine()):
        write(each, FIRST)
    unfinished = {name for name in names if name.endswith(".tmp")}
    assert len(unfinished) == 2, "no two writers have the same name"
    assert all(name.startswith(f"{FIRST.hex()}.") and f"-{os.getpid()}-" in name for name in unfinished)
    assert os.listdir(file.parent) == [file.name]


def test_an_engine_that_wants_it_for_itself_is_refused(path, engine):
    """It would remove what others have not finished writing."""
    engine()
    with pytest.raises(BackendError, match="several engines share this folder; write shared: true, or remove .kvtier"):
        open_own(path)
    (path / ".kvtier-shared").unlink()
    open_own(path).close()


def test_namespaces_of_others_are_reported(engine):
    for model in ("first", "second"):
        engine(model=model)
    assert sorted(engine().namespaces(), key=str) == sorted(map(make_namespace, ("first", "second")), key=str)


# -- the folder goes and comes ---------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [0, 1 << 20])
@pytest.mark.parametrize("gone", ["kv", "kv/*", "kv/*/??"])
def test_a_folder_that_is_removed_is_made_again_for_all(tmp_path, engine, gone, capacity):
    ours, theirs = engine(capacity=capacity), engine(capacity=capacity)
    write(ours, *KEYS)
    for folder in tmp_path.glob(gone):
        shutil.rmtree(folder) if folder.is_dir() else folder.unlink()
    assert read_all(theirs, KEYS) == [b""] * 3
    assert theirs.contains(KEYS) == [False] * 3
    theirs.delete(KEYS)
    write(theirs, *KEYS)
    assert read_all(ours, KEYS) == whole(*KEYS)


def test_another_folder_at_its_path_is_used(tmp_path, path, engine):
    """As when an operator moves it away and makes a new one."""
    ours, theirs = engine(), engine()
    write(ours, FIRST)
    path.rename(tmp_path / "away")
    path.mkdir(mode=0o700)
    assert read_all(ours, [FIRST]) == [b""]
    write(ours, SECOND)
    assert read_all(theirs, KEYS[:2]) == [b"", *whole(SECOND)]
    with pytest.raises(BackendError, match="several engines share this folder"):
        open_own(path)


@pytest.mark.parametrize("inside", [".", "kv"])
def test_a_folder_that_is_not_mounted_is_not_written_to(tmp_path, engine, inside):
    with tmpfs(tmp_path, 8 << 20) as disk:
        where = disk.folder / inside
        disk.folder.chmod(0o700)
        ours = engine(where)
        write(ours, FIRST)
        subprocess.run(["mount", "--move", disk.folder, make(tmp_path / "elsewhere")], check=True)
        try:
            for use in (read, write):
                with pytest.raises(BackendError, match="not on the file system that was opened; is it mounted"):
                    use(ours, FIRST)
            assert list(disk.folder.iterdir()) == []
        finally:
            subprocess.run(["mount", "--move", tmp_path / "elsewhere", disk.folder], check=True)
        assert read_all(ours, [FIRST]) == whole(FIRST)


def test_what_lies_below_the_mount_point_is_not_used(tmp_path, engine):
    """A folder with the right name that no engine has marked as shared."""
    with tmpfs(tmp_path, 8 << 20) as disk:
        disk.folder.chmod(0o700)
        ours, below = engine(disk.folder / "kv"), disk.folder / "kv"
        write(ours, FIRST)
        subprocess.run(["mount", "--move", disk.folder, make(tmp_path / "elsewhere")], check=True)
        try:
            below.mkdir(mode=0o700)
            for use in (read, write):
                with pytest.raises(BackendError, match="not on the file system that was opened; is it mounted"):
                    use(ours, FIRST)
            assert list(below.iterdir()) == []
        finally:
            subprocess.run(["mount", "--move", tmp_path / "elsewhere", disk.folder], check=True)
        assert read_all(ours, [FIRST]) == whole(FIRST)


def make(folder):
    folder.mkdir()
    return folder


def test_a_folder_may_be_mounted_again_from_another_device(tmp_path, path, engine):
    """NFS gives a mount another number each time; the folder is known by its mark."""
    ours = engine()
    write(ours, FIRST)
    with tmpfs(tmp_path, 8 << 20) as disk:
        shutil.copytree(path, disk.folder, dirs_exist_ok=True)
        disk.folder.chmod(0o700)
        subprocess.run(["mount", "--bind", disk.folder, path], check=True)
        try:
            assert read_all(ours, [FIRST]) == whole(FIRST)
            write(ours, SECOND)
            assert file_of(disk.folder, SECOND).exists()
        finally:
            subprocess.run(["umount", "--lazy", path], check=True)


@pytest.mark.parametrize("mode", [0o770, 0o707], ids=oct)
def test_a_folder_that_others_may_write_to_is_refused_at_any_time(path, engine, mode):
    """Users of one group, too: a checksum is no signature."""
    ours = engine()
    write(ours, FIRST)
    path.chmod(mode)
    for use in (lambda: engine(), lambda: read(ours, FIRST), lambda: write(ours, FIRST)):
        with pytest.raises(BackendError, match="others can write to it; run chmod go-w"):
            use()


def test_a_link_is_refused(tmp_path, engine):
    make(tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(BackendError, match="link: a link; name the folder itself"):
        engine(tmp_path / "link")


# -- one key ---------------------------------------------------------------------------------------


@pytest.fixture
def spoiled(path, engine):
    """An engine for whose SECOND nothing can be read or written: others may write to the folder it lies in."""
    ours = engine()
    write(ours, *KEYS)
    shard = file_of(path, SECOND).parent
    shard.chmod(0o777)
    yield ours
    shard.chmod(0o700)


def test_a_key_that_cannot_be_read_fails_alone(spoiled):
    first, second, third = read_all(spoiled, KEYS)
    assert [first, third] == whole(FIRST, THIRD)
    assert "others can write to it" in str(second)
    assert spoiled.contains(KEYS) == [True, False, True]
    (alone,) = read_all(spoiled, [SECOND])
    assert isinstance(alone, BackendError)


def test_a_key_that_cannot_be_written_fails_alone(spoiled, path):
    before = [file_of(path, key).stat().st_mtime_ns for key in KEYS]
    first, second, third = spoiled.write(KEYS, whole(*KEYS))
    assert first is third is None and "others can write to it" in str(second)
    after = [file_of(path, key).stat().st_mtime_ns for key in KEYS]
    assert [new > old for old, new in zip(before, after, strict=True)] == [True, False, True]
    assert not list(path.rglob("*.tmp"))


def test_a_key_that_failed_holds_no_view(spoiled):
    buffers = [bytearray(frame) for frame in whole(*KEYS)]
    views = [memoryview(buffer) for buffer in buffers]
    outcomes = [spoiled.write(KEYS, views), spoiled.read(KEYS, views)]
    for view, buffer in zip(views, buffers, strict=True):
        view.release()
        buffer.clear()  # raises BufferError if anything holds it
    assert all(isinstance(outcome[1], BackendError) for outcome in outcomes)


@pytest.mark.parametrize("capacity", [0, 1 << 20])
def test_something_else_at_a_frames_name_is_replaced_by_the_next_write(path, engine, capacity):
    ours = engine(capacity=capacity)
    write(ours, *KEYS)
    file_of(path, SECOND).unlink()
    file_of(path, SECOND).mkdir()
    first, second, third = read_all(ours, KEYS)
    assert [first, third] == whole(FIRST, THIRD)
    assert "a folder where a file is expected" in str(second)
    ours.quarantine([SECOND])
    assert file_of(path, SECOND).is_dir(), "nothing is removed that is not replaced"
    assert ours.write(KEYS, whole(*KEYS)) is None
    assert read_all(ours, KEYS) == whole(*KEYS)


@pytest.mark.parametrize("nbytes", [0, NBYTES + 1, NBYTES + FRAME_ALIGNMENT, 4 << 40])
def test_a_file_that_would_not_be_read_is_not_there(path, engine, nbytes):
    """Otherwise a request that waits for it would have it read again and again."""
    ours = engine(longest=NBYTES)
    write(ours, FIRST)
    os.truncate(file_of(path, FIRST), nbytes)
    assert ours.contains([FIRST]) == [False]
    assert read_all(ours, [FIRST]) == [b""]
    write(ours, FIRST)
    assert ours.contains([FIRST]) == [True]


@pytest.mark.parametrize("call", ["open", "preadv"])
def test_a_stale_handle_is_a_miss(path, engine, monkeypatch, call):
    """Another machine removed the file, and this one's NFS client had not heard of it; simulated."""
    ours = engine(direct="off", io="calls")
    write(ours, *KEYS)
    wanted, real = os.stat(file_of(path, SECOND)).st_ino, getattr(os, call)

    def stale(what, *arguments, **options):
        fd = real(what, *arguments, **options) if call == "open" else what
        if os.fstat(fd).st_ino == wanted:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return fd if call == "open" else real(what, *arguments, **options)

    monkeypatch.setattr(os, call, stale)
    assert read_all(ours, KEYS) == [*whole(FIRST), b"", *whole(THIRD)]


# -- disks in trouble ------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path):
    with tmpfs(tmp_path, 8 << 20) as disk:
        yield disk


@pytest.mark.parametrize("capacity", [0, 4 << 20])
def test_a_full_disk_refuses_writes_and_still_reads(disk, engine, monkeypatch, capacity):
    ours, theirs = [engine(disk.folder / "kv", capacity=capacity) for _ in range(2)]
    write(ours, FIRST)
    disk.fill()
    with pytest.raises(StoreFull, match="16KiB to write, 0B free, of which min_free reserves 0B"):
        write(theirs, SECOND)
    # Space that was free when it was asked for may be gone when it is used.
    monkeypatch.setattr("kvtier_disk.folder_backend.free_of", lambda folder: 1 << 60)
    with pytest.raises(StoreFull, match="No space left on device"):
        theirs.write(KEYS, whole(*KEYS))
    assert theirs.contains(KEYS[1:]) == [False, False]
    disk.make_room()
    write(theirs, *KEYS)
    assert read_all(ours, KEYS) == whole(*KEYS)
    assert len(files(disk.folder / "kv")) >= 3 and not list(disk.folder.rglob("*.tmp"))


@pytest.mark.parametrize("capacity", [0, 4 << 20])
def test_a_disk_that_becomes_read_only(disk, engine, capacity):
    ours = engine(disk.folder / "kv", capacity=capacity)
    write(ours, FIRST)
    disk.remount("ro")
    for call in (lambda: write(ours, SECOND), lambda: write(ours, FIRST), lambda: ours.delete([FIRST])):
        with pytest.raises(BackendError, match="Read-only file system"):
            call()
    assert read_all(ours, KEYS[:2]) == [*whole(FIRST), b""]
    disk.remount("rw")
    write(ours, *KEYS)
    assert read_all(ours, KEYS) == whole(*KEYS)


def test_min_free_holds(engine):
    ours = engine(min_free=Nbytes(1 << 60))
    with pytest.raises(StoreFull, match="of which min_free reserves 1024PiB"):
        write(ours, FIRST)


def test_its_files_are_accessible_to_their_user_alone(path, engine):
    write(engine(capacity=1 << 20), *KEYS)
    modes = {(each.is_dir(), stat.S_IMODE(each.stat().st_mode)) for each in [path, *path.rglob("*")]}
    assert {(folder, mode & 0o777) for folder, mode in modes} == {(True, 0o700), (False, 0o600)}
