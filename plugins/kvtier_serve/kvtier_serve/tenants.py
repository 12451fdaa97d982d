"""The tenants whose chunks are in the memory of a server, and their quotas.

A tenant is the ``cache_salt`` of requests, whatever their adapters. Its name is a keyed digest, so that a reader cannot
test which salt it belongs to. Requests without a ``cache_salt`` belong to the tenant `ANONYMOUS`.

A client that chose a new salt for each request would have a new quota each time. So the quotas of `ANONYMOUS` also
bound what a salt stores before it comes back: a tenant is bounded by its own quotas from its second request on.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

import attrs
import msgspec
from msgspec import Struct

from kvtier_core.types import ChunkKey

#: The tenant of requests without a salt, and of quotas for salts that have not come back.
ANONYMOUS = "anonymous"
#: The most tenants whose requests are counted. One that holds nothing and is not among them begins again.
_COUNTED = 1 << 16
#: Tenants beyond `_APART` in metrics.
OTHERS = "others"
#: The most tenants with their own metrics: those that were seen first, so that no count ever falls.
_APART = 64


@attrs.frozen
class Quota:
    """Bytes that a tenant may have in all arenas together, or a model in each; None: any number."""

    soft: int | None = None  #: beyond it its chunks are evicted before all others
    hard: int | None = None  #: beyond it they are evicted immediately


UNBOUNDED = Quota()


class _Salt(Struct):
    """What `kvtier_vllm.requests.identity` makes a salt from, except the adapter."""

    cache_salt: str = ""


class Book(Protocol):
    """What one arena holds of each tenant."""

    def used_by(self, tenant: str) -> int:
        """Bytes of the chunks that a tenant's quotas bound."""

    def of_tenant(self, tenant: str) -> Sequence[ChunkKey]:
        """The chunks of a tenant, whichever tenant's quotas bound them."""

    def comes_back(self, path: Sequence[ChunkKey], tenant: str) -> None:
        """These chunks of the tenant are bounded by its own quotas from now on."""


