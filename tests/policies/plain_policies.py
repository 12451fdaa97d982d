"""The policies that are there in C++ too, as they are in Python: what serves where nothing could be compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable

import attrs

from kvtier_core.interfaces import EvictionConfig, EvictionPolicy
from kvtier_core.policies.gittins import Gittins
from kvtier_core.policies.lru import Lru


@attrs.frozen
class Plain(EvictionConfig):
    type = "plain"
    policy: Callable[[], EvictionPolicy]

    def open(self) -> EvictionPolicy:
        return self.policy()


PLAIN_LRU = Plain(Lru)
PLAIN_GITTINS = Plain(functools.partial(Gittins, sizes=10))
PLAIN_SIMPLE_GITTINS = Plain(functools.partial(Gittins, sizes=1))
