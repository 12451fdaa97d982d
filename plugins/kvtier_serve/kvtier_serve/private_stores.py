"""Decides which namespace receives a store that takes only one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from kvtier_core.config.model import StoreTierConfig
from kvtier_core.config.open import open_keyed_seal
from kvtier_core.encoding.codec import FrameCodec
from kvtier_core.errors import BackendError
from kvtier_core.interfaces import SupportsWalk
from kvtier_core.layouts import ChunkLayout
from kvtier_remote.protocol import Opening

#: Seconds for which a store that holds frames waits for the engines of their namespace.
_WAITS = 30.0


class PrivateStores:
    """A store is for the model that its tier names, else for the namespace whose frames it holds, else for the first.

    The frames of a namespace that does not come back do not stand in the way of others for long.
    """

    def __init__(self, tiers: Iterable[StoreTierConfig], clock: Callable[[], float] = time.monotonic):
        """Looks at the first frame of each private store."""
        self._homes = {tier.name: home for tier in tiers if (home := _home_of(tier))}
        self._clock = clock
        self._until = clock() + _WAITS

    def is_for(self, tier: StoreTierConfig, opening: Opening, layout: ChunkLayout) -> bool:
        """Is a tier for an engine, if no other namespace has it yet? Raises BackendError without its secret."""
        if tier.model is not None or tier.config.shared:
            return tier.model in (None, opening.model)
        home = self._homes.get(tier.name)
        if home is None or self._clock() >= self._until:
            return True
        codec = FrameCodec(opening.namespace, layout, keyed_seal=open_keyed_seal(tier))
        return codec.namespace.digest.startswith(home)


def _home_of(tier: StoreTierConfig) -> bytes | None:
    """The beginning of the digest of the namespace whose frames a private store holds; None if it holds none."""
    if tier.config.shared or not isinstance(tier.config, SupportsWalk):
        return None
    try:
        with tier.config.walk() as found:
            return next((stored.home for stored in found if stored.home is not None), None)
    except BackendError:  # it is not there yet; or the engine that opens it is told why
        return None
