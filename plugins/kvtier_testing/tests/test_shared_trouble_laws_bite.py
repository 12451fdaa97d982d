"""The laws of a shared backend in trouble, and of one with a capacity, can fail, each where a bug is planted."""

from __future__ import annotations

import contextlib
import threading

import attrs
import pytest
from planted_backends import PlantedConfig
from planted_shared import FolderSpace, SharedFolder, laws_for, list_oldest, locked

from kvtier_core.errors import BackendError, StoreFull
from kvtier_core.storekit.shared_space import Count, SharedSpace
from kvtier_testing import SharedBackendLaws
from kvtier_testing.laws import shared_trouble


class BareLaws(SharedBackendLaws):
    """Can do nothing to its store but use it."""

    def config(self, folder):
        return PlantedConfig(folder, SharedFolder)


# -- trouble -----------------------------------------------------------------------------------


class FailsTheBatch(SharedFolder):
    def outcome(self, call, *args):
        return call(*args)


class GivesUpAtTheFirst(SharedFolder):
    def write(self, keys, frames):
        outcomes = super().write(keys, frames)
        failed = [error for error in outcomes if error is not None]
        return outcomes[: outcomes.index(failed[0])] + failed[:1] * len(keys) if failed else outcomes


class FindsNothingBesideIt(SharedFolder):
    def contains(self, keys):
        broken = any(self.file(key).is_dir() for key in keys)
        return [not broken and self.file(key).is_file() for key in keys]


class SaysThatItWroteIt(SharedFolder):
    def write(self, keys, frames):
        super().write(keys, frames)


class WaitsForEver(SharedFolder):
    def __init__(self, folder, ctx):
        super().__init__(folder, ctx)
        self.timeout = float("inf")


class WaitsForEachKey(SharedFolder):
    """A batch takes as many timeouts as it has keys."""

    def read(self, keys, into):
        return [self.read_alone(*each) for each in zip(keys, into, strict=True)]

    def read_alone(self, key, view):
        with contextlib.suppress(BackendError):
            return super().read([key], [view])[0]
        return 0


class RaisesWhatTheSystemRaises(SharedFolder):
    @contextlib.contextmanager
    def served(self):
        with locked(self.folder / "lock", timeout=self.timeout):
            yield


class Detached(SharedFolder):
    """Gives up, and leaves a thread behind that does not."""

    def __init__(self, folder, ctx):
        self.threads = []
        super().__init__(folder, ctx)

    def detach(self, call, *args):
        """The call in a thread without timeout. Raises BackendError after the timeout."""
        outcomes = []
        self.threads.append(threading.Thread(target=lambda: outcomes.append(call(*args))))
        self.threads[-1].start()
        self.threads[-1].join(self.timeout)
        if not outcomes:
            raise BackendError("no answer")
        return outcomes[0]

    @property
    def timeout(self):
        return float("inf") if threading.current_thread() in self.threads else self.given

    @timeout.setter
    def timeout(self, seconds):
        self.given = seconds

    def close(self):
        for thread in self.threads:
            thread.join()
        super().close()


class ReadsLater(Detached):
    def read(self, keys, into):
        return self.detach(super().read, keys, into)


class WritesLater(Detached):
    def write(self, keys, frames):
        return self.detach(super().write, keys, frames)


class StaysBroken(SharedFolder):
    broken = None

    @contextlib.contextmanager
    def served(self):
        if self.broken is not None:
            raise self.broken
        try:
            with super().served():
                yield
        except BackendError as error:
            self.broken = error
            raise


class LosesWhatItSaysItStored(SharedFolder):
    def write(self, keys, frames):
        with contextlib.suppress(BackendError):
            return super().write(keys, frames)


class KnowsWhatItWrote(SharedFolder):
    def __init__(self, folder, ctx):
        super().__init__(folder, ctx)
        self.known = {}

    def write_one(self, key, frame):
        super().write_one(key, frame)
        self.known[key] = bytes(frame)

    def read_one(self, key, view):
        return len(self.known.get(key, b"")) or super().read_one(key, view)

    def served(self):
        return contextlib.nullcontext()


