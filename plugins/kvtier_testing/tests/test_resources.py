"""The resources of this process, as the laws compare them."""

from __future__ import annotations

import os

from kvtier_testing.resources import Resources


def test_a_file_that_an_earlier_test_left_open_is_no_fault_of_the_next_one():
    """Warnings are errors here, also those of garbage."""
    cycle = [os.fdopen(os.memfd_create("left open"), "r+b", buffering=0)]
    cycle.append(cycle)
    del cycle
    assert "left open" not in str(Resources.now())


def test_a_descriptor_that_is_open_is_seen():
    before = Resources.now()
    with os.fdopen(os.memfd_create("still open"), "r+b", buffering=0) as file:
        assert [each for each in Resources.now().held if each not in before.held], file
    assert before.since() == []
