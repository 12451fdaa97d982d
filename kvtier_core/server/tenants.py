"""The tenants whose chunks lie in the memory of a server, and their quotas.

A tenant is a salt: the ``cache_salt`` of requests, with their adapter. Its name is a keyed digest, so that a reader
cannot test which salt it belongs to. Chunks without a salt belong to the tenant ``-``, which has no quota.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from collections.abc import Iterable, Sequence

import attrs

from kvtier_core.types import ChunkKey

#: The tenant of requests without a salt.
NOBODY = "-"
#: Chunks of tenants that are remembered, whether they are stored or not. Those of a request that waits are among them.
_REMEMBERED = 1 << 20


@attrs.frozen
class Quota:
    """Bytes that a tenant may have in all arenas together, or a model in each; None: any number."""

    soft: int | None = None  #: beyond it its chunks are evicted before all others
    hard: int | None = None  #: beyond it they are evicted at once


UNBOUNDED = Quota()


class Tenants:
    """The tenants of one server. One thread calls every method."""

    def __init__(self, default: Quota = UNBOUNDED, key: bytes = b""):
        """``default`` is the quota of each tenant that has none of its own, ``key`` that of their names."""
        self._key = key or secrets.token_bytes(32)
        self._default = default
        self._quotas: dict[str, Quota] = {}
        self._named: dict[ChunkKey, str] = {}  # its last tenant; the least recently named chunk first
        self.used: Counter[str] = Counter()  #: bytes of arenas, by tenant
        self.over_soft: set[str] = set()  #: tenants beyond their soft quota
        self.over_hard: set[str] = set()  #: tenants beyond their hard quota

    def name(self, salt: bytes) -> str:
        """The name of a tenant, as long as this server runs."""
        return hashlib.blake2b(salt, digest_size=8, key=self._key).hexdigest() if salt else NOBODY

    def note(self, path: Iterable[ChunkKey], salt: bytes) -> None:
        """Note that a request of this tenant names these chunks."""
        if salt:
            tenant = self.name(salt)
            for key in path:
                self._named.pop(key, None)
                self._named[key] = tenant
            while len(self._named) > _REMEMBERED:
                del self._named[next(iter(self._named))]

    def of(self, key: ChunkKey) -> str:
        """The tenant who named a chunk."""
        return self._named.get(key, NOBODY)

    def set_quota(self, salt: bytes, quota: Quota) -> None:
        """The quota of one tenant from now on."""
        self._quotas[self.name(salt)] = quota
        self._judge(self.name(salt))

    def quota(self, tenant: str) -> Quota:
        """The quota of a tenant."""
        return UNBOUNDED if tenant == NOBODY else self._quotas.get(tenant, self._default)

    def room(self, tenant: str, slot_nbytes: int) -> int | None:
        """How many slots a tenant may still have within its soft quota; None: any number."""
        soft = self.quota(tenant).soft
        return None if soft is None else max(0, soft - self.used[tenant]) // slot_nbytes

    def excess(self, tenant: str) -> int:
        """Bytes that a tenant has beyond its hard quota."""
        hard = self.quota(tenant).hard
        return 0 if hard is None else max(0, self.used[tenant] - hard)

    def add(self, tenants: Sequence[str], nbytes: int) -> None:
        """Add a slot of ``nbytes`` to each of these; negative: take it away."""
        for tenant in tenants:
            self.used[tenant] += nbytes
        for tenant in set(tenants):
            self._judge(tenant)

    def _judge(self, tenant: str) -> None:
        quota, used = self.quota(tenant), self.used[tenant]
        for limit, exceeding in ((quota.soft, self.over_soft), (quota.hard, self.over_hard)):
            if limit is not None and used > limit:
                exceeding.add(tenant)
            else:
                exceeding.discard(tenant)
        if not self.used[tenant]:
            del self.used[tenant]
