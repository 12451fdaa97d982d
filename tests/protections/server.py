"""Protections of a server and its engines."""

from __future__ import annotations

from protections.mutant import Mutant

SESSIONS = "plugins/kvtier_serve/kvtier_serve/sessions.py"
SERVER = "plugins/kvtier_serve/kvtier_serve/server.py"
MANAGER = "kvtier_core/stack/manager.py"
CLIENT = "plugins/kvtier_remote/kvtier_remote/client.py"
SLAB_TESTS = "plugins/kvtier_serve/tests/test_slabs_of_a_server.py::"
REFUSED_TESTS = "plugins/kvtier_serve/tests/test_refused_calls.py::"
SESSION_TESTS = "plugins/kvtier_serve/tests/test_shared_stack.py::"
FULL_BUFFERS = "plugins/kvtier_serve/tests/test_full_buffers.py::"

ADOPTION = "plugins/kvtier_serve/kvtier_serve/kept/adoption.py"
JOURNAL = "plugins/kvtier_serve/kvtier_serve/kept/journal.py"
MEMORY = "plugins/kvtier_remote/kvtier_remote/memory.py"
KEPT_TESTS = "plugins/kvtier_serve/tests/test_kept_memory.py::"
OPENED = "plugins/kvtier_serve/tests/test_opened_memory.py::"
TRUNCATED = "plugins/kvtier_serve/tests/test_truncated_memory.py::"

LENT_ARENA = "plugins/kvtier_serve/kvtier_serve/lent_arena.py"
TENANTS = "plugins/kvtier_serve/kvtier_serve/tenants.py"
ERASING_TESTS = "plugins/kvtier_serve/tests/test_erasing.py::"

TENANT_TESTS = "plugins/kvtier_vllm/tests/test_tenants_in_stores.py::"

