"""Words of clients about one request, in ``kv_transfer_params``: how much of it may be loaded, and stored.

``kvtier.load`` and ``kvtier.store`` are ``no`` or ``all``. ``max_load_tokens`` and ``max_offload_tokens`` are words of
vLLM for its own offloading, with the same meaning. No word changes a key or an answer.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

_ALL = sys.maxsize
_LOADED = ("kvtier.load", "max_load_tokens")
_STORED = ("kvtier.store", "max_offload_tokens")
WORDS = _LOADED + _STORED


def most_loaded(parameters: object) -> int:
    """How many tokens may be loaded after those that the engine has. A word that cannot be read says nothing."""
    return min(_ALL, *(_ALL if limit is None else limit for limit in _said(parameters, _LOADED)))


def most_stored(parameters: object) -> int:
    """How many tokens, from the first one on, may be stored: none if a word cannot be read."""
    return min(_ALL, *(limit or 0 for limit in _said(parameters, _STORED)))


def complaint(word: str, value: object) -> str:
    """What the log says of a word with this value if it cannot be read; empty if it can."""
    if _limit(word, value) is not None:
        return ""
    expected = "no or all" if word.startswith("kvtier.") else "a number of tokens"
    return f"expected {expected}, so {'nothing of the request is stored' if word in _STORED else 'ignored'}"


def _said(parameters: object, words: tuple[str, ...]) -> list[int | None]:
    """The limits in tokens that a request sets with these words; None for each one that cannot be read."""
    said = parameters if isinstance(parameters, Mapping) else {}
    return [_limit(word, said[word]) if word in said else _ALL for word in words]


def _limit(word: str, value: object) -> int | None:
    if word.startswith("kvtier."):
        return {"no": 0, "all": _ALL}.get(value) if isinstance(value, str) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
