"""The laws of a shared backend can fail, each where a bug is planted."""

from __future__ import annotations

import secrets
import time

import pytest
from planted_backends import PlantedConfig
from planted_shared import SharedFolder, SharedLaws, laws_for, list_oldest


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
            time.sleep(0.002)
            file.write(frame[len(frame) // 2 :])


class RemembersPresence(SharedFolder):
    def __init__(self, folder, ctx):
        super().__init__(folder, ctx)
        self.present = set()

    def contains(self, keys):
        self.present |= {key for key in keys if self.file(key).exists()}
        return [key in self.present for key in keys]


class DeletesWhatIsQuarantined(SharedFolder):
    def quarantine(self, keys):
        self.delete(keys)


class DeletesWhatNobodyReplaced(SharedFolder):
    """It asks whether the frame is the one that was read, and not whether another reads it well."""

    def __init__(self, folder, ctx):
        super().__init__(folder, ctx)
        self.was_read = {}

    def read_one(self, key, view):
        if self.file(key).exists():
            self.was_read[key] = self.file(key).stat().st_ino
        return super().read_one(key, view)

    def quarantine(self, keys):
        self.delete([key for key in keys if self.file(key).stat().st_ino == self.was_read.get(key)])


class WritesNothingTwice(SharedFolder):
    def __init__(self, folder, ctx):
        super().__init__(folder, ctx)
        self.stored = {}

    def write_one(self, key, frame):
        if self.stored.get(key) != frame:
            super().write_one(key, frame)
            self.stored[key] = bytes(frame)


class AsksInPages(SharedFolder):
    """And the last page comes first."""

    def contains(self, keys):
        return super().contains(keys[256:]) + super().contains(keys[:256])


class ReadsAsManyAsItHasConnections(SharedFolder):
    def read(self, keys, into):
        return super().read(keys[:32], into[:32]) + [0] * len(keys[32:])


class ListsAtOpen(SharedFolder):
    def __init__(self, folder, ctx):
        super().__init__(folder, ctx)
        list_oldest(folder)


class WritesInParts(SharedFolder):
    """Each part is whole, and each may be of another frame."""

    part = 1 << 20

    def write_one(self, key, frame):
        for begin in range(0, len(frame), self.part):
            unfinished = self.home / f"{key.hex()}.{secrets.token_hex(8)}"
            unfinished.write_bytes(frame[begin : begin + self.part])
            unfinished.replace(self.home / f"{key.hex()}.part{begin}")
        super().write_one(key, b"%d" % len(frame))

    def read_one(self, key, view):
        try:
            nbytes = int(self.file(key).read_bytes())
            for begin in range(0, nbytes, self.part):
                piece = (self.home / f"{key.hex()}.part{begin}").read_bytes()
                view[begin : begin + len(piece)] = piece
        except (FileNotFoundError, ValueError):
            return 0
        return nbytes


class LeavesItsLock(SharedFolder):
    """Nobody takes away the lock of a writer that was killed."""

    def write_one(self, key, frame):
        lock = self.home / f"{key.hex()}.lock"
        lock.touch(exist_ok=False)
        time.sleep(0.005)
        super().write_one(key, frame)
        lock.unlink()


class IgnoresTheCodec(SharedFolder):
    def __init__(self, folder, ctx):
        super().__init__(folder, ctx)
        self.home = folder / dict(ctx.namespace.facts)["model"]
        self.home.mkdir(exist_ok=True)


class SharesWhatIsUnfinished(SharedFolder):
    """Between namespaces: it is named by the key alone."""

    def write_one(self, key, frame):
        unfinished = self.folder / f"{key.hex()}.tmp"
        unfinished.write_bytes(frame)
        time.sleep(0.001)
        unfinished.replace(self.file(key))


BUGS = [
    (DoesNotSayIt, "test_a_shared_backend_is_marked_as_shared", "shared is False"),
    (RemembersAbsence, "test_absence_is_asked", r"contains\(\) does not find it"),
    (RemembersMisses, "test_absence_is_asked", r"read\(\) returns 0 bytes"),
    (RemembersPresence, "test_presence_is_asked", r"contains\(\) still finds it"),
    (ServesWhatItReadBefore, "test_what_others_change_is_seen", "other bytes than the new ones"),
    (MakesRoomAtOpen, "test_others_come_and_go_and_nothing_is_lost", "opened the store; "),
    (EndsWithItsFrames, "test_others_come_and_go_and_nothing_is_lost", "opened and closed the store; "),
    (DeletesWhatIsQuarantined, "test_quarantine_deletes_nothing", "that another one can read"),
    (DeletesWhatNobodyReplaced, "test_quarantine_deletes_nothing", "that another one can read"),
    (WritesNothingTwice, "test_what_is_quarantined_is_replaced", "quarantined and written again"),
    (AsksInPages, "test_large_batches_are_answered_in_order", r"contains\(\) of 300 keys"),
    (ReadsAsManyAsItHasConnections, "test_large_batches_are_answered_in_order", r"read\(\) of 40 keys"),
    (ListsAtOpen, "test_a_store_is_not_listed", "it was listed 1 times"),
    (SweepsAtOpen, "test_an_open_leaves_the_writes_of_others_alone", "writes failed"),
    (HasOneNameForTheUnfinished, "test_two_writers_of_one_key_leave_a_whole_frame", "calls went wrong|frame that is"),
    (WritesInPlace, "test_two_writers_of_one_key_leave_a_whole_frame", "a frame that is"),
    (WritesInPlace, "test_a_read_races_with_overwrites_and_deletes", "a frame that is"),
    (WritesInParts, "test_a_read_races_with_overwrites_and_deletes", "a frame that is"),
    (WritesInPlace, "test_a_killed_writer_harms_no_other", "a process was killed while it wrote; "),
    (LeavesItsLock, "test_a_killed_writer_harms_no_other", "another one cannot write that key"),
    (IgnoresTheCodec, "test_namespaces_share_keys_at_the_same_time", "three namespaces used one key"),
    (SharesWhatIsUnfinished, "test_namespaces_share_keys_at_the_same_time", "three namespaces used one key"),
]


@pytest.mark.parametrize(("bug", "law", "why"), BUGS)
def test_a_planted_bug_breaks_its_law(tmp_path, bug, law, why):
    with pytest.raises(AssertionError, match=why):
        getattr(laws_for(bug), law)(tmp_path)
