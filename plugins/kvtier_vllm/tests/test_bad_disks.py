"""Real vLLM over disks that go wrong in every way there is: answers stay right, nobody waits, and the log tells."""

from __future__ import annotations

import contextlib
import re
import threading
import time

import pytest
from disks import btrfs, ext4
from faulty_backend import FINE, Fault, FaultyBackend, always, every
from patience import HANG, wait_until
from real_engines import CHUNK, Engine, Outcome, cpu_and_disk, hit, miss, prompt
from sizes import some
from test_serving import NOISE

from kvtier_core.errors import BackendError
from kvtier_disk.config import DiskConfig
from kvtier_testing.samples import make_keys

FRAME = 4096 + 4 * 2 * 2 * 64 * CHUNK * 4  # layers, keys and values, heads, head size, tokens, float32
SLOTS = 16  # of the arena
ROOM = 14  # of the disk, in frames
INFLIGHT = 4  # frames, where a disk hangs

#: Six chunks each, and a bit.
PROMPTS = KEPT, *FRESH = [prompt(300 + i, 400) for i in range(8)]
FROM_DISK, FROM_MEMORY = hit(400, disk=384), hit(400, cpu=384)


def stack(*folders, load_wait="10s", **options):
    """An arena, and a disk in each folder. A request waits longer for a disk than any that is well can take.

    Both evict by `lru`, which takes in whatever is asked for: `git` may rather keep what is about to return.
    """
    stack = cpu_and_disk(folders[0], f"{SLOTS * FRAME}B", load_wait=load_wait)
    arena, disk = ({**tier, "eviction": "lru"} for tier in stack["tiers"])
    stack["tiers"] = [
        arena,
        *({**disk, "path": str(folder), "capacity": f"{ROOM * FRAME}B", **options} for folder in folders),
    ]
    return stack


class Served:
    """A real engine over disks that go wrong as planned. For their breakers, time passes when it is told to."""

    def __init__(self, engine, disks, truth):
        self.engine = engine
        self.disks = disks
        self.manager = engine.manager
        self.side = engine.connector.side
        self.now = 0.0
        self._truth = truth
        for tier in self.manager.tiers:
            tier._writes._calls.clock = self.clock
            for part in (tier, tier._health, tier._table, tier.chooser, tier.remote.absent, tier.remote.unusable):
                part._clock = self.clock

    def clock(self):
        return self.now

    def plan(self, plan):
        for disk in self.disks:
            disk.plan = plan

    def ask(self, *prompts):
        """How much of each was cached. The answers are right."""
        answers = self.engine.ask(*prompts)
        for asked, answer in zip(prompts, answers, strict=True):
            assert answer.differs(self._truth[tuple(asked)]) < NOISE
        return [answer.cached for answer in answers]

    def outcomes(self):
        return self.engine.outcomes()

    def keys(self, prompt):
        """Of the prompt's chunks."""
        return self.engine.connector.config.token_database.open(self.side.namespace, CHUNK).keys(prompt)

    def crowd_out(self):
        """Empty the arena, so that only the disks can answer."""
        self.engine.settle()
        self.manager.reserve(make_keys(SLOTS), "crowd")
        self.manager.release("crowd")
        assert self.manager.usage()[0].chunks == 0

    def recover(self):
        """Nothing goes wrong any more, and the rests of all breakers are over."""
        self.plan(always(FINE))
        self.now += 1000.0

    def forget(self):
        """Empty every tier."""
        self.recover()
        self.side.invalidate_all()
        self.engine.settle()

    def keep(self, said):
        """KEPT lies on the disk and comes up from there: so a case begins, and so it ends."""
        self.recover()
        # One request finds out what is lost, the next stores it, of two parts one after the other; and on a busy
        # machine a promotion may take longer than a request waits.
        wait_until(self._comes_up)
        self.crowd_out()
        self.engine.assert_at_rest()

    def _comes_up(self):
        self.crowd_out()
        self.outcomes()
        return self.ask(KEPT) == [384] and self.outcomes() == [FROM_DISK]


