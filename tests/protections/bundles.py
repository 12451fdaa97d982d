"""Protections of bundles."""

from __future__ import annotations

from protections.mutant import Mutant

FORMAT = "plugins/kvtier_bundle/kvtier_bundle/format.py"
EXPORTING = "plugins/kvtier_bundle/kvtier_bundle/exporting.py"
IMPORTING = "plugins/kvtier_bundle/kvtier_bundle/importing.py"
TESTS = "plugins/kvtier_bundle/tests/test_bundles.py::"
DAMAGED = "plugins/kvtier_bundle/tests/test_damaged_bundles.py::"

MUTANTS = (
    Mutant(
        "others-write-what-a-bundle-says",
        "plugins/kvtier_bundle/kvtier_bundle/backend.py",
        "            self._extents.clear()\n",
        "            pass\n",
        TESTS + "test_what_others_can_write_is_not_read",
    ),
    Mutant(
        "imports-are-not-verified",
        FORMAT,
        "            header = inspect_frame(page)\n",
        "",
        DAMAGED + "test_no_damaged_bundle_gives_a_wrong_frame",
    ),
    Mutant(
        "an-index-belongs-to-any-bundle",
        FORMAT,
        "return crc32(index, crc32(head))",
        "return crc32(index)",
        DAMAGED + "test_the_index_of_another_bundle_is_not_taken",
    ),
    Mutant(
        "a-length-is-believed",
        FORMAT,
        "(piece := file.read(min(nbytes, _PIECE_NBYTES)))",
        "(piece := file.read(nbytes))",
        DAMAGED + "test_a_length_that_no_bytes_follow_takes_no_memory",
    ),
    Mutant(
        "damaged-frames-are-exported",
        FORMAT,
        "return inspect(len(frame), lambda at, nbytes: frame[at : at + nbytes])",
        "return read_header(memoryview(frame))",
        TESTS + "test_damaged_frames_do_not_leave_and_are_told",
    ),
    Mutant(
        "an-interrupted-export-leaves-with-the-next",
        EXPORTING,
        "            if header.key not in chosen:\n",
        "            if False:\n",
        TESTS + "test_an_interrupted_export_leaves_nothing_that_is_not_asked_for_now",
    ),
    Mutant(
        "bundles-of-any-form-are-imported",
        "plugins/kvtier_bundle/kvtier_bundle/forms.py",
        'if ours != (theirs := facts.get(name, "")):',
        'if False and (theirs := facts.get(name, "")):',
        TESTS + "test_a_tier_of_another_form_refuses_a_bundle_before_anything_is_made",
    ),
    Mutant(
        "a-bundle-is-trusted-as-it-was-opened",
        "plugins/kvtier_bundle/kvtier_bundle/backend.py",
        "        self._must_be_trusted()  # before any of them counts\n",
        "",
        TESTS + "test_what_others_can_write_is_not_read",
    ),
    Mutant(
        "other-weights-are-imported",
        IMPORTING,
        "    if there and namespace not in there:\n",
        "    if False:\n",
        TESTS + "test_a_bundle_of_other_weights_is_not_imported",
    ),
    Mutant(
        "an-import-exceeds-the-capacity",
        IMPORTING,
        "        if room is not None and nbytes + len(frame) > room:\n",
        "        if False:\n",
        TESTS + "test_an_interrupted_import_is_repeated_and_capacity_is_kept",
    ),
    Mutant(
        "read-only-tiers-are-written-to",
        "kvtier_core/config/open.py",
        "takes_writes=not (tier.config.of_peers or tier.config.read_only),",
        "takes_writes=not tier.config.of_peers,",
        "plugins/kvtier_vllm/tests/test_bundles_in_engines.py::"
        "test_an_engine_starts_warm_with_the_chunks_of_a_prompt_alone",
    ),
    Mutant(
        "private-tiers-are-only-read",
        "kvtier_core/config/suitable.py",
        "(tier.config.read_only or tier.config.of_peers) and not tier.config.shared:",
        "False:",
        "tests/config/test_config.py::test_a_tier_that_is_only_read_cannot_be_private",
    ),
)
