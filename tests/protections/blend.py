"""Protections of requests that are blended, and of all others from these."""

from __future__ import annotations

from protections.mutant import Mutant

FOLDER = "plugins/kvtier_blend/kvtier_blend/"
ARRANGER, BLENDS = FOLDER + "arranger.py", FOLDER + "blends.py"
ENGINES = "plugins/kvtier_vllm/tests/test_blending.py::"
ONE_LAYER = ENGINES + "test_with_one_layer_a_blended_answer_is_the_computed_one"

MUTANTS = (
    Mutant(
        "values-are-turned-like-keys",
        ARRANGER,
        "turned, moved = self._rotation.turn(keys[there], old, new), values[there]",
        "turned, moved = (self._rotation.turn(each[there], old, new) for each in (keys, values))",
        ONE_LAYER,
    ),
    Mutant(
        "keys-are-turned-back",
        ARRANGER,
        "self._rotation.turn(keys[there], old, new)",
        "self._rotation.turn(keys[there], new, old)",
        ONE_LAYER,
    ),
    Mutant(
        "halves-of-keys-are-read-as-pairs",
        FOLDER + "rotation.py",
        "self._halves = bool(module.is_neox_style)",
        "self._halves = not module.is_neox_style",
        ONE_LAYER,
    ),
    Mutant(
        "gaps-between-chunks-are-not-computed",
        ARRANGER,
        "        self._link.compute(order.tokens, order.runs, order.blocks)\n",
        "",
        ONE_LAYER,
    ),
    Mutant(
        "shared-pages-are-turned-twice",
        FOLDER + "pages.py",
        "for name in each_once}",
        "for name in caches}",
        "plugins/kvtier_blend/tests/test_token_pages.py::test_pages_that_layers_share_are_there_once",
    ),
    Mutant(
        "models-are-blended-untested",
        ARRANGER,
        "        if why := model_check.fault(",
        "        if why := (lambda *_: '')(",
        ENGINES + "test_a_model_that_computes_other_keys_is_not_blended",
    ),
    Mutant(
        "any-report-allows-blending",
        FOLDER + "settings.py",
        "            report.check(weights, self.identity(chunk_tokens))\n",
        "",
        "plugins/kvtier_blend/tests/test_blend_quality.py::test_other_reports_do_not",
    ),
    Mutant(
        "failed-loads-are-arranged",
        ARRANGER,
        "if begun.failed or not self._has_arranged(begun.order):",
        "if not self._has_arranged(begun.order):",
        ENGINES + "test_a_request_whose_load_fails_is_computed",
    ),
    Mutant(
        "equal-hashes-are-equal-tokens",
        FOLDER + "content_index.py",
        "if at >= free and known.digest == _digest(salt, rest[at : at + self._chunk_tokens]):",
        "if at >= free:",
        "plugins/kvtier_blend/tests/test_content_index.py::test_tokens_with_the_hash_of_others_are_not_found",
    ),
    Mutant(
        "chunks-of-tenants-are-everybodys",
        BLENDS,
        "self.index.learn(view.identity.salt, tokens, state.path, number)",
        'self.index.learn(b"", tokens, state.path, number)',
        ENGINES + "test_a_tenant_is_given_its_own_kv_alone",
    ),
    Mutant(
        "blended-blocks-are-not-kept-apart",
        BLENDS,
        "        if not is_apart:\n",
        "        if False:\n",
        ENGINES + "test_only_a_request_that_asks_and_stays_apart_is_blended",
    ),
    Mutant(
        "lossy-chunks-are-blended",
        BLENDS,
        "zip(stretch[: found.exact], ",
        "zip(stretch, ",
        ENGINES + "test_chunks_that_passed_through_a_lossy_codec_are_not_blended",
    ),
    Mutant(
        "copies-of-known-chunks-are-stored",
        "kvtier_core/engine/scheduler/storing.py",
        "            if not is_unwanted:\n",
        "            if True:\n",
        ENGINES + "test_only_what_is_new_in_a_prompt_is_stored",
    ),
    Mutant(
        "audited-hits-are-blended",
        BLENDS,
        "if state.audits and state.match.found.chunks:",
        "if False:",
        ENGINES + "test_an_audited_hit_is_not_blended",
    ),
)
