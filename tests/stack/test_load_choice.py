"""What a store tier knows of its speed, and what it lets an engine load."""

from __future__ import annotations

import pytest

from kvtier_core.stack.load_choice import LoadChoice, LoadChooser, StoreSpeed
from kvtier_core.stack.outcomes import Declined, LoadLimit

MIB = 1 << 20


def measured(speed, nbytes, seconds, begun=0.0):
    """A read of so many bytes that took so long."""
    speed.begin(1, begun)
    speed.end(nbytes, begun + seconds)


def answered(speed, seconds, **how):
    """A question that took so long."""
    speed.asked(0.0)
    speed.answered(0.0, seconds, **how)


@pytest.fixture
def speed():
    """A store that answers in 10 ms and delivers 100 MiB/s."""
    speed = StoreSpeed()
    answered(speed, 0.01)
    measured(speed, 64 * MIB, 0.64)
    return speed


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def chooser(speed, clock):
    return LoadChooser("far", speed, clock)


def choose(chooser, chunks, chunk_seconds, wait=10.0, queued=0, growth=0.0):
    return chooser.choose(chunks, MIB, queued, LoadLimit(chunk_seconds, wait, growth))


# -- the speed -----------------------------------------------------------------------------------------


def test_the_speed_is_unknown_before_the_first_read():
    speed = StoreSpeed()
    assert (speed.rate, speed.answer, speed.seconds(1)) == (None, None, None)


def test_the_first_read_is_the_first_estimate(speed):
    assert speed.rate == pytest.approx(100 * MIB)
    assert speed.seconds(50 * MIB) == pytest.approx(0.51)
    assert speed.within(0.51) == pytest.approx(50 * MIB)
    assert speed.within(0.005) == 0


def test_reads_at_the_same_time_are_one_measurement():
    """Four threads that bring 4 MiB each in the same tenth of a second are 160 MiB/s, and not four times 40."""
    speed = StoreSpeed()
    speed.begin(4, 1.0)
    for ended in (1.099, 1.1, 1.0995, 1.1):
        speed.end(4 * MIB, ended)
    assert speed.rate == pytest.approx(160 * MIB)


def test_time_without_reads_does_not_count():
    speed = StoreSpeed()
    measured(speed, 10 * MIB, 0.1)
    measured(speed, 10 * MIB, 0.1, begun=100.0)
    assert speed.rate == pytest.approx(100 * MIB)


def test_failed_reads_say_nothing_of_the_rate():
    speed = StoreSpeed()
    speed.begin(1, 0.0)
    speed.end(0, 5.0)
    assert speed.rate is None


def test_a_call_that_fails_counts_with_its_time_at_once(speed):
    measured(speed, 0, 5.0)
    assert speed.seconds(0) == 5.0
    answered(speed, 7.0, ok=False)
    assert speed.seconds(0) == 7.0
    answered(speed, 1e-3, ok=False)
    assert speed.seconds(0) == 7.0, "it is refused at once, and hangs all the same"


@pytest.mark.parametrize("ok", [True, False])
def test_a_store_that_delivers_again_answers_as_soon(speed, ok):
    """Else nothing would be loaded any more: nobody asks for what is known to be there."""
    answered(speed, 5.0, ok=ok)
    measured(speed, MIB, 0.02)
    assert speed.seconds(0) == 0.02


def test_a_store_is_silent_from_the_oldest_question_on(speed):
    assert speed.silence(10.0) == 0
    speed.asked(10.0)
    speed.asked(11.0)
    assert speed.silence(13.0) == 3.0
    speed.answered(10.0, 13.0)
    assert speed.silence(13.0) == 2.0


def test_a_store_is_silent_since_it_last_delivered(speed):
    speed.begin(3, 10.0)
    assert speed.silence(12.0) == 2.0
    speed.end(MIB, 12.0)
    assert speed.silence(15.0) == 3.0
    speed.end(0, 15.0)
    assert speed.silence(15.0) == 3.0, "a failure delivers nothing"
    speed.end(MIB, 16.0)
    assert speed.silence(17.0) == 0


def test_a_store_that_becomes_slow_and_one_that_recovers_are_noticed_alike(speed):
    for _ in range(4):
        measured(speed, 16 * MIB, 16.0)
    assert speed.rate < 3 * MIB
    for _ in range(4):
        measured(speed, 16 * MIB, 0.16)
    assert speed.rate > 33 * MIB


