"""Protections, each taken out once: the test that is there for it must then fail.

    python tests/mutants.py [NAME ...]

makes a copy of the sources for each, changes the one place, and runs the one test. docs/reliability.md names them.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import attrs
from source_copy import SourceCopy

from kvtier_core.native import extension


@attrs.frozen
class Mutant:
    name: str
    file: str
    code: str  #: stands once in the file
    instead: str
    test: str  #: must fail then

    def survives(self) -> str:
        """What the test said if it did not fail; empty if it did."""
        with tempfile.TemporaryDirectory(prefix="kvtier-mutant-") as folder:
            copy = SourceCopy(Path(folder), extension.__file__)
            file = copy.folder / self.file
            source = file.read_text()
            if source.count(self.code) != 1:
                return f"{self.code!r} stands {source.count(self.code)} times in {self.file}"
            file.write_text(source.replace(self.code, self.instead))
            done = copy.test(["-x", "-q", self.test], capture_output=True, text=True)
            return "" if done.returncode == 1 else done.stdout[-2000:] + done.stderr[-1000:]


FRAME = "kvtier_core/frames/format.py"
STORE_TIER = "kvtier_core/stack/store_tier"
MANAGER = "kvtier_core/stack/manager.py"
CODEC = "kvtier_core/frames/codec.py"
KEYED_SEAL = "kvtier_core/frames/keyed_seal.py"
CODEC_IDENTITY = "kvtier_core/frames/identity.py"
ARENA = "kvtier_core/stack/arena.py"
LEASES = "kvtier_core/stack/lookup/leases.py"
SEALING = "tests/core/test_sealing.py::"
SEALED_TIERS = "tests/core/test_sealed_tiers.py::"
SEALED_NAMES = "tests/core/test_sealed_names.py::"
BUFFERS = "tests/core/test_buffers.py::"
CODEC_TESTS = "tests/core/test_codec.py::"
INCOMPATIBLE_TESTS = "tests/core/test_incompatible.py"
IDENTITY = "kvtier_core/vllm/identity/namespace.py"
SETTINGS = "kvtier_core/vllm/identity/settings.py"
DIGEST_CACHE = "kvtier_core/engine/digest_cache.py"
MODEL_WEIGHTS = "kvtier_core/vllm/identity/model_weights.py"
REQUESTS = "kvtier_core/vllm/requests/identity.py"
FIELDS = "kvtier_core/vllm/requests/fields.py"
ITEMS = "kvtier_core/vllm/requests/items.py"
NAMES = "kvtier_core/vllm/requests/names.py"
ADAPTERS = "kvtier_core/vllm/requests/adapters.py"
WEIGHTS = "kvtier_core/engine/weights.py"
SCHEDULER = "kvtier_core/engine/scheduler_side.py"
ASKING = "tests/core/test_asking.py::"
WAITING = "tests/engine/test_waiting.py::"
WORKER = "kvtier_core/engine/worker_side.py"
RECORDER = "kvtier_core/engine/recorder.py"
CONNECTOR = "kvtier_core/vllm/connector.py"
PROVENANCE = "kvtier_core/engine/scheduler/provenance.py"
REPORTS = "kvtier_core/engine/worker_reports.py"
DEVICE_MOVER = "kvtier_core/transfer/cuda/mover.py"
CUDA_PART = "csrc/cuda/part.cpp"
DEVICE_CHECKSUMS = "kvtier_core/transfer/cuda/checksums.py"
PAGE_LISTS = "kvtier_core/transfer/page_lists.py"
STORES = "kvtier_core/engine/scheduler/store_jobs.py"
LOADS = "kvtier_core/engine/scheduler/loads.py"
TRACKED = "kvtier_core/engine/scheduler/requests.py"
SELF_TEST_GATE = "kvtier_core/engine/scheduler/self_test_gate.py"
REQUEST_VIEW = "kvtier_core/engine/request_view.py"
SELF_TEST = "kvtier_core/engine/self_test.py"
STARTUP = "kvtier_core/vllm/startup.py"
TRANSFER = "kvtier_core/transfer"
DISK = "plugins/kvtier_disk/kvtier_disk"
REDIS = "plugins/kvtier_redis/kvtier_redis"
REDIS_CAPACITY = "plugins/kvtier_redis/tests/test_redis_capacity.py::"
S3 = "plugins/kvtier_s3/kvtier_s3"
S3_CAPACITY = "plugins/kvtier_s3/tests/test_s3_capacity.py::"
GDS = "plugins/kvtier_gds/kvtier_gds"
GDS_TESTS = "plugins/kvtier_gds/tests/test_gds.py::"
GDS_TROUBLE = "plugins/kvtier_gds/tests/test_gds_trouble.py::"
GDS_SECURITY = "plugins/kvtier_gds/tests/test_gds_security.py::"
ABOUT_IDENTITY = "tests/vllm/test_identity.py::"
REQUEST_TESTS = "tests/vllm/test_request_identity.py::"
WEIGHT_TESTS = "tests/vllm/test_weights.py::"
MIXED_UP = "tests/vllm/test_images.py::test_what_the_engine_mixed_up_under_one_name_is_not_kept"
SERVING = "tests/vllm/test_serving.py::"
WATCH = "kvtier_core/vllm/weight_watch.py"
CHANGED = "tests/vllm/test_changed_weights.py::test_changed_weights_meet_no_kv_of_before[False-"
TROUBLE = "tests/vllm/test_trouble.py::"
WORKER_TESTS = "tests/engine/test_worker_side.py::"
DISK_TESTS = "plugins/kvtier_disk/tests/test_disk.py::"
DISK_SECURITY = "plugins/kvtier_disk/tests/test_disk_security.py::"
DISK_TROUBLE = "plugins/kvtier_disk/tests/test_disk_trouble.py::"
SALTS = "tests/engine/test_salts.py::"
SHARED_SPACE = "kvtier_core/transfer/shared_space.py"
SHARED_SPACE_TESTS = "tests/core/test_shared_space.py::"
SHARED_DISK = "plugins/kvtier_disk/tests/test_shared_disk.py::"
SHARED_CAPACITY = "plugins/kvtier_disk/tests/test_shared_capacity.py::"
SELFTEST = "tests/vllm/test_self_test.py::"
SEAM = "tests/engine/test_scheduler_side.py::"
LAYOUTS = "kvtier_core/layouts.py"
SEARCH = "kvtier_core/stack/lookup/boundaries.py"
PARTED = "kvtier_core/stack/index/parted_index.py"
GROUPS = "tests/engine/test_groups.py::"
BESIDE = "tests/vllm/test_beside_others.py::"

MUTANTS = (
    # -- identity
    Mutant(
        "no-weights-in-the-namespace",
        IDENTITY,
        '"weights": weights_fact,',
        "",
        ABOUT_IDENTITY + "test_what_an_engine_reports_changes_the_namespace",
    ),
    Mutant(
        "settings-by-a-list",
        SETTINGS,
        "    if name in _HARMLESS_FIELDS:",
        '    if name in _HARMLESS_FIELDS or name.startswith("lora_config."):',
        ABOUT_IDENTITY + "test_every_field_of_the_configuration_counts_unless_it_is_known_to_be_harmless",
    ),
    Mutant(
        "variables-do-not-count",
        IDENTITY,
        "**settings.variables(),",
        "",
        ABOUT_IDENTITY + "test_a_variable_that_is_set_changes_the_namespace",
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
        ABOUT_IDENTITY + "test_what_may_be_a_credential_is_not_shown_whatever_it_is_called",
    ),
    Mutant(
        "one-lock-for-all-files",
        DIGEST_CACHE,
        'f"{self._name}.lock"',
        '"lock"',
        WEIGHT_TESTS + "test_nobody_waits_for_what_is_read_of_other_files",
    ),
    Mutant(
        "code-by-name",
        IDENTITY,
        "return name if top in _OF_THE_ENGINE else",
        "return name if True else",
        ABOUT_IDENTITY + "test_a_model_from_elsewhere_counts_with_its_code",
    ),
    Mutant(
        "dflash-reads-no-further",
        "kvtier_core/vllm/speculation.py",
        "speculative.num_speculative_tokens + speculative.use_dflash()",
        "speculative.num_speculative_tokens",
        "tests/vllm/test_speculation.py::test_a_draft_model_runs_when_vllm_says_so",
    ),
    Mutant(
        "names-are-forgotten-while-they-are-used",
        NAMES,
        "            self._note(name, self._older[name])\n",
        "            pass\n",
        "tests/vllm/test_names.py",
    ),
    Mutant(
        "packages-in-the-model-do-not-count",
        IDENTITY,
        "if top not in ours]",
        "if False]",
        ABOUT_IDENTITY + "test_all_code_of_a_package_that_is_in_the_model_counts",
    ),
    Mutant(
        "libraries-are-not-configured",
        "kvtier_core/vllm/identity/settings.py",
        'name.startswith(("VLLM_", *OF_LIBRARIES))',
        'name.startswith("VLLM_")',
        ABOUT_IDENTITY + "test_a_variable_that_changes_how_libraries_compute_counts_though_vllm_does_not_read_it",
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
        "layers-in-any-order",
        "kvtier_core/vllm/layout.py",
        "[*framed, *sorted(kv_caches)]",
        "sorted(kv_caches)",
        "tests/vllm/test_layout.py::test_the_order_of_layers_in_a_frame_is_told",
    ),
    Mutant(
        "no-salt-in-the-keys",
        REQUESTS,
        'ingredients["cache_salt"] = request.cache_salt',
        "pass",
        REQUEST_TESTS + "test_a_salt_separates_everything",
    ),
    Mutant(
        "adapters-by-name",
        REQUESTS,
        "self._adapters.content(adapter)",
        "adapter.lora_name",
        REQUEST_TESTS + "test_adapters_are_told_apart_by_content",
    ),
    Mutant(
        "adapters-may-change",
        ADAPTERS,
        "status.st_ctime_ns >= self._began.by_files - _MARGIN and",
        "False and",
        "tests/vllm/test_adapters.py::test_an_adapter_overwritten_after_it_was_loaded_leaves_nothing",
    ),
    Mutant(
        "links-may-change",
        ADAPTERS,
        "        yield step, status\n",
        "        if not stat.S_ISLNK(status.st_mode):\n            yield step, status\n",
        REQUEST_TESTS + "test_whatever_may_put_other_files_in_place_is_seen",
    ),
    Mutant(
        "folders-above-an-adapter-may-be-swapped",
        ADAPTERS,
        "return folder.st_ctime_ns == folder.st_mtime_ns",
        "return True",
        REQUEST_TESTS + "test_whatever_may_put_other_files_in_place_is_seen",
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
        "now.by_files - now.by_boot < self._began.by_files - self._began.by_boot - _MARGIN",
        "False",
        REQUEST_TESTS + "test_a_clock_that_was_set_back_says_nothing",
    ),
    Mutant(
        "any-file-system",
        ADAPTERS,
        "if kind not in _LOCAL:",
        "if False:",
        REQUEST_TESTS + "test_times_of_another_machine_say_nothing",
    ),
    Mutant(
        "images-by-position-alone",
        REQUEST_VIEW,
        "item.length, item.content)",
        'item.length, "")',
        REQUEST_TESTS + "test_images_count_by_content_where_they_lie",
    ),
    Mutant(
        "images-by-name",
        REQUESTS,
        "content = items.content(feature)",
        "content = feature.identifier",
        "tests/vllm/test_images.py::test_images_that_a_counter_names_are_told_apart_after_a_restart",
    ),
    Mutant(
        "images-by-address",
        ITEMS,
        "or not any(_tensors(element.data) for element in feature.data.values())",
        "",
        REQUEST_TESTS + "test_an_item_without_readable_content_is_bypassed",
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
        "sessions-as-they-began",
        FIELDS,
        'Refused("it is a session: more is added to its prompt later")',
        'Harmless("")',
        REQUEST_TESTS + "test_what_cannot_be_identified_is_bypassed",
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
        REQUEST_TESTS + "test_what_cannot_be_identified_is_bypassed",
    ),
    Mutant(
        "no-groups-in-the-namespace",
        IDENTITY,
        '"; ".join(group.fact for group in report.groups)',
        "len(report.groups)",
        "tests/vllm/test_identity.py::test_what_an_engine_reports_changes_the_namespace",
    ),
    Mutant(
        "whatever-is-derived-from-full-attention",
        "kvtier_core/vllm/groups.py",
        "if type(spec) not in _KINDS:",
        "if not isinstance(spec, FullAttentionSpec | SlidingWindowSpec | MambaSpec):",
        "tests/vllm/test_layout.py::test_a_kind_that_is_not_known_is_refused",
    ),
    Mutant(
        "embeddings-from-anywhere",
        "kvtier_core/vllm/layout.py",
        "if vllm_config.ec_transfer_config is not None or vllm_config.ec_manager_config.encoder_cache_manager_cls:",
        "if False:",
        "tests/vllm/test_layout.py::test_an_engine_whose_embeddings_come_from_elsewhere_is_refused",
    ),
    Mutant(
        "weights-are-sampled",
        MODEL_WEIGHTS,
        "found = weights.digest(folder, sampled=sampled)",
        "found = weights.digest(folder, sampled=True)",
        WEIGHT_TESTS + "test_the_weights_of_an_engine_are_all_of_its_folder",
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
        "any-loader",
        MODEL_WEIGHTS,
        "if type(loader) not in _FROM_THE_FOLDER or load.load_format == _FROM_A_CACHE:",
        "if False:",
        WEIGHT_TESTS + "test_weights_that_do_not_come_from_files_are_not_guessed",
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
        "weights-are-not-watched",
        CONNECTOR,
        "self.side.watch_weights(kv_connector_metadata.plan)",
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
        "kv-of-new-weights-under-the-old-name",
        WORKER,
        "        if self._stale:\n            self._failed.add(task)",
        "        if False:\n            self._failed.add(task)",
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
        "loads-of-a-worker-that-is-off-are-promised",
        SCHEDULER,
        "self._self_test.fail(result.progress.off)",
        "pass",
        TROUBLE + "test_nothing_is_promised_and_no_slot_reserved_when_a_worker_has_failed",
    ),
    Mutant(
        "stores-of-a-worker-that-is-off-never-end",
        CONNECTOR,
        "WorkerProgress(ended, ended, off=self._off)",
        "WorkerProgress(off=self._off)",
        TROUBLE + "test_nothing_is_promised_and_no_slot_reserved_when_a_worker_has_failed",
    ),
    Mutant(
        "a-side-that-failed-keeps-its-stack",
        CONNECTOR,
        "side.abandon()",
        "run(side.status.close)",
        TROUBLE + "test_a_schedulers_half_that_failed_lets_go_of_its_stack",
    ),
    Mutant(
        "a-stack-that-raises-keeps-its-threads",
        MANAGER,
        "        try:\n            return self.drain(timeout)\n        finally:",
        "        if self.drain(timeout) is not None:",
        TROUBLE + "test_a_stack_that_raises_is_let_go_of_all_the_same",
    ),
    Mutant(
        "sleeps-over-new-weights",
        "kvtier_core/vllm/connector.py",
        'if self.config.on_reset == "keep":',
        "if True:",
        "tests/vllm/test_sleep.py::test_weights_may_be_others_after_a_sleep_or_pause_that_resets",
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
        "what-others-loaded-is-ours",
        PROVENANCE,
        "return end if trusted >= start and step.writes_all else min(trusted, start)",
        "return end",
        BESIDE + "test_what_others_loaded_is_not_stored_nor_what_stands_on_it[False-True]",
    ),
    Mutant(
        "kv-that-no-draft-model-wrote",
        "kvtier_core/vllm/speculation.py",
        "tokens + self.queries <= self.model.max_model_len",
        "True",
        "tests/vllm/test_speculation.py::test_what_a_draft_model_had_no_room_to_compute_is_not_stored",
    ),
    Mutant(
        "the-draft-kv-of-another-token",
        "kvtier_core/engine/scheduler/requests.py",
        "if self._lookahead:",
        "if False:",
        "tests/engine/test_lookahead.py::test_a_chunk_is_found_where_the_tokens_behind_it_are_the_same_too",
    ),
    Mutant(
        "draft-kv-that-is-not-final",
        "kvtier_core/engine/scheduler_side.py",
        "state.trusted + bool(self._lookahead)",
        "state.trusted + self._lookahead",
        "tests/engine/test_lookahead.py::test_a_chunk_is_found_where_the_tokens_behind_it_are_the_same_too",
    ),
    Mutant(
        "numbers-of-our-own-kind",
        "kvtier_core/vllm/metrics.py",
        "value = float(reading)",
        "value = reading",
        "tests/vllm/test_metrics.py::test_a_report_can_be_sent_to_another_process",
    ),
    Mutant(
        "states-behind-drafts",
        "kvtier_core/vllm/groups.py",
        "offered.pop(request_id, None)",
        "pass",
        "tests/vllm/test_layout.py::test_a_state_is_not_taken_while_drafts_may_still_be_rejected",
    ),
    Mutant(
        "zeroed-before-they-are-read",
        "kvtier_core/engine/worker_side.py",
        "if self._fence_at_once:",
        "if False:",
        "tests/engine/test_worker_side.py::test_stores_of_an_engine_that_overwrites_blocks_early_are_fenced_at_once",
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
        "bad-blocks-go-unheard",
        SCHEDULER,
        "if self._provenance.trusts_any(result.invalid_blocks):",
        "if False:",
        BESIDE + "test_what_others_loaded_is_not_stored_nor_what_stands_on_it[True-False]",
    ),
    Mutant(
        "others-load-before-the-self-test",
        CONNECTOR,
        "self.side.attach(kv_connector_metadata.plan)",
        "self.start_load_kv = lambda *args: (\n"
        "            self.side.attach(kv_connector_metadata.plan), type(self).start_load_kv(self, *args))",
        BESIDE + "test_another_connector_may_exchange_handshakes_in_front_of_kvtier",
    ),
    Mutant(
        "others-handshakes-matter",
        CONNECTOR,
        '"""Ignored: the metadata is that of a connector beside this one."""',
        "super().set_xfer_handshake_metadata_pp_aware(metadata)",
        BESIDE + "test_or_behind_it",
    ),
    Mutant(
        "the-policy-inside-counts",
        STARTUP,
        "reports[0].failure_policy or ",
        "",
        BESIDE + "test_or_behind_it",
    ),
    Mutant(
        "producers-load",
        STARTUP,
        "loads=self.transfer.is_kv_consumer",
        "loads=True",
        BESIDE + "test_a_role_means_what_it_says",
    ),
    Mutant(
        "consumers-store",
        STARTUP,
        "stores=self.transfer.is_kv_producer",
        "stores=True",
        BESIDE + "test_a_role_means_what_it_says",
    ),
    Mutant(
        "keys-by-the-hash-of-the-process",
        "kvtier_core/builtin/chained.py",
        '"kvtier-root"',
        'str(hash("root"))[:16]',
        "tests/core/test_chained.py",
    ),
    # -- copies
    Mutant(
        "no-self-test",
        WORKER,
        "if wrong := try_copies(mover, table, self._caches, own):",
        'if wrong := "":',
        SELFTEST + "test_an_engine_with_another_layout_is_caught_before_traffic",
    ),
    Mutant(
        "a-self-test-nobody-reads",
        SELF_TEST_GATE,
        "if failures := [outcome for outcome in outcomes if outcome]:",
        "if failures := []:",
        SELFTEST + "test_an_arena_that_cannot_be_reached_is_told_and_not_used",
    ),
    # -- frames
    Mutant(
        "the-self-test-shifts-sampling",
        SELF_TEST,
        "random_(generator=generator)",
        "random_()",
        SELFTEST + "test_it_draws_from_generators_of_its_own",
    ),
    Mutant(
        "the-self-test-draws-from-pythons-generator",
        SELF_TEST,
        "drawn_from = random.Random()",
        "drawn_from = random",
        SELFTEST + "test_it_draws_from_generators_of_its_own",
    ),
    Mutant(
        "others-overtake-stores",
        SCHEDULER,
        "self._new_blocks.union(step.new_blocks)",
        "step.new_blocks",
        SEAM + "test_nor_does_another_connector_overwrite_it",
    ),
    Mutant(
        "no-fence",
        STORES,
        "if not store.blocks.isdisjoint(new_blocks))",
        "if False)",
        "tests/vllm/test_store_fence.py::test_the_engine_overtakes_no_store",
    ),
    Mutant(
        "stores-before-their-forward",
        DEVICE_MOVER,
        "through.kernels.wait_event(self._now(self._engine.current_stream(self._device)))",
        "pass",
        "tests/core/test_cuda_mover.py::test_whatever_the_streams_do_first",
    ),
    Mutant(
        "loads-overtake-stores",
        DEVICE_MOVER,
        "self._loads.kernels.wait_event(other.pages)",
        "pass",
        "tests/core/test_cuda_mover.py::test_whatever_the_streams_do_first",
    ),
    Mutant(
        "gathered-is-stored",
        DEVICE_MOVER,
        "self._now(self._stores.bus), result",
        "self._now(self._stores.kernels), result",
        "tests/core/test_cuda_mover.py::test_whatever_the_streams_do_first",
    ),
    Mutant(
        "copy-engines-before-the-forward",
        CUDA_PART,
        "if (!order(streams.kernels, turn_, streams.bus)) return false;",
        "",
        "tests/core/test_cuda_mover.py::test_whatever_the_streams_do_first",
    ),
    Mutant(
        "pages-are-free-before-copy-engines-read-them",
        CUDA_PART,
        "return order(streams.bus, turn_, streams.kernels) && listed;",
        "return listed;",
        "tests/core/test_cuda_mover.py::test_whatever_the_streams_do_first",
    ),
    Mutant(
        "gathers-into-a-half-that-is-not-empty",
        CUDA_PART,
        'if (half.used && !device_.call(&Driver::wait, "wait for an event", streams.kernels, half.emptied, 0u)) '
        "return false;",
        "",
        "tests/core/test_cuda_mover.py::test_whatever_the_streams_do_first",
    ),
    Mutant(
        "loads-into-a-half-that-is-not-empty",
        CUDA_PART,
        'if (half.used && !device_.call(&Driver::wait, "wait for an event", streams.bus, half.emptied, 0u)) '
        "return false;",
        "",
        "tests/core/test_cuda_mover.py::test_the_slices_of_a_job_use_the_same_memory_one_after_the_other",
    ),
    Mutant(
        "half-a-store-is-over-before-it-has-ended",
        CUDA_PART,
        "if (!done) order(",
        "if (false) order(",
        "tests/core/test_cuda_mover.py::test_what_fails_half_way_is_reported_when_no_page_is_read_any_more",
    ),
    Mutant(
        "holes-are-copied-too",
        CUDA_PART,
        "if (std::all_of(row, row + chunks.width, [](int32_t block) { return block >= 0; })) {",
        "if (true) {",
        "tests/core/test_cuda_mover.py::test_what_a_job_stores",
    ),
    Mutant(
        "checksums-of-holes",
        DEVICE_MOVER,
        "if whole and NO_BLOCK not in read else None",
        "if whole else None",
        "tests/core/test_device_checksums.py::test_a_staged_store_reports_those_of_its_shards_if_they_are_whole",
    ),
    Mutant(
        "checksums-are-told-before-they-are-computed",
        CUDA_PART,
        "done = order(streams.kernels, turn_, streams.bus) &&",
        "done =",
        "tests/core/test_device_checksums.py::test_a_staged_store_reports_those_of_its_shards_if_they_are_whole",
    ),
    Mutant(
        "two-jobs-tell-their-checksums-in-one-place",
        DEVICE_CHECKSUMS,
        "self._free.pop()",
        "self._free[-1]",
        "tests/core/test_device_checksums.py::test_jobs_under_way_at_once_have_their_own",
    ),
    Mutant(
        "any-checksum-of-a-device-is-believed",
        DEVICE_CHECKSUMS,
        "!= told[0]:",
        "is None:",
        "tests/core/test_device_checksums.py::test_what_the_host_computes_otherwise_is_not_reported_and_told_once",
    ),
    Mutant(
        "any-slot-at-any-time",
        DEVICE_MOVER,
        "return (self.locked.end - self.address) // self.nbytes",
        "return self.count",
        "tests/core/test_cuda_mover.py::test_what_touches_no_locked_slot_is_a_miss_and_so_is_a_load_of_any",
    ),
    Mutant(
        "copies-across-locked-pieces",
        "csrc/cuda/copies.cpp",
        "std::min(nbytes, left)",
        "nbytes",
        "tests/core/test_cuda_library.py::test_no_copy_reaches_from_one_locked_piece_into_the_next",
    ),
    Mutant(
        "one-system-page-in-two-pieces",
        "kvtier_core/transfer/cuda/host_registration.py",
        "self.base = pieces.address // mmap.PAGESIZE * mmap.PAGESIZE",
        "self.base = pieces.address",
        "tests/core/test_cuda_mover.py::test_pieces_begin_and_end_where_pages_of_the_system_do",
    ),
    Mutant(
        "calls-of-any-length",
        "csrc/cuda/copies.h",
        "kMost = 2048",
        "kMost = 4096",
        "tests/core/test_cuda_library.py::test_no_call_has_more_copies_than_drivers_survive",
    ),
    Mutant(
        "kernels-write-to-the-host",
        "csrc/cuda/kvtier_cuda.cpp",
        "return !to_slots && device->has_kernels()",
        "return device->has_kernels()",
        "tests/core/test_cuda_library.py::test_a_kernel_never_writes_to_the_host",
    ),
    Mutant(
        "empty-slots-are-served",
        STORES,
        "store.keys[store.filled :]",
        "()",
        "tests/engine/test_scheduler_side.py::test_of_a_store_that_filled_some_slots_the_leading_chunks_are_kept",
    ),
    Mutant(
        "an-empty-slot-counts-as-filled",
        WORKER,
        "leading = min(begun.empty)",
        "leading = begun.slots",
        "tests/engine/test_worker_side.py::test_of_a_store_that_fills_some_slots_the_leading_ones_are_reported",
    ),
    Mutant(
        "block-ids-of-any-number",
        PAGE_LISTS,
        "good = {tuple(map(len, chunk)) for chunk in pages} <= {part.blocks}",
        "good = True",
        "tests/core/test_mover.py::test_wrong_numbers_touch_no_memory",
    ),
    Mutant(
        "one-block-table-for-all-groups",
        PAGE_LISTS,
        "place.offset, firsts[place.group], place.blocks",
        "place.offset, 0, place.blocks",
        "tests/core/test_mover.py::test_store",
    ),
    Mutant(
        "no-checksum",
        FRAME,
        "header.payload_checksum != payload_checksum",
        "False",
        "tests/core/test_frame.py",
    ),
    Mutant(
        "no-checksum-of-the-header",
        FRAME,
        "crc32(frame[: _FIELDS.size]) != checksum",
        "False",
        "tests/core/test_frame.py",
    ),
    Mutant("any-codec", FRAME, "header.codec != codec", "False", INCOMPATIBLE_TESTS),
    Mutant(
        "version-1-is-damage",
        FRAME,
        "    FrameError.VERSION,\n    FrameError.SEAL,",
        "    FrameError.SEAL,",
        "tests/core/test_frame.py::test_a_frame_of_version_1_is_incompatible",
    ),
    Mutant(
        "options-do-not-count",
        CODEC_IDENTITY,
        "[name, version, _fields(type(config), config)]",
        "[name, version]",
        CODEC_TESTS + "test_every_option_counts",
    ),
    Mutant(
        "versions-of-plugins-do-not-count",
        CODEC_IDENTITY,
        "[name, version, _fields(type(config), config)]",
        "[name, _fields(type(config), config)]",
        CODEC_TESTS + "test_the_format_version_of_a_plugin_counts",
    ),
    Mutant(
        "options-are-guessed",
        CODEC_IDENTITY,
        '    raise _unusable(f"its option',
        '    return str(value)\n    raise _unusable(f"its option',
        CODEC_TESTS + "test_a_codec_that_cannot_be_named_is_not_opened",
    ),
    Mutant(
        "any-serializer-may-be-raw",
        CODEC_IDENTITY,
        "return CodecIdentity(name, digest, lossless)",
        'return RAW if name == "raw" else CodecIdentity(name, digest, lossless)',
        CODEC_TESTS + "test_no_serializer_passes_for_raw",
    ),
    Mutant(
        "decoders-are-believed",
        CODEC,
        " or header_of(frame).decoded_checksum != checksum",
        "",
        CODEC_TESTS + "test_what_another_codec_wrote_is_incompatible",
    ),
    Mutant(
        "one-decode-fails-its-batch",
        CODEC,
        "contextlib.suppress(Exception)",
        "contextlib.suppress(BackendError)",
        CODEC_TESTS + "test_whatever_decode_does_is_its_frames_alone",
    ),
    Mutant(
        "incompatible-is-damage",
        "kvtier_core/stack/store_tier/frame_io.py",
        "ReadStatus.INCOMPATIBLE if error.incompatible else ReadStatus.CORRUPT",
        "ReadStatus.CORRUPT",
        INCOMPATIBLE_TESTS + "::test_what_another_codec_wrote_is_a_miss_and_stays",
    ),
    Mutant(
        "incompatible-takes-no-room",
        STORE_TIER + "/space.py",
        "return self.limit.at(self._clock()) - self._kept_nbytes - self.incompatible.nbytes",
        "return self.limit.at(self._clock()) - self._kept_nbytes",
        INCOMPATIBLE_TESTS + "::test_its_room_is_counted_until_it_is_gone",
    ),
    Mutant(
        "incompatible-takes-room-for-ever",
        STORE_TIER + "/writes.py",
        "        self._deletes.evict_incompatible(-self._space.room)\n        self.start()",
        "        self.start()",
        INCOMPATIBLE_TESTS + "::test_its_room_is_counted_until_it_is_gone",
    ),
    Mutant(
        "evicts-what-is-written-over",
        STORE_TIER + "/writes.py",
        "self._space.incompatible.begin_write(keys)",
        "pass",
        INCOMPATIBLE_TESTS + "::test_what_is_being_written_over_is_not_evicted_for_it",
    ),
    Mutant(
        "asks-for-incompatible-frames-again-and-again",
        STORE_TIER + "/reads.py",
        "self._lookup_queue.unusable(keys)",
        "pass",
        INCOMPATIBLE_TESTS + "::test_in_a_shared_store_nothing_of_others_is_deleted_or_asked_for_again_and_again",
    ),
    Mutant(
        "decoded-is-exact",
        CODEC,
        "RAW if self.identity.lossless else DECODED_LOSSY",
        "RAW",
        CODEC_TESTS + "test_what_a_lossy_codec_decoded_says_so",
    ),
    Mutant(
        "inexact-frames-are-written",
        CODEC,
        "if header.codec != RAW:",
        "if False:",
        CODEC_TESTS + "test_what_a_lossy_codec_decoded_says_so",
    ),
    Mutant(
        "inexact-chunks-go-down",
        ARENA,
        "if self.has(key) and key not in self._inexact]",
        "if self.has(key)]",
        INCOMPATIBLE_TESTS + "::test_it_is_written_to_no_other_tier",
    ),
    Mutant(
        "lossy-loads-are-exact",
        LOADS,
        "pages[: state.found.exact]",
        "pages",
        "tests/vllm/test_lossy.py::test_what_is_computed_on_lossy_kv_is_not_stored",
    ),
    Mutant(
        "inexact-for-ever",
        ARENA,
        "self._inexact.difference_update(keys)",
        "pass",
        INCOMPATIBLE_TESTS + "::test_what_is_computed_anew_is_exact_again",
    ),
    Mutant(
        "lossy-decoders-are-not-tried",
        CODEC,
        "return crc32(decoded)",
        "return 0",
        CODEC_TESTS + "test_the_checksum_of_a_lossy_frame_is_of_what_it_decodes_to",
    ),
    Mutant(
        "fsck-removes-what-others-can-read",
        "kvtier_core/cli/fsck.py",
        "_HARMLESS = {Finding.WHOLE, Finding.INCOMPATIBLE, Finding.POLICY}",
        "_HARMLESS = {Finding.WHOLE, Finding.POLICY}",
        "plugins/kvtier_disk/tests/test_fsck.py::test_what_another_codec_or_version_wrote_is_told_and_left",
    ),
    Mutant("any-namespace", FRAME, "header.namespace != namespace", "False", "tests/core/test_frame.py"),
    Mutant("any-key", FRAME, "header.key != key", "False", "tests/core/test_frame.py"),
    Mutant(
        "any-length",
        FRAME,
        "payload_nbytes is not None and header.payload_nbytes != payload_nbytes",
        "False",
        "tests/core/test_frame.py",
    ),
    Mutant(
        "believes-the-length",
        FRAME,
        "header.payload_nbytes > len(frame) - FRAME_ALIGNMENT",
        "False",
        "tests/core/test_frame.py",
    ),
    Mutant(
        "damage-is-good",
        STORE_TIER + "/frame_io.py",
        "    if error is None:\n",
        "    if True:\n",
        "tests/core/test_store_tier.py",
    ),
    Mutant(
        "no-quarantine",
        STORE_TIER + "/deletes.py",
        "self._delete(corrupt, self._backend.quarantine)",
        "self._delete(corrupt, self._backend.delete)",
        "tests/core/test_store_tier.py",
    ),
    Mutant(
        "quarantine-without-end",
        DISK + "/backend.py",
        "if nbytes and kept + nbytes <= self._quarantine_nbytes:",
        "if nbytes:",
        "plugins/kvtier_disk/tests/test_disk.py::test_damaged_frames_are_kept_aside_until_there_are_too_many",
    ),
    Mutant(
        "lost-frames-are-left",
        STORE_TIER + "/deletes.py",
        "self._delete(missing, self._backend.delete)",
        "self._index.remove(missing)",
        "tests/core/test_store_tier.py::test_what_is_left_of_a_lost_frame_leaves_too",
    ),
    # -- crash
    Mutant(
        "written-in-place",
        DISK + "/frames.py",
        'return f"{stem}.{writer}{_UNFINISHED}" if writer else f"{stem}{_UNFINISHED}"',
        "return name",
        "plugins/kvtier_disk/tests/test_disk.py::test_a_writer_that_dies_half_way_leaves_nothing_under_the_name",
    ),
    Mutant(
        "no-sweep",
        DISK + "/opening.py",
        "                place.remove(root)\n        elif",
        "                pass\n        elif",
        "plugins/kvtier_disk/tests/test_disk.py::test_open_removes_what_is_no_frame",
    ),
    Mutant(
        "forgets-a-file",
        DISK + "/folder_backend.py",
        "[found for _, found in everything_of(root, self._name)]",
        "[found for _, found in everything_of(root, self._name)][1:]",
        "plugins/kvtier_disk/tests/test_disk_laws.py",
    ),
    Mutant(
        "any-memory-is-believed",
        "kvtier_core/stack/store_tier/policy_state.py",
        "if self._codec.verify_raw(self.key, found, self._length) is None:",
        "if True:",
        "tests/core/test_policy_state_on_disk.py::test_a_damaged_memory_is_a_cold_start",
    ),
    Mutant(
        "what-was-learned-waits-for-the-end",
        STORE_TIER + "/tier.py",
        "if self._policy_state.due(now) and",
        "if False and",
        "tests/core/test_policy_state_on_disk.py::test_whoever_is_killed_leaves_what_it_knew_a_minute_ago",
    ),
    Mutant(
        "a-memory-of-each-epoch",
        "kvtier_core/stack/store_tier/policy_state.py",
        "self._backend.write([self.key], [sealed])",
        "self._backend.write([key_of(self._namespace.renewed())], [sealed])",
        "tests/core/test_policy_state_on_disk.py::test_an_epoch_leaves_no_memory_of_its_own",
    ),
    # -- data parallelism
    Mutant(
        "replicas-share-a-folder",
        DISK + "/config.py",
        "if ctx.replicas > 1 else self.path",
        "if False else self.path",
        "plugins/kvtier_disk/tests/test_fsck.py::test_an_engine_alone_leaves_the_folders_of_several_alone",
    ),
    Mutant(
        "each-replica-takes-all",
        "kvtier_core/config/compose.py",
        "capacity=Nbytes((tier.capacity or 0) // sharers)",
        "capacity=Nbytes(tier.capacity or 0)",
        "tests/core/test_config.py::test_engines_that_share_a_configuration_share_the_capacities",
    ),
    # -- faults
    Mutant(
        "any-number-of-threads",
        "kvtier_core/config/model.py",
        "validator=[attrs.validators.ge(1), attrs.validators.le(_MOST_THREADS)]",
        "validator=attrs.validators.ge(1)",
        "tests/core/test_config.py::test_threads_are_bounded",
    ),
    Mutant(
        "copies-in-its-sleep",
        WORKER,
        "        if self._suspended:\n            mover = None\n",
        "",
        "tests/vllm/test_sleep.py::test_no_page_is_touched_while_the_engine_sleeps",
    ),
    Mutant(
        "no-limit-in-flight",
        STORE_TIER + "/tier.py",
        "room = self._inflight_limit - self._begun_nbytes",
        "room = 1 << 60",
        "tests/core/test_store_tier.py",
    ),
    Mutant(
        "room-for-what-is-not-read",
        "kvtier_core/stack/promotion.py",
        "now = here[: tier.may_read(self._frame_nbytes)]",
        "now = here",
        "tests/core/test_manager.py::test_no_room_is_made_for_more_than_may_be_in_flight",
    ),
    Mutant(
        "a-probe-never-ends",
        "kvtier_core/stack/store_tier/writes.py",
        "            self._health.give_up(self._health.writes)\n",
        "",
        "tests/core/test_store_queue.py::test_a_write_that_is_dropped_while_it_probes_ends_the_probe",
    ),
    Mutant(
        "no-breaker",
        "kvtier_core/stack/store_tier/breaker.py",
        "elif self._failures < _FAILURES:",
        "elif True:",
        "tests/core/test_breaker.py",
    ),
    Mutant(
        "any-count",
        CODEC,
        "if not 0 < count <= len(buffer):",
        "if False:",
        "tests/core/test_store_tier.py",
    ),
    Mutant(
        "any-number-of-answers",
        "kvtier_core/stack/batches.py",
        "if len(answers) != len(keys):",
        "if False:",
        "tests/core/test_store_tier.py",
    ),
    Mutant(
        "waits-for-ever",
        "kvtier_core/engine/scheduler/waiting.py",
        "if sum(state.waits.values()) >= longest:",
        "if False:",
        "tests/vllm/test_bad_disks.py::test_a_disk_that_hangs_stalls_nobody",
    ),
    Mutant(
        "closes-without-a-deadline",
        STORE_TIER + "/tier.py",
        "run_within(self._close, timeout) is not None",
        "self.backend.close() is None",
        "tests/core/test_faults.py::test_a_store_that_hangs_in_close_keeps_nobody",
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
        "events-for-everyone",
        "kvtier_core/observers/jsonl.py",
        "name, flags, 0o600)",
        "name, flags, 0o644)",
        "tests/core/test_observers.py::test_it_is_its_owners_alone",
    ),
    Mutant(
        "events-without-end",
        "kvtier_core/observers/jsonl.py",
        "                    file.unlink()\n",
        "",
        "tests/core/test_observers.py::test_all_files_together_keep_within_the_capacity",
    ),
    Mutant(
        "events-with-keys",
        "kvtier_core/observers/jsonl.py",
        "if self._keys and event.keys else",
        "if event.keys else",
        "tests/core/test_observers.py::test_a_line_says_what_is_known",
    ),
    Mutant(
        "metrics-for-the-network",
        "kvtier_core/observers/prometheus.py",
        'host: str = "127.0.0.1"',
        'host: str = "0.0.0.0"',
        "tests/core/test_observers.py::test_it_binds_to_loopback_unless_told_otherwise",
    ),
    Mutant(
        "metrics-for-every-user",
        "kvtier_core/observers/endpoint.py",
        "        os.chmod(self._path, 0o600)\n",
        "",
        "tests/core/test_observers.py::test_a_socket_is_its_owners_alone_and_replaces_what_a_kill_has_left",
    ),
    Mutant(
        "files-are-sockets",
        "kvtier_core/observers/endpoint.py",
        "if self._path.is_socket():",
        "if True:",
        "tests/core/test_observers.py::test_no_file_is_taken_for_a_socket",
    ),
    Mutant(
        "a-client-that-trickles-holds-the-metrics",
        "kvtier_core/observers/endpoint.py",
        "        left = self._deadline - time.monotonic()\n",
        "        left = _PATIENCE\n",
        "tests/core/test_observers.py::test_nor_does_one_that_says_a_byte_now_and_then",
    ),
    Mutant(
        "the-end-waits-for-clients",
        "kvtier_core/observers/endpoint.py",
        "        self._server.hang_up()\n",
        "",
        "tests/core/test_observers.py::test_nor_does_its_end_wait_for_a_client",
    ),
    Mutant(
        "plugins-end-threads",
        "kvtier_core/transfer/io_pool.py",
        "except BaseException as error:  # SystemExit",
        "except Exception as error:  # SystemExit",
        "tests/core/test_io_pool.py",
    ),
    Mutant(
        "one-frames-failure-is-everybodys",
        TRANSFER + "/disk_access.py",
        "if failure.errno not in OF_ONE_FRAME:",
        "if True:",
        DISK_TROUBLE + "test_a_bad_sector_is_one_frames_alone",
    ),
    Mutant(
        "a-dead-device-is-a-bad-frame",
        TRANSFER + "/disk_access.py",
        "            probe_device(folder)\n",
        "            pass\n",
        DISK_TROUBLE + "test_a_device_that_fails_and_comes_back",
    ),
    Mutant(
        "one-key-fails-its-batch",
        "kvtier_core/stack/store_tier/frame_io.py",
        "failed = ReadStatus.IO_ERROR if backend.shared else ReadStatus.CORRUPT",
        "raise next((count for count in counts if isinstance(count, BackendError)), BackendError('none'))",
        "tests/core/test_store_tier.py::test_what_cannot_be_read_is_its_keys_alone",
    ),
    Mutant(
        "a-frame-that-goes-stops-the-scan",
        f"{DISK}/frames.py",
        "except FileNotFoundError:  # deleted, or written whole, since it was listed",
        "except NotImplementedError:",
        "plugins/kvtier_disk/tests/test_disk_laws.py::"
        "test_a_frame_that_is_deleted_while_the_folder_is_listed_stops_no_scan",
    ),
    Mutant(
        "one-that-stays-keeps-all",
        STORE_TIER + "/deletes.py",
        "            if not again:\n                self._health.record",
        "            if True:\n                self._health.record",
        "tests/core/test_store_tier.py::test_one_that_can_never_be_deleted_keeps_no_other",
    ),
    Mutant(
        "room-that-a-failed-write-keeps",
        DISK + "/folder_backend.py",
        "except BaseException as error:  # OSError, or BackendError for a folder that others may write to",
        "except OSError as error:",
        "plugins/kvtier_disk/tests/test_space_account.py::test_the_account_agrees_with_the_disk_wherever_it_fails",
    ),
    Mutant(
        "room-that-is-not-there",
        DISK + "/space_account.py",
        "            if missing > 0:\n                raise StoreFull(",
        "            if False:\n                raise StoreFull(",
        "plugins/kvtier_disk/tests/test_space_account.py::test_a_frame_in_the_way_that_cannot_be_removed_is_a_full_store",
    ),
    Mutant(
        "any-length-is-a-frames",
        DISK + "/backend.py",
        "return found.nbytes <= (self._longest if found.namespace_folder == self._name else self._capacity)",
        "return True",
        DISK_TESTS + "test_a_file_of_impossible_length_is_no_frame",
    ),
    Mutant(
        "reads-whole-files",
        FRAME,
        "_PIECE_NBYTES = 4 << 20",
        "_PIECE_NBYTES = 4 << 40",
        "plugins/kvtier_disk/tests/test_fsck.py::test_a_large_frame_is_read_in_pieces",
    ),
    Mutant(
        "what-cannot-be-read-stays",
        "kvtier_core/cli/fsck.py",
        "removed = finding in self.removable and",
        "removed = finding in self.removable - {Finding.UNREADABLE} and",
        "plugins/kvtier_disk/tests/test_fsck.py::test_what_cannot_be_read_is_removed",
    ),
    Mutant(
        "a-full-store-is-a-broken-one",
        STORE_TIER + "/health.py",
        "if outcome.error is None or isinstance(outcome.error, StoreFull):",
        "if outcome.error is None:",
        "tests/core/test_store_tier.py::test_a_store_without_any_room_is_full_and_not_broken",
    ),
    Mutant(
        "the-granted-is-all-there",
        STORE_TIER + "/space.py",
        "        self._lowered = min(",
        "        min(",
        "tests/core/test_full_disk.py::test_newcomers_come_in_though_the_file_system_is_full",
    ),
    Mutant(
        "full-for-ever",
        STORE_TIER + "/space.py",
        "if self._until is not None and now >= self._until:",
        "if False:",
        "tests/core/test_full_disk.py::test_other_files_come_and_go",
    ),
    Mutant(
        "errors-of-the-system-escape",
        TRANSFER + "/folder.py",
        'raise BackendError(f"{error.filename or path}: {error.strerror}") from error',
        "raise",
        "plugins/kvtier_disk/tests/test_disk_trouble.py",
    ),
    Mutant(
        "hangs-go-unnoticed",
        STORE_TIER + "/health.py",
        "hangs = self._pool.longest() > self._hangs_after",
        "hangs = False",
        "tests/core/test_store_tier.py::test_while_a_call_hangs_nobody_else_waits_for_the_store",
    ),
    # -- leases, admission, shared stores
    Mutant(
        "what-comes-up-is-anybodys",
        LEASES,
        "self.pin(awaited, lease, holder)",
        "pass",
        "tests/core/test_manager.py::test_what_comes_up_is_kept_for_whom_asked",
    ),
    Mutant(
        "another-path-keeps-the-old-lease",
        LEASES,
        "            self.release(holder)\n            lease = None",
        "            lease = None",
        "tests/core/test_manager.py::test_another_path_of_a_holder_ends_what_it_had_found",
    ),
    Mutant(
        "another-path-keeps-what-lies-beyond",
        LEASES,
        "return {chunk_of(key) for key in lease.beyond} <= set(path)",
        "return True",
        "tests/core/test_manager.py::test_a_shorter_path_of_a_holder_keeps_nothing_beyond_it",
    ),
    Mutant(
        "a-holder-finds-what-was-invalidated",
        LEASES,
        "            lease.valid = False\n",
        "",
        "tests/core/test_manager.py::test_a_holder_does_not_find_again_what_was_invalidated",
    ),
    Mutant(
        "a-lookup-takes-the-pins-of-a-load",
        LOADS,
        "        if self._holders.get(state.view.request_id) == state.holder:",
        "        if False:",
        "tests/engine/test_scheduler_side.py::test_a_lookup_during_a_load_finds_nothing_and_takes_no_pin_from_it",
    ),
    Mutant(
        "all-parts-are-tested-in-one-slot",
        WORKER,
        "own = slots[self._rank % plan.layout.replicas :: plan.layout.replicas]",
        "own = [slots[self._rank % plan.layout.replicas]] * len(plan.layout.parts)",
        "tests/engine/test_worker_side.py::test_a_rank_tests_one_part_while_another_one_tests_another_part",
    ),
    Mutant(
        "a-slot-for-each-self-test",
        MANAGER,
        "        if not self._self_test_keys:",
        "        if True:",
        "tests/core/test_manager.py::test_self_test_slots_are_reserved_once",
    ),
    Mutant(
        "policies-are-asked-again-to-write",
        STORE_TIER + "/tier.py",
        "        writable = set(self._writable([frame.key for frame in frames]))",
        "        writable = set(self.would_admit([frame.key for frame in frames]))",
        "tests/core/test_manager.py::test_a_policy_is_asked_once_about_a_chunk",
    ),
    Mutant(
        "a-late-namespace-for-early-keys",
        STORE_TIER + "/writes.py",
        "self._waiting.append(_Group(group, codec, release))",
        "self._waiting.append(_Group(group, codec.with_namespace(codec.namespace.renewed()), release))",
        "tests/core/test_store_tier.py::test_what_waits_for_its_write_is_encoded_under_the_namespace_of_its_key",
    ),
    Mutant(
        "room-is-made-in-a-shared-store",
        STORE_TIER + "/deletes.py",
        "        if self._backend.shared:\n            self._index.remove(victims",
        "        if False:\n            self._index.remove(victims",
        "tests/core/test_store_tier.py::test_nothing_of_a_shared_store_is_deleted_to_make_room",
    ),
    Mutant(
        "a-shared-store-is-listed",
        STORE_TIER + "/tier.py",
        "        if self.backend.shared:\n            return\n",
        "        if False:\n            return\n",
        "tests/core/test_store_tier.py::test_nothing_of_a_shared_store_is_deleted_to_make_room",
    ),
    # -- slow and shared stores
    Mutant(
        "damage-is-deleted-in-a-shared-store",
        STORE_TIER + "/deletes.py",
        "            return self._quarantine_shared(corrupt)",
        "            self._delete(corrupt, self._backend.delete)",
        ASKING + "test_a_damaged_frame_is_not_asked_for_again_and_is_replaced",
    ),
    Mutant(
        "damage-is-asked-for-again",
        STORE_TIER + "/reads.py",
        "self._lookup_queue.unusable(found[ReadStatus.CORRUPT])",
        "pass",
        ASKING + "test_a_damaged_frame_is_not_asked_for_again_and_is_replaced",
    ),
    Mutant(
        "a-server-that-is-down-is-damage",
        STORE_TIER + "/frame_io.py",
        "failed = ReadStatus.IO_ERROR if backend.shared else ReadStatus.CORRUPT",
        "failed = ReadStatus.CORRUPT",
        ASKING + "test_one_key_that_fails_is_no_damage",
    ),
    Mutant(
        "what-was-not-written-is-there",
        STORE_TIER + "/frame_io.py",
        "stored = [len(frame) if error is None else error for",
        "stored = [len(frame) for",
        ASKING + "test_one_frame_that_is_not_written_is_not_there",
    ),
    Mutant(
        "a-full-shared-store-is-forgotten",
        STORE_TIER + "/writes.py",
        "            return self._space.limit.close(self._clock())",
        "            pass",
        ASKING + "test_a_full_shared_store_is_not_written_for_a_minute_and_nothing_is_forgotten",
    ),
    Mutant(
        "codecs-share-their-keys",
        CODEC,
        "if shared and identity != RAW:",
        "if False:",
        CODEC_TESTS + "test_in_a_shared_store_no_two_codecs_have_a_frame_in_common",
    ),
    Mutant(
        "contradictory-answers-are-believed",
        STORE_TIER + "/reads.py",
        "self._lookup_queue.not_there([*found[ReadStatus.MISSING], *found[ReadStatus.IO_ERROR]])",
        "pass",
        "tests/core/test_store_tier.py::test_what_another_engine_deleted_is_only_forgotten",
    ),
    Mutant(
        "waits-longer-than-computing-takes",
        "kvtier_core/engine/scheduler/waiting.py",
        "longest = min(longest, state.awaited_chunks * limit.chunk_seconds)",
        "pass",
        WAITING + "test_nobody_waits_longer_than_computing_takes",
    ),
    Mutant(
        "decoding-counts-as-a-prompt",
        "kvtier_core/engine/scheduler/requests.py",
        "prompts += max(0, min(request.end, state.admitted) - request.computed)",
        "prompts += request.scheduled",
        WAITING + "test_requests_that_decode_do_not_pull_the_speed_of_the_engine_down",
    ),
    Mutant(
        "prompts-pay-for-decoding",
        "kvtier_core/engine/scheduler/prefill_speed.py",
        "seconds - self._decoding_in(step, seconds)",
        "seconds",
        WAITING + "test_the_time_of_decoding_beside_a_prompt_is_not_the_prompts",
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
        "loads-for-a-wait-that-is-over",
        STORE_TIER + "/asking/load_choice.py",
        "if limit is None or (needed is None and limit.wait > 0):",
        "if limit is None or limit.wait <= 0 or needed is None:",
        "tests/core/test_load_choice.py::test_for_a_request_that_may_not_wait_nothing_is_loaded",
    ),
    Mutant(
        "waits-for-late-answers",
        STORE_TIER + "/asking/load_choice.py",
        "return self._speed.answer <= _QUESTION_SHARE * chunks * limit.chunk_seconds",
        "return True",
        ASKING + "test_nobody_waits_for_an_answer_that_takes_longer_than_a_tenth_of_the_computing",
    ),
    Mutant(
        "no-answer-takes-no-time",
        STORE_TIER + "/asking/lookups.py",
        "outcome.value or Timed([False] * len(keys), self._clock(), begun)",
        "outcome.value or Timed([False] * len(keys), begun, begun)",
        ASKING + "test_that_there_is_no_answer_takes_its_time_too",
    ),
    Mutant(
        "loads-whatever-it-costs",
        STORE_TIER + "/asking/load_choice.py",
        "if fitting and self._speed",
        "if fitting or self._speed",
        WAITING + "test_a_slow_store_is_declined_and_the_line_has_both_numbers",
    ),
    Mutant(
        "a-declined-store-stays-declined",
        STORE_TIER + "/asking/load_choice.py",
        "return min(chunks, max(1, _PROBE_NBYTES // nbytes))",
        "return 0",
        ASKING + "test_nobody_waits_for_a_probe",
    ),
    Mutant(
        "requests-wait-for-probes",
        "kvtier_core/stack/lookup/chain.py",
        "if path[at] in self._promotions.probes:",
        "if False:",
        ASKING + "test_nobody_waits_for_a_probe",
    ),
    Mutant(
        "prefetching-takes-the-whole-arena",
        "kvtier_core/stack/lookup/search.py",
        "max(0, self._arenas[0].memory.slots // _PREFETCH_SHARE - unused)",
        "self._arenas[0].memory.slots",
        ASKING + "test_a_prefetch_brings_up_a_quarter_of_the_arena_and_pins_nothing",
    ),
    Mutant(
        "stores-take-every-thread",
        STORE_TIER + "/tier.py",
        "concurrent=max(1, threads - 1)",
        "concurrent=threads",
        "tests/core/test_store_queue.py::test_a_thread_is_left_for_loads",
    ),
    Mutant(
        "loads-wait-for-stores",
        STORE_TIER + "/tier.py",
        "return max(0, self._inflight_limit - self._begun_nbytes) // view_nbytes",
        "return max(0, self._inflight_limit - self._inflight) // view_nbytes",
        "tests/core/test_manager.py::test_a_load_does_not_wait_for_stores_that_wait",
    ),
    Mutant(
        "new-stores-give-way-to-old-ones",
        STORE_TIER + "/tier.py",
        "self._writes.shed(self._inflight + sum(len(frame.view) for frame in fresh) - self._inflight_limit)",
        "pass",
        "tests/core/test_store_queue.py::test_the_oldest_store_that_waits_makes_room_for_a_new_one",
    ),
    # -- leaks
    Mutant(
        "pins-are-forgotten",
        LOADS,
        "            if holder := self._holders.pop(request_id, None):",
        "            if False and (holder := self._holders.pop(request_id, None)):",
        SEAM + "test_a_busy_host_under_many_kinds_of_trouble",
    ),
    Mutant(
        "requests-are-remembered",
        TRACKED,
        "return self._states.pop(request_id, None)",
        "return self._states.get(request_id)",
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
        "any-owner-unpins",
        "kvtier_core/stack/arena.py",
        "if not own[place]:",
        "if not self._pinned[place]:",
        "tests/core/test_arena.py",
    ),
    Mutant(
        "what-is-under-way-is-lost",
        SHARED_SPACE,
        "listed + max(count.taken - settled, taken)",
        "listed + taken",
        SHARED_SPACE_TESTS + "test_what_is_under_way_is_not_taken_for_that_of_a_killed_user",
    ),
    Mutant(
        "what-a-killed-user-took-is-lost-for-ever",
        SHARED_SPACE,
        "return taken if self._clock() - seen >= _SETTLED else 0",
        "return 0",
        SHARED_SPACE_TESTS + "test_what_a_killed_user_had_taken_comes_back",
    ),
    Mutant(
        "what-was-taken-in-advance-never-lapses",
        SHARED_SPACE,
        "            if self._clock() >= self._lapses:\n",
        "            if False:\n",
        SHARED_SPACE_TESTS + "test_what_an_idle_user_took_in_advance_lapses",
    ),
    Mutant(
        "an-account-without-a-lock",
        DISK + "/shared_account.py",
        "return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "return None",
        SHARED_CAPACITY + "test_three_processes_never_exceed_the_capacity_and_the_oldest_leave",
    ),
    Mutant(
        "the-newest-leave",
        DISK + "/shared_account.py",
        "known = oldest_first(",
        "known = reversed(",
        SHARED_CAPACITY + "test_the_oldest_leave_of_whatever_namespace_and_writer",
    ),
    Mutant(
        "what-is-replaced-counts-for-ever",
        DISK + "/shared.py",
        "            if self._bounded:\n",
        "            if False:\n",
        SHARED_CAPACITY + "test_what_is_replaced_or_deleted_is_given_back",
    ),
    Mutant(
        "a-broken-write-is-given-back",
        REDIS + "/writing.py",
        " and not self._transfers[number].left",
        "",
        REDIS_CAPACITY + "test_connections_that_break_in_a_write_never_exceed_it",
    ),
    Mutant(
        "a-refused-unlink-is-given-back",
        REDIS + "/backend.py",
        "(answer, unlinked.get(number))",
        "(answer,)",
        REDIS_CAPACITY + "test_parts_that_the_server_refuses_to_unlink_stay_counted",
    ),
    Mutant(
        "one-key-fails-all-of-a-shared-folder",
        DISK + "/shared.py",
        "if not _may_be_of_one_key(error) or not self._works():",
        "if True:",
        SHARED_DISK + "test_a_key_that_cannot_be_read_fails_alone",
    ),
    Mutant(
        "one-name-for-all-writers",
        DISK + "/shared.py",
        "writer=_this_writer()",
        'writer="writer"',
        SHARED_DISK + "test_an_unfinished_file_tells_whose_it_is",
    ),
    Mutant(
        "any-folder-is-the-shared-one",
        DISK + "/shared_folder.py",
        "if status.st_dev != known.st_dev and not is_shared(folder):",
        "if False:",
        SHARED_DISK + "test_a_folder_that_is_not_mounted_is_not_written_to",
    ),
    Mutant(
        "a-shared-folder-is-swept",
        DISK + "/shared_folder.py",
        "    if is_shared(folder):\n",
        "    if False:\n",
        SHARED_DISK + "test_an_engine_that_wants_it_for_itself_is_refused",
    ),
    Mutant(
        "fsck-removes-what-is-being-written",
        DISK + "/walk.py",
        "if listed.status.st_mtime < before or not listed.is_unfinished",
        "if True",
        "plugins/kvtier_disk/tests/test_shared_fsck.py::test_what_may_still_be_written_is_no_damage",
    ),
    # -- slabs
    Mutant(
        "a-slab-remembers-what-was-deleted",
        GDS + "/backend.py",
        "                    place.slab.clear(place)\n                except OSError as error:",
        "                    pass\n                except OSError as error:",
        GDS_TESTS + "test_what_was_deleted_stays_deleted_after_a_kill",
    ),
    Mutant(
        "a-record-before-its-frame",
        GDS + "/backend.py",
        "            unused = dict(enumerate(places))\n",
        "            unused = dict(enumerate(places))\n"
        "            for key, place in zip(keys, places, strict=True):\n"
        "                self._publish(key, place)\n",
        GDS_TESTS + "test_neither_the_frame_that_was_written_nor_the_one_that_lay_there",
    ),
    Mutant(
        "one-bad-place-retires-its-batch",
        GDS + "/backend.py",
        "                    if failures[i] is None:\n                        failures[i] = self._publish",
        "                    if not any(failures):\n                        failures[i] = self._publish",
        GDS_TROUBLE + "test_of_a_batch_only_the_place_that_fails_is_retired",
    ),
    Mutant(
        "a-bad-place-is-bad-for-ever",
        GDS + "/backend.py",
        "if since <= until]",
        "if False]",
        GDS_TROUBLE + "test_a_place_is_tried_again_when_the_drive_has_recovered",
    ),
    Mutant(
        "a-bad-place-is-used-again",
        GDS + "/backend.py",
        "                self._retire([unused.pop(i) for i in list(unused)])\n",
        "",
        GDS_TROUBLE + "test_a_place_that_takes_no_frame_is_not_tried_again",
    ),
    Mutant(
        "two-frames-in-one-place",
        GDS + "/table.py",
        "        if not kept or kept[-1][1].end <= record.at:\n",
        "        if True:\n",
        GDS_TESTS + "test_of_records_that_overlap_the_newer_counts",
    ),
    Mutant(
        "any-record-is-believed",
        GDS + "/table.py",
        "checksum != zlib.crc32(raw[begin : begin + _FIELDS.size])",
        "False",
        GDS_TESTS + "test_every_bit_of_a_record_counts",
    ),
    Mutant(
        "slabs-of-all-namespaces",
        GDS + "/backend.py",
        "if record.namespace != self._namespace.digest:",
        "if False:",
        GDS_TESTS + "test_frames_of_others_leave_for_what_has_no_room_oldest_first",
    ),
    Mutant(
        "whatever-lands-is-used",
        "kvtier_core/engine/landed_loads.py",
        "if not unread and run(",
        "if run(",
        "tests/engine/test_landed_loads.py::test_what_does_not_verify_reaches_no_page",
    ),
    Mutant(
        "a-frame-longer-than-its-slot",
        "kvtier_core/engine/own_shard.py",
        "nbytes=min(room, behind)",
        "nbytes=behind",
        "tests/engine/test_landed_loads.py::test_a_frame_that_is_longer_than_a_slot_does_not_reach_into_the_next",
    ),
    Mutant(
        "shards-on-a-gpu-are-not-summed",
        "kvtier_core/engine/own_shard.py",
        "None if checksums[number] == checksum else FrameError.CHECKSUM",
        "None",
        "tests/engine/test_device_landing.py",
    ),
    Mutant(
        "payloads-that-land-are-not-summed",
        "kvtier_core/engine/own_shard.py",
        "error = verify_checksums(found, checksum)",
        "error = None",
        "tests/engine/test_landed_loads.py::test_a_shard_that_begins_within_a_page_is_read_with_all_others",
    ),
    Mutant(
        "any-checksum-of-a-shard-is-believed",
        FRAME,
        "if end > FRAME_ALIGNMENT or frame[_FIELDS_END:end] != _summed(bytes(table), header.packed()):",
        "if end > FRAME_ALIGNMENT:",
        "tests/core/test_frame.py::test_the_checksums_of_another_frame_do_not_fit",
    ),
    Mutant(
        "payloads-that-ended-early-are-summed",
        "kvtier_core/engine/own_shard.py",
        "if read < self.nbytes:",
        "if False:",
        "tests/engine/test_device_landing.py",
    ),
    Mutant(
        "frames-that-workers-refuse-stay-promised",
        "kvtier_core/stack/manager.py",
        "self._leases.release_frames(tier)",
        "pass",
        "tests/core/test_slab_stacks.py::test_what_workers_refuse_to_read_passes_through_an_arena",
    ),
    Mutant(
        "a-place-that-is-held-is-given-away",
        "kvtier_core/stack/store_tier/landings.py",
        "free = [key for key in held.keys if not self._holders[key]]",
        "free = list(held.keys)",
        "tests/core/test_landings.py::test_what_one_of_two_still_holds_stays",
    ),
    # -- security
    Mutant(
        "files-for-everyone",
        TRANSFER + "/folder.py",
        "flags, 0o600,",
        "flags, 0o644,",
        "plugins/kvtier_disk/tests/test_disk.py::test_names_come_from_keys_and_nobody_else_may_look",
    ),
    Mutant(
        "follows-links",
        TRANSFER + "/folder.py",
        "if stat.S_ISLNK(status.st_mode):",
        "if False:",
        "plugins/kvtier_disk/tests/test_disk.py::test_a_link_is_refused",
    ),
    Mutant(
        "folders-of-others",
        TRANSFER + "/folder.py",
        "    if status.st_uid != os.geteuid():",
        "    if False:",
        "plugins/kvtier_disk/tests/test_disk.py::test_a_folder_of_somebody_else_is_refused",
    ),
    Mutant(
        "folders-for-others",
        TRANSFER + "/folder.py",
        "    if status.st_mode & 0o022:\n",
        "    if False:\n",
        "plugins/kvtier_disk/tests/test_disk.py::test_a_folder_that_others_may_write_to_is_refused",
    ),
    Mutant(
        "an-engine-that-makes-room-is-a-broken-store",
        DISK + "/shared_account.py",
        "raise StoreFull(str(error), missing=0) from None",
        "raise",
        "plugins/kvtier_disk/tests/test_shared_capacity.py::test_an_engine_that_holds_a_lock_keeps_no_other_for_ever",
    ),
    Mutant(
        "a-sweep-removes-what-is-called-like-a-namespace",
        DISK + "/opening.py",
        "if name == own or is_kvtiers(root, name)]",
        "]",
        DISK_TESTS + "test_open_leaves_alone_what_kvtier_has_not_made",
    ),
    Mutant(
        "frames-without-facts-take-no-room",
        DISK + "/namespaces.py",
        "read_facts(root, name) is not None or any(",
        "read_facts(root, name) is not None and any(",
        DISK_TESTS + "test_a_namespace_without_facts_is_known_by_its_frames",
    ),
    Mutant(
        "a-sticky-folder-is-the-tiers-alone",
        TRANSFER + "/folder.py",
        "    if status.st_mode & 0o022:\n",
        "    if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:\n",
        GDS_SECURITY + "test_a_sticky_folder_is_refused_whatever_a_stranger_put_there",
    ),
    Mutant(
        "files-of-others",
        TRANSFER + "/folder.py",
        "elif status.st_uid != os.geteuid():",
        "elif False:",
        GDS_SECURITY + "test_a_strangers_file_is_not_adopted_when_the_folder_is_closed_to_others",
    ),
    Mutant(
        "files-open-to-others",
        TRANSFER + "/folder.py",
        "elif status.st_mode & 0o077:",
        "elif False:",
        GDS_SECURITY + "test_a_file_that_is_not_the_tiers_alone_is_refused_untouched",
    ),
    Mutant(
        "files-with-another-name",
        TRANSFER + "/folder.py",
        "elif status.st_nlink > 1:",
        "elif False:",
        GDS_SECURITY + "test_a_file_that_is_not_the_tiers_alone_is_refused_untouched",
    ),
    Mutant(
        "a-file-of-others-is-a-frame",
        DISK + "/frames.py",
        "if why_no_file(status) or",
        "if",
        DISK_SECURITY + "test_open_removes_what_stands_for_a_frame_and_follows_none",
    ),
    Mutant(
        "folders-above-are-anybodys",
        TRANSFER + "/folder.py",
        "    parents_must_be_safe(path)\n",
        "",
        DISK_SECURITY + "test_a_folder_above_that_others_may_write_to_is_refused",
    ),
    Mutant(
        "any-folder-at-the-path",
        TRANSFER + "/folder_lock.py",
        "if os.path.samestat(status, os.fstat(held.fd)):",
        "if True:",
        DISK_SECURITY + "test_what_is_put_in_place_of_a_folder_is_never_read",
    ),
    Mutant(
        "any-folder-inside",
        TRANSFER + "/folder.py",
        "        must_be_ours(os.fstat(fd), *inner._called)\n",
        "",
        DISK_SECURITY + "test_what_is_put_in_place_of_a_folder_is_never_read",
    ),
    Mutant(
        "opens-before-it-looks",
        TRANSFER + "/folder.py",
        "self._must_be_file(name, self.status(name))",
        "pass",
        DISK_SECURITY + "test_what_stands_for_a_frame_is_no_frame",
    ),
    Mutant(
        "facts-of-any-namespace",
        DISK + "/namespaces.py",
        "return namespace if namespace is not None and namespace_folder_name(namespace) == name else None",
        "return namespace",
        DISK_TESTS + "test_odd_facts_are_passed_over",
    ),
    # -- keyed seals
    Mutant(
        "forged-frames-are-served",
        KEYED_SEAL,
        "if not _ends_well(gcm):\n            return",
        "if not _ends_well(gcm) and False:\n            return",
        SEALING + "test_no_forged_frame_is_served",
    ),
    Mutant(
        "what-is-sealed-with-a-key-is-served-without",
        FRAME,
        "if header.protection is not keyed.protection:",
        "if keyed != UNKEYED and header.protection is not keyed.protection:",
        SEALING + "test_a_tier_with_a_key_serves_none_without_one_and_none_of_the_other_kind",
    ),
    Mutant(
        "another-key-is-a-forgery",
        FRAME,
        "if keyed != UNKEYED and keyed_fields_of(frame).key_id != keyed.key_id:",
        "if False:",
        SEALING + "test_frames_of_another_key_are_left_alone",
    ),
    Mutant(
        "a-damaged-key-id-is-another-key",
        FRAME,
        "    if error := _verify_further_fields(header, frame):\n        return error\n    if keyed",
        "    if keyed",
        SEALING + "test_what_is_damaged_is_neither_forged_nor_of_another_key",
    ),
    Mutant(
        "encrypted-without-the-salt",
        KEYED_SEAL,
        '(salt if self.encrypts else b"")',
        'b""',
        SEALING + "test_the_key_alone_reads_no_frame_of_a_tenant",
    ),
    Mutant(
        "one-key-for-all-chunks",
        KEYED_SEAL,
        " + header.namespace + header.key",
        "",
        SEALING + "test_two_equal_nonces_give_nothing_away_unless_they_are_of_one_chunk",
    ),
    Mutant(
        "sealed-bytes-are-believed",
        KEYED_SEAL,
        "return verify_checksums(header, header.payload_checksum)",
        "return None",
        SEALING + "test_the_payload_is_what_its_checksum_in_memory_said",
    ),
    Mutant(
        "seals-in-the-slot",
        KEYED_SEAL,
        "protected(self.identity.protection), payload_of(frame)",
        "protected(self.identity.protection), payload or payload_of(frame)",
        SEALING + "test_the_slot_is_only_read",
    ),
    Mutant(
        "slots-under-a-tiers-namespace",
        CODEC,
        "seal_part(slot, self._arena_namespace, key, part, known)",
        "seal_part(slot, self.namespace, key, part, known)",
        SEALING + "test_what_was_read_can_be_written_to_any_other_tier",
    ),
    Mutant(
        "other-keys-under-the-same-names",
        CODEC,
        "if keyed_seal is not None:  #",
        "if False:  #",
        SEALING + "test_engines_with_other_keys_write_over_none_of_each_others_frames",
    ),
    Mutant(
        "stores-see-keys",
        "kvtier_core/config/compose.py",
        "if codec.keyed_seal is not None:",
        "if False:",
        SEALED_NAMES + "test_a_guessed_prompt_is_confirmed_by_no_name_and_no_header",
    ),
    Mutant(
        "headers-show-keys",
        CODEC,
        "return key if self.keyed_seal is None else",
        "return key if True else",
        SEALED_NAMES + "test_a_guessed_prompt_is_confirmed_by_no_name_and_no_header",
    ),
    Mutant(
        "buffers-show-what-they-held",
        CODEC,
        "    frame[FRAME_ALIGNMENT + payload_nbytes :] = bytes(",
        "    bytes(",
        BUFFERS + "test_nothing_of_what_a_buffer_held_before_is_stored",
    ),
    Mutant(
        "views-that-are-kept-are-overwritten",
        "kvtier_core/frames/buffers.py",
        "sys.getrefcount(found[0]) == 2",
        "sys.getrefcount(found[0])",
        BUFFERS + "test_a_buffer_of_which_a_view_was_kept_is_not_used_again",
    ),
    Mutant(
        "buffers-of-writes-that-failed-are-used-again",
        STORE_TIER + "/frame_io.py",
        "if not failed:  # a thread",
        "if True:  # a thread",
        BUFFERS + "test_a_buffer_of_a_write_that_failed_is_not_used_again",
    ),
    Mutant(
        "names-without-the-secret",
        KEYED_SEAL,
        "_derived(root, _AES_KEY_NBYTES, each)",
        "_derived(bytes(32), _AES_KEY_NBYTES, each)",
        SEALED_NAMES + "test_names_depend_on_the_secret_and_on_what_it_protects_from",
    ),
    Mutant(
        "what-a-policy-learned-is-anybodys",
        CODEC,
        "            self.keyed_seal.close(frame)\n",
        "            pass\n",
        SEALED_TIERS + "test_what_a_policy_learned_is_sealed",
    ),
    Mutant(
        "salts-stay-in-the-arena",
        "kvtier_core/stack/write_through.py",
        'salts.get(key, b"")',
        'b""',
        SEALED_TIERS + "test_a_salt_goes_with_a_chunk_to_the_store_and_back",
    ),
    Mutant(
        "salts-are-lost-on-the-way-up",
        "kvtier_core/stack/promotion.py",
        "{key: read[key].salt for key in kept if read[key].salt}",
        "{}",
        SEALED_TIERS + "test_a_chunk_that_comes_up_goes_to_the_tiers_between_with_its_salt",
    ),
    Mutant(
        "short-secrets",
        KEYED_SEAL,
        "if len(characters) < MIN_SECRET_LENGTH:",
        "if False:",
        SEALED_TIERS + "test_a_secret_that_is_too_short",
    ),
    Mutant(
        "secrets-that-repeat-themselves",
        KEYED_SEAL,
        "_MIN_BITS = 80",
        "_MIN_BITS = 0",
        SEALED_TIERS + "test_a_secret_that_could_be_guessed_is_refused_whatever_its_length",
    ),
    Mutant(
        "secrets-that-count",
        KEYED_SEAL,
        "_bits([b - a for a, b in pairwise(characters)])",
        "1000",
        SEALED_TIERS + "test_a_secret_that_could_be_guessed_is_refused_whatever_its_length",
    ),
    Mutant(
        "keys-are-shown",
        KEYED_SEAL,
        "attrs.field(repr=False)",
        "attrs.field()",
        SEALED_TIERS + "test_the_secret_is_shown_nowhere",
    ),
    Mutant(
        "stores-without-their-salt",
        STORES,
        "_holder(self._last_job + 1), salt, parts)",
        '_holder(self._last_job + 1), b"", parts)',
        SALTS + "test_what_was_stored_is_found_after_a_restart",
    ),
    Mutant(
        "lookups-without-their-salt",
        LOADS,
        "state.holder, limit, state.view.identity.salt, skipped)",
        'state.holder, limit, b"", skipped)',
        SALTS + "test_what_was_stored_is_found_after_a_restart",
    ),
    Mutant(
        "offers-without-their-salt",
        TRACKED,
        "view.hints, view.identity.salt)",
        "view.hints)",
        SALTS + "test_what_is_written_when_it_is_named_again_is_found_too",
    ),
    Mutant(
        "fsck-takes-salted-frames-for-forged",
        "kvtier_core/cli/fsck.py",
        "if not self.keyed_seal.encrypts:",
        "if True:",
        "plugins/kvtier_disk/tests/test_fsck.py::test_without_its_salt_an_encrypted_frame_cannot_be_checked",
    ),
    Mutant(
        "fsck-takes-any-tag",
        "kvtier_core/cli/fsck.py",
        "if self.keyed_seal.matches(page, payload_pieces(header, stored.read)):",
        "if True:",
        "plugins/kvtier_disk/tests/test_fsck.py::test_a_seal_is_checked",
    ),
    # -- plugins
    Mutant(
        "plugins-are-trusted-at-open",
        "kvtier_core/config/compose.py",
        "if not isinstance(value, expected):",
        "if False:",
        "tests/core/test_config.py::test_what_is_no_backend_is_a_problem_with_a_place",
    ),
    Mutant(
        "errors-of-plugins-without-a-place",
        "kvtier_core/config/compose.py",
        '        failed = self.failed(f"{type(error).__name__}: {error}")\n',
        "        raise error\n",
        "tests/core/test_config.py::test_an_error_that_no_plugin_may_raise_is_a_problem_with_a_place",
    ),
    Mutant(
        "arenas-are-trusted-at-open",
        "kvtier_core/config/compose.py",
        "if isinstance(store, AllocatorBackend) and (why := call.ask(lambda: _contradiction(store, ctx))):",
        'if why := "":',
        "tests/core/test_config.py::test_an_arena_that_contradicts_the_interface_is_not_used",
    ),
    Mutant(
        "a-forgotten-mark-is-passed-over",
        "kvtier_core/config/examine.py",
        "    _must_be_marked(manager, implementation)\n",
        "",
        "tests/core/test_registry.py::test_a_broken_plugin_is_kept_with_its_reason_and_hides_no_other",
    ),
    Mutant(
        "broken-plugins-are-silent",
        CONNECTOR,
        "self._registry.log_problems()",
        "pass",
        "tests/vllm/test_start.py::test_a_broken_plugin_is_told_though_nobody_asks_for_it",
    ),
    Mutant(
        "aliases-clash-unseen",
        "kvtier_core/config/registry.py",
        "for offer in self._offers for name in offer.names})",
        "for offer in self._offers for name in [offer.name]})",
        "tests/core/test_registry.py::test_an_alias_clashes_with_whatever_has_its_name",
    ),
    Mutant(
        "stale-code-is-used",
        "kvtier_core/native.py",
        "if stamp and stamp == expected_stamp():",
        "if True:",
        "tests/core/test_native.py::test_a_stale_one_is_not_used_for_anything",
    ),
    Mutant(
        "half-compiled",
        "kvtier_core/native.py",
        "getattr(extension, name)",
        "getattr(extension, name, plain)",
        "tests/core/test_native.py::test_a_name_that_it_lacks_is_an_error",
    ),
    Mutant(
        "variables-in-paths",
        "kvtier_core/config/yaml_nodes.py",
        "if _VARIABLE.search(text):",
        "if False:",
        "tests/core/test_config.py::test_no_path_is_taken_for_another",
    ),
    Mutant(
        "a-memory-for-others",
        DIGEST_CACHE,
        ' if is_ours(self._folder) else ""',
        "",
        WEIGHT_TESTS + "test_a_memory_that_others_could_write_to_is_not_believed",
    ),
    Mutant(
        "reports-of-others",
        TRANSFER + "/folder.py",
        "    if status.st_uid != os.geteuid():",
        "    if False:",
        BESIDE + "test_a_folder_that_others_could_write_to_is_not_believed",
    ),
    Mutant(
        "reports-for-others",
        TRANSFER + "/folder.py",
        "    if status.st_mode & 0o022:\n",
        "    if False:\n",
        BESIDE + "test_a_folder_that_others_could_write_to_is_not_believed",
    ),
    Mutant(
        "reports-behind-a-link",
        TRANSFER + "/folder.py",
        "must_be_ours(path.lstat(), path)\n    except",
        "must_be_ours(path.stat(), path)\n    except",
        BESIDE + "test_a_folder_that_others_could_write_to_is_not_believed",
    ),
    Mutant(
        "a-squatter-stops-serving",
        REPORTS,
        ", *([cached] if cached else [])]",
        "]",
        "tests/engine/test_runtime_folder.py::test_where_a_stranger_has_its_name_it_lies_with_caches",
    ),
    Mutant(
        "windows-one-block-short",
        LAYOUTS,
        "return -(-(self.reach - 1) // self.block_tokens)",
        "return (self.reach - 1) // self.block_tokens",
        "tests/core/test_layouts.py::test_what_a_group_needs_behind_a_prefix",
    ),
    Mutant(
        "what-the-engine-keeps-stays-as-it-is",
        LOADS,
        "if self._expected(tables, state.computed, end) - _blocks_of(pages):",
        "if False:",
        GROUPS + "test_an_engine_that_keeps_more_than_was_found_computes_it",
    ),
    Mutant(
        "no-token-left-to-compute",
        SCHEDULER,
        "return view.tokens - 1 if self._boundaries and not self._lookahead else view.tokens",
        "return view.tokens",
        GROUPS + "test_one_token_is_always_left_to_compute",
    ),
    Mutant(
        "boundaries-without-their-parts",
        SEARCH,
        "if all(map(holds, self.needed(i)))",
        "if holds(self.chunks[i - 1])",
        GROUPS + "test_a_boundary_that_lacks_a_part_is_not_found",
    ),
    Mutant(
        "boundaries-with-holes",
        "kvtier_core/engine/scheduler/chunk_pages.py",
        "if not any(map(_has_holes, pages.values())):",
        "if True:",
        GROUPS + "test_a_window_that_has_passed_is_not_stored",
    ),
    Mutant(
        "parts-outlive-their-chunk",
        PARTED,
        "leaving += [last, *parts]",
        "leaving += [last]",
        "tests/core/test_parted_index.py::test_a_boundary_leaves_with_its_parts_and_the_chunks_that_only_it_needed",
    ),
    Mutant(
        "parts-in-use-leave",
        PARTED,
        "if not all(map(may_leave, parts)) or (leaving and parts):",
        "if leaving and parts:",
        "tests/core/test_parted_index.py::test_what_is_pinned_or_spared_stays_and_all_before_it",
    ),
    Mutant(
        "useless-chunks-stay",
        PARTED,
        "last = parent if parent is not None and parent in self.held and may_leave(parent) else None",
        "last = None",
        "tests/core/test_parted_index.py::test_a_boundary_leaves_with_its_parts_and_the_chunks_that_only_it_needed",
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
        "tests/simulate/test_recorder.py::test_it_stays_within_its_capacity_over_all_starts",
    ),
)


def main(names: list[str]) -> int:
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    survivors = 0
    for mutant in chosen:
        said = mutant.survives()
        print(f"{'SURVIVES' if said else 'dies    '}  {mutant.name}", flush=True)
        if said:
            survivors += 1
            print(said)
    print(f"{len(chosen)} mutants, {survivors} survive")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