class Tenants:
    """The tenants of one server. One thread calls every method."""

    def __init__(
        self,
        default: Quota = UNBOUNDED,
        key: bytes = b"",
        books: Collection[Book] = (),
    ):
        """``default`` is the quota of each tenant that has none of its own, ``key`` that of their names.

        ``books`` always has those of all arenas that exist: a closed one no longer counts.
        """
        self.key = key or secrets.token_bytes(32)  #: that of the tenants' names
        self._default = default
        self._books = books
        self._quotas: dict[str, Quota] = {}
        self._requests: dict[str, int] = {}  # of each tenant: 1, or 2 for more; the one that came last at the end
        self._books_of: dict[str, WeakKeyDictionary[Book, None]] = {}  # in which a tenant has chunks
        self.over_soft: dict[str, None] = {}  #: tenants beyond their soft quota, the next to be looked at first
        self.over_hard: dict[str, None] = {}  #: tenants beyond their hard quota, in the same order
        self._unjudged: dict[str, None] = {}  # tenants whose quotas may have changed
        self.lookups: dict[tuple[str, str], tuple[int, int]] = {}  #: chunks asked for and found, by model and tenant
        self._apart: set[str] = set()

    def name(self, salt: bytes) -> str:
        """The name of the tenant whose requests have this salt, as long as this server runs."""
        try:
            tenant = msgspec.json.decode(salt, type=_Salt).cache_salt.encode() if salt else b""
        except (msgspec.DecodeError, ValueError, RecursionError):
            tenant = salt  # of an engine that makes its salts in another way
        return hashlib.blake2b(tenant, digest_size=8, key=self.key).hexdigest() if tenant else ANONYMOUS

    def came(self, salt: bytes) -> str:
        """Note a request. Returns its tenant if that is bounded by quotas of its own, else an empty string."""
        tenant = self.name(salt)
        if tenant == ANONYMOUS:
            return ""
        self._requests[tenant] = min(2, self._requests.pop(tenant, 0) + 1)
        if len(self._requests) > _COUNTED:
            del self._requests[next(iter(self._requests))]
        return tenant if self.bounding(tenant) == tenant else ""

    def bounding(self, tenant: str) -> str:
        """The tenant whose quotas bound what this one stores now: itself if it has come back, or holds something."""
        known = tenant in self._quotas or self._requests.get(tenant) == 2 or self.used_by(tenant)
        return tenant if known else ANONYMOUS

    def set_quotas(self, default: Quota, quotas: Mapping[str, Quota]) -> None:
        """Set the quotas: those of the tenants with these names, and that of each other tenant."""
        new = quotas.keys() - self._quotas.keys()
        self._default, self._quotas = default, dict(quotas)
        for tenant in new:
            for book in self._books:
                book.comes_back(book.of_tenant(tenant)[::-1], tenant)
        self._unjudged = dict.fromkeys((*new, *self._books_of))

    def judge(self, count: int) -> bool:
        """Check whether some of the tenants keep within quotas that have changed. Are more of them left?"""
        for tenant in list(itertools.islice(self._unjudged, count)):
            del self._unjudged[tenant]
            self._judge(tenant)
        return bool(self._unjudged)

    def quota(self, tenant: str) -> Quota:
        """The quota of a tenant."""
        return self._quotas.get(tenant, self._default)

    @property
    def names(self) -> list[str]:
        """The tenants that may have chunks in some arena."""
        return list(self._books_of)

    def used_by(self, tenant: str) -> int:
        """Bytes of all arenas that count for this tenant."""
        return sum(book.used_by(tenant) for book in self.books_of(tenant))

    def books_of(self, tenant: str) -> list[Book]:
        """Those of the arenas in which a tenant has chunks."""
        books = self._books_of.get(tenant)
        if books is None:
            return []
        if not (existing := [book for book in books if book in self._books]):
            del self._books_of[tenant]
        return existing

    def room(self, tenant: str, slot_nbytes: int) -> int | None:
        """How many slots a tenant may still have within its soft quota; None: any number."""
        soft = self.quota(tenant).soft
        return None if soft is None else max(0, soft - self.used_by(tenant)) // slot_nbytes

    def excess(self, tenant: str, limit: int | None) -> int:
        """Bytes that a tenant has beyond a limit."""
        return 0 if limit is None else max(0, self.used_by(tenant) - limit)

    def in_turn(self, exceeding: dict[str, None], count: int, here: Container[str] | None = None) -> list[str]:
        """The next ``count`` tenants beyond a quota, of those ``here``: all others come before these do again."""
        named = list(itertools.islice(exceeding if here is None else filter(here.__contains__, exceeding), count))
        for tenant in named:
            exceeding[tenant] = exceeding.pop(tenant)
            self._judge(tenant)  # an arena in which it had chunks may have been closed
        return [tenant for tenant in named if tenant in exceeding]

    def changed(self, tenants: Iterable[str], book: Book) -> None:
        """Note that an arena has more or fewer chunks of these tenants than before."""
        for tenant in tenants:
            if book.used_by(tenant):
                self._books_of.setdefault(tenant, WeakKeyDictionary())[book] = None
            elif books := self._books_of.get(tenant):
                books.pop(book, None)
            self._judge(tenant)

    def looked(self, model: str, tenant: str, asked: int, found: int) -> None:
        """Count the chunks for which a request looked, and those that it found."""
        which = model, self.told_as(tenant)
        before = self.lookups.get(which, (0, 0))
        self.lookups[which] = before[0] + asked, before[1] + found

    def told_as(self, tenant: str) -> str:
        """The name of a tenant in metrics."""
        if len(self._apart) < _APART:
            self._apart.add(tenant)
        return tenant if tenant in self._apart else OTHERS

    def _judge(self, tenant: str) -> None:
        quota = self.quota(tenant)
        if quota == UNBOUNDED and tenant not in self.over_soft and tenant not in self.over_hard:
            return
        used = self.used_by(tenant)
        for limit, exceeding in ((quota.soft, self.over_soft), (quota.hard, self.over_hard)):
            if limit is not None and used > limit:
                exceeding.setdefault(tenant)
            else:
                exceeding.pop(tenant, None)
