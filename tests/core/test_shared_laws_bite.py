"""The laws of a shared backend can fail, each where a bug is planted."""

from __future__ import annotations

import secrets
import time

import pytest
from planted_backends import PlantedConfig, SharedFolder, SpoiltLaws

from kvtier_core.testing import BackendLaws, SharedBackendLaws, laws_of


class SharedLaws(SharedBackendLaws):
    persistent = True
    spoil = SpoiltLaws.spoil
    stalled = SpoiltLaws.stalled


def laws_for(backend):
    class PlantedLaws(SharedLaws):
        def config(self, folder):
            return PlantedConfig(folder, backend)

    return PlantedLaws()


class TestReference(SharedLaws):
    def config(self, folder):
        return PlantedConfig(folder, SharedFolder)


class DoesNotSayIt(SharedFolder):
    shared = False


class RemembersAbsence(SharedFolder):
    def __init__(self, folder, ctx):
        super().__init__(folder, ctx)
        self.absent = set()

    def contains(self, keys):
        self.absent |= {key for key in keys if not self.file(key).exists()}
        return [key not in self.absent for key in keys]

    def write_one(self, key, frame):
        self.absent.discard(key)
        super().write_one(key, frame)


class RemembersMisses(SharedFolder):
    def __init__(self, folder, ctx):
        super().__init__(folder, ctx)
        self.missed = set()

    def read_one(self, key, view):
        count = 0 if key in self.missed else super().read_one(key, view)
        if not count:
            self.missed.add(key)
        return count


class ServesWhatItReadBefore(SharedFolder):
    def __init__(self, folder, ctx):
        super().__init__(folder, ctx)
        self.before = {}

    def write_one(self, key, frame):
        self.before[key] = bytes(frame)
        super().write_one(key, frame)

    def read_one(self, key, view):
        if key not in self.before or not self.file(key).exists():
            return super().read_one(key, view)
        view[: len(self.before[key])] = self.before[key]
        return len(self.before[key])


class MakesRoomAtOpen(SharedFolder):
    """It is its capacity that is kept, and its own namespace's frames that are all there is."""

    def __init__(self, folder, ctx):
        super().__init__(folder, ctx)
        files = sorted(folder.glob("*/*"))
        while sum(file.stat().st_size for file in files) > ctx.capacity:
            files.pop().unlink()


class EndsWithItsFrames(SharedFolder):
    def close(self):
        for file in self.home.iterdir():
            file.unlink(missing_ok=True)


class SweepsAtOpen(SharedFolder):
    def __init__(self, folder, ctx):
        super().__init__(folder, ctx)
        for file in self.home.glob("*.*"):
            file.unlink(missing_ok=True)

    def write_one(self, key, frame):
        unfinished = self.home / f"{key.hex()}.{secrets.token_hex(8)}"
        unfinished.write_bytes(frame)
        time.sleep(0.001)
        unfinished.replace(self.file(key))


class HasOneNameForTheUnfinished(SharedFolder):
    def write_one(self, key, frame):
        unfinished = self.home / f"{key.hex()}.tmp"
        unfinished.write_bytes(frame)
        time.sleep(0.001)
        unfinished.replace(self.file(key))


class WritesInPlace(SharedFolder):
    def write_one(self, key, frame):
        with self.file(key).open("wb", buffering=0) as file:
            file.write(frame[: len(frame) // 2])
            time.sleep(0.001)
            file.write(frame[len(frame) // 2 :])


BUGS = [
    (DoesNotSayIt, "test_it_says_that_it_is_shared"),
    (RemembersAbsence, "test_absence_is_asked"),
    (RemembersMisses, "test_absence_is_asked"),
    (ServesWhatItReadBefore, "test_what_others_change_is_seen"),
    (MakesRoomAtOpen, "test_others_come_and_go_and_nothing_is_lost"),
    (EndsWithItsFrames, "test_others_come_and_go_and_nothing_is_lost"),
    (SweepsAtOpen, "test_an_open_leaves_the_writes_of_others_alone"),
    (HasOneNameForTheUnfinished, "test_two_writers_of_one_key_leave_a_whole_frame"),
    (WritesInPlace, "test_two_writers_of_one_key_leave_a_whole_frame"),
]


@pytest.mark.parametrize(("bug", "law"), [pytest.param(*pair, id=f"{pair[0].__name__}-{pair[1]}") for pair in BUGS])
def test_a_planted_bug_breaks_its_law(tmp_path, bug, law):
    with pytest.raises(AssertionError):
        getattr(laws_for(bug), law)(tmp_path)


def test_every_law_of_sharing_has_a_planted_bug():
    assert {law for _, law in BUGS} | set(laws_of(BackendLaws)) == set(laws_of(SharedBackendLaws))
