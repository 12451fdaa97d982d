"""Strangers on the same machine: they read no frame, plant none, and turn no write, read or delete elsewhere."""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
import threading

import pytest
from patience import HANG

from kvtier_core.errors import BackendError
from kvtier_core.types import FRAME_ALIGNMENT, Nbytes
from kvtier_disk.config import DiskConfig
from kvtier_testing.samples import make_context, make_frame, make_key, make_namespace

NBYTES = 4 * FRAME_ALIGNMENT
KEY, MATE = make_key(0), make_key(1)
STRANGER = 12345

only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file away, or make a device")


def open_disk(path):
    return DiskConfig(path=path, direct="off", min_free=Nbytes(0)).open(make_context(namespace=make_namespace()))


def write(disk):
    disk.write([KEY], [make_frame(KEY, nbytes=NBYTES)])


def read(disk):
    into = memoryview(bytearray(NBYTES))
    (count,) = disk.read([KEY], [into])
    return count if isinstance(count, BackendError) else bytes(into[:count])


def mode(path):
    return stat.S_IMODE(path.stat(follow_symlinks=False).st_mode)


@pytest.fixture
def folder(tmp_path):
    """Where the tier will be; the path of KEY's frame in it is `file_in`."""
    return tmp_path / "kv"


def home_in(folder):
    return folder / make_namespace().digest.hex()[:16]


def file_in(folder):
    return home_in(folder) / KEY.hex()[:2] / f"{KEY.hex()}.kv"


@pytest.fixture
def elsewhere(tmp_path):
    """A folder that is none of the tier's business, and a file in it that would pass as KEY's frame."""
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / KEY.hex()[:2]).mkdir(parents=True)
    for file in (elsewhere / "precious", elsewhere / KEY.hex()[:2] / f"{KEY.hex()}.kv", elsewhere / f"{KEY.hex()}.kv"):
        file.write_bytes(make_frame(KEY, nbytes=NBYTES, seed=7))
        file.chmod(0o600)
    return elsewhere


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def no_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def in_time(work):
    """The outcome of a call that might hang; the thread of one that does is left behind."""
    outcome = []

    def run():
        try:
            outcome.append(work())
        except BackendError as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(HANG)
    assert outcome, "it hangs"
    return outcome[0]


# -- what the tier makes -------------------------------------------------------------------------------


def test_no_umask_opens_what_the_tier_makes(folder, no_umask):
    disk = open_disk(folder)
    write(disk)
    assert {(path.is_dir(), mode(path)) for path in [folder, *folder.rglob("*")]} == {
        (True, 0o4700),
        (False, 0o1600),
    }
    disk.close()


def test_no_umask_opens_the_folders_above(tmp_path, no_umask):
    """Whoever may write to a folder above may put another in the tier's place."""
    open_disk(tmp_path / "a" / "b" / "kv").close()
    assert {mode(tmp_path / "a") & 0o022, mode(tmp_path / "a" / "b") & 0o022} == {0}


# -- whose the folder is -------------------------------------------------------------------------------


@pytest.mark.parametrize("open_to", [0o720, 0o770, 0o702, 0o777], ids=oct)
def test_a_folder_that_others_may_write_to_is_refused(folder, open_to):
    """They could put folders of their own in place of the tier's, and frames in them: a checksum is no signature."""
    folder.mkdir()
    folder.chmod(open_to)
    with pytest.raises(BackendError, match=f"{folder}: .*write"):
        open_disk(folder)
    folder.chmod(0o755)
    open_disk(folder).close()


@only_root
def test_a_folder_of_another_user_is_refused(folder):
    """Its owner may do with what lies in it as he likes, whatever the mode says."""
    folder.mkdir(mode=0o700)
    os.chown(folder, STRANGER, STRANGER)
    with pytest.raises(BackendError, match=f"{folder}: .*{STRANGER}"):
        open_disk(folder)


def test_a_folder_in_a_sticky_one_is_good_enough(tmp_path):
    """As in /tmp, or a tmpfs: nobody else can replace what is there."""
    tmp_path.chmod(0o1777)
    open_disk(tmp_path / "kv").close()
    assert mode(home_in(tmp_path / "kv")) == 0o4700