# -- capacity ----------------------------------------------------------------------------------


class HasNoLimit(SharedFolder):
    def __init__(self, folder, ctx):
        super().__init__(folder, ctx)
        self.space = None


class OwnCount(FolderSpace):
    """Counts and sees what this user wrote."""

    def __init__(self, folder, written):
        super().__init__(folder)
        self.__dict__["own"] = Count(0, 0)
        self.__dict__["written"] = written

    def count(self, *, taken=0, freed=0):
        self.__dict__["own"] = Count(self.own.taken + taken, self.own.freed + freed)
        return self.own

    def oldest(self):
        return [(file, nbytes) for file, nbytes in super().oldest() if file in self.written]


class CountsAlone(SharedFolder):
    def __init__(self, folder, ctx):
        super().__init__(folder, ctx)
        self.written = set()
        self.space = SharedSpace(OwnCount(folder, self.written), ctx.capacity)

    def write_one(self, key, frame):
        self.written.add(self.file(key))
        super().write_one(key, frame)


class OwnNamespace(FolderSpace):
    """Counts and sees the frames of one namespace."""

    def count(self, **changes):
        own = FolderSpace(self.folder.parent.parent / self.folder.name)
        own.folder.mkdir(exist_ok=True)
        return own.count(**changes)

    def evicting(self):
        return locked(self.folder.parent / "evicting")

    def oldest(self):
        return [(file, nbytes) for file, nbytes in list_oldest(self.folder.parent) if file.parent == self.folder]


class CountsItsNamespace(SharedFolder):
    def __init__(self, folder, ctx):
        super().__init__(folder, ctx)
        self.space = SharedSpace(OwnNamespace(self.home), ctx.capacity)


class RejectsWhatDoesNotFit(SharedFolder):
    def take(self, nbytes):
        if sum(taken for _, taken in list_oldest(self.folder)) + nbytes > self.space._capacity:
            raise StoreFull("full", missing=nbytes)


class DropsWhatDoesNotFit(SharedFolder):
    """Begins early to do so: three users look at the same time."""

    def write_one(self, key, frame):
        if sum(taken for _, taken in list_oldest(self.folder)) < 0.9 * self.space._capacity:
            super().write_one(key, frame)

    def take(self, nbytes):
        pass


class ClearsTheStore(SharedFolder):
    def take(self, nbytes):
        if sum(taken for _, taken in list_oldest(self.folder)) + nbytes > self.space._capacity:
            for file, _ in list_oldest(self.folder):
                file.unlink(missing_ok=True)


@attrs.frozen
class NewestFirst(FolderSpace):
    def oldest(self):
        return super().oldest()[::-1]


class EvictsTheNewest(SharedFolder):
    def __init__(self, folder, ctx):
        super().__init__(folder, ctx)
        self.space = SharedSpace(NewestFirst(folder), ctx.capacity)


class CountsEveryWrite(SharedFolder):
    """And never what they replace."""

    def __init__(self, folder, ctx):
        super().__init__(folder, ctx)
        self.left = ctx.capacity

    def take(self, nbytes):
        self.left -= nbytes
        if self.left < 0:
            for file, _ in list_oldest(self.folder)[:1]:
                file.unlink()
            self.left += nbytes

    def give(self, nbytes):
        pass


class TakesNoCapacityForNone(SharedFolder):
    def __init__(self, folder, ctx):
        super().__init__(folder, ctx)
        self.capacity = ctx.capacity

    def take(self, nbytes):
        while (files := list_oldest(self.folder)) and sum(taken for _, taken in files) + nbytes > self.capacity:
            files[0][0].unlink()


