"""Identity: what a namespace and a request's keys are made of."""

from __future__ import annotations

from protections.mutant import Mutant

IDENTITY = "plugins/kvtier_vllm/kvtier_vllm/identity/namespace.py"
SETTINGS = "plugins/kvtier_vllm/kvtier_vllm/identity/settings.py"
MODEL_WEIGHTS = "plugins/kvtier_vllm/kvtier_vllm/identity/model_weights.py"
REQUESTS = "plugins/kvtier_vllm/kvtier_vllm/requests/identity.py"
FIELDS = "plugins/kvtier_vllm/kvtier_vllm/requests/fields.py"
ITEMS = "plugins/kvtier_vllm/kvtier_vllm/requests/items.py"
NAMES = "plugins/kvtier_vllm/kvtier_vllm/requests/names.py"
ADAPTERS = "plugins/kvtier_vllm/kvtier_vllm/requests/adapters.py"
ABOUT_IDENTITY = "plugins/kvtier_vllm/tests/test_identity.py::"
REQUEST_TESTS = "plugins/kvtier_vllm/tests/test_request_identity.py::"
WEIGHT_TESTS = "plugins/kvtier_vllm/tests/test_weights.py::"
MIXED_UP = "plugins/kvtier_vllm/tests/test_images.py::test_items_that_the_engine_confused_under_one_name_are_not_stored"
WATCH = "plugins/kvtier_vllm/kvtier_vllm/weight_watch.py"
CHANGED = "plugins/kvtier_vllm/tests/test_changed_weights.py::test_changed_weights_find_no_earlier_kv[False-"