MUTANTS = (
    Mutant(
        "a-client-forgets-what-stays-in-memory",
        CLIENT,
        "promised_to, memory_only)",
        "promised_to, False)",
        "plugins/kvtier_vllm/tests/test_server.py::"
        "test_what_a_request_keeps_in_memory_serves_other_engines_and_lies_on_no_disk",
    ),
    Mutant(
        "a-log-has-salts",
        "plugins/kvtier_serve/kvtier_serve/operators/console.py",
        '_SECRET = {"tokens", "keys", "cache_salt"}',
        '_SECRET = {"tokens"}',
        "plugins/kvtier_serve/tests/test_operators.py::test_each_change_is_logged_with_who_made_it_and_without_salts",
    ),
    Mutant(
        "a-capacity-without-room-is-taken",
        "plugins/kvtier_serve/kvtier_serve/spaces.py",
        "        if too_small := [",
        "        if False and [",
        "plugins/kvtier_serve/tests/test_reload.py::test_a_capacity_without_room_for_a_chunk_changes_nothing",
    ),
    Mutant(
        "quotas-end-with-the-server",
        "plugins/kvtier_serve/kvtier_serve/operators/console.py",
        "        found.lost = self._server.quotas.keep()",
        '        found.lost = ""',
        "plugins/kvtier_serve/tests/test_reload.py::test_quotas_outlive_the_server_without_any_salt",
    ),
    Mutant(
        "metrics-keep-closed-stacks",
        "plugins/kvtier_serve/kvtier_serve/operators/metrics.py",
        "WeakKeyDictionary[Space, Readings] = WeakKeyDictionary()",
        "dict[Space, Readings] = {}",
        "plugins/kvtier_serve/tests/test_server_metrics.py::test_closed_namespaces_leave_no_series_and_no_stack_and_sums_never_fall",
    ),
    Mutant(
        "a-call-that-was-given-up-is-carried-out",
        SERVER,
        "        if not (future.running() or future.set_running_or_notify_cancel()):\n",
        "        if not (future.running() or future.set_running_or_notify_cancel()):\n            list(pieces)\n",
        "plugins/kvtier_serve/tests/test_operators.py::test_a_call_that_was_answered_503_is_not_carried_out_later",
    ),
    Mutant(
        "what-a-former-server-left-is-believed",
        ADOPTION,
        "if error is None and self._arena.is_reserved(key)",
        "if self._arena.is_reserved(key)",
        KEPT_TESTS + "test_a_slot_that_was_changed_is_not_adopted",
    ),
    Mutant(
        "a-load-of-truncated-memory-is-good",
        MEMORY,
        "if ended and self._memory.is_broken:",
        "if False:",
        TRUNCATED + "test_a_load_that_meets_a_truncation_has_failed",
    ),
    Mutant(
        "what-is-left-of-a-page-counts",
        "plugins/kvtier_remote/kvtier_remote/guarded_memory.py",
        "return self._opened or self.size() < len(self) or",
        "return self._opened or",
        TRUNCATED + "test_a_load_that_meets_a_truncation_has_failed",
    ),
    Mutant(
        "opened-memory-is-trusted",
        "plugins/kvtier_remote/kvtier_remote/guarded_memory.py",
        "self._file >= 0 and why_no_file(os.fstat(self._file))",
        'False and ""',
        OPENED + "test_memory_that_was_opened_is_lost_and_the_server_begins_anew",
    ),
    Mutant(
        "memory-that-is-closed-again-is-trusted",
        "plugins/kvtier_remote/kvtier_remote/guarded_memory.py",
        "self._opened = self._opened or (self._file >= 0",
        "self._opened = (self._file >= 0",
        OPENED + "test_memory_that_was_seen_open_is_never_trusted_again",
    ),
    Mutant(
        "opened-memory-stops-a-server",
        "kvtier_core/storekit/folder.py",
        'if self._opened != "is left" and self._makes_way(self.status(name)):',
        "if False:",
        OPENED + "test_memory_that_was_opened_between_two_servers_is_not_adopted",
    ),
    Mutant(
        "truncated-memory-is-sealed",
        "kvtier_core/work/io_pool.py",
        "if (unusable := run(self._check).error) is not None:",
        "if False:",
        TRUNCATED + "test_what_was_sealed_in_truncated_memory_is_written_nowhere",
    ),
    Mutant(
        "former-users-are-forgotten",
        "plugins/kvtier_serve/kvtier_serve/memories.py",
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
        "plugins/kvtier_serve/kvtier_serve/lent_arena.py",
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
        "        self._folder.remove_made(_NAME)\n\n    def close",
        "\n    def close",
        KEPT_TESTS + "test_a_journal_that_cannot_be_written_is_removed",
    ),
    Mutant(
        "memory-of-which-nothing-is-known-is-recorded-as-free",
        JOURNAL,
        "            self.forget()\n            return False",
        "            self.forget()\n            self.resume()\n            return False",
        KEPT_TESTS + "test_memory_with_a_worthless_journal_is_used_when_no_earlier_process_has_it",
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
        "if self._lost and not self._jobs and self._file:",
        "if self._lost and self._file:",
        KEPT_TESTS + "test_a_copy_under_way_ends_before_the_next_server_may_have_its_slot",
    ),
    Mutant(
        "a-model-takes-beyond-its-quota",
        "plugins/kvtier_serve/kvtier_serve/extents.py",
        " and (not share.count or not self._is_over(share))",
        "",
        "plugins/kvtier_serve/tests/test_extents.py::test_a_model_beyond_its_soft_quota_takes_from_no_other_and_gives_first",
    ),
    Mutant(
        "a-models-hard-quota-is-none",
        "plugins/kvtier_serve/kvtier_serve/extents.py",
        " or self.room(share.model) - len(given) < len(window):",
        ":",
        "plugins/kvtier_serve/tests/test_extents.py::test_no_model_ever_has_more_than_its_hard_quota",
    ),
    Mutant(
        "engines-share-their-holders",
        SESSIONS,
        'return f"{self.number}/"',
        'return "0/"',
        SESSION_TESTS + "test_holders_of_two_engines_may_have_the_same_name",
    ),
    Mutant(
        "slots-of-others-are-freed",
        MANAGER,
        "        reservation.check_own(empty)\n",
        "",
        REFUSED_TESTS + "test_an_engine_cannot_free_the_slots_of_another",
    ),
    Mutant(
        "a-refused-commit-has-ended-its-reservation",
        MANAGER,
        "        reservation.check_own(empty)\n",
        "        del self._reservations[holder]\n        reservation.check_own(empty)\n",
        REFUSED_TESTS + "test_a_refused_commit_keeps_its_reservation",
    ),
    Mutant(
        "what-was-looked-up-outlives-its-engine",
        SESSIONS,
        "            if any(space.stack.holds(own)):",
        "            if space.stack.holds(own).reserved:",
        REFUSED_TESTS + "test_what_was_looked_up_and_committed_under_one_name_is_released",
    ),
    Mutant(
        "self-tests-take-all-slots",
        SESSIONS,
        "if own != self._testing and self.space.stack.holds(self._testing).self_test_slots:",
        "if False:",
        REFUSED_TESTS + "test_an_engine_has_the_slots_of_one_self_test",
    ),
    Mutant(
        "a-session-opens-in-the-epoch-of-before",
        CLIENT,
        "        if opening is self._opening:",
        "        if True:",
        REFUSED_TESTS + "test_an_engine_whose_epoch_is_refused_finds_nothing_earlier",
    ),
    Mutant(
        "the-dead-keep-what-they-held",
        SERVER,
        "            self.ask(session.end)",
        "            pass",
        "plugins/kvtier_serve/tests/test_kills.py::test_an_engine_that_is_killed_leaves_nothing_behind",
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
        "a-full-buffer-is-silent-for-ever",
        "plugins/kvtier_remote/kvtier_remote/engine_session.py",
        "        self.connection.flush()\n",
        "",
        FULL_BUFFERS + "test_the_cache_is_back_after_any_stall",
    ),
    Mutant(
        "a-server-that-takes-nothing-is-asked-on",
        "plugins/kvtier_remote/kvtier_remote/engine_session.py",
        "return self.connection.unsent <= _MOST_UNSENT",
        "return True",
        FULL_BUFFERS + "test_a_stall_without_end_holds_a_bounded_amount_of_calls",
    ),
    Mutant(
        "a-stall-is-answered-by-a-miss",
        CLIENT,
        "            self._catch_up()\n",
        "            pass\n",
        FULL_BUFFERS + "test_an_engine_that_was_idle_meanwhile_finds_at_its_first_request",
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
        "plugins/kvtier_serve/tests/test_late_answers.py::test_found_chunks_are_pinned_even_if_the_answer_is_late",
    ),
    Mutant(
        "a-plan-of-other-memory",
        "kvtier_core/engine/worker/side.py",
        "if self._stale or plan.attachment != self._attachment:",
        "if self._stale:",
        "tests/engine/test_worker_side.py::test_a_plan_of_other_memory_is_not_carried_out",
    ),
    Mutant(
        "extents-of-others-are-usable",
        "plugins/kvtier_serve/kvtier_serve/extents.py",
        "if all(self._owners[extent] is share or extent in given for extent in share.extents_of(slot))",
        "if True",
        "plugins/kvtier_serve/tests/test_extents.py::test_no_byte_is_lent_twice_whatever_comes_and_goes",
    ),
    Mutant(
        "kv-of-before-is-kept",
        SESSIONS,
        "                space.stack.abort(own)",
        "                space.stack.commit(own, checksums, empty)",
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
        "[*terms.not_direct, *self._not_direct]",
        "self._not_direct",
        SLAB_TESTS + "test_handed_over_frames_of_a_slab_are_read_into_memory",
    ),
    Mutant(
        "one-engine-stops-the-reads-of-all",
        SESSIONS,
        "why = self._stopped[tier] = printable(why)",
        "self.space.stack.stop_direct_reads(tier, why)",
        SLAB_TESTS + "test_frames_pass_through_memory_for_an_engine_without_direct_reads_alone",
    ),
    Mutant(
        "what-an-engine-does-not-read-stays-promised",
        SESSIONS,
        "        self.space.stack.release_frames(tier, holders)\n",
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
        "kvtier_core/engine/worker/side.py",
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
        "plugins/kvtier_remote/kvtier_remote/connection.py",
        "if nbytes > LONGEST:",
        "if False:",
        "plugins/kvtier_serve/tests/test_protocol.py::test_a_message_without_end_ends_its_connection_alone",
    ),
    Mutant(
        "quotas-are-judged-afterwards",
        "plugins/kvtier_serve/kvtier_serve/lent_arena.py",
        "if within is not None and within < len(newcomers):",
        "if False:",
        "plugins/kvtier_serve/tests/test_tenants.py::test_a_tenant_that_floods_the_memory_costs_others_nothing",
    ),
    Mutant(
        "a-store-is-opened-again-before-it-is-closed",
        "plugins/kvtier_serve/kvtier_serve/spaces.py",
        "functools.partial(self._closed, space.number)",
        "lambda outcome, number=self._claims.pop(space.number): None",
        "plugins/kvtier_serve/tests/test_openings.py::test_a_stack_whose_close_hangs_keeps_its_store_and_delays_no_one",
    ),
    Mutant(
        "a-turn-answers-all-that-there-is",
        SERVER,
        "while self._calling and work < _WORK:",
        "while self._calling:",
        "plugins/kvtier_serve/tests/test_turns.py::test_an_engine_that_calls_without_a_pause_is_served_in_turn_with_others",
    ),
    Mutant(
        "a-private-store-is-for-whoever-comes-first",
        "plugins/kvtier_serve/kvtier_serve/private_stores.py",
        "        return codec.namespace.digest.startswith(home)",
        "        return True",
        "plugins/kvtier_serve/tests/test_openings.py::test_a_private_disk_returns_to_the_namespace_whose_frames_it_holds",
    ),
    Mutant(
        "a-hard-quota-is-soft",
        "plugins/kvtier_serve/kvtier_serve/spaces.py",
        "if victims := arena.beyond_quota(tenant, left):",
        "if victims := []:",
        "plugins/kvtier_serve/tests/test_tenants.py::test_beyond_the_hard_quota_nothing_is_kept",
    ),
    Mutant(
        "all-tenants-are-erased",
        "plugins/kvtier_serve/kvtier_serve/operators/console.py",
        "if not mark or is_marked(key, mark)",
        "if True",
        "plugins/kvtier_serve/tests/test_tenants.py::test_a_tenant_is_erased_from_memory_and_disk_and_others_stay",
    ),
    Mutant(
        "keys-do-not-say-whose-they-are",
        "kvtier_core/engine/scheduler/requests.py",
        "range(known, chunks)), identity.tenant)",
        'range(known, chunks)), b"")',
        TENANT_TESTS + "test_a_tenant_is_removed_alone_and_its_receipt_can_be_checked[plain]",
    ),
    Mutant(
        "names-are-taken-for-keys",
        "plugins/kvtier_doctor/kvtier_doctor/stores.py",
        "(seal.keys(keys) if seal else keys)",
        "keys",
        TENANT_TESTS + "test_a_tenant_is_removed_alone_and_its_receipt_can_be_checked[sealed]",
    ),
    Mutant(
        "a-tenant-is-cleared-in-part",
        "plugins/kvtier_doctor/kvtier_doctor/clear.py",
        "[tenant_frames(tier, tenant) for tier in chosen]",
        "(tenant_frames(tier, tenant) for tier in chosen)",
        "plugins/kvtier_doctor/tests/test_tier_commands.py::"
        "test_clear_removes_nothing_of_a_tenant_if_a_tier_hides_its_keys_and_the_secret_is_missing",
    ),
    Mutant(
        "a-tenant-is-its-adapters",
        "kvtier_core/engine/request_view.py",
        "tenant=tenant_mark(cache_salt)",
        "tenant=tenant_mark(cache_salt + adapter)",
        "tests/engine/test_salts.py::test_all_frames_of_a_tenant_have_its_mark_whatever_their_adapter",
    ),
    Mutant(
        "erased-slots-are-free-as-they-are",
        LENT_ARENA,
        "        self.condemn(keys)\n        return self.drop(keys)\n",
        "        return self.drop(keys)\n",
        ERASING_TESTS + "test_no_mark_of_a_tenant_is_left_and_those_of_others_are",
    ),
    Mutant(
        "erased-frames-are-only-deleted",
        "kvtier_core/stack/store_tier/deletes.py",
        "            delete = self._backend.erase\n",
        "            pass\n",
        ERASING_TESTS + "test_no_mark_of_a_tenant_is_left_and_those_of_others_are",
    ),
    Mutant(
        "the-journal-remembers-what-was-erased",
        LENT_ARENA,
        "            keeper.forget_erased()\n",
        "            pass\n",
        ERASING_TESTS + "test_no_mark_of_a_tenant_is_left_and_those_of_others_are",
    ),
    Mutant(
        "the-next-server-leaves-what-was-erased",
        ADOPTION,
        "        self._arena.condemn(self._unusable)",
        "        pass",
        ERASING_TESTS + "test_what_was_in_use_when_the_server_ended_is_overwritten_by_the_next",
    ),
    Mutant(
        "quarantine-is-not-erased",
        "kvtier_core/stack/store_tier/deletes.py",
        "        if self.keeps_damaged:\n",
        "        self._swept = quarantined\n        if False:\n",
        ERASING_TESTS + "test_damaged_frames_that_are_kept_are_erased",
    ),
    Mutant(
        "every-new-salt-has-a-quota-of-its-own",
        TENANTS,
        "return tenant if known else ANONYMOUS",
        "return tenant",
        "plugins/kvtier_serve/tests/test_tenants.py::test_a_salt_that_comes_back_has_quotas_of_its_own",
    ),
    Mutant(
        "an-adapter-is-another-tenant",
        TENANTS,
        'tenant = msgspec.json.decode(salt, type=_Salt).cache_salt.encode() if salt else b""',
        "tenant = salt",
        "plugins/kvtier_serve/tests/test_tenants.py::test_an_adapter_is_of_the_tenant_whose_requests_have_it",
    ),
    Mutant(
        "what-was-closed-still-counts",
        TENANTS,
        "[book for book in books if book in self._books]",
        "list(books)",
        "plugins/kvtier_serve/tests/test_tenants.py::test_a_tenant_whose_stacks_are_closed_has_nothing",
    ),
    Mutant(
        "another-user-asks-on-the-socket",
        "kvtier_core/storekit/owner_socket.py",
        "return credentials(client)[1] == 0 or not stranger(client)",
        "return True",
        "plugins/kvtier_serve/tests/test_strangers.py::test_every_listener_tells_a_stranger_at_most_whether_it_is_alive",
    ),
    Mutant(
        "who-reads-confirms-prompts",
        "plugins/kvtier_serve/kvtier_serve/operators/openapi.py",
        """*([FOR_GET] if each.method != "GET" else [])""",
        """*([FOR_GET] if each.changes else [])""",
        "plugins/kvtier_serve/tests/test_operators.py::test_a_token_for_reading_changes_and_confirms_nothing",
    ),
    Mutant(
        "engines-take-all-files",
        "plugins/kvtier_serve/kvtier_serve/server.py",
        "if len(self._peers) >= self._most_peers:",
        "if False:",
        "plugins/kvtier_serve/tests/test_strangers.py::test_whoever_floods_it_leaves_files_for_stores_and_operators",
    ),
    Mutant(
        "strangers-take-all-files",
        "plugins/kvtier_serve/kvtier_serve/operators/clients.py",
        "if len(self._connections) >= self._most:",
        "if False:",
        "plugins/kvtier_serve/tests/test_strangers.py::test_a_further_connection_ends_the_one_that_has_been_silent_for_longest",
    ),
    Mutant(
        "files-that-come-are-opened",
        "plugins/kvtier_remote/kvtier_remote/connection.py",
        "socket.recv_fds(self._socket, _PIECE, self._files)",
        "socket.recv_fds(self._socket, _PIECE, 16)",
        "plugins/kvtier_serve/tests/test_strangers.py::test_files_that_come_with_a_message_are_closed_unread",
    ),
    Mutant(
        "a-stranger-asks-like-an-operator",
        "plugins/kvtier_serve/kvtier_serve/operators/access.py",
        "        return self._apps.strangers",
        "        return self._apps.operators",
        "plugins/kvtier_serve/tests/test_operators.py::test_nothing_is_answered_without_the_token_but_whether_it_is_alive",
    ),
)