BUGS = [
    (FailsTheBatch, "test_a_key_that_fails_fails_alone", "raises for all of its batch"),
    (GivesUpAtTheFirst, "test_a_key_that_fails_fails_alone", "two others were not written"),
    (FindsNothingBesideIt, "test_a_key_that_fails_fails_alone", "does not find 2 others"),
    (SaysThatItWroteIt, "test_a_key_that_fails_fails_alone", "does not find 1 others"),
    (WaitsForEver, "test_no_call_outlasts_its_timeout", "had not returned"),
    (WaitsForEachKey, "test_no_call_outlasts_its_timeout", r"later read\(\) had not returned"),
    (RaisesWhatTheSystemRaises, "test_no_call_outlasts_its_timeout", "it raised TimeoutError"),
    (ReadsLater, "test_a_call_that_gave_up_is_over", "wrote to its view later"),
    (WritesLater, "test_a_call_that_gave_up_is_over", "left a frame that is"),
    (RaisesWhatTheSystemRaises, "test_a_store_that_recovers_is_used_again", "it raised FileNotFoundError"),
    (StaysBroken, "test_a_store_that_recovers_is_used_again", "calls still fail"),
    (LosesWhatItSaysItStored, "test_a_store_that_recovers_is_used_again", "is a miss or another one"),
    (KnowsWhatItWrote, "test_a_store_that_recovers_is_used_again", r"read\(\) finds a frame"),
    (HasNoLimit, "test_all_users_together_keep_within_the_capacity", "in the store at once"),
    (CountsAlone, "test_all_users_together_keep_within_the_capacity", "in the store at once"),
    (CountsItsNamespace, "test_all_users_together_keep_within_the_capacity", "in the store at once"),
    (RejectsWhatDoesNotFit, "test_all_users_together_keep_within_the_capacity", "of a full store wrote new frames"),
    (DropsWhatDoesNotFit, "test_all_users_together_keep_within_the_capacity", "last 3 frames written to a full store"),
    (ClearsTheStore, "test_the_oldest_go_first", "newer ones are gone"),
    (HasNoLimit, "test_the_oldest_go_first", "all are found"),
    (EvictsTheNewest, "test_the_oldest_go_first", "newer ones are gone"),
    (CountsEveryWrite, "test_room_is_given_back", "that should have stayed are gone"),
    (TakesNoCapacityForNone, "test_without_a_capacity_nothing_is_evicted", "frames were evicted"),
]


@pytest.mark.parametrize(("bug", "law", "why"), BUGS)
def test_a_planted_bug_breaks_its_law(tmp_path, bug, law, why, monkeypatch):
    monkeypatch.setattr(shared_trouble, "PATIENCE", 1.0)
    with pytest.raises(AssertionError, match=why):
        getattr(laws_for(bug), law)(tmp_path)


@pytest.mark.parametrize(
    ("law", "why"),
    [
        ("test_a_key_that_fails_fails_alone", "cannot make the store fail for one key"),
        ("test_no_call_outlasts_its_timeout", "cannot make the store wait"),
        ("test_a_call_that_gave_up_is_over", "cannot make the store wait"),
        ("test_a_store_that_recovers_is_used_again", "cannot make the store unreachable"),
        ("test_all_users_together_keep_within_the_capacity", "this store bounds itself"),
        ("test_the_oldest_go_first", "this store bounds itself"),
        ("test_room_is_given_back", "this store bounds itself"),
        ("test_a_store_is_not_listed", "cannot see whether the store is listed"),
    ],
)
def test_laws_that_a_suite_cannot_try_are_skipped(tmp_path, law, why):
    with pytest.raises(pytest.skip.Exception, match=why):
        getattr(BareLaws(), law)(tmp_path)


def test_a_hook_that_does_not_stall_is_found_out(tmp_path):
    class Idle(BareLaws):
        @contextlib.contextmanager
        def stalled_store(self, folder):
            yield True

    with pytest.raises(AssertionError, match="of this suite does not stall"):
        Idle().test_no_call_outlasts_its_timeout(tmp_path)
