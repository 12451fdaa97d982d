"""Frames: their format, codecs, seals."""

from __future__ import annotations

from protections.mutant import Mutant

FRAME = "kvtier_core/frames/format.py"
CODEC = "kvtier_core/encoding/codec.py"
KEYED_SEAL = "kvtier_core/encoding/keyed_seal.py"
PACKED = "kvtier_core/transfer/packing.py"
CODEC_IDENTITY = "kvtier_core/frames/identity.py"
SEALING = "tests/encoding/test_sealing.py::"
SEALED_TIERS = "tests/encoding/test_sealed_tiers.py::"
SEALED_NAMES = "tests/relays/test_sealed_names.py::"
PACKED_TESTS = "tests/builtin/test_packed.py::"
PACKED_SLOTS = "tests/builtin/test_packed_slots.py::"
BUFFERS = "tests/encoding/test_buffers.py::"
CODEC_TESTS = "tests/encoding/test_codec.py::"
INCOMPATIBLE_TESTS = "tests/encoding/test_incompatible.py"
REGROUP = "kvtier_core/transfer/regroup.py"
REGROUP_TESTS = "tests/transfer/test_regroup.py::"

SHOWN_STORE = "kvtier_core/relays/shown_store.py"
SHOWN_STORE_TESTS = "tests/relays/test_shown_store.py::"

