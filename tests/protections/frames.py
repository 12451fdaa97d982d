"""Frames: their format, codecs, seals."""

from __future__ import annotations

from protections.mutant import Mutant

FRAME = "kvtier_core/frames/format.py"
CODEC = "kvtier_core/frames/codec.py"
KEYED_SEAL = "kvtier_core/frames/keyed_seal.py"
PACKED = "kvtier_core/builtin/packed.py"
CODEC_IDENTITY = "kvtier_core/frames/identity.py"
SEALING = "tests/core/test_sealing.py::"
SEALED_TIERS = "tests/core/test_sealed_tiers.py::"
SEALED_NAMES = "tests/core/test_sealed_names.py::"
PACKED_TESTS = "tests/core/test_packed.py::"
BUFFERS = "tests/core/test_buffers.py::"
CODEC_TESTS = "tests/core/test_codec.py::"
INCOMPATIBLE_TESTS = "tests/core/test_incompatible.py"

MUTANTS = (
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
        "header.payload_nbytes > len(frame) - FRAME_HEADER_NBYTES",
        "False",
        "tests/core/test_frame.py",
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
        "tests/core/test_frame.py::test_the_checksums_of_another_frame_do_not_fit",
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
        "what-does-not-pack-is-packed",
        PACKED,
        "if len(exponents.translate(None, known)) > _ESCAPES:",
        "if False:",
        PACKED_TESTS + "test_random_bytes_are_kept_as_they_are",
    ),
    Mutant(
        "tiles-reach-beyond-their-frame",
        PACKED,
        "if end + nbytes > len(encoded):",
        "if False:",
        PACKED_TESTS + "test_what_no_payload_becomes_is_refused",
    ),
    Mutant(
        "escapes-beyond-their-tile",
        PACKED,
        "if place >= n:",
        "if False:",
        PACKED_TESTS + "test_what_no_payload_becomes_is_refused",
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
        "lossy-decoders-are-not-tried",
        CODEC,
        "return crc32(decoded)",
        "return 0",
        CODEC_TESTS + "test_the_checksum_of_a_lossy_frame_is_of_what_it_decodes_to",
    ),
    Mutant(
        "any-count",
        CODEC,
        "if not 0 < count <= len(buffer):",
        "if False:",
        "tests/core/test_failing_store.py",
    ),
    Mutant(
        "codecs-share-their-keys",
        CODEC,
        "if shared and identity != RAW:",
        "if False:",
        CODEC_TESTS + "test_in_a_shared_store_no_two_codecs_have_a_frame_in_common",
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
        BUFFERS + "test_nothing_of_what_a_buffer_held_before_is_stored",
    ),
    Mutant(
        "what-a-policy-learned-is-anybodys",
        CODEC,
        "            self.keyed_seal.close(frame)\n",
        "            pass\n",
        SEALED_TIERS + "test_what_a_policy_learned_is_sealed",
    ),
    Mutant(
        "forged-frames-are-served",
        KEYED_SEAL,
        "if not _ends_well(gcm):\n            return",
        "if not _ends_well(gcm) and False:\n            return",
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
        "kvtier_core/frames/buffers.py",
        "sys.getrefcount(found[0]) == 2",
        "sys.getrefcount(found[0])",
        BUFFERS + "test_a_buffer_of_which_a_view_was_kept_is_not_used_again",
    ),
)
