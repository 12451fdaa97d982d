"""The laws of observers can fail, each where a bug is planted."""

from __future__ import annotations

import os
import threading
from collections import Counter
from pathlib import Path
from typing import ClassVar

import attrs
import pytest

from kvtier_core.interfaces import Observer, ObserverConfig
from kvtier_core.types import EventKind
from kvtier_testing import ObserverLaws


class Log(Observer):
    """Correct: a line an event."""

    def __init__(self, path):
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def observe(self, events):
        os.write(self.file, "".join(f"{each.kind.value} {each.tier} {len(each.keys)}\n" for each in events).encode())

    def close(self):
        os.close(self.file)


class TellsTheFirst(Log):
    def observe(self, events):
        super().observe(events[:1])


class TellsTheLastFirst(Log):
    def observe(self, events):
        super().observe(events[::-1])


class KnowsItsKinds(Log):
    def observe(self, events):
        super().observe([event for event in events if EventKind(event.kind)])


class ChangesEvents(Log):
    def observe(self, events):
        super().observe(events)
        object.__setattr__(events[0], "nbytes", 0)


class KeepsEvents(Log):
    def __init__(self, path):
        super().__init__(path)
        self.events = []

    def observe(self, events):
        super().observe(events)
        self.events += events


class LeavesItsFileOpen(Log):
    def close(self):
        pass


class LeavesAThread(Log):
    def __init__(self, path):
        super().__init__(path)
        self.closed = threading.Event()
        threading.Thread(target=self.closed.wait, daemon=True).start()


class LocksTheFolder(Log):
    """What it has left keeps the next one out."""

    def __init__(self, path):
        self.lock = path.with_suffix(".lock")
        os.close(os.open(self.lock, os.O_CREAT | os.O_EXCL))
        super().__init__(path)

    def close(self):
        super().close()
        self.lock.unlink()


IN_THIS_PROCESS = []


class IsTheOnlyOne(Log):
    def __init__(self, path):
        assert not IN_THIS_PROCESS, "there is one already"
        IN_THIS_PROCESS.append(self)
        super().__init__(path)

    def close(self):
        IN_THIS_PROCESS.remove(self)
        super().close()


class OpensWhereItWasWritten(Log):
    pass


@attrs.frozen
class PlantedConfig(ObserverConfig):
    type: ClassVar[str] = "planted"
    folder: Path
    observer: str = "Log"
    process: int = attrs.field(factory=os.getpid)

    def open(self, ctx):
        assert self.observer != "OpensWhereItWasWritten" or self.process == os.getpid()
        self.folder.mkdir(exist_ok=True)
        return globals()[self.observer](self.folder / "events")


class TestPlanted(ObserverLaws):
    planted = "Log"

    def config(self, folder):
        return PlantedConfig(folder, self.planted)

    def told(self, folder, observer):
        lines = [line.split() for line in (folder / "events").read_text().splitlines()]
        return [(kind, tier, int(chunks)) for kind, tier, chunks in lines]


class TestCounting(TestPlanted):
    """The same observer, for those that only count."""

    ordered = False

    def told(self, folder, observer):
        sums = Counter()
        for kind, tier, chunks in super().told(folder, observer):
            sums[kind, tier] += chunks
        return [(kind, tier, chunks) for (kind, tier), chunks in sums.items()]


ONCE = "test_every_event_is_told_once_and_in_order"
BUGS = [
    (TestPlanted, "TellsTheFirst", ONCE),
    (TestPlanted, "TellsTheLastFirst", ONCE),
    (TestCounting, "TellsTheFirst", ONCE),
    (TestPlanted, "KnowsItsKinds", "test_any_event_is_taken"),
    (TestPlanted, "ChangesEvents", "test_events_stay_as_they_are"),
    (TestPlanted, "KeepsEvents", "test_what_was_observed_is_not_kept"),
    (TestPlanted, "LeavesItsFileOpen", "test_close_releases_everything"),
    (TestPlanted, "LeavesAThread", "test_close_releases_everything"),
    (TestPlanted, "LocksTheFolder", "test_engines_that_share_a_configuration_share_nothing"),
    (TestPlanted, "LocksTheFolder", "test_an_observer_opens_again_after_a_kill"),
    (TestPlanted, "IsTheOnlyOne", "test_two_engines_may_be_in_one_process"),
    (TestPlanted, "OpensWhereItWasWritten", "test_an_observer_opens_in_any_process"),
]


@pytest.mark.parametrize(("suite", "planted", "law"), BUGS)
def test_a_planted_bug_breaks_its_law(tmp_path, monkeypatch, suite, planted, law):
    monkeypatch.setattr(suite, "planted", planted)
    monkeypatch.setattr("kvtier_testing.resources.PATIENCE", 0.2)
    with pytest.raises((AssertionError, ValueError, FileExistsError)):
        getattr(suite(), law)(tmp_path)
