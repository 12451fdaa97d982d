"""Which policies are there in C++ too."""

from __future__ import annotations

from collections.abc import Callable

from kvtier_core.interfaces import EvictionPolicy
from kvtier_core.native import extension


def native_counterpart(plain: type[EvictionPolicy]) -> Callable[..., EvictionPolicy]:
    """Who answers as this one does, to the last bit, and sooner; itself, where nothing could be compiled."""
    return EvictionPolicy.register(getattr(extension, plain.__name__, plain))
