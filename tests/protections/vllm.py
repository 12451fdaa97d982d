"""What is taken from vLLM: layouts, groups, drafts, its connector."""

from __future__ import annotations

from protections.mutant import Mutant

CONNECTOR = "plugins/kvtier_vllm/kvtier_vllm/connector.py"
KV_EVENTS = "plugins/kvtier_vllm/kvtier_vllm/kv_events.py"
STARTUP = "plugins/kvtier_vllm/kvtier_vllm/startup.py"
CHANGED = "plugins/kvtier_vllm/tests/test_changed_weights.py::test_changed_weights_find_no_earlier_kv[False-"
TROUBLE = "plugins/kvtier_vllm/tests/test_trouble.py::"
EVENTS = "plugins/kvtier_vllm/tests/test_kv_events.py::"
REUSE = "plugins/kvtier_vllm/kvtier_vllm/reuse.py"
OF_REUSE = "plugins/kvtier_vllm/tests/test_reuse.py::"
BESIDE = "plugins/kvtier_vllm/tests/test_beside_others.py::"
WORDS = "plugins/kvtier_vllm/tests/test_words_of_requests.py::"

MUTANTS = (
    Mutant(
        "two-connectors-answer-to-the-same-words",
        CONNECTOR,
        "reads_handovers=is_alone",
        "reads_handovers=True",
        BESIDE + "test_beside_others_kvtier_leaves_words_about_prefill_and_decode_to_them",
    ),
    Mutant(
        "adapters-leak-on-no-device",
        CONNECTOR,
        "adapters_leak=leak",
        "adapters_leak=False",
        "plugins/kvtier_vllm/tests/test_adapters.py::test_what_vllm_computes_without_an_adapter_beside_one_is_not_kept",
    ),
    Mutant(
        "unread-words-store",
        "plugins/kvtier_vllm/kvtier_vllm/requests/words.py",
        "said[word]) or 0 for",
        "said[word]) or sys.maxsize for",
        WORDS + "test_a_word_that_cannot_be_read_stores_nothing_and_is_logged_once",
    ),
    Mutant(
        "one-salts-exception-is-everyones",
        "kvtier_core/config/model.py",
        "if each.cache_salt.value == cache_salt",
        "if cache_salt",
        WORDS + "test_an_operator_decides_by_salt",
    ),
    Mutant(
        "held-means-readable-now",
        KV_EVENTS,
        "self._media.keys() & place.held",
        "self._media.keys() & place.tiers",
        EVENTS + "test_what_a_disk_in_trouble_holds_is_told",
    ),
    Mutant(
        "late-arrivals-find-no-name",
        KV_EVENTS,
        "if place.arrives and key not in self._published:",
        "if False:",
        EVENTS + "test_a_chunk_that_arrives_after_its_request_gave_up_is_told",
    ),
    Mutant(
        "engines-that-failed-are-told-as-holding",
        CONNECTOR,
        "if self._kv_events and (epoch != side.epoch or side.loads_nothing):",
        "if self._kv_events and epoch != side.epoch:",
        EVENTS + "test_an_engine_that_no_longer_loads_holds_nothing_for_a_router",
    ),
    Mutant(
        "producers-are-told-as-holding",
        CONNECTOR,
        "side.loads_nothing or kv_events.obstacle(published)",
        "kv_events.obstacle(published)",
        EVENTS + "test_an_engine_that_only_stores_tells_routers_of_no_tier_and_the_log_says_so",
    ),
    Mutant(
        "routers-forget",
        KV_EVENTS,
        "if self._table is not self._pool.cached_block_hash_to_block:",
        "if False:",
        EVENTS + "test_a_reset_of_all_caches_tells_again_what_is_kept",
    ),
    Mutant(
        "what-leaves-untold-is-removed",
        KV_EVENTS,
        "        if key in self._untold:\n            return\n",
        "",
        EVENTS + "test_a_reset_is_told_in_parts",
    ),
    Mutant(
        "children-are-told-before-their-parents",
        KV_EVENTS,
        "            if self._untold:\n",
        "            if False:\n",
        EVENTS + "test_a_reset_is_told_in_parts",
    ),
    Mutant(
        "names-are-forgotten-at-once",
        KV_EVENTS,
        "if key in storing}",
        "if False}",
        EVENTS + "test_a_queue_of_any_length_is_told_whole",
    ),
    Mutant(
        "blocks-are-told-with-each-chunk",
        KV_EVENTS,
        "_stored(blocks, known, medium)",
        "_stored(blocks, 0, medium)",
        EVENTS + "test_a_block_that_two_chunks_begin_with_is_held_until_neither_is",
    ),
    Mutant(
        "late-events-find-no-name",
        KV_EVENTS,
        "        if ended:",
        "        if False:",
        EVENTS + "test_a_chunk_is_told_when_its_store_ends_before_the_server_tells_of_it",
    ),
    Mutant(
        "lost-events-are-not-missed",
        KV_EVENTS,
        "if self._gaps != self._stack.gaps:",
        "if False:",
        EVENTS + "test_when_events_were_lost_nothing_is_held_any_more",
    ),
    Mutant(
        "answers-outlive-a-reset",
        KV_EVENTS,
        "if clears == self._clears:",
        "if True:",
        EVENTS + "test_an_answer_about_what_was_forgotten_meanwhile_tells_nothing",
    ),
    Mutant(
        "anything-is-a-flag",
        "plugins/kvtier_vllm/kvtier_vllm/requests/disaggregation.py",
        "if not all(flag is None or isinstance(flag, bool) for flag in (decode, prefill)):",
        "if False:",
        "plugins/kvtier_vllm/tests/test_disaggregation.py::test_malformed_parameters_are_ignored",
    ),
    Mutant(
        "keys-lie-as-their-tensor-says",
        "plugins/kvtier_vllm/kvtier_vllm/layout.py",
        "Elements(heads, tokens, keys, 0, of_head, 1, tokens)",
        "Elements(heads, tokens, keys, 0, of_head, keys, 1)",
        "plugins/kvtier_vllm/tests/test_lossy_codecs.py::test_keys_and_values_are_where_the_layout_says",
    ),
    Mutant(
        "dflash-reads-no-further",
        "plugins/kvtier_vllm/kvtier_vllm/speculation.py",
        "speculative.num_speculative_tokens + speculative.use_dflash()",
        "speculative.num_speculative_tokens",
        "plugins/kvtier_vllm/tests/test_speculation.py::test_a_draft_model_runs_when_vllm_says_so",
    ),
    Mutant(
        "kv-that-no-draft-model-wrote",
        "plugins/kvtier_vllm/kvtier_vllm/speculation.py",
        "tokens + self.queries <= self.model.max_model_len",
        "True",
        "plugins/kvtier_vllm/tests/test_speculation.py::test_draft_kv_that_was_not_computed_for_lack_of_room_is_not_stored",
    ),
    Mutant(
        "layers-in-any-order",
        "plugins/kvtier_vllm/kvtier_vllm/layout.py",
        "[*framed, *sorted(kv_caches)]",
        "sorted(kv_caches)",
        "plugins/kvtier_vllm/tests/test_layout.py::test_the_order_of_layers_in_a_frame_is_reported",
    ),
    Mutant(
        "nobody-asks-why-reuse-is-off",
        REUSE,
        'return "vLLM turned prefix caching off, as it does where reuse would be wrong; its log says why"',
        'return ""',
        OF_REUSE + "test_an_engine_whose_cache_vllm_turns_off_is_refused",
    ),
    Mutant(
        "only-what-vllm-says-is-wrong",
        REUSE,
        'if "CPU_MLA" in names:',
        "if False:",
        OF_REUSE + "test_latent_attention_whose_kernel_computes_wrongly_behind_a_prefix_is_passed_by",
    ),
    Mutant(
        "an-unknown-wish-is-a-wish",
        REUSE,
        "if unwanted is None:",
        'if unwanted is None:\n        return ""\n    if False:',
        OF_REUSE + "test_where_nobody_noted_what_was_asked_an_engine_without_its_own_cache_is_refused",
    ),
    Mutant(
        "embeddings-from-anywhere",
        "plugins/kvtier_vllm/kvtier_vllm/layout.py",
        "if vllm_config.ec_transfer_config is not None or vllm_config.ec_manager_config.encoder_cache_manager_cls:",
        "if False:",
        "plugins/kvtier_vllm/tests/test_layout.py::test_an_engine_whose_embeddings_come_from_elsewhere_is_refused",
    ),
    Mutant(
        "whatever-is-derived-from-full-attention",
        "plugins/kvtier_vllm/kvtier_vllm/groups.py",
        "if type(spec) not in _KINDS:",
        "if not isinstance(spec, FullAttentionSpec | SlidingWindowSpec | MambaSpec):",
        "plugins/kvtier_vllm/tests/test_layout.py::test_a_kind_that_is_not_known_is_refused",
    ),
    Mutant(
        "states-behind-drafts",
        "plugins/kvtier_vllm/kvtier_vllm/groups.py",
        "offered.pop(request_id, None)",
        "pass",
        "plugins/kvtier_vllm/tests/test_layout.py::test_a_state_is_not_taken_while_drafts_may_still_be_rejected",
    ),
    Mutant(
        "weights-are-not-watched",
        CONNECTOR,
        "side.watch_weights(kv_connector_metadata.plan)",
        "pass",
        CHANGED + "reload_past_the_engine]",
    ),
    Mutant(
        "calls-of-workers-go-unheard",
        CONNECTOR,
        "follow_calls(_workers_were_called)",
        "follow_calls(lambda *_: None)",
        CHANGED + "any_function]",
    ),
    Mutant(
        "stores-of-a-worker-that-is-off-never-end",
        CONNECTOR,
        "WorkerProgress(ended, ended, off=self._off)",
        "WorkerProgress(off=self._off)",
        TROUBLE + "test_no_lookup_or_reservation_after_a_worker_has_failed",
    ),
    Mutant(
        "a-side-that-failed-keeps-its-stack",
        CONNECTOR,
        "side.abandon()",
        "run(side.status.close)",
        TROUBLE + "test_a_schedulers_half_that_failed_lets_go_of_its_stack",
    ),
    Mutant(
        "sleeps-over-new-weights",
        "plugins/kvtier_vllm/kvtier_vllm/connector.py",
        'if self.config.on_reset == "keep":',
        "if True:",
        "plugins/kvtier_vllm/tests/test_sleep.py::test_weights_may_be_others_after_a_sleep_or_pause_that_resets",
    ),
    Mutant(
        "others-load-before-the-self-test",
        CONNECTOR,
        "side.attach(kv_connector_metadata.plan)",
        "self.start_load_kv = lambda *args: (\n"
        "            side.attach(kv_connector_metadata.plan), type(self).start_load_kv(self, *args))",
        BESIDE + "test_another_connector_may_exchange_handshakes_in_front_of_kvtier",
    ),
    Mutant(
        "others-handshakes-matter",
        CONNECTOR,
        '"""Ignored: the metadata is that of a connector beside this one."""',
        "super().set_xfer_handshake_metadata_pp_aware(metadata)",
        BESIDE + "test_another_connector_may_exchange_handshakes_after_kvtier",
    ),
    Mutant(
        "broken-plugins-are-silent",
        CONNECTOR,
        "registry.log_problems()",
        "pass",
        "plugins/kvtier_vllm/tests/test_start.py::test_a_broken_plugin_is_reported_even_if_unused",
    ),
    Mutant(
        "numbers-of-our-own-kind",
        "plugins/kvtier_vllm/kvtier_vllm/metrics.py",
        "value = float(reading)",
        "value = reading",
        "plugins/kvtier_vllm/tests/test_metrics.py::test_a_report_can_be_sent_to_another_process",
    ),
    Mutant(
        "the-policy-inside-counts",
        STARTUP,
        "reports[0].failure_policy or ",
        "",
        BESIDE + "test_another_connector_may_exchange_handshakes_after_kvtier",
    ),
    Mutant(
        "producers-load",
        STARTUP,
        "loads=transfer.is_kv_consumer",
        "loads=True",
        BESIDE + "test_a_role_means_what_it_says",
    ),
    Mutant(
        "consumers-store",
        STARTUP,
        "stores=transfer.is_kv_producer",
        "stores=True",
        BESIDE + "test_a_role_means_what_it_says",
    ),
)
