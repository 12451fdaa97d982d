"""A request waits for no chunk that its own chunks keep out of the arena: it gets as many as fit, and the reason."""

from __future__ import annotations

import pytest
from benches import MISS, PENDING, READY, StackBench
from test_machine import Slab

from kvtier_core.stack.outcomes import Terms, TooSmall
from kvtier_testing.samples import make_keys

PATH = make_keys(6)
TOO_SMALL = "cpu is too small for 2 more of this prompt's chunks"


def below(path=PATH, **shape):
    """A stack whose store has a path, and whose arenas are empty."""
    bench = StackBench(**shape)
    for key in path:
        bench.store([key])
    for arena in bench.arenas:
        arena.make_room(arena.capacity)
    return bench


def found(bench, path=PATH, holder="waiter"):
    """Chunks, pending chunks, chunks that do not fit."""
    answer = bench.manager.lookup(path, holder)
    return answer.chunks, answer.pending, answer.rest.chunks if isinstance(answer.rest, TooSmall) else 0


@pytest.mark.parametrize("slots", range(1, 7))
def test_as_many_chunks_are_awaited_as_the_arena_has_slots(slots):
    bench = below(arenas=(slots,))
    assert found(bench) == (0, slots, 6 - slots)
    bench.settle()
    for _ in range(3):
        assert found(bench) == (slots, 0, 6 - slots)
        assert not bench.manager.still_pending("waiter")
        bench.manager.step()
    bench.manager.release("waiter")
    bench.at_rest()


def test_chunks_that_do_not_fit_are_a_miss_with_a_reason():
    bench = below()
    assert bench.why(PATH) == TOO_SMALL
    bench.look(PATH, keep="waiter")
    bench.settle()
    assert bench.why(PATH) == TOO_SMALL
    assert bench.why(PATH[:4]) == ""


def test_a_shorter_hit_has_its_own_reason():
    bench = below()
    del bench.shelves[0].frames[PATH[2]]
    bench.look(PATH, keep="waiter")
    bench.settle()
    assert found(bench) == (2, 0, 0)
    assert bench.why(PATH) == "not stored"


def test_chunks_after_a_gap_make_way_for_those_that_fill_it():
    bench = below(arenas=(4,), path=PATH[:2])
    bench.store(PATH[2:])
    assert bench.look(PATH[2:]) == [READY] * 4
    assert found(bench) == (0, 4, 2)
    bench.settle()
    assert found(bench) == (4, 0, 2)
    bench.manager.release("waiter")
    bench.at_rest()


def test_two_requests_with_the_same_chunks_do_not_wait_for_each_other():
    bench = below()
    assert [found(bench, holder=holder) for holder in "ab"] == [(0, 4, 2)] * 2
    bench.settle()
    assert [found(bench, holder=holder) for holder in "ab"] == [(4, 0, 2)] * 2


def test_slots_that_others_have_pinned_are_not_a_matter_of_size():
    """They will be free again."""
    other = make_keys(10)[6:]
    bench = below()
    bench.store(other)
    assert bench.look(other, keep="reader") == [READY] * 4
    assert found(bench) == (0, 4, 2)


def test_chunks_in_a_colder_arena_need_no_slot():
    bench = below(arenas=(2, 3))
    bench.arenas[1].reserve(PATH[:3])
    bench.arenas[1].commit(PATH[:3], [None, *PATH[:2]])
    assert found(bench) == (3, 2, 1)
    bench.settle()
    assert found(bench) == (5, 0, 1)


def test_frames_that_workers_read_need_no_slot():
    bench = below(shelf=Slab)
    bench.tiers[0].not_direct = ""
    assert found(bench) == (6, 0, 0)


def test_a_prefetch_is_not_awaited_beyond_what_fits():
    bench = below()
    bench.manager.prefetch(PATH)
    bench.settle()
    assert found(bench) == (1, 3, 2)
    bench.settle()
    assert found(bench) == (4, 0, 2)
    assert bench.look(PATH) == [READY] * 4 + [MISS] * 2
    assert PENDING not in bench.look(PATH)


def test_chunks_that_are_kept_for_long_leave_their_slots_to_nobody():
    """As those of a prompt that another engine continues: a request waits for none of their slots."""
    other = make_keys(8)[6:]
    bench = below()
    bench.store(other)
    assert bench.manager.lookup(other, "keeper", Terms(lasting=True)).chunks == 2
    assert found(bench) == (0, 2, 4)
    assert bench.why(PATH) == "cpu is too small for 4 more of this prompt's chunks beside prompts that must stay there"
    bench.settle()
    assert found(bench) == (2, 0, 4)
    bench.manager.release("keeper")
    assert found(bench) == (2, 2, 2)
    bench.settle()
    assert found(bench) == (4, 0, 2)
    bench.manager.release("waiter")
    bench.at_rest()


def test_chunks_that_are_promised_are_kept_as_long():
    other = make_keys(8)[6:]
    bench = below()
    bench.manager.reserve(other, "store", promised_to="keeper")
    bench.manager.commit("store")
    bench.settle()
    assert found(bench) == (0, 2, 4)
    bench.manager.release("keeper")
    assert found(bench) == (0, 4, 2)


def test_chunks_before_a_pinned_one_do_not_leave():
    """The engine has them itself, so that nothing of this request pins them."""
    bench = below()
    bench.store(PATH[:3])
    assert found(bench, PATH[2:]) == (1, 1, 2)
    bench.settle()
    assert found(bench, PATH[2:]) == (2, 0, 2)
    assert bench.why(PATH[2:]) == TOO_SMALL


def test_of_two_requests_that_keep_each_other_from_their_slots_one_goes_on():
    """Each has the common prefix and two chunks from the first store, and waits for two from the second."""
    keys = make_keys(10)
    prefix, (ours, theirs) = keys[:2], (keys[2:6], keys[6:])
    bench = StackBench(arenas=(6,), tiers=(12, 12))
    for tier, few in ((0, [*ours[:2], *theirs[:2]]), (1, [*ours[2:], *theirs[2:]])):
        bench.tiers[1 - tier]._takes_writes = False
        for key in few:
            bench.store([key])
        bench.tiers[1 - tier]._takes_writes = True
    bench.arenas[0].make_room(6)
    bench.fill(prefix)
    bench.manager.commit("store")
    bench.settle()
    paths = {"a": [*prefix, *ours], "b": [*prefix, *theirs]}
    done = []
    for _ in range(20):
        for holder in [each for each in paths if each not in done]:
            if not bench.manager.still_pending(holder) and not found(bench, paths[holder], holder)[1]:
                done.append(holder)
                chunks = found(bench, paths[holder], holder)[0]
                bench.manager.release(holder)
                assert chunks == (4 if len(done) == 1 else 6)
        bench.settle()
        bench.manager.step()  # an engine steps twice between two looks
    assert done == ["a", "b"]
    bench.at_rest()
