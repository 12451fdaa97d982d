"""Text from outside: cut and escaped where it enters, and whole where it identifies something."""

from __future__ import annotations

from protections.mutant import Mutant

OUTSIDE = "kvtier_core/outside.py"
IDENTITY = "plugins/kvtier_vllm/kvtier_vllm/requests/identity.py"
SERVE = "plugins/kvtier_serve/kvtier_serve"
STATUS_PAGE = "tests/engine/test_status_page.py::"
SALTS = "plugins/kvtier_vllm/tests/test_request_identity.py::test_all_of_a_salt_counts_and_a_long_one_takes_no_memory"
FSCK = "plugins/kvtier_disk/tests/test_fsck.py::"
OPERATORS = "plugins/kvtier_serve/tests/test_operators.py::"
FLEET = "plugins/kvtier_fleet/tests/test_fleet.py::"

MUTANTS = (
    Mutant(
        "text-from-outside-is-not-escaped",
        OUTSIDE,
        'c if c.isprintable() else c.encode("unicode_escape").decode()',
        "c",
        "tests/test_outside.py::test_what_is_shown_is_a_line_of_bounded_length",
    ),
    Mutant(
        "text-from-outside-is-not-cut",
        OUTSIDE,
        "if len(shown) > longest:",
        "if False:",
        "tests/test_outside.py::test_texts_that_begin_alike_differ",
    ),
    Mutant(
        "ids-are-kept-whole",
        "kvtier_core/engine/scheduler/requests.py",
        "name = printable(view.request_id)",
        "name = Printable(view.request_id)",
        STATUS_PAGE + "test_what_is_remembered_of_a_request_does_not_grow_with_its_id",
    ),
    Mutant(
        "long-salts-are-cut",
        OUTSIDE,
        'f"#{_digest(text, 64)}"',
        "text[:LONGEST]",
        SALTS,
    ),
    Mutant(
        "salts-are-kept-whole",
        "kvtier_core/engine/request_view.py",
        "stand_in(cache_salt)",
        "cache_salt",
        SALTS,
    ),
    Mutant(
        "names-are-kept-whole",
        IDENTITY,
        "stand_in(feature.identifier)",
        "feature.identifier",
        "plugins/kvtier_vllm/tests/test_names.py::test_long_names_are_told_apart_and_take_no_memory",
    ),
    Mutant(
        "facts-of-strangers-are-shown-raw",
        "kvtier_core/stack/manager.py",
        "map(printable, differences[0])",
        "differences[0]",
        "tests/stack/test_manager.py::test_the_facts_of_a_strangers_namespace_forge_no_line",
    ),
    Mutant(
        "names-of-codecs-are-shown-raw",
        "kvtier_core/frames/format.py",
        'printable(self.codec_type.rstrip(b"\\0").decode(errors="replace"))',
        'self.codec_type.rstrip(b"\\0").decode(errors="replace")',
        FSCK + "test_the_name_of_a_codec_forges_no_line",
    ),
    Mutant(
        "names-of-files-are-shown-raw",
        "plugins/kvtier_doctor/kvtier_doctor/fsck.py",
        "printable(stored.where, LONGEST_PATH)",
        "stored.where",
        FSCK + "test_the_name_of_a_file_forges_no_line",
    ),
    Mutant(
        "names-of-pins-are-shown-raw",
        f"{SERVE}/operators/http.py",
        "{field: printable(name) for field, name in request.path_params.items()}",
        "request.path_params",
        OPERATORS + "test_what_clients_and_engines_name_forges_no_line",
    ),
    Mutant(
        "operators-make-other-salts",
        f"{SERVE}/operators/console.py",
        "tenants.name(KVIdentity.of(cache_salt).salt)",
        "tenants.name(json.dumps({'cache_salt': cache_salt}).encode())",
        OPERATORS + "test_a_long_salt_is_the_one_that_engines_make",
    ),
    Mutant(
        "output-is-logged-raw",
        f"{SERVE}/programs.py",
        "printable(text, 4 * _LINE)",
        "text",
        "plugins/kvtier_serve/tests/test_programs.py::test_output_forges_no_line",
    ),
    Mutant(
        "answers-of-servers-are-shown-raw",
        f"{SERVE}/operators/asking.py",
        "printable(told, LONGEST_PATH) if isinstance(told, str) else told",
        "told",
        FLEET + "test_what_a_server_says_forges_no_line",
    ),
    Mutant(
        "what-operators-name-is-logged-raw",
        "plugins/kvtier_fleet/kvtier_fleet/http.py",
        'printable(", ".join(on))',
        '", ".join(on)',
        FLEET + "test_an_operators_words_forge_no_line_in_the_log",
    ),
)