@pytest.fixture(scope="module")
def truth(model):
    """What an engine without kvtier answers."""
    plain = Engine(model, None)
    answers = plain.ask(*PROMPTS)
    plain.close()
    return {tuple(asked): answer for asked, answer in zip(PROMPTS, answers, strict=True)}


@pytest.fixture(scope="module")
def start(model, truth):
    """``start(stack)`` is a context with an engine that was Served faulty disks."""

    @contextlib.contextmanager
    def start(stack):
        disks = []
        open_disk = DiskConfig.open

        def open_faulty(config, ctx):
            disks.append(FaultyBackend(open_disk(config, ctx), always(FINE)))
            return disks[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DiskConfig, "open", open_faulty)
            engine = Engine(model, stack)
        try:
            yield Served(engine, disks, truth)
        finally:
            engine.close()

    return start


@pytest.fixture(autouse=True)
def _every_line_is_logged(monkeypatch):
    """The engine is that of many tests, whose faults have the same causes."""
    monkeypatch.setattr("kvtier_core.telemetry.log_limit.EVERY", 0.0)


# -- every fault ---------------------------------------------------------------------------------------

PLANNED = BackendError("planned")
LOSSES = [Fault(error=PLANNED), Fault(surplus=9), Fault(damage=True), Fault(lose=True)]
MISCOUNTED = r"io_error: \d chunks: ContractError: \d answers for \d keys"
CASES = {
    "reads raise": (always(Fault(error=PLANNED), "read"), r"io_error: \d chunks: BackendError: planned"),
    "one key cannot be read": (always(Fault(unreadable=PLANNED), "read"), "corrupt: 1 chunks: planned"),
    "reads raise what they may not": (
        always(Fault(error=ZeroDivisionError("planned")), "read"),
        r"io_error: \d chunks: ZeroDivisionError: planned",
    ),
    "calls end their thread": (always(Fault(error=SystemExit("planned"))), r"io_error: \d chunks: SystemExit: planned"),
    "writes raise": (always(Fault(error=PLANNED), "write"), r"io_error: \d chunks: BackendError: planned"),
    "deletes raise": (always(Fault(error=PLANNED), "delete"), "no room: an earlier delete failed"),
    "everything raises": (always(Fault(error=PLANNED)), "breaker_open: no reads for 1s"),
    "every third call raises": (every(3, Fault(error=PLANNED)), "BackendError: planned"),
    "everything is slow": (always(Fault(delay=0.01)), FROM_DISK),
    "longer than the view": (
        always(Fault(surplus=1)),
        rf"io_error: \d chunks: ContractError: read returned {FRAME + 1} bytes for a view of {FRAME}",
    ),
    "shorter than the frame": (always(Fault(surplus=-1)), "corrupt: 1 chunks: shorter than its header says"),
    "less than nothing": (
        always(Fault(surplus=-2 * FRAME)),
        rf"io_error: \d chunks: ContractError: read returned {-FRAME} bytes for a view of {FRAME}",
    ),
    "more answers than keys": (always(Fault(answers=1)), r"io_error: \d chunks: ContractError: \d answers for \d keys"),
    "fewer answers than keys": (
        always(Fault(answers=-1)),
        r"io_error: \d chunks: ContractError: \d answers for \d keys",
    ),
    "other bytes": (always(Fault(damage=True)), "corrupt: 1 chunks: the checksum does not match"),
    "writes vanish": (always(Fault(drop=True), "write"), "missing: 1 chunks"),
    "deletes vanish": (always(Fault(drop=True), "delete"), FROM_DISK),
    "everything vanishes": (always(Fault(drop=True)), "missing: 1 chunks"),
    "keys are dropped later": (always(Fault(lose=True)), "missing: 1 chunks"),
    "one thing after the other": (lambda method, call: LOSSES[call % len(LOSSES)], "kvtier: disk: "),
}