def plant_as_a_stranger(folder, plant, name):
    """Another account does it, which reaches this folder alone."""
    where = os.open(folder, os.O_RDONLY)
    os.seteuid(STRANGER)
    try:
        plant(name, where)
    finally:
        os.seteuid(0)
        os.close(where)


def a_file(name, where):
    os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666, dir_fd=where))


def a_folder(name, where):
    os.mkdir(name, 0o777, dir_fd=where)


@only_root
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize(
    ("name", "plant"), [("quarantine", a_folder), (".kvtier-shared", a_file), (".kvtier-evicting", a_file)]
)
def test_a_sticky_folder_is_refused_whatever_a_stranger_put_there(folder, no_umask, shared, name, plant):
    """Nobody else may replace files in it, but anybody may make those that the tier has not made yet."""
    folder.mkdir()
    folder.chmod(0o1777)
    plant_as_a_stranger(folder, plant, name)
    with pytest.raises(BackendError, match=f"{folder}: others can write to it; name a folder in it"):
        DiskConfig(path=folder, shared=shared).open(make_context(namespace=make_namespace()))
    assert os.listdir(folder) == [name]


OTHER = make_namespace("other").digest.hex()[:16]
#: The names that a tier has for something.
NAMES = (".kvtier-shared", ".kvtier-lock", ".kvtier-evicting", ".kvtier-probe-0", "quarantine", OTHER, f"{OTHER}/00")
OF_OURS = (home_in, lambda folder: home_in(folder) / "namespace.json", lambda folder: file_in(folder).parent, file_in)


@only_root
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("kind", [a_file, a_folder])
@pytest.mark.parametrize("place", [*NAMES, *OF_OURS], ids=[*NAMES, "home", "facts", "shard", "frame"])
def test_what_another_user_left_in_the_folder_stops_nothing_and_stays(folder, no_umask, shared, kind, place):
    """From a time when the folder was open to all."""
    place = folder / place if isinstance(place, str) else place(folder)
    place.parent.mkdir(parents=True)
    place.parent.chmod(0o777)
    plant_as_a_stranger(place.parent, kind, place.name)
    theirs = place.stat().st_ino
    for each in (folder, *place.parent.parents, place.parent):
        if each.is_relative_to(folder):
            each.chmod(0o700)
    for found in (b"", make_frame(KEY, nbytes=NBYTES)):
        ctx = make_context(namespace=make_namespace(), capacity=1 << 20)
        disk = DiskConfig(path=folder, direct="off", min_free=Nbytes(0), shared=shared).open(ctx)
        before = read(disk)
        assert before == found or (not found and isinstance(before, BackendError)), "of this key alone"
        write(disk)
        assert read(disk) == make_frame(KEY, nbytes=NBYTES)
        disk.close()
    assert [path.stat().st_ino for path in folder.rglob("*") if path.stat().st_uid == STRANGER] == [theirs]


@only_root
@pytest.mark.parametrize("whose", [home_in, lambda folder: file_in(folder).parent], ids=["home", "shard"])
def test_a_folder_that_another_user_made_inside_is_not_used(folder, whose):
    """From a time when the path was open to all."""
    whose(folder).mkdir(parents=True)
    os.chown(whose(folder), STRANGER, STRANGER)
    try:
        disk = open_disk(folder)
        write(disk)
    except BackendError:
        assert not file_in(folder).exists()
        return
    assert whose(folder).stat().st_uid == os.geteuid()
    disk.close()


@pytest.mark.parametrize(("owner", "open_to"), [(None, 0o770), (None, 0o777), (STRANGER, 0o755)])
def test_others_may_write_to_a_folder_above(tmp_path, owner, open_to):
    """They can rename the tier's folder, but neither make one of this user nor put files into it."""
    (tmp_path / "above" / "between").mkdir(parents=True)
    (tmp_path / "above").chmod(open_to)
    if owner is not None:
        if os.geteuid() != 0:
            pytest.skip("only root may give a folder away")
        os.chown(tmp_path / "above", owner, owner)
    disk = open_disk(tmp_path / "above" / "between" / "kv")
    write(disk)
    assert read(disk) == make_frame(KEY, nbytes=NBYTES)
    disk.close()


