"""What requests asked and loaded, by tenant: those of one ``cache_salt`` and adapter."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence

import attrs

#: Tenants that are counted apart. The one with the fewest tokens makes room for a new one, and joins the others.
_APART = 64
OTHERS = "others"


@attrs.define
class _Counts:
    requests: int = 0
    tokens: int = 0
    queried: int = 0
    loaded: int = 0

    def add(self, more: _Counts) -> None:
        self.requests += more.requests
        self.tokens += more.tokens
        self.queried += more.queried
        self.loaded += more.loaded


class Tenants:
    """Counts by a keyed digest: who sees it cannot try out which salt it is of, so that none is told."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._counts: dict[str, _Counts] = {}

    def count(self, salt: bytes, tokens: int, queried: int, loaded: int) -> None:
        """A request had so many tokens, of which the engine lacked some, and some of these were loaded."""
        tenant = hashlib.blake2b(salt, digest_size=4, key=self._key).hexdigest() if salt else "-"
        if tenant not in self._counts and len(self._counts) >= _APART:
            apart = [name for name in self._counts if name != OTHERS]
            least = min(apart, key=lambda name: self._counts[name].tokens)
            self._counts.setdefault(OTHERS, _Counts()).add(self._counts.pop(least))
        self._counts.setdefault(tenant, _Counts()).add(_Counts(1, tokens, queried, loaded))

    def describe(self) -> Sequence[Mapping[str, str | int]]:
        """Those with the most tokens first. One without a salt is ``-``."""
        ordered = sorted(self._counts.items(), key=lambda item: -item[1].tokens)
        return [{"tenant": name, **attrs.asdict(counts)} for name, counts in ordered]
