"""The laws of an observer. Subclass `ObserverLaws` and name a config."""

from __future__ import annotations

import contextlib
import copy
import enum
import gc
import random
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import ClassVar

import attrs
import pytest

from kvtier_core.interfaces import Observer, ObserverConfig, OpenContext
from kvtier_core.types import Event, EventKind, Usage
from kvtier_core.work.io_pool import run_within
from kvtier_testing import resources
from kvtier_testing.laws.base import Laws, in_new_process, kill_at_work
from kvtier_testing.resources import PATIENCE
from kvtier_testing.samples import make_context, make_keys

#: An event as an observer may pass it on: its kind, its tier, and how many chunks.
Told = tuple[str, str, int]

_MANY = 10_000
#: Of these, an observer may keep this many, for example to send them together.
_MAY_KEEP = 1000


class _Newer(enum.Enum):
    """Events that a later release may add."""

    KIND = "a kind of a later release"


class ObserverLaws(Laws[ObserverConfig]):
    """Subclass, and implement `config`; also `told`, if what was observed can be found anywhere."""

    contract: ClassVar[str] = "kvtier_core.interfaces.observer"
    ordered: ClassVar[bool] = True  #: does `told` return each event? False: one entry per kind and tier, with the sum

    def told(self, folder: Path, observer: Observer) -> Iterable[Told]:
        """The events that the observer has passed on so far: all ever observed in this folder, if it keeps them."""
        pytest.skip(f"{type(self).__name__} does not say what it was told")

    @contextlib.contextmanager
    def opened(self, folder: Path, ctx: OpenContext | None = None) -> Iterator[Observer]:
        """The observer under test, closed afterwards."""
        observer = self.config(folder).open(ctx or make_context())
        try:
            yield observer
        finally:
            _aside(observer.close)

    def test_every_event_is_told_once_and_in_order(self, tmp_path: Path) -> None:
        """Each event is passed on once, in the order in which it was observed, whatever the batches.

        Otherwise sums would not add up, and a log would say that a chunk left before it came.
        """
        events = some_events(200)
        with self.opened(tmp_path) as observer:
            for batch in _batches(events):
                _observe(observer, batch)
            self._must_have_told(self.told(tmp_path, observer), events)

    def test_any_event_is_taken(self, tmp_path: Path) -> None:
        """An observer takes any kind of event, also of a later release, any text, no keys and thousands.

        Otherwise the first such event would raise, and the engine would drop the observer until its next start.
        """
        keys = tuple(make_keys(2000))
        usage = Usage("disk", chunks=1, nbytes=2, capacity=0, inflight=1 << 60, can_read=False)
        hard = [
            *(Event(kind, "disk", usage=usage if kind is EventKind.USAGE else None) for kind in EventKind),
            *(Event(kind, "disk", keys, 1 << 62, "for room", 1e-9, 1 << 40) for kind in EventKind),
            Event(EventKind.IO_ERROR, "disk#2", why='no "room"\n\\ in \x00 \ud800 the \u2028 house' * 100),
            Event(_Newer.KIND, "disk", keys[:1]),  # type: ignore[arg-type]  # not a kind of this release
            Event(EventKind.READ, "disk", seconds=float("inf")),
        ]
        with self.opened(tmp_path) as observer:
            for event in hard:
                try:
                    _observe(observer, (event,))
                except Exception as error:
                    error.add_note(f"while it observed {event.kind}")
                    raise

    def test_events_stay_as_they_are(self, tmp_path: Path) -> None:
        """An observer changes no event: all observers are shown the same objects.

        Otherwise another observer would learn of events that never happened.
        """
        events = some_events(50)
        before = copy.deepcopy(events)
        with self.opened(tmp_path) as observer:
            _observe(observer, events)
        assert events == before, "an observer changed an event, which others are told too"

    def test_what_was_observed_is_not_kept(self, tmp_path: Path) -> None:
        """Events are passed on or counted, and not kept.

        Otherwise a server that runs for months would run out of memory.
        """
        with self.opened(tmp_path) as observer:
            alive: list[weakref.ref[Event]] = []
            for _ in range(_MANY // 100):
                events = some_events(100)
                alive += map(weakref.ref, events)
                _observe(observer, events)
                del events
            gc.collect()
            kept = sum(ref() is not None for ref in alive)
        assert kept <= _MAY_KEEP, f"of {_MANY} events it keeps {kept}"

    def test_close_releases_everything(self, tmp_path: Path) -> None:
        """After `close` no thread, descriptor or process is left, even if nothing was observed.

        Otherwise an engine that stops would hang, or a process that serves one engine after another would run out of
        them.
        """
        if not resources.READABLE:
            pytest.skip("what a process holds is read from /proc")
        with self.opened(tmp_path):
            pass  # what is imported and kept at the first time
        before = resources.Resources.now()
        for count in (0, 100):
            with self.opened(tmp_path) as observer:
                if count:
                    _observe(observer, some_events(count))
        left = before.since()
        assert not left, f"after close it still holds {', '.join(left)}"

    def test_engines_that_share_a_configuration_share_nothing(self, tmp_path: Path) -> None:
        """Data parallel replicas with one configuration are open together, and end one after the other.

        Otherwise the second replica would not start, or overwrite what the first one says.
        """
        contexts = [attrs.evolve(make_context(), replica=number, replicas=2) for number in (0, 1)]
        with self.opened(tmp_path, contexts[0]) as first, self.opened(tmp_path, contexts[1]) as second:
            for observer in (first, second, first):
                _observe(observer, some_events(10))
        with self.opened(tmp_path, contexts[1]) as again:
            _observe(again, some_events(10))

    def test_two_engines_may_be_in_one_process(self, tmp_path: Path) -> None:
        """Two observers of different configurations live in one process.

        Otherwise a program with two engines would count both in one place, or could not open the second.
        """
        one, another = tmp_path / "one", tmp_path / "another"
        one.mkdir()
        another.mkdir()
        with self.opened(one) as first, self.opened(another) as second:
            for observer in (first, second):
                _observe(observer, some_events(10))

    def test_an_observer_opens_again_after_a_kill(self, tmp_path: Path) -> None:
        """An engine that is killed closes nothing, and may be writing: the next one opens all the same.

        Otherwise an engine would not come back after a crash until somebody tidied up.
        """
        for _ in range(3):
            kill_at_work(observe_until_killed, self.config(tmp_path))
        with self.opened(tmp_path) as observer:
            _observe(observer, some_events(10))

    def test_an_observer_opens_in_any_process(self, tmp_path: Path) -> None:
        """A configuration can be sent to another process and opened there.

        Otherwise vLLM, whose engine has a process of its own, could not use it.
        """
        assert in_new_process(observe_once, self.config(tmp_path)) == 10

    def _must_have_told(self, told: Iterable[Told], events: Sequence[Event]) -> None:
        expected = [(event.kind.value, event.tier, len(event.keys)) for event in events]
        if self.ordered:
            found = list(told)
            assert len(found) == len(expected), f"{len(expected)} events happened, and {len(found)} were told"
            parting = next((i for i, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1]), None)
            assert parting is None, f"event {parting} was {expected[parting]}, and told was {found[parting]}"
            return
        sums: Counter[tuple[str, str]] = Counter()
        for kind, tier, chunks in expected:
            sums[kind, tier] += chunks
        counted = {(kind, tier): chunks for kind, tier, chunks in told}
        assert counted == sums, f"what happened is {dict(sums)}, and told was {counted}"


