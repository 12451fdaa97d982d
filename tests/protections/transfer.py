"""What moves bytes: page lists, threads, CUDA."""

from __future__ import annotations

from protections.mutant import Mutant

DEVICE_MOVER = "kvtier_core/transfer/cuda/mover.py"
CUDA_PART = "csrc/cuda/part.cpp"
DEVICE_CHECKSUMS = "kvtier_core/transfer/cuda/checksums.py"
CUDA_PACKING = "csrc/cuda/packing.h"
CUDA_PACKING_TESTS = "tests/core/test_cuda_packing.py::"
PAGE_LISTS = "kvtier_core/transfer/page_lists.py"

MUTANTS = (
    Mutant(
        "stores-before-their-forward",
        DEVICE_MOVER,
        "through.kernels.wait_event(before)",
        "pass",
        "tests/core/test_cuda_mover.py::test_copies_are_right_in_any_order_of_the_streams",
    ),
    Mutant(
        "pages-are-read-before-the-forward-has-written-them",
        "csrc/cuda/copies.cpp",
        "to_host_ ? kInStreamOrder : kInAnyOrder",
        "kInAnyOrder",
        "tests/core/test_cuda_mover.py::test_copies_are_right_in_any_order_of_the_streams",
    ),
    Mutant(
        "copies-are-timed-and-not-compared",
        "kvtier_core/transfer/cuda/autotune.py",
        "if not self._is_right(scratch.value, method, to_slots)",
        "if False",
        "tests/core/test_cuda_mover.py::test_a_way_that_takes_one_page_for_another_is_not_chosen",
    ),
    Mutant(
        "loads-before-their-step",
        DEVICE_MOVER,
        "self._loads, after or self.mark())",
        "self._loads, after or self._now(self._loads.kernels))",
        "tests/core/test_cuda_mover.py::test_a_load_waits_for_no_forward_of_its_own_step",
    ),
    Mutant(
        "a-lost-device-has-copied",
        DEVICE_MOVER,
        "begun.end(ok=outcome.error is None)",
        "begun.end(ok=True)",
        "tests/core/test_cuda_mover.py::test_a_device_that_is_lost_has_copied_nothing_and_holds_nobody_up",
    ),
    Mutant(
        "a-question-that-fails-is-an-answer",
        DEVICE_MOVER,
        "        event.synchronize()\n",
        "        pass\n",
        "tests/core/test_cuda_mover.py::test_a_question_that_fails_does_not_end_a_job",
    ),
    Mutant(
        "loads-overtake-stores",
        DEVICE_MOVER,
        "self._loads.kernels.wait_event(other.pages)",
        "pass",
        "tests/core/test_cuda_mover.py::test_copies_are_right_in_any_order_of_the_streams",
    ),
    Mutant(
        "gathered-is-stored",
        DEVICE_MOVER,
        "self._now(self._stores.kernels), self._now(self._stores.bus)",
        "self._now(self._stores.kernels), self._now(self._stores.kernels)",
        "tests/core/test_cuda_mover.py::test_copies_are_right_in_any_order_of_the_streams",
    ),
    Mutant(
        "checksums-of-holes",
        DEVICE_MOVER,
        "if packed or (whole and NO_BLOCK not in read) else None",
        "if packed or whole else None",
        "tests/core/test_device_checksums.py::test_a_staged_store_reports_those_of_its_shards_if_they_are_whole",
    ),
    Mutant(
        "any-slot-at-any-time",
        DEVICE_MOVER,
        "return (self.locked.end - self.address) // self.nbytes",
        "return self.count",
        "tests/core/test_cuda_mover.py::test_a_job_without_locked_slots_fails_and_so_does_a_load_of_any_other",
    ),
    Mutant(
        "page-locking-spoils-captures",
        "csrc/cuda/device.h",
        "    if (ok_) device_.driver().exchange_capture_mode(&mode_);\n",
        "",
        "tests/core/test_cuda_mover.py::test_a_graph_may_be_captured_while_slots_are_locked",
    ),
    Mutant(
        "copy-engines-before-the-forward",
        CUDA_PART,
        "if (!order(streams.kernels, turn_, streams.bus)) return false;",
        "",
        "tests/core/test_cuda_mover.py::test_copies_are_right_in_any_order_of_the_streams",
    ),
    Mutant(
        "pages-are-free-before-copy-engines-read-them",
        CUDA_PART,
        "return order(streams.bus, turn_, streams.kernels) && listed;",
        "return listed;",
        "tests/core/test_cuda_mover.py::test_copies_are_right_in_any_order_of_the_streams",
    ),
    Mutant(
        "gathers-into-a-half-that-is-not-empty",
        CUDA_PART,
        'if (half.used && !device_.call(&Driver::wait, "wait for an event", streams.kernels, half.emptied, 0u)) '
        "return false;",
        "",
        "tests/core/test_cuda_mover.py::test_copies_are_right_in_any_order_of_the_streams",
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
        "tests/core/test_cuda_mover.py::test_a_failed_store_is_reported_once_it_reads_no_page_any_more",
    ),
    Mutant(
        "holes-are-copied-too",
        CUDA_PART,
        "if (chunks.whole(i)) {",
        "if (true) {",
        "tests/core/test_cuda_mover.py::test_a_job_stores_its_pages",
    ),
    Mutant(
        "checksums-are-told-before-they-are-computed",
        CUDA_PART,
        "return order(streams.kernels, turn_, streams.bus) &&",
        "return",
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
        "tests/core/test_device_checksums.py::test_checksums_that_the_host_contradicts_are_dropped_and_logged_once",
    ),
    Mutant(
        "what-has-no-room-on-a-gpu-counts-as-stored",
        DEVICE_MOVER,
        "self.whole and not told.flagged",
        "self.whole",
        CUDA_PACKING_TESTS + "test_a_chunk_without_room_leaves_the_others",
    ),
    Mutant(
        "places-without-a-page-hold-other-pages",
        CUDA_PART,
        "(!packs() || clear_holes(chunks, slice, half.base, streams.kernels)) &&",
        "",
        CUDA_PACKING_TESTS + "test_jobs_leave_what_those_of_the_host_leave",
    ),
    Mutant(
        "what-is-not-packed-is-loaded-from-a-gpu",
        CUDA_PACKING,
        "return header.low == kMagic && header.high == shard.pages_nbytes;",
        "return true;",
        CUDA_PACKING_TESTS + "test_a_load_of_what_is_not_packed_fails_and_the_next_does_not",
    ),
    Mutant(
        "escapes-beyond-their-tile-on-a-gpu",
        CUDA_PACKING,
        "if (place >= tile.n) return false;",
        "",
        CUDA_PACKING_TESTS + "test_a_head_that_tells_what_cannot_be_is_noticed",
    ),
    Mutant(
        "ends-beyond-their-shard-on-a-gpu",
        CUDA_PACKING,
        "if (!has_room(shard, before, tile.n)) return false;",
        "",
        CUDA_PACKING_TESTS + "test_a_shard_of_raw_tiles_without_ends_is_read_no_further",
    ),
    Mutant(
        "ends-are-placed-where-there-is-no-room",
        CUDA_PACKING,
        "if (!has_room(shard, number, tile.n)) {",
        "if (false) {",
        CUDA_PACKING_TESTS + "test_raw_tiles_have_the_same_room_as_on_the_host",
    ),
    Mutant(
        "packs-without-flags",
        DEVICE_MOVER,
        "if slots and not (checksums if packed else places):",
        "if slots and not places:",
        CUDA_PACKING_TESTS + "test_without_a_place_for_its_flags_a_job_fails",
    ),
    Mutant(
        "halves-are-too-short-for-packed-shards",
        "kvtier_core/transfer/cuda/opening.py",
        "max(half_nbytes, _longest_packing(cache))",
        "half_nbytes",
        CUDA_PACKING_TESTS + "test_a_half_always_has_room_for_a_shard_in_both_forms",
    ),
    Mutant(
        "packed-frames-in-a-gpus-memory-pass-for-raw-ones",
        "kvtier_core/transfer/cuda/device_slots.py",
        "if cache.layout.packed:",
        "if False:",
        CUDA_PACKING_TESTS + "test_frames_in_the_memory_of_a_gpu_are_not_unpacked",
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
        "plugins-end-threads",
        "kvtier_core/transfer/io_pool.py",
        "except BaseException as error:  # SystemExit",
        "except Exception as error:  # SystemExit",
        "tests/core/test_io_pool.py",
    ),
)