class TestOneEngine:
    """Each case leaves the engine as it found it."""

    @pytest.fixture(scope="class")
    @classmethod
    def served(cls, start, tmp_path_factory):
        with start(stack(tmp_path_factory.mktemp("store"))) as served:
            yield served

    def go_through(self, served, said, plan, news):
        served.plan(plan)
        cached = []
        for _ in range(2):
            cached += served.ask(KEPT)
            cached += served.ask(*FRESH[:2])
            served.crowd_out()
        served.engine.assert_at_rest()
        told = said()
        outcomes = served.outcomes()
        claimed = [outcome.loaded for outcome in outcomes]
        assert sorted(claimed) == sorted(cached), "a hit that was not had"
        if isinstance(news, Outcome):
            assert news in outcomes
        else:
            assert any(re.search(news, line) for line in told), "\n".join(told)
        served.keep(said)

    @pytest.mark.parametrize("case", some(CASES, "reads raise", "longer than the view", "everything raises"))
    def test_a_disk_that_goes_wrong(self, served, said, case):
        served.forget()
        served.keep(said)
        self.go_through(served, said, *CASES[case])

    def test_a_disk_that_returns_another_chunks_frame(self, served, said):
        served.forget()
        served.keep(said)
        *_, (another, _) = served.disks[0].scan()  # the newest: there may be some whose deletes vanished
        self.go_through(served, said, always(Fault(instead=another)), "corrupt: 1 chunks: a frame of another key")

    @pytest.mark.parametrize("answers", [1, -1])
    def test_a_disk_that_is_asked_and_miscounts(self, served, said, monkeypatch, answers):
        served.forget()
        served.keep(said)
        with monkeypatch.context() as patch:
            patch.setattr(served.disks[0], "shared", True)
            plan = always(Fault(answers=answers), "contains")
            self.go_through(served, said, plan, f"ContractError: {12 + answers} answers for 12 keys")


# -- loss of everything below the arena ----------------------------------------------------------------


def test_when_every_disk_is_lost_memory_goes_on_and_no_one_asks_them(start, said, tmp_path):
    with start(stack(tmp_path / "first", tmp_path / "second")) as served:
        served.keep(said)
        served.plan(always(Fault(error=PLANNED)))
        for asked in (*FRESH[:3], KEPT):
            served.ask(asked)
            served.engine.settle()
        told = said()
        for disk in ("disk", "disk#2"):
            assert sum(f"{disk}: breaker_open" in line for line in told) == 2, "its reads, and its writes"
        calls = [len(disk.calls) for disk in served.disks]
        assert min(calls) > 0

        served.outcomes()
        assert served.ask(KEPT) == [384]
        assert served.outcomes() == [FROM_MEMORY]
        for asked in FRESH:
            assert served.ask(asked, KEPT)[1] == 384
            served.engine.settle()
        assert [len(disk.calls) for disk in served.disks] == calls
        served.engine.assert_at_rest()
        served.keep(said)


# -- a disk that hangs ---------------------------------------------------------------------------------


@contextlib.contextmanager
def hanging(served, *methods):
    """These calls hang. Whoever waits for them is let go in the end, and the test fails: nobody may wait."""
    release = threading.Event()
    patience = threading.Timer(HANG, release.set)
    patience.start()
    served.plan(always(Fault(until=release), *methods))
    try:
        yield
        assert not release.is_set(), "somebody waited for a call that hangs"
    finally:
        patience.cancel()
        release.set()


def holds_little(served):
    """What hangs may hold so many slots of the arena, and no more."""
    sealing = served.manager._pool
    while sealing.jobs:
        sealing.wait(1.0)
        served.manager.step()
    arena, disk = served.manager.usage()
    assert disk.inflight <= INFLIGHT * FRAME
    assert arena.pins <= INFLIGHT
    return disk.inflight == INFLIGHT * FRAME


def passing_with_requests(served, monkeypatch):
    """From here on a second passes whenever a request is finished, and not before; for the scheduler side, too."""
    finished = served.side.finished

    def later(view, reason):
        served.now += 1.0
        finished(view, reason)

    for part in (served.side, served.side.events, served.side._waiting):
        monkeypatch.setattr(part, "_clock", served.clock)
    monkeypatch.setattr(served.side, "finished", later)