MUTANTS = (
    Mutant(
        "peers-read-what-is-being-written",
        SHOWN_STORE,
        "self._changed.wait_for(lambda: self._named.isdisjoint(keys))",
        "pass",
        SHOWN_STORE_TESTS + "test_no_two_calls_name_the_same_key_and_peers_get_whole_frames_or_none",
    ),
    Mutant(
        "peers-get-what-is-damaged",
        SHOWN_STORE,
        " or self._codec.verify(key, buffer[:nbytes]) is not None",
        "",
        SHOWN_STORE_TESTS + "test_what_is_not_whole_is_not_sent_and_not_announced_any_more",
    ),
    Mutant(
        "a-store-closes-while-peers-read",
        SHOWN_STORE,
        "self._changed.wait_for(lambda: not self._named)",
        "pass",
        SHOWN_STORE_TESTS + "test_a_store_closes_when_no_peer_reads_any_more",
    ),
    Mutant(
        "slow-links-hold-turns-at-a-store",
        SHOWN_STORE,
        """                finally:
                    self._turns.release()
            yield frame
""",
        """                finally:
                    pass
            yield frame
""",
        SHOWN_STORE_TESTS + "test_frames_that_are_sent_slowly_keep_no_other_from_reading",
    ),
    Mutant(
        "shared-stores-are-shown",
        "kvtier_core/config/open.py",
        "codec.is_raw and not self._shared and self.config.has_peers",
        "codec.is_raw and self.config.has_peers",
        SHOWN_STORE_TESTS + "test_only_private_stores_of_frames_as_they_are_in_slots_are_shown",
    ),
    Mutant(
        "encoded-stores-are-shown",
        "kvtier_core/config/open.py",
        "codec.is_raw and not self._shared and self.config.has_peers",
        "not self._shared and self.config.has_peers",
        SHOWN_STORE_TESTS + "test_only_private_stores_of_frames_as_they_are_in_slots_are_shown",
    ),
    Mutant(
        "other-ranks-as-they-lie",
        CODEC,
        "        self._regrouping.rearrange(slot, found)\n",
        "",
        REGROUP_TESTS + "test_each_head_comes_to_its_place",
    ),
    Mutant(
        "any-number-of-shards-is-believed",
        CODEC,
        "found is None or (checksums and checksums_of(frame, found) != list(checksums))",
        "found is None",
        REGROUP_TESTS + "test_a_number_of_shards_that_is_not_true_is_a_miss",
    ),
    Mutant(
        "any-page-divides-by-head",
        REGROUP,
        "if not self.divides:",
        "if False:",
        REGROUP_TESTS + "test_pages_that_do_not_divide_by_head_are_left_alone",
    ),
    Mutant(
        "rows-that-overlap-divide-by-head",
        REGROUP,
        " and not any(step % row for step in outside)",
        "",
        REGROUP_TESTS + "test_pages_that_do_not_divide_by_head_are_left_alone",
    ),
    Mutant(
        "encoded-frames-of-any-ranks",
        CODEC,
        "            self.namespace = namespace_of_ranks(self.namespace, layout)\n",
        "            pass\n",
        REGROUP_TESTS + "test_only_frames_arranged_like_pages_are_found_by_other_ranks",
    ),
    Mutant(
        "packed-frames-of-any-ranks",
        CODEC,
        " and keyed_seal is None and not layout.packed:",
        " and keyed_seal is None:",
        REGROUP_TESTS + "test_only_frames_arranged_like_pages_are_found_by_other_ranks",
    ),
    Mutant(
        "workers-read-frames-of-any-ranks",
        "kvtier_core/config/open.py",
        "if opened.codec.regroups:",
        "if False:",
        "tests/stack/test_slab_stacks.py::test_frames_of_any_ranks_pass_through_an_arena",
    ),
    Mutant(
        "no-checksum",
        FRAME,
        "header.payload_checksum != payload_checksum",
        "False",
        "tests/frames/test_frame.py",
    ),
    Mutant(
        "no-checksum-of-the-header",
        FRAME,
        "crc32(frame[: _FIELDS.size]) != checksum",
        "False",
        "tests/frames/test_frame.py",
    ),
    Mutant("any-codec", FRAME, "header.codec != codec", "False", INCOMPATIBLE_TESTS),
    Mutant(
        "version-1-is-damage",
        FRAME,
        "    FrameError.VERSION,\n    FrameError.SEAL,",
        "    FrameError.SEAL,",
        "tests/frames/test_frame.py::test_a_frame_of_version_1_is_incompatible",
    ),
    Mutant("any-namespace", FRAME, "header.namespace != namespace", "False", "tests/frames/test_frame.py"),
    Mutant("any-key", FRAME, "header.key != key", "False", "tests/frames/test_frame.py"),
    Mutant(
        "any-length",
        FRAME,
        "payload_nbytes is not None and header.payload_nbytes != payload_nbytes",
        "False",
        "tests/frames/test_frame.py",
    ),
    Mutant(
        "believes-the-length",
        FRAME,
        "header.payload_nbytes > len(frame) - FRAME_HEADER_NBYTES",
        "False",
        "tests/frames/test_frame.py",
    ),
    Mutant(
        "reads-whole-files",
        FRAME,
        "_PIECE_NBYTES = 4 << 20",
        "_PIECE_NBYTES = 4 << 40",
        "plugins/kvtier_disk/tests/test_fsck.py::test_a_large_frame_is_read_in_pieces",
    ),
    Mutant(
        "any-checksum-of-a-shard-is-believed",
        FRAME,
        "if end > FRAME_HEADER_NBYTES or frame[_FIELDS_END:end] != _summed(bytes(table), header.packed()):",
        "if end > FRAME_HEADER_NBYTES:",
        "tests/frames/test_frame.py::test_the_checksums_of_another_frame_do_not_fit",
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
        SEALING + "test_a_damaged_frame_is_called_neither_forged_nor_of_another_key",
    ),
    Mutant(
        "damage-under-a-key-is-a-forgery",
        KEYED_SEAL,
        "return verify_checksums(header, crc32(payload)) or FrameError.FORGED",
        "return FrameError.FORGED",
        SEALING + "test_a_damaged_frame_is_called_neither_forged_nor_of_another_key",
    ),
    Mutant(
        "what-does-not-pack-is-packed",
        PACKED,
        "if len(exponents.translate(None, known)) > _ESCAPES:",
        "if False:",
        PACKED_TESTS + "test_random_bytes_are_kept_as_they_are",
    ),
    Mutant(
        "tiles-reach-beyond-their-frame",
        PACKED,
        " or len(end) < len(tile) // 4:",
        ":",
        PACKED_TESTS + "test_input_that_no_payload_encodes_to_is_refused",
    ),
    Mutant(
        "escapes-beyond-their-tile",
        PACKED,
        "if place >= n:",
        "if False:",
        PACKED_TESTS + "test_input_that_no_payload_encodes_to_is_refused",
    ),
    Mutant(
        "packed-frames-pass-for-raw-ones",
        CODEC_IDENTITY,
        "return PACKED if layout.packed else RAW",
        "return RAW",
        PACKED_SLOTS + "test_an_arena_that_does_not_pack_serves_no_packed_frame_nor_the_other_way_round",
    ),
    Mutant(
        "serializers-below-packed-arenas-are-the-same",
        CODEC_IDENTITY,
        "if packed:",
        "if False:",
        PACKED_SLOTS + "test_a_serializer_below_encodes_what_was_packed",
    ),
    Mutant(
        "what-has-no-room-counts-as-stored",
        "kvtier_core/transfer/host_mover.py",
        " and len(filled) == len(checksums)",
        "",
        PACKED_SLOTS + "test_a_mover_says_which_slots_are_filled_and_which_load_failed",
    ),
    Mutant(
        "any-mover-packs",
        "kvtier_core/config/open.py",
        'tier.packing == "auto" and device in tier.config.packs for',
        'tier.packing == "auto" for',
        PACKED_SLOTS + "test_all_arenas_pack_or_none",
    ),
    Mutant(
        "any-reader-unpacks",
        "kvtier_core/config/open.py",
        "if opened.codec.layout.packed and not tier.config.reads_packed:",
        "if False:",
        "tests/stack/test_slab_stacks.py::test_encoded_frames_are_read_by_readers_that_unpack_them",
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
        CODEC_TESTS + "test_a_frame_of_another_codec_is_incompatible",
    ),
    Mutant(
        "one-decode-fails-its-batch",
        CODEC,
        "contextlib.suppress(Exception)",
        "contextlib.suppress(BackendError)",
        CODEC_TESTS + "test_an_error_of_decode_fails_its_frame_alone",
    ),
    Mutant(
        "decoded-is-exact",
        CODEC,
        "self._of_slots if self.identity.lossless else lossy(self._of_slots)",
        "self._of_slots",
        CODEC_TESTS + "test_a_slot_decoded_by_a_lossy_codec_is_marked",
    ),
    Mutant(
        "inexact-frames-are-written",
        CODEC,
        "if header.codec != self._of_slots:",
        "if False:",
        CODEC_TESTS + "test_a_slot_decoded_by_a_lossy_codec_is_marked",
    ),
    Mutant(
        "lossy-decoders-are-not-tried",
        CODEC,
        "checksum = crc32(buffer[:nbytes])",
        "checksum = 0",
        CODEC_TESTS + "test_the_checksum_of_a_lossy_frame_is_of_what_it_decodes_to",
    ),
    Mutant(
        "any-count",
        CODEC,
        "if not 0 < count <= len(buffer):",
        "if False:",
        "tests/stack/test_failing_store.py",
    ),
    Mutant(
        "codecs-share-their-keys",
        CODEC,
        "if shared and serializer is not None:",
        "if False:",
        CODEC_TESTS + "test_in_a_shared_store_no_two_codecs_have_a_frame_in_common",
    ),
    Mutant(
        "slots-under-a-tiers-namespace",
        CODEC,
        "seal_part(slot, self._arena_namespace, key, part, known, ",
        "seal_part(slot, self.namespace, key, part, known, ",
        SEALING + "test_a_frame_that_was_read_can_be_written_to_any_other_tier",
    ),
    Mutant(
        "other-keys-under-the-same-names",
        CODEC,
        "if keyed_seal is not None:  #",
        "if False:  #",
        SEALING + "test_engines_with_other_keys_write_over_none_of_each_others_frames",
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
        "    frame[FRAME_HEADER_NBYTES + payload_nbytes :] = bytes(",
        "    bytes(",
        BUFFERS + "test_earlier_bytes_of_a_buffer_are_not_stored",
    ),
    Mutant(
        "what-a-policy-learned-is-anybodys",
        CODEC,
        "            self.keyed_seal.close(frame)\n",
        "            pass\n",
        SEALED_TIERS + "test_a_policys_state_is_sealed",
    ),
    Mutant(
        "forged-frames-are-served",
        KEYED_SEAL,
        "if not _ends_well(gcm):",
        "if not _ends_well(gcm) and False:",
        SEALING + "test_no_forged_frame_is_served",
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
        "return verify_checksums(header, summed)",
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
        "names-without-the-secret",
        KEYED_SEAL,
        "_derived(root, _AES_KEY_NBYTES, each)",
        "_derived(bytes(32), _AES_KEY_NBYTES, each)",
        SEALED_NAMES + "test_names_depend_on_the_secret_and_on_what_it_protects_from",
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
        "views-that-are-kept-are-overwritten",
        "kvtier_core/work/buffers.py",
        "sys.getrefcount(found[0]) == 2",
        "sys.getrefcount(found[0])",
        BUFFERS + "test_a_buffer_of_which_a_view_was_kept_is_not_used_again",
    ),
)