@pytest.mark.parametrize("open_to", [0o777, 0o1777], ids=oct)
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_a_link_on_the_way_is_followed_only_where_no_other_user_could_have_put_it(tmp_path, elsewhere, open_to, shared):
    (tmp_path / "links").mkdir(mode=0o755)
    for name, target in (("absolute", elsewhere), ("relative", "../elsewhere"), ("again", "relative")):
        (tmp_path / "links" / name).symlink_to(target)
        ctx = make_context(namespace=make_namespace())
        DiskConfig(path=tmp_path / "links" / name / f"kv-{name}", shared=shared).open(ctx).close()
        assert (elsewhere / f"kv-{name}").is_dir()
    (tmp_path / "links").chmod(open_to)
    with pytest.raises(BackendError, match=f"{tmp_path}/links/again: a link in a folder that others can write to"):
        DiskConfig(path=tmp_path / "links/again/kv", shared=shared).open(make_context(namespace=make_namespace()))
    assert not (elsewhere / "kv").exists()


def test_links_that_lead_to_each_other_end(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(BackendError, match="a link; name the folder itself"):
        open_disk(tmp_path / "a" / "kv")


def test_a_file_on_the_way_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(BackendError, match=f"{tmp_path}/file: Not a directory"):
        open_disk(tmp_path / "file" / "kv")


@pytest.mark.parametrize("swap", ["path", "home", "shard"])
def test_a_folder_put_in_place_of_the_tiers_is_never_read(folder, tmp_path, swap):
    """Forged frames, as whole as any, while the tier is open. It goes on when its own folder is back."""
    disk = open_disk(folder)
    write(disk)
    place = {"path": folder, "home": home_in(folder), "shard": file_in(folder).parent}[swap]
    forged = tmp_path / "forged"
    shutil.copytree(place, forged)
    for file in forged.rglob("*.kv"):
        file.write_bytes(make_frame(KEY, nbytes=NBYTES, seed=666))
    forged.chmod(0o700 if swap == "path" else 0o707)
    place.rename(tmp_path / "real")
    forged.rename(place)
    before = contents(place)
    for use in (read, write, lambda disk: disk.delete([KEY]), lambda disk: disk.quarantine([KEY])):
        for _ in range(3):
            with pytest.raises(BackendError, match="not the folder that was opened|others can write to it"):
                use(disk)
    assert contents(place) == before
    shutil.rmtree(place)
    (tmp_path / "real").rename(place)
    assert read(disk) == make_frame(KEY, nbytes=NBYTES)
    disk.close()


def test_an_empty_folder_in_its_place_is_claimed(folder, tmp_path):
    """As an operator makes one; nothing can be forged in it."""
    disk = open_disk(folder)
    write(disk)
    folder.rename(tmp_path / "real")
    folder.mkdir(mode=0o700)
    with pytest.raises(BackendError, match="not the folder that was opened"):
        read(disk)
    write(disk)
    assert read(disk) == make_frame(KEY, nbytes=NBYTES)
    with pytest.raises(BackendError, match="another engine or tier"):
        open_disk(folder)
    disk.close()


# -- what lies in it -----------------------------------------------------------------------------------


@pytest.mark.parametrize("link", [home_in, lambda folder: file_in(folder).parent], ids=["home", "shard"])
def test_a_link_in_place_of_a_folder_leads_nowhere(folder, elsewhere, link):
    """A frame behind it is not found; a write, a delete and a sweep leave alone what is there."""
    link(folder).parent.mkdir(parents=True, exist_ok=True)
    link(folder).symlink_to(elsewhere if link is home_in else elsewhere / KEY.hex()[:2])
    before = contents(elsewhere)
    try:
        disk = open_disk(folder)
    except BackendError:
        return
    assert read(disk) == b""
    assert list(disk.contains([KEY])) == [False]
    try:
        write(disk)
        disk.delete([KEY])
    except BackendError:
        pass
    assert contents(elsewhere) == before
    disk.close()


def plant_link(path, target):
    path.symlink_to(target)


def plant_pipe(path, _):
    os.mkfifo(path)


def plant_device(path, _):
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("no device can be made here")


def plant_socket(path, _):
    with socket.socket(socket.AF_UNIX) as listener:
        where = os.open(path.parent, os.O_RDONLY)
        listener.bind(f"/proc/self/fd/{where}/{path.name}")  # the name itself may be too long
        os.close(where)


def plant_folder(path, target):
    """With something in it, and a way out."""
    path.mkdir()
    (path / "file").touch()
    (path / "link").symlink_to(target.parent)


def is_a_strangers(path, _):
    path.write_bytes(make_frame(KEY, nbytes=NBYTES, seed=666))
    path.chmod(0o600)
    os.chown(path, STRANGER, STRANGER)


def may_be_written_by_others(path, _):
    path.write_bytes(make_frame(KEY, nbytes=NBYTES, seed=666))
    path.chmod(0o606)


def has_another_name(path, target):
    os.link(target, path)


#: Files that are not ours alone.
FOREIGN = [pytest.param(is_a_strangers, marks=only_root), may_be_written_by_others, has_another_name]

PLANTS = [
    *FOREIGN,
    plant_link,
    plant_pipe,
    pytest.param(plant_device, marks=only_root),
    plant_socket,
    plant_folder,
]


@pytest.mark.parametrize("plant", PLANTS)
def test_open_removes_what_stands_for_a_frame_and_follows_none(folder, elsewhere, plant):
    file_in(folder).parent.mkdir(parents=True)
    plant(file_in(folder), elsewhere / "precious")
    before = contents(elsewhere)
    disk = in_time(lambda: open_disk(folder))
    assert not os.path.lexists(file_in(folder))
    assert list(disk.scan()) == []
    assert contents(elsewhere) == before
    disk.close()


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("settle", ["write", "delete", "quarantine"])
def test_only_a_regular_file_is_a_frame(folder, elsewhere, plant, settle):
    """Planted while the tier is open: that key alone cannot be read, nobody waits, and no link is followed."""
    disk = open_disk(folder)
    write(disk)
    disk.write([MATE], [make_frame(MATE, nbytes=NBYTES)])
    file_in(folder).unlink()
    plant(file_in(folder), elsewhere / "precious")
    before = contents(elsewhere)
    into = [memoryview(bytearray(NBYTES)) for _ in range(2)]
    failed, count = in_time(lambda: disk.read([KEY, MATE], into))
    assert re.search(f"{KEY.hex()}.kv: (a .* where a file|owned by user|others can|the file has)", str(failed))
    assert (count, into[1]) == (NBYTES, make_frame(MATE, nbytes=NBYTES))
    in_time(
        {"write": lambda: write(disk), "delete": lambda: disk.delete([KEY])}.get(settle)
        or (lambda: disk.quarantine([KEY]))
    )
    assert read(disk) == (make_frame(KEY, nbytes=NBYTES) if settle == "write" else b"")
    assert os.path.lexists(file_in(folder)) == (settle == "write")
    assert contents(elsewhere) == before
    disk.close()


@pytest.mark.parametrize("plant", [*FOREIGN, plant_link, plant_pipe, plant_socket, plant_folder])
def test_only_a_regular_file_is_written_to(folder, elsewhere, plant):
    disk = open_disk(folder)
    write(disk)
    plant(file_in(folder).with_suffix(".tmp"), elsewhere / "precious")
    before = contents(elsewhere)
    in_time(lambda: write(disk))
    assert contents(elsewhere) == before
    assert read(disk) == make_frame(KEY, nbytes=NBYTES)
    disk.close()


@pytest.mark.parametrize("name", ["probe", "probe.tmp", "README"])
def test_files_directly_in_the_path_are_left_alone(folder, name):
    folder.mkdir()
    (folder / name).write_text("not ours, and not in the way")
    disk = DiskConfig(path=folder, direct="auto", min_free=Nbytes(0)).open(make_context())
    disk.close()
    assert (folder / name).read_text() == "not ours, and not in the way"
