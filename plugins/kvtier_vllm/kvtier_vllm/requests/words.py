"""Words of clients about one request, in ``kv_transfer_params``: how much of it may be loaded, and stored.

``kvtier.load`` and ``kvtier.store`` are ``no`` or ``all``. ``max_load_tokens`` and ``max_offload_tokens`` are words of
vLLM for its own offloading, with the same meaning. No word changes a key or an answer.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

#: The limits in tokens that these words set.
_LIMITS = {"no": 0, "all": sys.maxsize}
_LOADED = ("kvtier.load", "max_load_tokens")
_STORED = ("kvtier.store", "max_offload_tokens")
WORDS = _LOADED + _STORED


def most_loaded(parameters: object, default: str = "all") -> int:
    """How many tokens may be loaded after those that the engine has. A word that cannot be read says nothing."""
    said = [limit for limit in _said(parameters, _LOADED) if limit is not None]
    return min(said, default=_LIMITS[default])


def most_stored(parameters: object, default: str = "all") -> int:
    """How many tokens, from the first one on, may be stored: none if a word cannot be read."""
    return min((limit or 0 for limit in _said(parameters, _STORED)), default=_LIMITS[default])


def fault(word: str, value: object) -> str:
    """What the log says of a word with this value if it cannot be read; empty if it can."""
    if _limit(word, value) is not None:
        return ""
    expected = "no or all" if word.startswith("kvtier.") else "a number of tokens"
    return f"expected {expected}, so {'nothing of the request is stored' if word in _STORED else 'ignored'}"


def _said(parameters: object, words: tuple[str, ...]) -> list[int | None]:
    """The limits in tokens that a request sets with these words; None for each one that cannot be read."""
    said = parameters if isinstance(parameters, Mapping) else {}
    return [_limit(word, said[word]) for word in words if word in said]


def _limit(word: str, value: object) -> int | None:
    if word.startswith("kvtier."):
        return _LIMITS.get(value) if isinstance(value, str) else None
    return min(value, _LIMITS["all"]) if type(value) is int and value >= 0 else None
