"""The account of what may still be written agrees with the disk, whatever fails and wherever."""

import errno
import itertools
import os

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_disk import files, open_disk

from kvtier_core.errors import BackendError, StoreFull
from kvtier_core.types import FRAME_ALIGNMENT
from kvtier_disk.frames import Place
from kvtier_disk.space_account import SpaceAccount
from kvtier_testing.samples import make_frame, make_keys

SMALL, LARGE = 2 * FRAME_ALIGNMENT, 4 * FRAME_ALIGNMENT
CAPACITY = 8 * LARGE
OLD, NEW, BAD, OTHER = make_keys(4)
SYSTEM_CALLS = ("open", "mkdir", "replace", "unlink", "stat", "scandir", "pwritev", "fstatvfs", "rmdir", "fstat")


def put(backend, key, nbytes=LARGE):
    backend.write([key], [make_frame(key, nbytes=nbytes)])


#: The requests of a tier; each changes how much lies on the disk.
ACTIONS = {
    "a new frame": lambda disk: put(disk, NEW),
    "a longer frame in the place of one": lambda disk: put(disk, OLD),
    "a shorter frame in the place of one": lambda disk: put(disk, BAD, SMALL),
    "several frames": lambda disk: disk.write(
        [NEW, OLD, BAD], [make_frame(key, nbytes=LARGE) for key in (NEW, OLD, BAD)]
    ),
    "a delete": lambda disk: disk.delete([OLD, BAD]),
    "a quarantine": lambda disk: disk.quarantine([OLD, BAD]),
}
FAILURES = {
    "I/O error": lambda: OSError(errno.EIO, "Input/output error"),
    "full": lambda: OSError(errno.ENOSPC, "No space left on device"),
    "read-only": lambda: OSError(errno.EROFS, "Read-only file system"),
    "not ours": lambda: BackendError("owned by user 12345"),
}


class Sabotage:
    """The n-th system call from now on fails, or all of them from the n-th on."""

    def __init__(self, monkeypatch, n, failure, *, lasting):
        self.left = n
        self.lasting = lasting
        self.failure = failure
        for name in SYSTEM_CALLS:
            monkeypatch.setattr(os, name, self._wrap(getattr(os, name)))

    def _wrap(self, call):
        def wrapped(*arguments, **options):
            self.left -= 1
            if self.left == -1 or (self.lasting and self.left < 0):
                raise self.failure()
            return call(*arguments, **options)

        return wrapped

    @property
    def struck(self):
        return self.left < 0


def on_disk(folder):
    """Bytes of all frames, those in quarantine too; unfinished files are no frames."""
    return sum(file.stat().st_size for file in files(folder) if file.suffix != ".tmp")


@pytest.fixture
def prepare(tmp_path):
    """Makes a folder with a frame of another namespace and two of this one; returns it, and the tier that is open."""
    numbers = itertools.count()

    def prepare(capacity=CAPACITY):
        folder = tmp_path / str(next(numbers))
        other = open_disk(folder, model="other", io="calls")
        put(other, OTHER)
        other.close()
        disk = open_disk(folder, capacity=capacity, quarantine=LARGE, io="calls")
        put(disk, OLD, SMALL)
        put(disk, BAD)
        return folder, disk

    return prepare


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
@pytest.mark.parametrize("action", ACTIONS.values(), ids=ACTIONS)
def test_the_account_agrees_with_the_disk_wherever_it_fails(prepare, monkeypatch, action, failure, lasting):
    for n in itertools.count():
        folder, disk = prepare()
        with monkeypatch.context() as broken:
            sabotage = Sabotage(broken, n, failure, lasting=lasting)
            try:
                action(disk)
            except BackendError:
                assert sabotage.struck
        assert disk.space.free == CAPACITY - on_disk(folder), f"at system call {n}"
        disk.close()
        if not sabotage.struck:
            break
    assert n > 3


def test_a_frame_in_the_way_that_cannot_be_removed_is_a_full_store(prepare, monkeypatch):
    """Then the tier keeps within less, instead of writing beyond the capacity; and tries again later."""

    def fail(place, base):
        raise FAILURES["read-only"]()

    folder, disk = prepare(capacity=2 * LARGE + SMALL)
    before = on_disk(folder)
    with monkeypatch.context() as broken:
        broken.setattr(Place, "remove", fail)
        for _ in range(2):
            with pytest.raises(
                StoreFull, match="cannot remove a frame of another namespace: .*Read-only file system"
            ) as full:
                put(disk, NEW)
            assert full.value.missing == LARGE
            assert on_disk(folder) == before
    put(disk, NEW)
    assert on_disk(folder) == before  # now the other's frame made room
    disk.close()


@attrs.define
class Model:
    """Files of others by their places, and which of them cannot be removed."""

    lying: dict[Place, int]
    stuck: set[Place]

    def remove(self, place):
        if place in self.stuck:
            raise OSError(errno.EPERM, "Operation not permitted")
        self.lying.pop(place, None)


sizes = st.integers(0, 9)


@given(
    free=st.integers(-30, 30),
    others=st.lists(st.tuples(sizes, st.booleans()), max_size=5),
    calls=st.lists(st.tuples(st.sampled_from(["take", "free up", "hand over"]), sizes), max_size=12),
)
def test_the_account_loses_and_gains_nothing(free, others, calls):
    """Free bytes, own frames and others' frames always add up to the capacity; room is taken whole or not at all."""
    names = [Place((), str(i)) for i in range(len(others))]
    model = Model({}, {place for place, (_, stuck) in zip(names, others, strict=True) if stuck})
    model.lying = {place: size for place, (size, _) in zip(names, others, strict=True)}
    capacity = free + sum(model.lying.values())
    own = 0
    try:
        account = SpaceAccount(free, list(model.lying.items()), model.remove)
    except StoreFull:
        assert model.stuck
        return
    for i, (call, size) in enumerate(calls):
        if call == "take":
            try:
                account.take(size)
                own += size
                assert account.free >= 0 or not model.lying
            except StoreFull as full:
                assert full.missing > 0 and model.stuck & model.lying.keys()
        elif call == "free up" and size <= own:
            account.give(size)
            own -= size
        elif call == "hand over" and size <= own:
            place = Place((), f"{i % 3}")
            account.hand_over(place, size)
            model.lying[place] = size
            own -= size
        assert account.free == capacity - own - sum(model.lying.values())