def test_a_long_run_of_reads_is_measured_before_its_end():
    speed = StoreSpeed()
    speed.begin(100, 0.0)
    for second in range(1, 65):
        speed.end(MIB, float(second))
    assert speed.rate == pytest.approx(MIB)


def test_calls_that_take_no_time_are_not_counted():
    """As in a simulation, whose clock stands still."""
    speed = StoreSpeed()
    measured(speed, MIB, 0.0)
    answered(speed, 0.0)
    answered(speed, 0.0, ok=False)
    assert (speed.rate, speed.answer) == (None, None)


# -- the choice ----------------------------------------------------------------------------------------


def test_chunks_faster_to_load_are_loaded(chooser):
    assert choose(chooser, 20, chunk_seconds=0.02) == LoadChoice(20)


def test_chunks_faster_to_compute_are_declined_with_both_times(chooser):
    choice = choose(chooser, 20, chunk_seconds=0.005)
    assert choice.chunks == 0
    assert choice.declined == Declined("far", 20, pytest.approx(0.21), pytest.approx(0.1))
    assert str(choice.declined) == "far has 20 more chunks: 0.210 s to load them, 0.100 s to compute them"


def test_chunks_far_back_in_a_prompt_take_longer_to_compute(chooser):
    assert choose(chooser, 20, chunk_seconds=0.005, growth=0.001) == LoadChoice(20)
    assert choose(chooser, 5, chunk_seconds=0.005, growth=0.001).declined.compute_seconds == pytest.approx(0.035)


def test_a_few_chunks_are_not_worth_the_latency_that_many_are(chooser):
    assert choose(chooser, 1, chunk_seconds=0.015).chunks == 0
    assert choose(chooser, 10, chunk_seconds=0.015).chunks == 10


def test_queued_bytes_come_first(chooser):
    assert choose(chooser, 20, chunk_seconds=0.02, queued=100 * MIB).chunks == 0


def test_only_as_much_is_loaded_as_comes_while_the_request_may_wait(chooser):
    assert choose(chooser, 500, chunk_seconds=0.02, wait=0.51).chunks == 50
    assert choose(chooser, 500, chunk_seconds=0.02, wait=0.015).declined


@pytest.mark.parametrize(
    ("limit", "rate"),
    [(None, 1.0), (LoadLimit(1e-9, 1.0), None)],
    ids=["load: always", "the speed is not known yet"],
)
def test_everything_is_loaded(clock, limit, rate):
    speed = StoreSpeed()
    speed.rate = rate
    assert LoadChooser("far", speed, clock).choose(7, MIB, 0, limit) == LoadChoice(7)


def test_a_store_that_delivered_nothing_yet_and_does_not_answer_is_declined(clock):
    speed = StoreSpeed()
    measured(speed, 0, 5.0)
    chooser = LoadChooser("far", speed, clock)
    assert choose(chooser, 7, chunk_seconds=1.0).chunks == 7
    assert choose(chooser, 7, chunk_seconds=0.5).declined == Declined("far", 7, 5.0, 3.5)


@pytest.mark.parametrize("wait", [0.0, -30.0])
def test_for_a_request_that_may_not_wait_nothing_is_loaded(chooser, clock, wait):
    assert choose(chooser, 20, chunk_seconds=1.0, wait=wait).chunks == 0
    unknown = LoadChooser("far", StoreSpeed(), clock).choose(7, MIB, 0, LoadLimit(1.0, wait))
    assert unknown.chunks == 0
    assert str(unknown.declined) == "far has 7 more chunks, and the request has waited for as long as it may"


def test_a_declined_store_is_probed_now_and_then(chooser, clock):
    probes = []
    for clock.now in (0.0, 0.5, 0.99, 1.0, 1.5, 2.0):
        probes.append(chooser.probe(100, MIB, 0))
    assert probes == [16, 0, 0, 16, 0, 16]


def test_no_probe_queues_behind_another(chooser):
    assert chooser.probe(100, MIB, MIB) == 0


def test_a_question_is_worth_waiting_for_if_it_is_a_small_part_of_the_computing(chooser):
    assert chooser.worth_asking(10, LoadLimit(0.01, 1.0))
    assert not chooser.worth_asking(9, LoadLimit(0.01, 1.0))
    assert chooser.worth_asking(1, None)
