"""Disaggregated prefill: the words for it in ``kv_transfer_params``, which are those of vLLM's NIXL connector.

A proxy sends a prompt to one engine with ``do_remote_decode``, and passes on what that returns to another. No word of a
request makes an engine connect anywhere: it asks the stores and peers that its own configuration names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def is_continued_elsewhere(parameters: object) -> bool:
    """Will another engine decode after this prompt?"""
    return _flags(parameters) == (True, False)


def computed_elsewhere(parameters: Any, prompt_tokens: int) -> int:
    """How many tokens of the prompt, from the first one on, another engine has computed; 0 if ill-formed."""
    if _flags(parameters) != (False, True):
        return 0
    tokens = parameters.get("remote_num_tokens")
    if tokens is None:
        return prompt_tokens
    return max(0, min(tokens, prompt_tokens)) if type(tokens) is int else 0


def handed_over(tokens: int, engine: str, request_id: str) -> dict[str, Any]:
    """What a proxy passes on to the decoding engine, which finds ``tokens`` tokens of the prompt with this one.

    Proxies expect all of these words. Those that locate something are for other connectors.
    """
    return {
        "do_remote_prefill": tokens > 0,
        "do_remote_decode": False,
        "remote_engine_id": engine,
        "remote_request_id": request_id,
        "remote_num_tokens": tokens,
        "remote_block_ids": [],
        "remote_host": None,
        "remote_port": None,
    }


def _flags(parameters: object) -> tuple[bool, bool]:
    """``do_remote_decode`` and ``do_remote_prefill``; neither if one of them is not a flag."""
    if not isinstance(parameters, Mapping):
        return False, False
    decode, prefill = (parameters.get(f"do_remote_{name}") for name in ("decode", "prefill"))
    if not all(flag is None or isinstance(flag, bool) for flag in (decode, prefill)):
        return False, False
    return bool(decode), bool(prefill)
