"""Speculative decoding: which of vLLM's ways to draft are served, and what their drafts leave in the KV cache.

Among a request's token ids are no drafts but those that were accepted, and only the KV of these tokens is stored: what
a rejected draft left behind was overwritten before. What is left to mind is the KV of a draft model's own layers. EAGLE
and MTP compute it at a position from the token behind that too, so a chunk's key does not say what its end holds.
"""

from __future__ import annotations

import attrs
from vllm.config import LoadConfig, ModelConfig, SpeculativeConfig, VllmConfig

#: Ways to draft from the tokens alone: nothing of theirs is in the KV cache.
_FROM_TOKENS = ("ngram", "ngram_gpu", "suffix")
#: Ways to draft with a model that has KV, and whether that at a position depends on the token behind it too.
_WITH_A_MODEL = {"eagle": True, "eagle3": True, "mtp": True, "draft_model": False}


@attrs.frozen
class DraftModel:
    """A model whose layers have KV beside those of the model that an engine serves."""

    model: ModelConfig
    load: LoadConfig  #: where its weights come from
    reads_next_token: bool  #: its KV at a position depends on the token behind that too
    tokens: int  #: that it drafts at once, at most

    def computes(self, tokens: int) -> bool:
        """Does it run in a step after which the longest sequence has this many ``tokens``?

        It does not if its drafts could be too long for it. Its KV of all requests of that step is then never written.
        """
        return tokens + self.tokens <= self.model.max_model_len


def changes_kv(config: VllmConfig) -> bool:
    """Can drafts, or how they are made, change what is in the KV cache?"""
    return config.speculative_config is not None and config.speculative_config.method not in _FROM_TOKENS


def refusal(config: VllmConfig) -> str:
    """Why an engine that drafts like this is not served; empty if it is, or drafts nothing."""
    speculative = config.speculative_config
    if not changes_kv(config):
        return ""
    if speculative.method not in _WITH_A_MODEL:
        return f"speculative decoding with {speculative.method} is not served yet"
    if speculative.parallel_drafting:
        return "speculative decoding with parallel drafts is not served yet"
    if _modules(speculative) > 1:
        return "speculative decoding with several MTP modules is not served yet: they read several tokens ahead"
    return ""


def draft_model(config: VllmConfig) -> DraftModel | None:
    """The draft model of an engine; None if it has none."""
    speculative = config.speculative_config
    if not changes_kv(config):
        return None
    return DraftModel(
        model=speculative.draft_model_config,
        load=speculative.draft_load_config or config.load_config,
        reads_next_token=_WITH_A_MODEL.get(speculative.method, True),
        tokens=speculative.num_speculative_tokens,
    )


def _modules(speculative: SpeculativeConfig) -> int:
    """How many MTP modules draft, one behind the other."""
    if speculative.method != "mtp":
        return 1
    modules = getattr(speculative.draft_model_config.hf_config, "num_nextn_predict_layers", 1)
    return min(modules, speculative.num_speculative_tokens)
