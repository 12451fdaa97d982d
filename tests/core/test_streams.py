"""Simulated streams keep the order that CUDA promises, and no other."""

import pytest

from kvtier_core.testing.streams import SimulatedStreams

SEEDS = range(40)


def orders(enqueue):
    """Every order in which the work was done that ``enqueue(device, note)`` gives, over some seeds."""
    seen = set()
    for seed in SEEDS:
        device, done = SimulatedStreams(seed), []
        enqueue(device, done.append)
        device.finish()
        seen.add("".join(done))
    return seen


def test_a_stream_does_its_work_in_order_and_streams_wait_for_nobody():
    def enqueue(device, note):
        one, two = device.Stream(), device.Stream()
        for stream, name in ((one, "a"), (two, "x"), (one, "b"), (two, "y")):
            stream.run(lambda name=name: note(name))

    assert {"abxy", "xyab"} <= orders(enqueue)
    assert all(each.index("a") < each.index("b") and each.index("x") < each.index("y") for each in orders(enqueue))


def test_an_event_is_where_it_was_recorded_when_the_stream_was_told_to_wait():
    def enqueue(device, note):
        one, two, event = device.Stream(), device.Stream(), device.Event()
        one.run(lambda: note("a"))
        event.record(one)
        two.wait_event(event)
        two.run(lambda: note("x"))
        one.run(lambda: note("b"))
        event.record(one)  # nobody waits for this one

    assert orders(enqueue) == {"abx", "axb"}


def test_the_host_waits_until_the_device_was_there():
    device, done = SimulatedStreams(), []
    device.engine.run(lambda: done.append("a"))
    event = device.engine.record_event()
    assert not event.query()
    event.synchronize()
    assert (event.query(), done) == (True, ["a"])


def test_a_device_that_progresses_does_so_while_the_host_asks():
    device, done = SimulatedStreams(progresses=True), []
    device.engine.run(lambda: done.append("a"))
    event = device.engine.record_event()
    assert any(event.query() for _ in range(100))


def test_the_current_stream_is_that_of_the_context():
    device = SimulatedStreams()
    other = device.Stream()
    with device.stream(other):
        assert device.current_stream() is other
    assert device.current_stream() is device.engine


def test_streams_that_wait_for_each_other_are_told():
    device = SimulatedStreams()
    one, two = device.Stream(), device.Stream()
    event = device.Event()
    with pytest.raises(RuntimeError, match="^nobody would wait for an event that was never recorded$"):
        one.wait_event(event)
    one.run(lambda: None, when=lambda: False)
    two.wait_stream(one)
    with pytest.raises(RuntimeError, match="^streams wait for each other$"):
        device.finish()
    with pytest.raises(RuntimeError, match="^the host waits for ever$"):
        two.synchronize()
