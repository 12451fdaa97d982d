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


FRAME = "kvtier_core/frame.py"
TIER = "kvtier_core/tier.py"
IDENTITY = "kvtier_core/vllm/identity.py"
REQUESTS = "kvtier_core/vllm/request_identity.py"
WEIGHTS = "kvtier_core/vllm/weights.py"
SCHEDULER = "kvtier_core/vllm/scheduler.py"
WORKER = "kvtier_core/vllm/worker.py"
RECORDER = "kvtier_core/vllm/recorder.py"
CONNECTOR = "kvtier_core/vllm/connector.py"
PROVENANCE = "kvtier_core/vllm/provenance.py"
REPORTS = "kvtier_core/vllm/reports.py"
STORES = "kvtier_core/vllm/stores.py"
DISK = "plugins/kvtier_disk/kvtier_disk"
ABOUT_IDENTITY = "tests/vllm/test_identity.py::"
REQUEST_TESTS = "tests/vllm/test_request_identity.py::"
WEIGHT_TESTS = "tests/vllm/test_weights.py::"
SERVING = "tests/vllm/test_serving.py::"
SELFTEST = "tests/vllm/test_selftest.py::"
BESIDE = "tests/vllm/test_beside_others.py::"

MUTANTS = (
    # -- identity
    Mutant(
        "no-weights-in-the-namespace",
        IDENTITY,
        '"weights": weights_identity,',
        "",
        ABOUT_IDENTITY + "test_what_an_engine_reports_changes_the_namespace",
    ),
    Mutant(
        "no-dtype-in-the-namespace",
        IDENTITY,
        '"dtype": model.dtype,',
        "",
        ABOUT_IDENTITY + "test_an_option_that_changes_the_kv_changes_the_namespace",
    ),
    Mutant(
        "no-page-facts-in-the-namespace",
        IDENTITY,
        "**dict(survey.facts),",
        "",
        ABOUT_IDENTITY + "test_every_fact_of_the_pages_counts",
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
        'f"{digest} {asked.is_3d_lora_weight}", ""',
        'asked.lora_name, ""',
        REQUEST_TESTS + "test_adapters_are_told_apart_by_content",
    ),
    Mutant(
        "adapters-may-change",
        REQUESTS,
        "if state != before:",
        "if False:",
        REQUEST_TESTS + "test_an_adapter_whose_files_change_under_the_engine_is_bypassed",
    ),
    Mutant(
        "images-by-position-alone",
        REQUESTS,
        "(f.mm_position.offset, f.mm_position.length, f.identifier)",
        '(f.mm_position.offset, f.mm_position.length, "")',
        REQUEST_TESTS + "test_images_count_where_they_lie",
    ),
    Mutant(
        "images-by-any-name",
        REQUESTS,
        're.compile(r"[0-9a-f]{64,}")',
        're.compile(r".*")',
        REQUEST_TESTS + "test_what_cannot_be_identified_is_bypassed",
    ),
    Mutant(
        "embeddings-as-tokens",
        REQUESTS,
        "request.prompt_embeds is not None",
        "False",
        REQUEST_TESTS + "test_what_cannot_be_identified_is_bypassed",
    ),
    Mutant(
        "a-tensor-is-skipped",
        WEIGHTS,
        "for name, tensor in tensors if",
        "for name, tensor in tensors[:-1] if",
        WEIGHT_TESTS + "test_every_tensor_of_every_file_counts",
    ),
    Mutant(
        "only-safetensors-count",
        WEIGHTS,
        '"*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.tensors", "*.json", "*.py"',
        '"*.safetensors",',
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
        "self._epoch = self._first_epoch.renewed()",
        "self._epoch = self._first_epoch",
        SERVING + "test_a_frame_of_before_is_not_served_even_if_it_could_not_be_deleted",
    ),
    Mutant(
        "requests-go-on-over-an-epoch",
        SCHEDULER,
        'tracked.identity = tracked.bypass = "it began before the cache was reset"\n        self._disown()',
        "pass",
        SERVING + "test_a_request_under_way_when_the_weights_change_is_not_kept",
    ),
    Mutant(
        "the-engines-own-cache-outlives-an-epoch",
        SCHEDULER,
        "self._disown()\n        return not self._loading",
        "return not self._loading",
        BESIDE + "test_what_the_engine_held_when_the_cache_was_reset_is_not_stored",
    ),
    Mutant(
        "what-others-loaded-is-ours",
        PROVENANCE,
        "return end if known >= start else known",
        "return end",
        BESIDE + "test_what_others_loaded_is_not_stored_nor_what_stands_on_it[False-True]",
    ),
    Mutant(
        "blocks-are-ours-for-ever",
        PROVENANCE,
        "self._ours.difference_update(blocks[-(-computed // self._block_tokens) :])",
        "pass",
        BESIDE + "test_what_others_loaded_is_not_stored_nor_what_stands_on_it[True-False]",
    ),
    Mutant(
        "made-up-kv-is-ours",
        PROVENANCE,
        "known = size * sum(1 for _ in takewhile(self._ours.__contains__, blocks[: -(-start // size)]))",
        "known = start",
        BESIDE + "test_what_another_connector_made_up_is_not_stored",
    ),
    Mutant(
        "bad-blocks-go-unheard",
        SCHEDULER,
        "if self._provenance.holds_any(output.invalid_block_ids):",
        "if False:",
        BESIDE + "test_what_others_loaded_is_not_stored_nor_what_stands_on_it[True-False]",
    ),
    Mutant(
        "others-load-before-the-self-test",
        CONNECTOR,
        "self.half.attach(kv_connector_metadata)",
        "self.start_load_kv = lambda *args: (\n"
        "            self.half.attach(kv_connector_metadata), type(self).start_load_kv(self, *args))",
        BESIDE + "test_another_connector_may_exchange_handshakes_in_front_of_kvtier",
    ),
    Mutant(
        "others-handshakes-matter",
        CONNECTOR,
        '"""It is that of a connector beside this one."""',
        "super().set_xfer_handshake_metadata_pp_aware(metadata)",
        BESIDE + "test_or_behind_it",
    ),
    Mutant(
        "the-policy-inside-counts",
        CONNECTOR,
        "survey.failure_policy or ",
        "",
        BESIDE + "test_or_behind_it",
    ),
    Mutant(
        "producers-load",
        CONNECTOR,
        "loads=self._kv_transfer_config.is_kv_consumer",
        "loads=True",
        BESIDE + "test_a_role_means_what_it_says",
    ),
    Mutant(
        "consumers-store",
        CONNECTOR,
        "stores=self._kv_transfer_config.is_kv_producer",
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
        "if wrong := try_copies(mover, self._table, self._caches, slot.index):",
        'if wrong := "":',
        SELFTEST + "test_an_engine_with_another_layout_is_caught_before_traffic",
    ),
    Mutant(
        "a-self-test-nobody-reads",
        SCHEDULER,
        "if wrong := [what for what in tried if what]:",
        "if wrong := []:",
        SELFTEST + "test_an_arena_that_cannot_be_reached_is_told_and_not_used",
    ),
    # -- frames
    Mutant(
        "no-fence",
        STORES,
        "if not store.blocks.isdisjoint(given))",
        "if False)",
        "tests/vllm/test_overtaken.py::test_the_engine_overtakes_no_store",
    ),
    Mutant(
        "stores-before-their-forward",
        "kvtier_core/cuda/mover.py",
        "stream.wait_event(self._now(self._streams.current_stream(self._device)))",
        "pass",
        "tests/core/test_cuda_mover.py::test_whatever_the_streams_do_first",
    ),
    Mutant(
        "loads-overtake-stores",
        "kvtier_core/cuda/mover.py",
        "self._loads.wait_event(other.done)",
        "pass",
        "tests/core/test_cuda_mover.py::test_whatever_the_streams_do_first",
    ),
    Mutant(
        "any-slot-at-any-time",
        "kvtier_core/cuda/mover.py",
        "if not self._lock.covers(slots):",
        "if False:",
        "tests/core/test_cuda_mover.py::test_a_job_with_a_slot_that_is_not_locked_yet_is_a_miss",
    ),
    Mutant(
        "no-checksum",
        FRAME,
        "crc32(payload, crc32(frame[: _FIELDS.size])) == checksum",
        "True",
        "tests/core/test_frame.py",
    ),
    Mutant("any-namespace", FRAME, "header.namespace != namespace.digest", "False", "tests/core/test_frame.py"),
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
        "header.payload_nbytes > len(frame) - PAGE_NBYTES",
        "False",
        "tests/core/test_frame.py",
    ),
    Mutant("damage-is-good", TIER, "if verdict is True:", "if verdict:", "tests/core/test_tier.py"),
    Mutant(
        "no-quarantine",
        TIER,
        "self._remove(damaged, self.backend.quarantine)",
        "self._remove(damaged, self.backend.delete)",
        "tests/core/test_tier.py",
    ),
    Mutant(
        "quarantine-without-end",
        DISK + "/backend.py",
        "self._aside_nbytes() + nbytes <= self._config.quarantine",
        "True",
        "plugins/kvtier_disk/tests/test_disk.py::test_damaged_frames_are_kept_aside_until_there_are_too_many",
    ),
    Mutant(
        "lost-frames-are-left",
        TIER,
        "self._remove(lost, self.backend.delete)",
        "[self.residents.remove(key) for key in lost]",
        "tests/core/test_tier.py::test_what_is_left_of_a_lost_frame_leaves_too",
    ),
    # -- crash
    Mutant(
        "written-in-place",
        DISK + "/files.py",
        "return path.with_suffix(_UNFINISHED)",
        "return path",
        "plugins/kvtier_disk/tests/test_disk.py::test_a_writer_that_dies_half_way_leaves_nothing_under_the_name",
    ),
    Mutant(
        "no-sweep",
        DISK + "/backend.py",
        "                file.unlink()\n            elif",
        "                pass\n            elif",
        "plugins/kvtier_disk/tests/test_disk.py::test_open_removes_what_is_no_frame",
    ),
    Mutant(
        "forgets-a-file",
        DISK + "/folder.py",
        "if (found := _frame(entry)))",
        "if (found := _frame(entry)))[1:]",
        "plugins/kvtier_disk/tests/test_disk_laws.py",
    ),
    Mutant(
        "any-memory-is-believed",
        "kvtier_core/memo.py",
        "if frame.check(found, namespace, key, payload_nbytes=self._length) is None:",
        "if True:",
        "tests/core/test_memo_on_disk.py::test_a_damaged_memory_is_a_cold_start",
    ),
    # -- faults
    Mutant(
        "no-limit-in-flight",
        TIER,
        "room = self._inflight_limit - self._inflight",
        "room = 1 << 60",
        "tests/core/test_tier.py",
    ),
    Mutant(
        "no-breaker",
        "kvtier_core/breaker.py",
        "elif self._failures < _FAILURES:",
        "elif True:",
        "tests/core/test_breaker.py",
    ),
    Mutant(
        "any-count", "kvtier_core/door.py", "if not 0 < count <= len(landed):", "if False:", "tests/core/test_tier.py"
    ),
    Mutant(
        "any-number-of-answers",
        "kvtier_core/batches.py",
        "if len(answers) != len(keys):",
        "if False:",
        "tests/core/test_tier.py",
    ),
    Mutant(
        "waits-for-ever",
        SCHEDULER,
        "return now - tracked.waiting_since < self._config.load_wait",
        "return True",
        "tests/vllm/test_bad_disks.py::test_a_disk_that_hangs_stalls_nobody",
    ),
    Mutant(
        "closes-without-a-deadline",
        TIER,
        "run_within(self._close, timeout) is not None",
        "self.backend.close() is None",
        "tests/core/test_faults.py::test_a_store_that_hangs_in_close_keeps_nobody",
    ),
    Mutant(
        "plugins-end-threads",
        "kvtier_core/workers.py",
        "except BaseException as error:  # SystemExit",
        "except Exception as error:  # SystemExit",
        "tests/core/test_workers.py",
    ),
    Mutant(
        "errors-of-the-system-escape",
        DISK + "/backend.py",
        "raise BackendError(why, retryable=error.errno not in _LASTING) from error",
        "raise",
        "plugins/kvtier_disk/tests/test_disk_trouble.py",
    ),
    Mutant(
        "hangs-go-unnoticed",
        TIER,
        "hangs = self.pool.longest() > _PATIENCE",
        "hangs = False",
        "tests/core/test_tier.py::test_while_a_call_hangs_nobody_else_waits_for_the_store",
    ),
    # -- leaks
    Mutant(
        "pins-are-forgotten",
        SCHEDULER,
        "self.manager.unpin(self._loading.pop(request_id, ()), _loader(request_id))",
        "self._loading.pop(request_id, ())",
        "tests/vllm/test_leaks.py",
    ),
    Mutant(
        "requests-are-remembered",
        SCHEDULER,
        "self._tracked.pop(request.request_id, None)",
        "self._tracked.get(request.request_id)",
        "tests/vllm/test_leaks.py",
    ),
    Mutant(
        "chunks-in-the-wrong-pages",
        SCHEDULER,
        "Transfer(tuple(slots), pages)",
        "Transfer(tuple(reversed(slots)), pages)",
        "tests/vllm/test_leaks.py",
    ),
    Mutant(
        "any-owner-unpins",
        "kvtier_core/arena.py",
        "if not own[place]:",
        "if not self._pinned[place]:",
        "tests/core/test_arena.py",
    ),
    # -- security
    Mutant(
        "files-for-everyone",
        DISK + "/files.py",
        "0o600)",
        "0o644)",
        "plugins/kvtier_disk/tests/test_disk.py::test_names_come_from_keys_and_nobody_else_may_look",
    ),
    Mutant(
        "follows-links",
        DISK + "/claim.py",
        "if stat.S_ISLNK(status.st_mode):",
        "if False:",
        "plugins/kvtier_disk/tests/test_disk.py::test_a_link_is_refused",
    ),
    Mutant(
        "folders-of-others",
        DISK + "/claim.py",
        "status.st_uid != os.geteuid()",
        "False",
        "plugins/kvtier_disk/tests/test_disk.py::test_a_folder_of_somebody_else_is_refused",
    ),
    Mutant(
        "folders-for-others",
        DISK + "/claim.py",
        "status.st_mode & 0o022",
        "False",
        "plugins/kvtier_disk/tests/test_disk.py::test_a_folder_that_others_may_write_to_is_refused",
    ),
    Mutant(
        "a-memory-for-others",
        "kvtier_core/vllm/memo.py",
        " and not status.st_mode & 0o022",
        "",
        WEIGHT_TESTS + "test_a_memory_that_others_could_write_to_is_not_believed",
    ),
    Mutant(
        "reports-of-others",
        REPORTS,
        " and status.st_uid == os.geteuid()",
        "",
        BESIDE + "test_a_folder_that_others_could_write_to_is_not_believed",
    ),
    Mutant(
        "reports-for-others",
        REPORTS,
        " and not status.st_mode & 0o022",
        "",
        BESIDE + "test_a_folder_that_others_could_write_to_is_not_believed",
    ),
    Mutant(
        "reports-behind-a-link",
        REPORTS,
        "folder.lstat()",
        "folder.stat()",
        BESIDE + "test_a_folder_that_others_could_write_to_is_not_believed",
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
