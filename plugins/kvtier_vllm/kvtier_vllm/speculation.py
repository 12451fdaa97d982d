"""Speculative decoding: which of vLLM's ways to draft are served, and what their drafts leave in the KV cache.

A request's token ids contain no drafts but those that were accepted, and only the KV of these tokens is stored: what a
rejected draft left was overwritten before. What remains is the KV of a draft model's own layers. EAGLE and MTP compute
it at a position also from the token after it, several MTP modules from several tokens.
"""

from __future__ import annotations

import attrs
from vllm.config import LoadConfig, ModelConfig, VllmConfig

from kvtier_vllm import versions

#: Ways to draft from tokens or from the model's last output: they leave nothing in the KV cache.
_WITHOUT_KV = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
#: Ways to draft with layers that have KV.
_WITH_KV = ("eagle", "eagle3", "mtp", "dflash", "dspark", "draft_model")


@attrs.frozen
class DraftModel:
    """A model whose layers have KV in addition to those of the model that an engine serves."""

    model: ModelConfig
    load: LoadConfig  #: the source of its weights
    lookahead: int  #: number of tokens after a position that its KV there depends on
    queries: int  #: number of tokens after the sequence that it computes together: its drafts, and with DFlash one more

    def computes(self, tokens: int) -> bool:
        """Does it run in a step after which the longest sequence has this many ``tokens``?

        It does not if its drafts could be too long for it. Its KV of all requests of that step is then never written.
        """
        return tokens + self.queries <= self.model.max_model_len


def changes_kv(config: VllmConfig) -> bool:
    """Can drafts, or how they are made, change what is in the KV cache?"""
    return config.speculative_config is not None and config.speculative_config.method not in _WITHOUT_KV


def refusal(config: VllmConfig, keeps_states: bool) -> str:
    """Why an engine that drafts like this is not served; empty if it is, or drafts nothing.

    ``keeps_states``: it has layers with recurrent states.
    """
    speculative = config.speculative_config
    if not changes_kv(config):
        return ""
    if speculative.method not in _WITH_KV:
        return f"the KV that speculative decoding with {speculative.method} leaves is unknown"
    lookahead = versions.lookahead_of(config)
    if lookahead is None:
        return "this vLLM does not report how many tokens its MTP modules read ahead"
    if keeps_states and lookahead > 1:
        return "several MTP modules complete the KV after a recurrent state only once vLLM has released that state"
    return ""


def draft_model(config: VllmConfig) -> DraftModel | None:
    """The draft model of an engine; None if it has none."""
    speculative = config.speculative_config
    if not changes_kv(config):
        return None
    return DraftModel(
        model=speculative.draft_model_config,
        load=speculative.draft_load_config or config.load_config,
        lookahead=versions.lookahead_of(config) or 0,
        queries=speculative.num_speculative_tokens + speculative.use_dflash(),
    )
