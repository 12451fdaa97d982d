"""The laws of a backend can fail: each planted bug breaks the law that is there for it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from typing import ClassVar

import pytest
from planted_backends import PlantedConfig, Reference, Slab, SlabFile, SpoiltLaws, UnlistedConfig

from kvtier_core.errors import BackendError
from kvtier_core.transfer.staged_reader import StagedReader
from kvtier_core.types import FRAME_ALIGNMENT, FrameRead, ReadStatus
from kvtier_testing import BackendLaws, Laws, resources
from kvtier_testing.laws import backends


def laws_for(backend):
    class PlantedLaws(SpoiltLaws):
        def config(self, folder):
            return PlantedConfig(folder, backend)

    return PlantedLaws()


class TestReference(SpoiltLaws):
    def config(self, folder):
        return PlantedConfig(folder, Reference)


class SaysButDoesNotRead(Reference):
    def read_one(self, key, view):
        return super().read_one(key, memoryview(bytearray(len(view))))


class LosesTheLastByte(Reference):
    def write_one(self, key, frame):
        super().write_one(key, bytes(frame[:-1]) + b"\0")


class WritesOneByteTooMany(Reference):
    def read_one(self, key, view):
        count = super().read_one(key, view)
        if 0 < count < len(view):
            view[count] = 0
        return count


class ScribblesOnAMiss(Reference):
    def read_one(self, key, view):
        view[0] = 0
        return super().read_one(key, view)


class MovesHitsToTheFront(Reference):
    def read(self, keys, into):
        hits = [key for key in keys if self.file(key).exists()]
        counts = super().read(hits, into[: len(hits)])
        return counts + [0] * (len(keys) - len(hits))


class AnswersOnlyForWhatIsThere(Reference):
    def contains(self, keys):
        return [there for there in super().contains(keys) if there]


class TearsWhatDoesNotFit(Reference):
    def read_one(self, key, view):
        whole = memoryview(bytearray(64 * FRAME_ALIGNMENT))
        count = min(super().read_one(key, whole), len(view))
        view[:count] = whole[:count]
        return count


class KeepsTheView(Reference):
    def write(self, keys, frames):
        self.kept = [frame[:] for frame in frames]
        super().write(keys, frames)


class KeepsTheViewItRead(Reference):
    def read(self, keys, into):
        self.kept = [view[:] for view in into]
        return super().read(keys, into)


class WritesLater(Reference):
    """Behind a copy of the view that shares its memory, when somebody asks."""

    def write(self, keys, frames):
        self.later = (keys, frames)

    def read(self, keys, into):
        super().write(*self.later)
        return super().read(keys, into)


class KeepsTheOldBytes(Reference):
    def write_one(self, key, frame):
        if not self.file(key).exists():
            super().write_one(key, frame)


class NamesFilesByTheKeyItself(Reference):
    def file(self, key):
        return self.home / key.decode("latin-1")


class IgnoresCase(Reference):
    def file(self, key):
        return self.home / key.lower().hex()


class WantsKeysToDelete(Reference):
    def delete(self, keys):
        for key in keys:
            self.file(key).unlink()


class DeletesNothing(Reference):
    def delete(self, keys):
        pass


class ErasesNothing(Reference):
    def erase(self, keys):
        pass


class LooksAwayFromDamage(Reference):
    def quarantine(self, keys):
        pass


class FailsTheWholeBatch(Reference):
    def read_one(self, key, view):
        if self.file(key).exists() and not self.file(key).stat().st_size:
            raise BackendError("one of them cannot be read")
        return super().read_one(key, view)


class CallsAMissAnError(Reference):
    def read_one(self, key, view):
        return super().read_one(key, view) or BackendError("no such frame")


class ChokesOnAnEmptyBatch(Reference):
    def read(self, keys, into):
        keys[0]
        return super().read(keys, into)


class IgnoresTheNamespace(Reference):
    def __init__(self, folder, ctx):
        super().__init__(folder, ctx)
        self.home = folder


class ForgetsAtClose(Reference):
    def close(self):
        for file in self.home.iterdir():
            file.unlink()


class ScansNewestFirst(Reference):
    def scan(self):
        return reversed(list(super().scan()))


class ScansPayloadSizes(Reference):
    def scan(self):
        return ((key, nbytes - FRAME_ALIGNMENT) for key, nbytes in super().scan())


class WritesInPlace(Reference):
    def write_one(self, key, frame):
        with self.file(key).open("wb", buffering=0) as file:
            file.write(frame[: len(frame) // 2])
            time.sleep(0.002)
            file.write(frame[len(frame) // 2 :])


class LeaksOtherErrors(Reference):
    def read_one(self, key, view):
        return os.pread(-1, 1, 0) if self.closed else super().read_one(key, view)


class ClosesOnce(Reference):
    def close(self):
        if self.closed:
            raise BackendError("closed already")
        super().close()


class TalksInNumbers(Reference):
    def facts(self):
        return {"threads": 4}


class SharesAScratchBuffer(Reference):
    scratch = bytearray(64 * FRAME_ALIGNMENT)

    def read_one(self, key, view):
        count = super().read_one(key, memoryview(self.scratch)[: len(view)])
        time.sleep(0)
        view[:count] = self.scratch[:count]
        return count


class SaysThatItIsShared(Reference):
    shared = True


class LooksTwiceWhileItScans(Reference):
    def scan(self):
        files = [file for file in self.home.iterdir() if not file.suffix]
        time.sleep(0.001)
        return iter([(bytes.fromhex(file.name), file.stat().st_size) for file in files])


class ScansLazily(Reference):
    def scan(self):
        for file in sorted(file for file in self.home.iterdir() if not file.suffix):
            yield bytes.fromhex(file.name), file.stat().st_size


class KeepsAllNamespaces(Reference):
    def make_room(self, nbytes):
        pass


class ReadsOneAtATime(Reference):
    def __init__(self, folder, ctx):
        super().__init__(folder, ctx)
        self.lock = threading.Lock()

    def read(self, keys, into):
        with self.lock:
            return super().read(keys, into)


class LeavesADescriptor(Reference):
    def __init__(self, folder, ctx):
        super().__init__(folder, ctx)
        self.fd = os.open(folder, os.O_RDONLY)


class LeavesAThread(Reference):
    def __init__(self, folder, ctx):
        super().__init__(folder, ctx)
        threading.Thread(target=threading.Event().wait, daemon=True).start()


class LeavesAChild(Reference):
    children: ClassVar = []

    def __init__(self, folder, ctx):
        super().__init__(folder, ctx)
        self.children.append(subprocess.Popen(["sleep", "600"]))


class LeavesAZombie(LeavesAChild):
    def close(self):
        self.children[-1].kill()


GIVES_BACK = "test_close_gives_everything_back"
CAPACITY = "test_what_other_namespaces_left_counts_against_the_capacity"


class GivesAwayThePlaces(Slab):
    def place(self):
        return 0


class LocatesWhatIsGone(Slab):
    def delete(self, keys):
        Reference.delete(self, keys)


class Address:
    """Its own reader can use it, in this process."""

    def __init__(self, at):
        self.at = at

    def __add__(self, offset):
        return self.at + offset


class LocatesWithObjects(Slab):
    def locate(self, keys):
        return [found and found._replace(place=(Address(*found.place),)) for found in super().locate(keys)]


class FromTheirBeginning(SlabFile):
    def read(self, ranges, into):
        return super().read([each._replace(offset=0) for each in ranges], into)


class ReadsFramesFromTheirBeginning(Slab):
    source = FromTheirBeginning


class Credulous(StagedReader):
    """It takes any frame for the one that was asked for."""

    def _carry_out(self, piece, job, lane):
        lane.read(piece.frames)
        self._unclaimed.pop(piece.number)
        lane.mover.load(0, range(len(piece.frames)), piece.pages)
        lane.mover.wait([0])
        lane.mover.finished()
        return [FrameRead(ReadStatus.VERIFIED)] * len(piece.frames), True


class BelievesEveryFrame(Slab):
    reader = Credulous


class Hasty(Credulous):
    """It says what it found, when the pages are overwritten."""

    def _carry_out(self, piece, job, lane):
        super()._carry_out(piece, job, lane)
        return lane.read(piece.frames), False


class VerifiesTooLate(Slab):
    reader = Hasty


BUGS = [
    (BelievesEveryFrame, "test_a_reader_brings_nothing_that_is_not_the_frame"),
    (VerifiesTooLate, "test_a_reader_brings_nothing_that_is_not_the_frame"),
    (ReadsFramesFromTheirBeginning, "test_workers_read_a_frame_by_themselves"),
    (GivesAwayThePlaces, "test_workers_read_a_frame_by_themselves"),
    (LocatesWhatIsGone, "test_workers_read_a_frame_by_themselves"),
    (LocatesWithObjects, "test_workers_read_a_frame_by_themselves"),
    (SaysThatItIsShared, "test_a_shared_backend_is_tried_as_one"),
    (LooksTwiceWhileItScans, "test_a_scan_may_race_with_a_delete"),
    (ScansLazily, "test_a_scan_may_race_with_a_delete"),
    (KeepsAllNamespaces, CAPACITY),
    (ReadsOneAtATime, "test_a_slow_read_does_not_block_others"),
    (LeavesADescriptor, GIVES_BACK),
    (LeavesAThread, GIVES_BACK),
    (LeavesAChild, GIVES_BACK),
    (LeavesAZombie, GIVES_BACK),
    (SaysButDoesNotRead, "test_bytes_read_are_bytes_written"),
    (LosesTheLastByte, "test_bytes_read_are_bytes_written"),
    (WritesOneByteTooMany, "test_only_the_given_view_is_touched"),
    (ScribblesOnAMiss, "test_only_the_given_view_is_touched"),
    (MovesHitsToTheFront, "test_misses_stay_in_place"),
    (AnswersOnlyForWhatIsThere, "test_misses_stay_in_place"),
    (TearsWhatDoesNotFit, "test_a_view_too_small_is_a_miss"),
    (KeepsTheView, "test_no_view_is_kept"),
    (KeepsTheViewItRead, "test_no_view_is_kept"),
    (WritesLater, "test_no_view_is_kept"),
    (KeepsTheOldBytes, "test_an_overwrite_gives_the_new_bytes"),
    (NamesFilesByTheKeyItself, "test_keys_are_any_32_bytes"),
    (IgnoresCase, "test_keys_are_any_32_bytes"),
    (WantsKeysToDelete, "test_deleted_is_gone"),
    (DeletesNothing, "test_deleted_is_gone"),
    (ErasesNothing, "test_deleted_is_gone"),
    (LooksAwayFromDamage, "test_what_is_quarantined_is_gone"),
    (FailsTheWholeBatch, "test_a_frame_that_cannot_be_read_fails_alone"),
    (ChokesOnAnEmptyBatch, "test_an_empty_batch_is_nothing"),
    (IgnoresTheNamespace, "test_two_namespaces_never_meet"),
    (ForgetsAtClose, "test_two_namespaces_never_meet"),
    (ForgetsAtClose, "test_scan_finds_what_survived"),
    (ScansNewestFirst, "test_scan_finds_what_survived"),
    (ScansPayloadSizes, "test_scan_finds_what_survived"),
    (WritesInPlace, "test_a_killed_writer_leaves_no_torn_frame"),
    (LeaksOtherErrors, "test_only_backend_error_escapes"),
    (ClosesOnce, "test_close_twice"),
    (TalksInNumbers, "test_facts_are_plain_words"),
    (SharesAScratchBuffer, "test_threads_at_once"),
    (CallsAMissAnError, "test_threads_at_once"),
]


def test_a_slab_keeps_the_law_of_those_that_workers_read(tmp_path):
    laws = laws_for(Slab)
    laws.test_workers_read_a_frame_by_themselves(tmp_path)
    laws.test_a_reader_brings_nothing_that_is_not_the_frame(tmp_path)


@pytest.mark.parametrize(("bug", "law"), [pytest.param(*pair, id=f"{pair[0].__name__}-{pair[1]}") for pair in BUGS])
def test_a_planted_bug_breaks_its_law(tmp_path, monkeypatch, bug, law):
    monkeypatch.setattr(resources, "PATIENCE", 0.2)
    monkeypatch.setattr(backends, "PATIENCE", 0.5)
    with (
        contextlib.ExitStack() as afterwards,
        pytest.raises((AssertionError, OSError, ValueError, IndexError, BackendError)),
    ):
        afterwards.callback(end_children)
        getattr(laws_for(bug), law)(tmp_path)


@pytest.mark.parametrize("backend", [Reference, KeepsAllNamespaces])
def test_a_store_without_walk_keeps_the_law_of_capacity_or_breaks_it(tmp_path, backend):
    class UnlistedLaws(SpoiltLaws):
        def config(self, folder):
            return UnlistedConfig(folder, backend)

    breaks = pytest.raises(AssertionError, match="frames of other namespaces must make room")
    with breaks if backend is KeepsAllNamespaces else contextlib.nullcontext():
        getattr(UnlistedLaws(), CAPACITY)(tmp_path)


def test_a_read_that_gives_up_for_a_waiting_one_is_named(tmp_path):
    class GivesUp(ReadsOneAtATime):
        def read(self, keys, into):
            if not self.lock.acquire(timeout=0.2):
                raise BackendError("timed out")
            with contextlib.ExitStack() as locked:
                locked.callback(self.lock.release)
                return Reference.read(self, keys, into)

    with pytest.raises(AssertionError, match="that of another one raised timed out: calls come on several threads"):
        laws_for(GivesUp).test_a_slow_read_does_not_block_others(tmp_path)


def end_children():
    while LeavesAChild.children:
        child = LeavesAChild.children.pop()
        child.kill()
        child.wait()


def test_a_heavy_import_breaks_its_law(tmp_path, monkeypatch):
    package = tmp_path / "planted_heavy"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "config.py").write_text("class Config: pass")
    (package / "plugin.py").write_text("import torch")
    (tmp_path / "torch.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    from planted_heavy.config import Config

    class HeavyLaws(BackendLaws):
        def config(self, folder):
            return Config()

    with pytest.raises(AssertionError, match=r"imports torch"):
        HeavyLaws().test_import_is_light(tmp_path)
    assert "planted_heavy.plugin" not in sys.modules


def test_a_thread_that_an_import_starts_breaks_its_law(tmp_path, monkeypatch):
    (tmp_path / "planted_thread.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\nclass Config: pass"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = type("Config", (), {"__module__": "planted_thread"})

    class ThreadLaws(BackendLaws):
        def config(self, folder):
            return config()

    with pytest.raises(AssertionError, match=r"importing planted_thread starts 1 threads; start them in `open`"):
        ThreadLaws().test_import_is_light(tmp_path)


def test_the_laws_of_tiers_need_no_hypothesis():
    """Authors of tiers need not install it."""
    script = (
        "import sys; sys.modules['hypothesis'] = None\n"
        "from kvtier_testing import ArenaLaws, BackendLaws, SharedBackendLaws, TokenDatabaseLaws"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_law_cannot_be_overridden():
    with pytest.raises(TypeError, match="Mine overrides the law test_close_twice; excuse it instead, with a reason"):

        class Mine(BackendLaws):
            def test_close_twice(self, tmp_path):
                pass


def test_a_law_cannot_be_overridden_from_the_side():
    class Aside:
        def test_close_twice(self, tmp_path):
            pass

    with pytest.raises(TypeError, match="overrides the law test_close_twice"):

        class Mine(Aside, BackendLaws):
            pass


def test_a_law_of_ones_own_is_welcome():
    class Mine(BackendLaws):
        def test_of_mine(self, tmp_path):
            pass

    with pytest.raises(TypeError, match="overrides the law test_of_mine"):

        class Yours(Mine):
            def test_of_mine(self, tmp_path):
                pass


def test_an_excuse_needs_a_law_and_a_reason():
    with pytest.raises(TypeError, match="Mine excuses test_of_nothing, which is not a law; have: test_a_frame"):

        class Mine(BackendLaws):
            excused: ClassVar = {"test_of_nothing": "it is not there"}

    with pytest.raises(TypeError, match="excuses test_close_twice without a reason"):

        class Yours(BackendLaws):
            excused: ClassVar = {"test_close_twice": ""}


def test_a_suite_must_name_its_subject(tmp_path):
    with pytest.raises(NotImplementedError, match="Laws must say which config is under test"):
        Laws().config(tmp_path)


class TestExcused(Laws):
    """Would fail, were it not skipped."""

    excused: ClassVar = {"test_import_is_light": "planted"}


def test_laws_of_persistence_are_skipped_without_it(tmp_path):
    class Forgetful(BackendLaws):
        def config(self, folder):
            return PlantedConfig(folder, ForgetsAtClose)

    with pytest.raises(pytest.skip.Exception, match="this suite cannot make a frame unreadable"):
        Forgetful().test_a_frame_that_cannot_be_read_fails_alone(tmp_path)
    for law in (Forgetful().test_scan_finds_what_survived, Forgetful().test_a_killed_writer_leaves_no_torn_frame):
        with pytest.raises(pytest.skip.Exception, match="nothing survives by design"):
            law(tmp_path)
    Forgetful().test_two_namespaces_never_meet(tmp_path)