MUTANTS = (
    Mutant(
        "salts-of-the-locale",
        "kvtier_core/types.py",
        'os.environb.get(self.variable.encode(), b"").decode(errors="surrogateescape")',
        "os.environ.get(self.variable)",
        "tests/test_encodings.py::test_a_secret_is_the_same_in_every_locale",
    ),
    Mutant(
        "the-longest-sequence-never-counts",
        IDENTITY,
        'return not all(text and "max_model_len" not in text for text in sources)',
        "return False",
        "plugins/kvtier_vllm/tests/test_models.py::test_a_rope_that_depends_on_the_longest_sequence_is_cold_with_another_one",
    ),
    Mutant(
        "ranks-never-count",
        IDENTITY,
        "counted = facts if report.own_ranks else facts.keys()",
        "counted = facts.keys()",
        ABOUT_IDENTITY + "test_the_number_of_ranks_counts_unless_they_share",
    ),
    Mutant(
        "heads-in-any-order",
        IDENTITY,
        'facts["heads in pages"] = "; ".join(str(group.elements) for group in groups)',
        "pass",
        ABOUT_IDENTITY + "test_ranks_count_if_heads_have_another_order_or_number",
    ),
    Mutant(
        "heads-that-ranks-share-are-divided",
        "plugins/kvtier_vllm/kvtier_vllm/groups.py",
        "parallel.tensor_parallel_size != total for",
        "parallel.tensor_parallel_size < total for",
        "plugins/kvtier_vllm/tests/test_layout.py::test_ranks_count_unless_each_head_is_on_one_of_them",
    ),
    Mutant(
        "draft-layers-are-divided-alike",
        "plugins/kvtier_vllm/kvtier_vllm/groups.py",
        "if config.speculative_config is not None:",
        "if False:",
        "plugins/kvtier_vllm/tests/test_layout.py::test_ranks_with_draft_layers_count",
    ),
    Mutant(
        "scratch-is-divided-by-head",
        "plugins/kvtier_vllm/kvtier_vllm/groups.py",
        "if len(found) < len(kv_cache_config.kv_cache_groups):",
        "if False:",
        "plugins/kvtier_vllm/tests/test_layout.py::test_ranks_count_beside_layers_that_are_not_served",
    ),
    Mutant(
        "no-weights-in-the-namespace",
        IDENTITY,
        '"weights": weights_fact,',
        "",
        ABOUT_IDENTITY + "test_facts_reported_by_an_engine_change_the_namespace",
    ),
    Mutant(
        "variables-do-not-count",
        IDENTITY,
        "**settings.variables(),",
        "",
        ABOUT_IDENTITY + "test_a_variable_that_is_set_changes_the_namespace",
    ),
    Mutant(
        "code-by-name",
        IDENTITY,
        "return name if top in _OF_THE_ENGINE else",
        "return name if True else",
        ABOUT_IDENTITY + "test_a_model_from_elsewhere_counts_with_its_code",
    ),
    Mutant(
        "packages-in-the-model-do-not-count",
        IDENTITY,
        "if top not in ours]",
        "if False]",
        ABOUT_IDENTITY + "test_all_code_of_a_package_that_is_in_the_model_counts",
    ),
    Mutant(
        "weights-from-two-places",
        IDENTITY,
        "if not asked.named and _has_a_second_source(found):",
        "if False:",
        ABOUT_IDENTITY + "test_a_model_with_weights_from_two_places_is_not_guessed",
    ),
    Mutant(
        "no-page-facts-in-the-namespace",
        IDENTITY,
        "**dict(report.facts),",
        "",
        ABOUT_IDENTITY + "test_every_fact_of_the_pages_counts",
    ),
    Mutant(
        "no-groups-in-the-namespace",
        IDENTITY,
        '"; ".join(group.fact for group in groups)',
        "len(groups)",
        "plugins/kvtier_vllm/tests/test_identity.py::test_facts_reported_by_an_engine_change_the_namespace",
    ),
    Mutant(
        "settings-by-a-list",
        SETTINGS,
        "    if name in harmless.FIELDS:",
        '    if name in harmless.FIELDS or name.startswith("lora_config."):',
        ABOUT_IDENTITY + "test_every_field_of_the_configuration_counts_unless_it_is_known_to_be_harmless",
    ),
    Mutant(
        "settings-are-guessed",
        SETTINGS,
        "    kind = type(value).__name__",
        "    return type(value).__name__",
        ABOUT_IDENTITY + "test_a_setting_that_cannot_be_compared_is_not_guessed",
    ),
    Mutant(
        "credentials-are-shown",
        SETTINGS,
        "return name.startswith(_NOT_SHOWN) or (",
        "return (",
        ABOUT_IDENTITY + "test_credentials_in_free_settings_count_and_are_not_shown",
    ),
    Mutant(
        "credentials-by-a-list",
        SETTINGS,
        "bool(_LIKE_A_CREDENTIAL.search(name))",
        "False",
        ABOUT_IDENTITY + "test_possible_credentials_are_not_shown",
    ),
    Mutant(
        "libraries-are-not-configured",
        "plugins/kvtier_vllm/kvtier_vllm/identity/settings.py",
        'name.startswith(("VLLM_", *OF_LIBRARIES))',
        'name.startswith("VLLM_")',
        ABOUT_IDENTITY + "test_a_variable_that_changes_how_libraries_compute_counts_though_vllm_does_not_read_it",
    ),
    Mutant(
        "names-are-forgotten-while-they-are-used",
        NAMES,
        "            self._note(name, self._older[name])\n",
        "            pass\n",
        "plugins/kvtier_vllm/tests/test_names.py",
    ),
    Mutant(
        "any-encoding-of-the-name",
        NAMES,
        "self._encoded.get(item.name) != item.source",
        "False",
        MIXED_UP,
    ),
    Mutant(
        "any-cached-kv-of-the-name",
        NAMES,
        "return self._younger.get(name, self._older.get(name)) == content",
        "return True",
        MIXED_UP,
    ),
    Mutant(
        "no-salt-in-the-keys",
        REQUESTS,
        "KVIdentity.of(self.salt(request), content)",
        'KVIdentity.of("", content)',
        REQUEST_TESTS + "test_a_salt_separates_everything",
    ),
    Mutant(
        "adapters-by-name",
        REQUESTS,
        "self._adapters.content(adapter)",
        "adapter.lora_name",
        REQUEST_TESTS + "test_adapters_are_distinguished_by_content",
    ),
    Mutant(
        "images-by-name",
        REQUESTS,
        "content = items.content(feature)",
        "content = feature.identifier",
        "plugins/kvtier_vllm/tests/test_images.py::test_images_that_a_counter_names_are_distinguished_after_a_restart",
    ),
    Mutant(
        "adapters-may-change",
        ADAPTERS,
        "status.st_ctime_ns >= self._began.by_files - _MARGIN and",
        "False and",
        "plugins/kvtier_vllm/tests/test_adapters.py::test_an_adapter_overwritten_after_it_was_loaded_leaves_nothing",
    ),
    Mutant(
        "links-may-change",
        ADAPTERS,
        "        yield step, status\n",
        "        if not stat.S_ISLNK(status.st_mode):\n            yield step, status\n",
        REQUEST_TESTS + "test_any_replacement_of_files_is_noticed",
    ),
    Mutant(
        "folders-above-an-adapter-may-be-swapped",
        ADAPTERS,
        "return folder.st_ctime_ns == folder.st_mtime_ns",
        "return True",
        REQUEST_TESTS + "test_any_replacement_of_files_is_noticed",
    ),
    Mutant(
        "one-number-many-adapters",
        ADAPTERS,
        "if state != before:",
        "if False:",
        REQUEST_TESTS + "test_one_number_is_one_adapter",
    ),
    Mutant(
        "any-clock",
        ADAPTERS,
        "now.by_files - now.by_boot < self._began.by_files - self._began.by_boot - _APART",
        "False",
        REQUEST_TESTS + "test_a_clock_that_was_set_back_says_nothing",
    ),
    Mutant(
        "any-file-system",
        ADAPTERS,
        "not in _LOCAL:",
        "in ():",
        REQUEST_TESTS + "test_times_of_another_machine_say_nothing",
    ),
    Mutant(
        "images-by-address",
        ITEMS,
        "or not any(_tensors(element.data) for element in feature.data.values())",
        "",
        REQUEST_TESTS + "test_an_item_without_readable_content_is_bypassed",
    ),
    Mutant(
        "sessions-as-they-began",
        FIELDS,
        'Refused("it is a session: its prompt is extended later")',
        'Harmless("")',
        REQUEST_TESTS + "test_requests_that_cannot_be_identified_are_bypassed",
    ),
    Mutant(
        "unknown-fields-are-harmless",
        FIELDS,
        "raise Unidentified(meaning.why if meaning else",
        "if meaning:\n            raise Unidentified(meaning.why if meaning else",
        REQUEST_TESTS + "test_a_field_of_another_vllm_counts_when_it_is_set",
    ),
    Mutant(
        "embeddings-as-tokens",
        FIELDS,
        '"prompt_embeds": Refused("its prompt is given as embeddings")',
        '"prompt_embeds": Harmless("")',
        REQUEST_TESTS + "test_requests_that_cannot_be_identified_are_bypassed",
    ),
    Mutant(
        "weights-are-sampled",
        MODEL_WEIGHTS,
        "found = weights.digest(folder, sampled=sampled)",
        "found = weights.digest(folder, sampled=True)",
        WEIGHT_TESTS + "test_the_weights_of_an_engine_are_all_of_its_folder",
    ),
    Mutant(
        "any-loader",
        MODEL_WEIGHTS,
        "if type(loader) not in _FROM_THE_FOLDER or load.load_format == _FROM_A_CACHE:",
        "if False:",
        WEIGHT_TESTS + "test_weights_that_do_not_come_from_files_are_not_guessed",
    ),
    Mutant(
        "formats-of-weights-never-count",
        MODEL_WEIGHTS,
        'return "" if found and alike else',
        'return "" if True else',
        WEIGHT_TESTS + "test_another_format_of_the_same_files_hits_and_other_files_of_the_folder_do_not",
    ),
    Mutant(
        "weights-of-mistrals-format-are-like-others",
        MODEL_WEIGHTS,
        " and not any(os.path.basename(file).startswith(_MISTRALS) for file in found)",
        "",
        WEIGHT_TESTS + "test_formats_share_where_each_reads_the_same_files[model.safetensors consolidated.safetensors]",
    ),
    Mutant(
        "named-weights-have-any-format",
        MODEL_WEIGHTS,
        "asked.weights + _format(load),",
        "asked.weights,",
        WEIGHT_TESTS + "test_a_format_counts_however_weights_are_identified[name:acme 7]",
    ),
    Mutant("loaders-go-unheard", WATCH, "if self._loaders:", "if False:", CHANGED + "load_tensors]"),
    Mutant(
        "writes-to-weights-are-not-counted",
        WATCH,
        "if list(map(_version, readable)) != self._versions:",
        "if False:",
        CHANGED + "an_optimizers_step]",
    ),
    Mutant(
        "no-byte-of-the-weights-is-compared",
        WATCH,
        'if b"".join(self._samples) != self._bytes:',
        "if False:",
        CHANGED + "every_value_by_hand]",
    ),
    Mutant(
        "weights-may-lie-elsewhere",
        WATCH,
        "if list(map(_pointer, readable)) != self._pointers:",
        "if False:",
        CHANGED + "other_memory]",
    ),
    Mutant(
        "weights-may-be-other-objects",
        WATCH,
        "if not self._modules.are_the_same() or not self._parameters.are_the_same():",
        "if False:",
        CHANGED + "other_objects]",
    ),
)