def test_a_disk_that_hangs_stalls_no_one(start, said, monkeypatch, tmp_path):
    waited = miss(400, "it was not promoted in time")
    with contextlib.ExitStack() as running:
        little = f"{INFLIGHT * FRAME}B"
        served = running.enter_context(start(stack(tmp_path, load_wait="200ms", inflight=little)))
        passing_with_requests(served, monkeypatch)
        served.keep(said)

        with hanging(served, "write", "delete"):
            for asked in FRESH[:4]:
                assert served.ask(asked) == [0]
                assert served.ask(asked) == [384]
                assert served.outcomes() == [miss(400), FROM_MEMORY]
                assert holds_little(served), "nothing hangs"
        served.keep(said)

        served.ask(FRESH[4])
        served.outcomes()
        with hanging(served, "contains"), monkeypatch.context() as patch:
            patch.setattr(served.disks[0], "shared", True)
            assert served.ask(FRESH[5], FRESH[4]) == [0, 384]
            assert served.outcomes() == [FROM_MEMORY, waited], "the second is served and finished while the first waits"
        served.keep(said)

        served.ask(FRESH[4])
        served.outcomes()
        with hanging(served, "read"):
            assert served.ask(KEPT, FRESH[4]) == [0, 384]
            assert served.outcomes() == [FROM_MEMORY, waited]
            assert holds_little(served), "nothing hangs"
            assert served.ask(FRESH[6]) == [0]
            assert served.ask(FRESH[6]) == [384]
            running.close()
    assert served.manager.close_tiers(time.monotonic() + HANG)
    served.manager.close_arenas()  # which was not done while a thread might have written to them


# -- a disk that really fails --------------------------------------------------------------------------


def test_a_real_disk_that_is_full_and_then_broken(start, said, tmp_path):
    with ext4(tmp_path, 16 << 20) as disk, start(stack(disk.folder / "kv")) as served:
        served.keep(said)
        disk.fill()
        served.ask(FRESH[0])
        served.crowd_out()
        assert served.ask(KEPT) == [384]
        told = said()
        assert any("io_error: 6 chunks: StoreFull: " in line and "0B free" in line for line in told), "\n".join(told)
        assert not any("breaker_open" in line for line in told), "a full disk is not broken"
        assert served.outcomes()[-1] == FROM_DISK, "a full disk can be read"
        served.crowd_out()
        disk.make_room()
        served.keep(said)

        disk.forget()
        disk.fail()
        assert served.ask(KEPT) == [0]
        served.ask(FRESH[1])
        served.engine.assert_at_rest()
        told = said()
        assert any("io_error: " in line and "Input/output error" in line for line in told)
        served.crowd_out()
        disk.heal()
        served.recover()
        served.outcomes()
        assert served.ask(KEPT) == [384]
        assert served.outcomes() == [FROM_DISK], "what was there before is there again"
        served.keep(said)


def test_a_bad_sector_costs_one_prompt_once(start, said, tmp_path):
    """The disk goes on for everybody else, and what could not be read is stored anew."""
    with btrfs(tmp_path, 128 << 20) as disk:
        with start(stack(disk.folder / "kv")) as served:
            served.ask(KEPT)
            served.ask(FRESH[0])
            served.crowd_out()
            (first, *_) = served.keys(KEPT)
            (file,) = disk.folder.rglob(f"{first.hex()}.kv")
            disk.spoil(file)
            said()
            assert served.ask(FRESH[0], KEPT) == [384, 0], "the other prompt comes up beside the frame that cannot"
            told = said()
            assert any("corrupt: 1 chunks: " in line and "Input/output error" in line for line in told)
            for _ in range(3):
                served.crowd_out()
                assert served.ask(FRESH[0], KEPT)[0] == 384
            served.crowd_out()
            told += said()
            served.engine.assert_at_rest()
        with start(stack(disk.folder / "kv")) as served:
            assert served.ask(KEPT, FRESH[0]) == [384, 384]
            told += said()
    assert not any("breaker_open" in line or "io_error" in line for line in told), "\n".join(told)
