"""A call that names what its holder does not have is refused whole: no table of the stack has changed."""

from __future__ import annotations

import contextlib

import pytest
from machine import LAYOUT, PATHS, StackMachine
from patience import HANG
from test_machine import Slab
from wrong_calls import UNKNOWN, WRONG

import kvtier_disk.plugin
from kvtier_core.config.load import load_config
from kvtier_core.config.open import open_stack
from kvtier_core.config.registry import Registry
from kvtier_core.errors import ContractError
from kvtier_core.layouts import ChunkLayout, KVKind, chunk_key, part_key
from kvtier_core.stack.outcomes import LoadLimit, Terms
from kvtier_core.types import StoredFrame
from kvtier_testing.samples import make_context, make_group, make_keys


class Machine(StackMachine):
    shelf = Slab


@pytest.fixture
def machine():
    """A stack with two reservations, and frames that were found for a request."""
    machine = Machine()
    machine.open()
    machine.serve("abqr")
    machine.serve("mnop")  # evicts it from the arena
    machine.load("abqr", known=True)
    machine.store("abcdef", 2)
    machine.store("abcxyz", 4)
    assert len(machine.storing) == 2 and found(machine)
    return machine


def found(machine):
    """The frames among what was found for the request."""
    return [each for each in machine.loading[0][2] if isinstance(each, StoredFrame)]


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_changes_nothing(name, machine):
    for which in range(60):  # there are fewer
        machine.call_wrongly(name, "abqr", which)
    machine.teardown()


def test_a_load_begins_once_and_ends_what_it_began(machine):
    holder, frames = machine.loading[0][0], found(machine)
    machine.manager.load_begins(frames, holder)
    for which in range(60):
        machine.call_wrongly("load_begins", "abqr", which)
    with pytest.raises(ContractError, match="is in progress"):
        machine.manager.load_begins(frames[:1], holder)
    machine.manager.load_ended(holder, {}, ok=True)
    machine.teardown()


def test_a_load_that_is_released_before_it_ends_counts_as_given_up(machine):
    """Nobody waits for it any more, and the next one is measured as if it had not been."""
    holder = machine.loading[0][0]
    machine.manager.load_begins(found(machine), holder)
    machine.now += 100.0
    machine.manager.release(holder)
    machine.loading.clear()
    machine.now += 100.0
    assert not machine.tier_levels[0].chooser.silence
    machine.teardown()


@pytest.mark.parametrize("endless", [float("inf"), float("nan"), 1e308], ids=str)
def test_a_limit_that_is_infinite_for_some_chunks_is_refused(endless):
    """Before the lookup begins, which computes the time of several chunks."""
    for times in ((endless, 1.0), (1.0, endless), (-endless, 1.0)):
        with pytest.raises(ContractError):
            Terms(LoadLimit(*times))


@pytest.mark.parametrize("skipped", [-1, -(1 << 40)])
def test_a_path_that_begins_before_its_prompt_is_refused(skipped):
    with pytest.raises(ContractError):
        Terms(skipped=skipped)


def test_the_longest_limit_is_no_error_for_any_number_of_chunks(tmp_path):
    """One part is awaited, which completes four chunks: the time of four chunks is its own."""
    window = make_group(kind=KVKind.SLIDING_WINDOW, reach=8, name="window")
    layout = ChunkLayout([make_group(), window], LAYOUT.tokens)
    path = [chunk_key(key) for key in make_keys(4)]
    parts = [part_key(path[-1], 1)]
    heap, disk = {"type": "heap", "capacity": "4MiB"}, {"type": "disk", "path": str(tmp_path), "capacity": "4MiB"}
    config = load_config({"version": 1, "tiers": [heap, disk | {"min_free": "0B"}]}, Registry.of(kvtier_disk.plugin))
    for held in (parts, ()):  # the second stack has the part on its disk alone
        with contextlib.closing(open_stack(config, make_context(layout=layout))) as stack:
            stack.reserve(path, "store", parts=held)
            stack.commit("store")
            stack.drain(HANG)
            if not held:
                for _ in range(2):
                    assert stack.lookup(path, "request", Terms(LoadLimit(1e100, 1e100))).pending == 4
                stack.drain(HANG)
                assert stack.lookup(path, "request").chunks == 4
            stack.release("request")


def test_keys_of_chunks_with_several_parts_name_their_parts():
    window = make_group(kind=KVKind.SLIDING_WINDOW, reach=64, name="window")
    layout = ChunkLayout([make_group(), window], LAYOUT.tokens)
    first, second = map(chunk_key, make_keys(2))
    layout.check_path([first, second], [part_key(first, 1), part_key(second, 1)])
    for path, parts in (
        ([part_key(first, 1)], []),
        ([first], [first]),
        ([first], [second]),
        ([first], [part_key(first, 2)]),
        ([first], [part_key(first, 1)] * 2),
        ([first, first], []),
        ([first[:31]], []),
    ):
        with pytest.raises(ContractError):
            layout.check_path(path, parts)
    LAYOUT.check_path(PATHS["abqr"])
    with pytest.raises(ContractError):
        LAYOUT.check_path(PATHS["abqr"], [UNKNOWN])
