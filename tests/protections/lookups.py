"""Lookups: what a request waits for."""

from __future__ import annotations

from protections.mutant import Mutant

LOOKUP = "kvtier_core/stack/lookup"
SIDE = "kvtier_core/engine/scheduler/side.py"
ROOM = "tests/stack/test_room.py::"
QUESTIONS = "plugins/kvtier_serve/tests/test_questions.py::"
SMALL = "tests/engine/test_small_arenas.py::"

MUTANTS = (
    Mutant(
        "chunks-that-do-not-fit-are-awaited",
        f"{LOOKUP}/chain.py",
        "path[: at + room], at, terms",
        "path, at, terms",
        ROOM + "test_as_many_chunks_are_awaited_as_the_arena_has_slots",
    ),
    Mutant(
        "boundaries-that-do-not-fit-are-awaited",
        f"{LOOKUP}/boundaries.py",
        "self._fitting(sought, ready, wanted, lease)",
        "wanted",
        SMALL + "test_models_with_several_parts_wait_for_no_boundary_that_does_not_fit",
    ),
    Mutant(
        "a-limit-may-overflow",
        "kvtier_core/stack/outcomes.py",
        "_LONGEST = 1e100",
        '_LONGEST = float("1.7e308")',
        "tests/stack/test_wrong_calls.py::test_a_limit_that_is_infinite_for_some_chunks_is_refused",
    ),
    Mutant(
        "late-chunks-that-do-not-fit-are-awaited",
        SIDE,
        "isinstance(found.rest, Declined | TooSmall)",
        "isinstance(found.rest, Declined)",
        SMALL + "test_chunks_that_another_engine_has_just_computed_are_not_awaited_where_they_do_not_fit",
    ),
    Mutant(
        "requests-wait-for-each-others-slots",
        f"{LOOKUP}/search.py",
        "self._arenas[0].pinned if self._is_deadlocked(lease) else self._leases.lasting",
        "self._leases.lasting",
        ROOM + "test_of_two_requests_that_keep_each_other_from_their_slots_one_goes_on",
    ),
    Mutant(
        "slots-that-stay-pinned-are-awaited",
        f"{LOOKUP}/search.py",
        "self._arenas[0].pinned if self._is_deadlocked(lease) else self._leases.lasting",
        "self._arenas[0].pinned if self._is_deadlocked(lease) else ()",
        SMALL + "test_a_prompt_waits_for_no_slot_of_one_that_another_engine_continues",
    ),
    Mutant(
        "slots-that-chunks-in-use-keep-are-awaited",
        "kvtier_core/stack/arena.py",
        "self.index.select_victims(lacking, lambda key: 1, spared, pinned)",
        "[key for key in self.index.resident if not any(key in each for each in spared)]",
        SMALL + "test_a_prompt_of_which_the_beginning_is_there_waits_for_no_slot_that_this_keeps",
    ),
    Mutant(
        "keepers-count-as-about-to-end",
        f"{LOOKUP}/leases.py",
        "lease.lasting or lease.awaited",
        "lease.awaited",
        "tests/stack/test_standing_still.py",
    ),
    Mutant(
        "requests-keep-the-slots-of-the-self-test",
        SIDE,
        "if not self._self_test.is_open and not self._self_test.slots:",
        "if False:",
        SMALL + "test_no_request_keeps_the_slots_that_the_self_test_needs",
    ),
    Mutant(
        "slots-that-are-not-lent-are-counted-on",
        "plugins/kvtier_serve/kvtier_serve/lent_arena.py",
        "self.share.lendable(slots - self.free)",
        "self.share.unused",
        "plugins/kvtier_serve/tests/test_extents.py::test_the_slots_that_a_path_may_count_on_are_there",
    ),
    Mutant(
        "a-question-borrows-slots",
        "plugins/kvtier_serve/kvtier_serve/lent_arena.py",
        "self.share.lendable(slots - self.free)",
        "len(self.share.borrow(slots - self.free))",
        "plugins/kvtier_serve/tests/test_extents.py::test_the_slots_that_a_path_may_count_on_are_there",
    ),
    Mutant(
        "a-lookup-costs-what-it-names",
        f"{LOOKUP}/chain.py",
        "self._too_small(len(path) - at, coming + 1, path[:at], lease)",
        "self._too_small(len(path) - at, coming + 1, [*filter(self._is_ready, path)], lease)",
        QUESTIONS + "test_a_lookup_costs_what_it_finds",
    ),
    Mutant(
        "a-store-is-asked-for-what-it-cannot-reach",
        f"{LOOKUP}/boundaries.py",
        "            if not sought.may_come(chunk):\n",
        "            if False:\n",
        QUESTIONS + "test_a_lookup_costs_what_it_finds",
    ),
)
