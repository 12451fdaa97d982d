"""Pages of hosts, vLLM's own offloading and SGLang's HiCache over kvtier's tiers."""

from __future__ import annotations

from protections.mutant import Mutant

PAGES = "plugins/kvtier_hosts/kvtier_hosts/pages.py"
STACK = "plugins/kvtier_hosts/kvtier_hosts/page_stack.py"
VLLM = "plugins/kvtier_vllm/kvtier_vllm/offloading.py"
MODEL = "plugins/kvtier_hosts/kvtier_hosts/model_pages.py"
OF_PAGES = "plugins/kvtier_hosts/tests/test_page_store.py::"
OF_MODELS = "plugins/kvtier_hosts/tests/test_model_pages.py::"
OF_VLLM = "plugins/kvtier_vllm/tests/test_offloading_host.py::"
HICACHE = "plugins/kvtier_hosts/kvtier_hosts/hicache.py"
OF_HICACHE = "plugins/kvtier_hosts/tests/test_hicache.py::"
SGLANG = "build/sglang-0.5.23"

MUTANTS = (
    Mutant(
        "who-follows-hears-of-no-departure",
        STACK,
        "        if self._followed:",
        "        if False:",
        OF_PAGES + "test_who_follows_learns_what_came_and_what_left_every_tier",
    ),
    Mutant(
        "lost-pages-are-promised",
        VLLM,
        "JobResult(job.job_id, not lost, good,",
        "JobResult(job.job_id, True, good,",
        OF_VLLM + "test_a_damaged_file_is_computed_again",
    ),
    Mutant(
        "offloads-under-any-weights",
        VLLM,
        "namespace.facts_before_start(config, weights.fact)",
        'namespace.facts_before_start(config, "any")',
        OF_VLLM + "test_other_weights_in_the_same_folder_find_nothing",
    ),
    Mutant(
        "a-reset-is-no-news-for-a-tier",
        VLLM,
        'self.forget("its caches are reset")',
        "self._store.cancel()",
        OF_VLLM + "test_after_a_reset_nothing_is_found_nor_what_follows_after_a_restart",
    ),
    Mutant(
        "calls-of-workers-are-no-news-for-a-tier",
        VLLM,
        "follow_calls(_workers_were_called)",
        "follow_calls(lambda *_: None)",
        OF_VLLM + "test_calls_of_the_workers_may_have_changed_the_weights",
    ),
    Mutant(
        "offloads-what-was-begun-before",
        VLLM,
        "return req_context.get_state(_Since) == _Since(self._epoch)",
        "return True",
        OF_VLLM + "test_requests_that_began_before_new_weights_are_not_stored",
    ),
    Mutant(
        "offloads-adapters-by-name",
        VLLM,
        "if config.lora_config is not None:",
        "if False:",
        OF_VLLM + "test_engines_with_features_that_keys_do_not_cover_are_refused",
    ),
    Mutant(
        "epochs-of-hosts-outlive-their-engine",
        STACK,
        "self._stack.invalidate_all(self._first_namespace)  # no other",
        "pass  # no other",
        OF_PAGES + "test_pages_of_new_weights_are_deleted_at_the_end",
    ),
    Mutant(
        "jobs-wait-for-a-store-that-hangs",
        PAGES,
        "late=now > job.begun + self._wait",
        "late=False",
        OF_PAGES + "test_a_store_that_hangs_holds_no_page_of_the_host",
    ),
    Mutant(
        "jobs-of-a-closed-store-are-forgotten",
        PAGES,
        "if not self._hand_over(job):",
        "if self._hand_over(job) is None:",
        OF_PAGES + "test_jobs_of_many_threads_end_although_the_store_is_closed_meanwhile",
    ),
    Mutant(
        "many-closes-run-into-each-other",
        PAGES,
        "if self._off:  # another thread has closed it meanwhile",
        "if False:",
        OF_PAGES + "test_many_threads_may_close_it",
    ),
    Mutant(
        "a-host-goes-by-the-name-of-the-model",
        MODEL,
        '{**self._facts, "weights": self._weights()}',
        "self._facts",
        OF_MODELS + "test_other_weights_under_the_same_name_find_nothing",
    ),
    Mutant(
        "a-host-serves-on-when-weights-change",
        MODEL,
        "if self._state() != self._before:",
        "if False:",
        OF_MODELS + "test_weights_that_change_meanwhile_end_it",
    ),
    Mutant(
        "pages-of-any-kind",
        MODEL,
        "store = self._store if asked == self._page and not self._ended else None",
        "store = None if self._ended else self._store",
        OF_MODELS + "test_pages_of_a_second_kind_are_refused",
    ),
    Mutant(
        "hosts-with-any-packages",
        STACK,
        'of_pages.narrowed("installed packages", _installed())',
        "of_pages",
        OF_PAGES + "test_another_package_makes_it_cold_unless_one_has_brought_its_own",
    ),
    Mutant(
        "hicache-under-any-weights",
        HICACHE,
        '"weights": _weights(settings, model, asked),',
        "",
        OF_HICACHE + "test_other_weights_find_nothing_and_take_nothing_away",
        SGLANG,
    ),
    Mutant(
        "hicache-under-any-settings",
        HICACHE,
        '**{f"SGLang, {name}": settings[name] for name in _counted()},',
        "",
        OF_HICACHE + "test_other_settings_find_nothing",
        SGLANG,
    ),
    Mutant(
        "hicache-files-of-settings",
        HICACHE,
        "found or [name for name in _counted() if os.path.exists(str(settings[name]))]",
        "found",
        OF_HICACHE + "test_an_engine_with_what_keys_do_not_cover_is_refused",
        SGLANG,
    ),
    Mutant(
        "hicache-code-from-elsewhere",
        HICACHE,
        "if value and name.startswith(_OTHER_CODE)",
        "if name in ('SGLANG_EXTERNAL_MODEL_PACKAGE',)",
        OF_HICACHE + "test_code_from_elsewhere_is_refused_whatever_its_variable",
        SGLANG,
    ),
    Mutant(
        "hicache-ranks-meet",
        HICACHE,
        '"any" if same else rank.tp_rank',
        '"any"',
        OF_HICACHE + "test_ranks_have_pages_of_their_own_unless_their_attention_is_latent",
        SGLANG,
    ),
    Mutant(
        "hicache-adapters-by-name",
        HICACHE,
        'if settings["enable_lora"] or settings["lora_paths"]:',
        "if False:",
        OF_HICACHE + "test_an_engine_with_what_keys_do_not_cover_is_refused",
        SGLANG,
    ),
    Mutant(
        "hicache-pictures-by-name",
        HICACHE,
        "if is_multimodal_model(_architectures(model)):",
        "if False:",
        OF_HICACHE + "test_a_model_that_reads_pictures_is_refused",
        SGLANG,
    ),
    Mutant(
        "hicache-weights-of-any-folder",
        HICACHE,
        "if given and not os.path.samefile(loaded, given):",
        "if False:",
        OF_HICACHE + "test_another_folder_than_the_one_that_is_loaded_is_refused",
        SGLANG,
    ),
    Mutant(
        "hicache-stores-a-part-of-a-hybrid",
        HICACHE,
        "if host_pool_name != PoolName.KV:",
        "if False:",
        OF_HICACHE + "test_a_hybrid_model_is_refused_with_its_second_pool",
        SGLANG,
    ),
    Mutant(
        "hicache-stores-any-pool",
        HICACHE,
        "type(mem_pool_host) not in _POOLS or ",
        "",
        OF_HICACHE + "test_a_pool_that_is_not_known_is_refused",
        SGLANG,
    ),
    Mutant(
        "new-weights-are-no-news-for-hicache",
        HICACHE,
        "_note_new_weights(self)",
        "None",
        OF_HICACHE + "test_after_a_call_that_may_change_the_weights_nothing_is_stored_or_found",
        SGLANG,
    ),
    Mutant(
        "hicache-serves-what-was-not-read",
        HICACHE,
        "if key.encode() in good}",
        "}",
        OF_HICACHE + "test_a_damaged_page_ends_the_prefix",
        SGLANG,
    ),
    Mutant(
        "hicache-waits-for-ever",
        HICACHE,
        ", self._stack.load_wait + _GRACE)",
        ")",
        OF_HICACHE + "test_a_result_that_never_comes_is_no_page",
        SGLANG,
    ),
)
