"""Words of clients about one request, in ``kv_transfer_params``: what of it may be loaded, and stored.

``kvtier.load`` and ``kvtier.store`` are ``no``, ``memory`` or ``all``. ``max_load_tokens``, ``kv_load_tiers`` and
``max_offload_tokens`` are words of vLLM for its own offloading, and others are LMCache's, with the same meaning. No
word changes a key or an answer.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any

import attrs

from kvtier_core.config.model import RequestsConfig
from kvtier_core.engine.request_view import ANY_MEDIUM
from kvtier_core.interfaces import Medium

#: The limits in tokens that these words set.
_LIMITS = {"no": 0, "memory": sys.maxsize, "all": sys.maxsize}
_LOAD, _STORE, _TIERS, _SKIP = "kvtier.load", "kvtier.store", "kv_load_tiers", "lmcache.skip_save"
OWN = (_LOAD, _STORE)
_LOADED = (_LOAD, "max_load_tokens")
_STORED = (_STORE, "max_offload_tokens", _SKIP, "lmcache.max_offload_tokens")
WORDS = (*_LOADED, *_STORED, _TIERS)

#: The medium and the locality of kvtier's tiers in vLLM's words; None: unknown, which matches all of them.
_PLACES = {Medium.HOST: ("CPU", "LOCAL"), Medium.DISK: ("STORAGE", "LOCAL"), Medium.UNSPECIFIED: (None, None)}
_KNOWN = (["CPU", "STORAGE", None], ["LOCAL", "REMOTE", None])


@attrs.frozen
class Words:
    """What a request says of itself, as `RequestView` has it."""

    most_loaded: int = sys.maxsize
    media: Collection[Medium] = ANY_MEDIUM
    most_stored: int = sys.maxsize
    memory_only: bool = False

    @classmethod
    def of(cls, parameters: object, default: RequestsConfig) -> Words:
        """Read them. A word about loads that cannot be read says nothing; one about storing, that nothing is stored."""
        said = parameters if isinstance(parameters, Mapping) else {}
        loaded = [limit for word in _LOADED if word in said and (limit := _limit(word, said[word])) is not None]
        stored = [_limit(word, said[word]) or 0 for word in _STORED if word in said and (word != _SKIP or said[word])]
        load = said[_LOAD] if _limit(_LOAD, said.get(_LOAD)) is not None else default.load
        media = frozenset() if load == "memory" else _media(said.get(_TIERS))
        return cls(
            min(loaded, default=_LIMITS[default.load]),
            ANY_MEDIUM if media is None else media,
            min(stored, default=_LIMITS[default.store]),
            said.get(_STORE, default.store) == "memory",
        )


def fault(word: str, value: object) -> str:
    """What the log says of a word with this value if it cannot be read; empty if it can."""
    if word == _TIERS:
        return "" if value is None or _media(value) is not None else "expected a list of tiers, so ignored"
    if _limit(word, value) is not None:
        return ""
    expected = "no, memory or all" if word.startswith("kvtier.") else "a number of tokens"
    return f"expected {expected}, so {'nothing of the request is stored' if word in _STORED else 'ignored'}"


def _limit(word: str, value: object) -> int | None:
    if word == _SKIP:
        return 0
    if word.startswith("kvtier."):
        return _LIMITS.get(value) if isinstance(value, str) else None
    return min(value, _LIMITS["all"]) if type(value) is int and value >= 0 else None


def _media(tiers: object) -> Collection[Medium] | None:
    """The media of the store tiers that ``kv_load_tiers`` allows; None if it cannot be read. Wrong entries are left
    out, as vLLM does.
    """
    if not isinstance(tiers, list):
        return None
    wanted = [place for entry in tiers if (place := _place(entry)) is not None]
    if tiers and not wanted:
        return None
    return frozenset(medium for medium, here in _PLACES.items() if any(_matches(here, place) for place in wanted))


def _place(entry: Any) -> tuple[Any, ...] | None:
    """The medium and the locality of an entry; None if it has other values than those that vLLM knows."""
    if not isinstance(entry, Mapping):
        return None
    said = entry.get("medium"), entry.get("locality")
    place = tuple(value.upper() if isinstance(value, str) else value for value in said)
    return place if all(value in known for value, known in zip(place, _KNOWN, strict=True)) else None


def _matches(here: tuple[Any, ...], wanted: tuple[Any, ...]) -> bool:
    return all(None in pair or pair[0] == pair[1] for pair in zip(here, wanted, strict=True))