def some_events(count: int) -> tuple[Event, ...]:
    """Events of chunks as a stack reports them, the same at every run."""
    rng, keys = random.Random(0), make_keys(20)
    kinds = [EventKind.STORED, EventKind.PROMOTED, EventKind.WRITTEN, EventKind.READ, EventKind.MISSING]
    return tuple(
        Event(
            rng.choice(kinds),
            rng.choice(("cpu", "disk")),
            tuple(rng.sample(keys, rng.randrange(1, 5))),
            rng.randrange(1 << 30),
            seconds=rng.random(),
        )
        for _ in range(count)
    )


def observe_once(config: ObserverConfig) -> int:
    """Open, observe some events, close; returns how many."""
    events = some_events(10)
    observer = config.open(make_context())
    observer.observe(events)
    observer.close()
    return len(events)


def observe_until_killed(config: ObserverConfig, pipe: Connection) -> None:
    """In a process of its own: says that it has begun, and never stops observing."""
    observer = config.open(make_context())
    events = some_events(100)
    observer.observe(events)
    pipe.send("observing")
    while True:
        observer.observe(events)


def _batches(events: Sequence[Event]) -> Iterator[Sequence[Event]]:
    """Events in their order, in batches of 1 to 17."""
    at, size = 0, 1
    while at < len(events):
        yield events[at : at + size]
        at, size = at + size, size % 17 + 1


def _observe(observer: Observer, events: Sequence[Event]) -> None:
    _aside(lambda: observer.observe(events))


def _aside(call: Callable[[], None]) -> None:
    """Make the call on another thread, as an engine does."""
    outcome = run_within(call, PATIENCE)
    assert outcome is not None, f"a call has taken {PATIENCE:.0f} s"
    if outcome.error is not None:
        raise outcome.error
