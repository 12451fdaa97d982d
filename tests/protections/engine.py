"""Both sides of an engine: what is promised, loaded, stored and counted."""

from __future__ import annotations

from protections.mutant import Mutant

DIGEST_CACHE = "kvtier_core/engine/digest_cache.py"
WEIGHTS = "kvtier_core/engine/weights.py"
SCHEDULER = "kvtier_core/engine/scheduler_side.py"
WAITING = "tests/engine/test_waiting.py::"
WORKER = "kvtier_core/engine/worker_side.py"
RECORDER = "kvtier_core/engine/recorder.py"
PROVENANCE = "kvtier_core/engine/scheduler/provenance.py"
REPORTS = "kvtier_core/engine/worker_reports.py"
STORES = "kvtier_core/engine/scheduler/store_jobs.py"
LOADS = "kvtier_core/engine/scheduler/loads.py"
TRACKED = "kvtier_core/engine/scheduler/requests.py"
SELF_TEST_GATE = "kvtier_core/engine/scheduler/self_test_gate.py"
REQUEST_VIEW = "kvtier_core/engine/request_view.py"
SELF_TEST = "kvtier_core/engine/self_test.py"
REQUEST_TESTS = "tests/vllm/test_request_identity.py::"
WEIGHT_TESTS = "tests/vllm/test_weights.py::"
SERVING = "tests/vllm/test_serving.py::"
TROUBLE = "tests/vllm/test_trouble.py::"
WORKER_TESTS = "tests/engine/test_worker_side.py::"
SALTS = "tests/engine/test_salts.py::"
SELFTEST = "tests/vllm/test_self_test.py::"
SEAM = "tests/engine/test_scheduler_side.py::"
GROUPS = "tests/engine/test_groups.py::"
BESIDE = "tests/vllm/test_beside_others.py::"

