"""Movers and readers in a worker process, for tiers that the scheduler side has opened."""

from __future__ import annotations

import functools

from kvtier_core.config.guard import PluginCall
from kvtier_core.config.model import ArenaTierConfig, StoreTierConfig
from kvtier_core.errors import Problem
from kvtier_core.interfaces import DirectReader, Mover, PagedKVCache


def attach(tier: ArenaTierConfig, handle: str, cache: PagedKVCache) -> Mover:
    """A mover between the engine's pages and the slots of this arena.

    ``handle`` is the value of `AllocatorBackend.handle` where the arena was opened. Raises ConfigError.
    """
    return _worker_call(tier, "attach to").returns(Mover, lambda: tier.config.attach(handle, cache))


def attach_reader(tier: StoreTierConfig, handle: str, cache: PagedKVCache) -> DirectReader:
    """A reader that copies frames of this store straight into the engine's pages.

    ``handle`` is the result of `SupportsDirectReads.reader_handle` where the store was opened. Raises ConfigError.
    """
    call = _worker_call(tier, "read the frames of")
    return call.returns(DirectReader, lambda: tier.config.attach_reader(handle, cache, tier.timeout))


def _worker_call(tier: ArenaTierConfig | StoreTierConfig, verb: str) -> PluginCall:
    problem = functools.partial(Problem, tier.source.where)
    return PluginCall(tier.source.plugin, f"tier {tier.name}", tier.source.path, problem, verb)
