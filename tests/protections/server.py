"""Protections of a server and its engines."""

from __future__ import annotations

from protections.mutant import Mutant

SESSIONS = "kvtier_core/server/sessions.py"
SERVER = "kvtier_core/server/server.py"
CLIENT = "kvtier_core/server/client.py"
SLAB_TESTS = "tests/server/test_slabs_of_a_server.py::"
SESSION_TESTS = "tests/server/test_shared_stack.py::"

ADOPTION = "kvtier_core/server/kept/adoption.py"
JOURNAL = "kvtier_core/server/kept/journal.py"
MEMORY = "kvtier_core/server/memory.py"
KEPT_TESTS = "tests/server/test_kept_memory.py::"

MUTANTS = (
    Mutant(
        "what-a-former-server-left-is-believed",
        ADOPTION,
        "if error is None and self._arena.is_reserved(key)",
        "if self._arena.is_reserved(key)",
        KEPT_TESTS + "test_a_slot_that_was_changed_is_not_adopted",
    ),
    Mutant(
        "former-users-are-forgotten",
        "kvtier_core/server/spaces.py",
        "return self.journal is not None and user_locks.used_by_others(self.backend.descriptor, boot)",
        "return False",
        KEPT_TESTS + "test_slots_of_a_hung_worker_stay_as_they_are_until_it_has_ended",
    ),
    Mutant(
        "what-is-adopted-is-not-pinned",
        ADOPTION,
        "self._pinned += self._arena.pin(whole, _FORMER)",
        "pass",
        KEPT_TESTS + "test_adopted_chunks_stay_while_earlier_processes_may_read_them",
    ),
    Mutant(
        "what-was-dropped-comes-back",
        "kvtier_core/server/lent_arena.py",
        "        self._keep_as_taken((*in_use, *filled))\n",
        "",
        KEPT_TESTS + "test_invalidated_chunks_are_not_adopted",
    ),
    Mutant(
        "a-damaged-journal-is-believed",
        JOURNAL,
        "        if crc32(body) != checksum:\n",
        "        if False:\n",
        KEPT_TESTS + "test_a_journal_with_any_byte_changed_is_not_believed",
    ),
    Mutant(
        "a-journal-that-lacks-records-is-kept",
        JOURNAL,
        "        self._folder.remove(_NAME)\n\n    def close",
        "\n    def close",
        KEPT_TESTS + "test_a_journal_that_cannot_be_written_is_removed",
    ),
    Mutant(
        "memory-of-which-nothing-is-known-is-recorded-as-free",
        JOURNAL,
        "            self.forget()\n            return False",
        "            self.forget()\n            self.resume()\n            return False",
        KEPT_TESTS + "test_memory_whose_journal_is_worthless_is_used_when_nobody_of_before_has_it",
    ),
    Mutant(
        "copies-begin-when-the-server-is-gone",
        MEMORY,
        "            if self._lost:\n",
        "            if False:\n",
        KEPT_TESTS + "test_an_idle_engine_keeps_nothing_from_the_next_server",
    ),
    Mutant(
        "a-copy-under-way-keeps-nobody-out",
        MEMORY,
        "if self._lost and not self._jobs:",
        "if self._lost:",
        KEPT_TESTS + "test_a_copy_under_way_ends_before_the_next_server_may_have_its_slot",
    ),
    Mutant(
        "a-model-takes-beyond-its-quota",
        "kvtier_core/server/extents.py",
        " and (not self.of(share) or not self._is_over(share))",
        "",
        "tests/server/test_extents.py::test_a_model_beyond_its_soft_quota_takes_from_no_other_and_gives_first",
    ),
    Mutant(
        "a-models-hard-quota-is-none",
        "kvtier_core/server/extents.py",
        " and self.room(share.model) >= len(window):",
        ":",
        "tests/server/test_extents.py::test_no_model_ever_has_more_than_its_hard_quota",
    ),
    Mutant(
        "engines-share-their-holders",
        SESSIONS,
        'return f"{self.number}/"',
        'return "0/"',
        SESSION_TESTS + "test_holders_of_two_engines_may_have_the_same_name",
    ),
    Mutant(
        "the-dead-keep-what-they-held",
        SERVER,
        "            session.end()",
        "            pass",
        "tests/server/test_kills.py::test_an_engine_that_is_killed_leaves_nothing_behind",
    ),
    Mutant(
        "the-hung-lose-what-they-hold",
        SESSIONS,
        "return self.hung_up and not self.workers",
        "return self.hung_up",
        SESSION_TESTS + "test_a_dead_scheduler_side_frees_nothing_that_its_worker_may_touch",
    ),
    Mutant(
        "every-lookup-waits-for-a-silent-server",
        CLIENT,
        "patience = seconds if session.silence < seconds else 0.0",
        "patience = seconds",
        SESSION_TESTS + "test_a_server_that_stops_answering_costs_one_wait_and_is_used_when_it_answers",
    ),
    Mutant(
        "an-answer-that-came-late-is-lost",
        CLIENT,
        "self._late[holder] = told.found\n",
        "pass\n",
        SESSION_TESTS + "test_a_late_answer_is_the_next_lookups",
    ),
    Mutant(
        "a-late-answer-outlives-its-pins",
        CLIENT,
        "if self._asked_for.get(holder) is path:",
        "if True:",
        "tests/server/test_late_answers.py::test_found_chunks_are_pinned_even_if_the_answer_is_late",
    ),
    Mutant(
        "a-plan-of-other-memory",
        "kvtier_core/engine/worker_side.py",
        "if self._stale or plan.attachment != self._attachment:",
        "if self._stale:",
        "tests/engine/test_worker_side.py::test_a_plan_of_other_memory_is_not_carried_out",
    ),
    Mutant(
        "extents-of-others-are-usable",
        "kvtier_core/server/extents.py",
        "if all(self._owners[extent] is share for extent in share.extents_of(slot))",
        "if True",
        "tests/server/test_extents.py::test_no_byte_is_lent_twice_whatever_comes_and_goes",
    ),
    Mutant(
        "kv-of-before-is-kept",
        SESSIONS,
        "        if own in self._holders[self.space]:",
        "        if True:",
        SESSION_TESTS + "test_an_engine_beside_others_moves_and_keeps_what_it_is_loading",
    ),
    Mutant(
        "who-fails-requests-is-promised-frames",
        SESSIONS,
        "return self._stopped if self.opening.recomputes else dict.fromkeys(self.space.stack.media, FAILS_REQUESTS)",
        "return self._stopped",
        SLAB_TESTS + "test_frames_pass_through_memory_for_an_engine_without_direct_reads_alone",
    ),
    Mutant(
        "what-peers-are-to-find-stays-in-slabs",
        SESSIONS,
        "{*not_direct, *self._not_direct}",
        "self._not_direct",
        SLAB_TESTS + "test_handed_over_frames_of_a_slab_are_read_into_memory",
    ),
    Mutant(
        "one-engine-stops-the-reads-of-all",
        SESSIONS,
        "        self._stopped[tier] = why\n",
        "        self.space.stack.stop_direct_reads(tier, why)\n",
        SLAB_TESTS + "test_frames_pass_through_memory_for_an_engine_without_direct_reads_alone",
    ),
    Mutant(
        "what-an-engine-does-not-read-stays-promised",
        SESSIONS,
        "        self.space.stack.release_frames(tier, self._holders[self.space])\n",
        "",
        SLAB_TESTS + "test_frames_pass_through_memory_for_an_engine_without_direct_reads_alone",
    ),
    Mutant(
        "late-answers-promise-what-is-not-read",
        CLIENT,
        """        self._tell("stop_direct_reads", tier, why)
        self._forget()
""",
        """        self._tell("stop_direct_reads", tier, why)
""",
        SLAB_TESTS + "test_an_answer_from_before_direct_reads_were_stopped_is_not_used",
    ),
    Mutant(
        "a-worker-says-that-it-has-ended-and-reads-on",
        "kvtier_core/engine/worker_side.py",
        "for reader in self._readers.values():\n            reader.close()\n        for mover in self._movers:",
        "for mover in self._movers:",
        "tests/engine/test_worker_side.py::test_movers_are_closed_when_no_reader_reads_any_more",
    ),
    Mutant(
        "loads-of-the-dead-never-end",
        SESSIONS,
        "                space.stack.load_ended(holder, {}, ok=False)\n",
        "                pass\n",
        SLAB_TESTS + "test_frames_of_a_dead_engine_may_leave_once_its_worker_has_ended",
    ),
    Mutant(
        "a-message-without-end-is-awaited",
        "kvtier_core/server/connection.py",
        "if header.nbytes > LONGEST:",
        "if False:",
        "tests/server/test_protocol.py::test_a_message_without_end_ends_its_connection_alone",
    ),
    Mutant(
        "quotas-are-judged-afterwards",
        "kvtier_core/server/lent_arena.py",
        "if within is not None and within < len(newcomers):",
        "if False:",
        "tests/server/test_tenants.py::test_a_tenant_that_floods_the_memory_costs_others_nothing",
    ),
    Mutant(
        "a-hard-quota-is-soft",
        SESSIONS,
        "(victims := arena.beyond_quota())",
        "(victims := [])",
        "tests/server/test_tenants.py::test_beyond_the_hard_quota_nothing_is_kept",
    ),
    Mutant(
        "all-tenants-are-erased",
        "kvtier_core/server/http.py",
        "arena.of_tenant(tenant)",
        "arena.of_tenant(None)",
        "tests/server/test_tenants.py::test_a_tenant_is_erased_from_memory_and_disk_and_others_stay",
    ),
    Mutant(
        "anybody-may-clear",
        "kvtier_core/server/http.py",
        "if changes or self._guarded:",
        "if self._guarded:",
        "tests/server/test_operators.py::test_requests_that_change_something_need_the_token",
    ),
)