MUTANTS = (
    Mutant(
        "elements-of-one-stage-are-those-of-all",
        "kvtier_core/engine/ranks.py",
        "elements=elements.pop() if len(elements) == 1 else (),",
        "elements=elements.pop(),",
        "tests/engine/test_ranks.py::test_where_keys_and_values_lie_is_known_if_all_stages_say_the_same",
    ),
    Mutant(
        "one-lock-for-all-files",
        DIGEST_CACHE,
        'f"{self._name}.lock"',
        '"lock"',
        WEIGHT_TESTS + "test_nobody_waits_for_what_is_read_of_other_files",
    ),
    Mutant(
        "a-memory-for-others",
        DIGEST_CACHE,
        ' if is_ours(self._folder) else ""',
        "",
        WEIGHT_TESTS + "test_a_memory_that_others_could_write_to_is_not_believed",
    ),
    Mutant(
        "images-by-position-alone",
        REQUEST_VIEW,
        "item.length, item.content)",
        'item.length, "")',
        REQUEST_TESTS + "test_images_count_by_content_where_they_lie",
    ),
    Mutant(
        "a-piece-is-skipped",
        WEIGHTS,
        "for at in range(0, end, _PIECE_NBYTES)]",
        "for at in range(0, end - _PIECE_NBYTES + 1, _PIECE_NBYTES)]",
        WEIGHT_TESTS + "test_every_byte_counts",
    ),
    Mutant(
        "a-tensor-is-skipped",
        WEIGHTS,
        "for name, tensor in tensors if",
        "for name, tensor in tensors[:-1] if",
        WEIGHT_TESTS + "test_sampling_sees_every_tensor",
    ),
    Mutant(
        "only-safetensors-count",
        WEIGHTS,
        "return sorted(file for file in found if file.is_file())",
        'return sorted(file for file in found if file.suffix == ".safetensors")',
        WEIGHT_TESTS + "test_whatever_lies_beside_the_weights_counts",
    ),
    Mutant(
        "a-digest-is-never-forgotten",
        WEIGHTS,
        "s.st_size, s.st_mtime_ns, s.st_ctime_ns)",
        "s.st_size, 0)",
        WEIGHT_TESTS + "test_a_digest_is_remembered_until_a_file_changes",
    ),
    Mutant(
        "no-epoch",
        SCHEDULER,
        "self.namespace = self._first_namespace.renewed()",
        "self.namespace = self._first_namespace",
        SERVING + "test_a_frame_of_before_is_not_served_even_if_it_could_not_be_deleted",
    ),
    Mutant(
        "a-report-of-changed-weights-is-dropped",
        SCHEDULER,
        "if how := result.progress.changed.get(self.epoch):",
        "if how := None:",
        SEAM + "test_what_workers_notice_of_their_weights_opens_one_epoch",
    ),
    Mutant(
        "every-report-of-changed-weights-is-news",
        SCHEDULER,
        "if how := result.progress.changed.get(self.epoch):",
        'if how := next(iter(result.progress.changed.values()), ""):',
        SEAM + "test_what_workers_notice_of_their_weights_opens_one_epoch",
    ),
    Mutant(
        "loads-of-a-worker-that-is-off-are-promised",
        SCHEDULER,
        "self._self_test.end(result.progress.off)",
        "pass",
        TROUBLE + "test_nothing_is_promised_and_no_slot_reserved_when_a_worker_has_failed",
    ),
    Mutant(
        "requests-go-on-over-an-epoch",
        SCHEDULER,
        'Bypass("it began before the cache was reset"))\n        self._distrust_all()',
        "None)",
        SERVING + "test_a_request_under_way_when_the_weights_change_is_not_kept",
    ),
    Mutant(
        "the-engines-own-cache-outlives-an-epoch",
        SCHEDULER,
        "self._distrust_all()\n        return not self._loads",
        "return not self._loads",
        BESIDE + "test_what_the_engine_held_when_the_cache_was_reset_is_not_stored",
    ),
    Mutant(
        "draft-kv-that-is-not-final",
        "kvtier_core/engine/scheduler_side.py",
        "state.trusted + bool(self._lookahead)",
        "state.trusted + self._lookahead",
        "tests/engine/test_lookahead.py::test_a_chunk_is_found_where_the_tokens_behind_it_are_the_same_too",
    ),
    Mutant(
        "bad-blocks-go-unheard",
        SCHEDULER,
        "if self._provenance.trusts_any(result.invalid_blocks):",
        "if False:",
        BESIDE + "test_what_others_loaded_is_not_stored_nor_what_stands_on_it[True-False]",
    ),
    Mutant(
        "others-overtake-stores",
        SCHEDULER,
        "self._new_blocks.union(step.new_blocks)",
        "step.new_blocks",
        SEAM + "test_another_connector_overwrites_no_block_before_a_late_store_has_read_it",
    ),
    Mutant(
        "no-token-left-to-compute",
        SCHEDULER,
        "return view.tokens - 1 if self._boundaries and not self._lookahead else view.tokens",
        "return view.tokens",
        GROUPS + "test_one_token_is_always_left_to_compute",
    ),
    Mutant(
        "kv-of-new-weights-under-the-old-name",
        WORKER,
        "if self._stale or plan.attachment",
        "if plan.attachment",
        WORKER_TESTS + "test_a_step_after_the_weights_changed_stores_and_loads_nothing",
    ),
    Mutant(
        "an-epoch-begins-with-the-weights-of-the-last",
        WORKER,
        "self._weights.renew()",
        "pass",
        WORKER_TESTS + "test_nothing_is_stored_before_a_plan_of_the_new_epoch_and_then_all_is",
    ),
    Mutant(
        "a-load-outlives-its-epoch",
        WORKER,
        "            self._failed.update(loads)\n            return",
        "            return",
        WORKER_TESTS + "test_a_load_under_way_when_the_weights_change_has_failed[1]",
    ),
    Mutant(
        "a-load-outlives-its-weights",
        WORKER,
        '{how}"\n            self._failed.update(loads)',
        '{how}"',
        WORKER_TESTS + "test_a_load_under_way_when_the_weights_change_has_failed[0]",
    ),
    Mutant(
        "zeroed-before-they-are-read",
        "kvtier_core/engine/worker_side.py",
        "if self._fence_at_once:",
        "if False:",
        "tests/engine/test_worker_side.py::test_stores_of_an_engine_that_overwrites_blocks_early_are_fenced_at_once",
    ),
    Mutant(
        "no-self-test",
        WORKER,
        "if wrong := try_copies(mover, table, self._caches, own):",
        'if wrong := "":',
        SELFTEST + "test_an_engine_with_another_layout_is_caught_before_traffic",
    ),
    Mutant(
        "an-empty-slot-counts-as-filled",
        WORKER,
        "self._filled[task.id] = min(begun.empty)",
        "self._filled[task.id] = begun.slots",
        "tests/engine/test_worker_side.py::test_of_a_store_that_fills_some_slots_the_leading_ones_are_reported",
    ),
    Mutant(
        "copies-in-its-sleep",
        WORKER,
        "if mover is None or self._suspended:",
        "if mover is None:",
        "tests/vllm/test_sleep.py::test_no_page_is_touched_while_the_engine_sleeps",
    ),
    Mutant(
        "all-parts-are-tested-in-one-slot",
        WORKER,
        "own = slots[self._rank % plan.layout.replicas :: plan.layout.replicas]",
        "own = [slots[self._rank % plan.layout.replicas]] * len(plan.layout.parts)",
        "tests/engine/test_worker_side.py::test_a_rank_tests_one_part_while_another_one_tests_another_part",
    ),
    Mutant(
        "what-others-loaded-is-ours",
        PROVENANCE,
        "return end if trusted >= start and step.writes_all else min(trusted, start)",
        "return end",
        BESIDE + "test_what_others_loaded_is_not_stored_nor_what_stands_on_it[False-True]",
    ),
    Mutant(
        "blocks-are-ours-for-ever",
        PROVENANCE,
        "self._trusted.difference_update(blocks[-(-computed // size) :])",
        "pass",
        BESIDE + "test_what_others_loaded_is_not_stored_nor_what_stands_on_it[True-False]",
    ),
    Mutant(
        "made-up-kv-is-ours",
        PROVENANCE,
        "trusted = min(self._leading(blocks[: -(-start // size)]) * size for blocks, size in tables)",
        "trusted = start",
        BESIDE + "test_what_another_connector_made_up_is_not_stored",
    ),
    Mutant(
        "the-draft-kv-of-another-token",
        "kvtier_core/engine/scheduler/requests.py",
        "if self._lookahead:",
        "if False:",
        "tests/engine/test_lookahead.py::test_a_chunk_is_found_where_the_tokens_behind_it_are_the_same_too",
    ),
    Mutant(
        "decoding-counts-as-a-prompt",
        "kvtier_core/engine/scheduler/requests.py",
        "prompts += max(0, min(request.end, state.admitted) - request.computed)",
        "prompts += request.scheduled",
        WAITING + "test_requests_that_decode_do_not_pull_the_speed_of_the_engine_down",
    ),
    Mutant(
        "requests-are-remembered",
        TRACKED,
        "return self._states.pop(request_id, None)",
        "return self._states.get(request_id)",
        SEAM + "test_a_busy_host_under_many_kinds_of_trouble",
    ),
    Mutant(
        "offers-without-their-salt",
        TRACKED,
        "view.hints, view.identity.salt)",
        "view.hints)",
        SALTS + "test_what_is_written_when_it_is_named_again_is_found_too",
    ),
    Mutant(
        "a-self-test-nobody-reads",
        SELF_TEST_GATE,
        "if failures := [problem for problem in found if problem]:",
        "if failures := []:",
        SELFTEST + "test_an_arena_that_cannot_be_reached_is_told_and_not_used",
    ),
    Mutant(
        "the-self-test-shifts-sampling",
        SELF_TEST,
        "random_(generator=generator)",
        "random_()",
        SELFTEST + "test_the_self_test_draws_from_generators_of_its_own",
    ),
    Mutant(
        "the-self-test-draws-from-pythons-generator",
        SELF_TEST,
        "drawn_from = random.Random()",
        "drawn_from = random",
        SELFTEST + "test_the_self_test_draws_from_generators_of_its_own",
    ),
    Mutant(
        "no-fence",
        STORES,
        "if not store.blocks.isdisjoint(new_blocks))",
        "if False)",
        "tests/vllm/test_store_fence.py::test_the_engine_overtakes_no_store",
    ),
    Mutant(
        "empty-slots-are-served",
        STORES,
        "store.keys[store.filled :]",
        "()",
        "tests/engine/test_scheduler_side.py::test_of_a_store_that_filled_some_slots_the_leading_chunks_are_kept",
    ),
    Mutant(
        "stores-without-their-salt",
        STORES,
        "_holder(self._last_job + 1), salt, parts)",
        '_holder(self._last_job + 1), b"", parts)',
        SALTS + "test_what_was_stored_is_found_after_a_restart",
    ),
    Mutant(
        "lossy-loads-are-exact",
        LOADS,
        "pages[: state.found.exact]",
        "pages",
        "tests/vllm/test_lossy.py::test_what_is_computed_on_lossy_kv_is_not_stored",
    ),
    Mutant(
        "a-lookup-takes-the-pins-of-a-load",
        LOADS,
        "        if self._holders.get(state.view.request_id) == state.holder:",
        "        if False:",
        "tests/engine/test_scheduler_side.py::test_a_lookup_during_a_load_finds_nothing_and_takes_no_pin_from_it",
    ),
    Mutant(
        "pins-are-forgotten",
        LOADS,
        "            if holder := self._holders.pop(request_id, None):",
        "            if False and (holder := self._holders.pop(request_id, None)):",
        SEAM + "test_a_busy_host_under_many_kinds_of_trouble",
    ),
    Mutant(
        "chunks-in-the-wrong-pages",
        LOADS,
        "tuple(state.found.slots[: len(loaded)])",
        "tuple(reversed(state.found.slots[: len(loaded)]))",
        SEAM + "test_a_busy_host_under_many_kinds_of_trouble",
    ),
    Mutant(
        "loads-are-not-pinned",
        LOADS,
        "        del self._waiting[state.holder]\n",
        "        self.release(state)\n",
        SEAM + "test_a_slot_stays_pinned_until_the_load_has_read_it",
    ),
    Mutant(
        "lookups-without-their-salt",
        LOADS,
        "state.holder, limit, state.view.identity.salt, skipped)",
        'state.holder, limit, b"", skipped)',
        SALTS + "test_what_was_stored_is_found_after_a_restart",
    ),
    Mutant(
        "what-the-engine-keeps-stays-as-it-is",
        LOADS,
        "if self._expected(tables, state.computed, end) - _blocks_of(pages):",
        "if False:",
        GROUPS + "test_an_engine_that_keeps_more_than_was_found_computes_it",
    ),
    Mutant(
        "waits-for-ever",
        "kvtier_core/engine/scheduler/waiting.py",
        "if left <= 0:",
        "if False:",
        "tests/vllm/test_bad_disks.py::test_a_disk_that_hangs_stalls_nobody",
    ),
    Mutant(
        "everybody-waits-for-a-silent-store",
        "kvtier_core/engine/scheduler/waiting.py",
        "max(sum(state.waits.values()), found.silence)",
        "sum(state.waits.values())",
        WAITING + "test_a_store_that_is_silent_for_so_long_is_not_waited_for",
    ),
    Mutant(
        "waits-longer-than-computing-takes",
        "kvtier_core/engine/scheduler/waiting.py",
        "longest = min(longest, state.awaited_chunks * limit.chunk_seconds)",
        "pass",
        WAITING + "test_nobody_waits_longer_than_computing_takes",
    ),
    Mutant(
        "the-engines-queue-is-a-tiers",
        "kvtier_core/engine/scheduler/waiting.py",
        "        state.asked = None\n\n    def allows",
        "        state.waiting_since = self._clock()\n\n    def allows",
        WAITING + "test_the_engines_own_queue_is_not_waiting",
    ),
    Mutant(
        "not-asking-is-waiting",
        "kvtier_core/engine/scheduler/waiting.py",
        "self._last_step.until = self._clock()",
        "pass",
        WAITING + "test_steps_in_which_the_engine_does_not_ask_are_not_waiting",
    ),
    Mutant(
        "dropped-observers-are-called",
        "kvtier_core/engine/observers.py",
        "        if self._failed:\n            return\n",
        "",
        "tests/core/test_observers.py::test_one_that_raises_is_dropped_and_said_once_and_the_others_go_on",
    ),
    Mutant(
        "events-wait-for-ever",
        "kvtier_core/engine/observers.py",
        "if self._waiting > _MAX_WAITING:",
        "if False:",
        "tests/core/test_observers.py::test_memory_for_one_that_blocks_is_bounded",
    ),
    Mutant(
        "prompts-pay-for-decoding",
        "kvtier_core/engine/scheduler/prefill_speed.py",
        "seconds - self._decoding_in(step, seconds)",
        "seconds",
        WAITING + "test_the_time_of_decoding_beside_a_prompt_is_not_the_prompts",
    ),
    Mutant(
        "whatever-a-reader-reads-is-used",
        "kvtier_core/transfer/staged_reader.py",
        "if any(read.status is not ReadStatus.VERIFIED for read in reads):",
        "if False:",
        "tests/engine/test_staged_reader.py::test_what_does_not_verify_reaches_no_page",
    ),
    Mutant(
        "what-was-given-up-is-copied",
        "kvtier_core/transfer/staged_reader.py",
        "if self._unclaimed.pop(piece.number, None) is None:",
        "if False:",
        "tests/engine/test_staged_reader.py::test_what_was_given_up_reaches_no_page_when_its_read_returns",
    ),
    Mutant(
        "marks-outlive-their-step",
        WORKER,
        "        self._marks = {}\n        if idle:",
        "        if idle:",
        "tests/engine/test_worker_side.py::test_a_reader_waits_for_the_stores_under_way",
    ),
    Mutant(
        "readers-overtake-stores",
        "kvtier_core/engine/worker_side.py",
        "if direct else []",
        "if False else []",
        "tests/engine/test_worker_side.py::test_a_reader_waits_for_the_stores_under_way",
    ),
    Mutant(
        "a-frame-longer-than-its-slot",
        "kvtier_core/transfer/own_shard.py",
        "FrameRange(frame, offset, min(room, behind))",
        "FrameRange(frame, offset, behind)",
        "tests/engine/test_staged_reader.py::test_a_frame_that_is_longer_than_a_slot_does_not_reach_into_the_next",
    ),
    Mutant(
        "shards-on-a-gpu-are-not-summed",
        "kvtier_core/transfer/own_shard.py",
        "None if checksums[number] == checksum else FrameError.CHECKSUM",
        "None",
        "tests/engine/test_device_reads.py",
    ),
    Mutant(
        "payloads-of-direct-reads-are-not-summed",
        "kvtier_core/transfer/own_shard.py",
        "error = verify_checksums(found, checksum)",
        "error = None",
        "tests/engine/test_staged_reader.py::test_a_shard_that_begins_within_a_page_is_read_with_all_others",
    ),
    Mutant(
        "payloads-that-ended-early-are-summed",
        "kvtier_core/transfer/own_shard.py",
        "if read < self.nbytes:",
        "if False:",
        "tests/engine/test_device_reads.py",
    ),
    Mutant(
        "a-squatter-stops-serving",
        REPORTS,
        ", *([cached] if cached else [])]",
        "]",
        "tests/engine/test_runtime_folder.py::test_where_a_stranger_has_its_name_it_lies_with_caches",
    ),
    Mutant(
        "boundaries-with-holes",
        "kvtier_core/engine/scheduler/chunk_pages.py",
        "if not any(map(_has_holes, pages.values())):",
        "if True:",
        GROUPS + "test_a_window_that_has_passed_is_not_stored",
    ),
    Mutant(
        "one-salt-for-all-recordings",
        RECORDER,
        "secrets.token_bytes(32)",
        'b"salt"',
        "tests/simulate/test_recorder.py::test_no_recording_can_be_laid_beside_another",
    ),
    Mutant(
        "recordings-for-everyone",
        RECORDER,
        "0o600",
        "0o644",
        "tests/simulate/test_recorder.py::test_nobody_else_may_read_it",
    ),
    Mutant(
        "recordings-without-end",
        RECORDER,
        "self._room -= len(text)",
        "pass",
        "tests/simulate/test_recorder.py::test_a_recording_stays_within_its_capacity_over_all_starts",
    ),
)
