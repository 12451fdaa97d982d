"""Blocks loads until every rank has passed its self-test, and for ever if one has failed."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping

from kvtier_core.layouts import ChunkLayout
from kvtier_core.stack.interface import Stack
from kvtier_core.types import Slot

logger = logging.getLogger("kvtier")

#: How often `SelfTestGate.wants_steps` says so. A worker that never reports must not keep an idle engine awake.
_MOST_STEPS = 1000


class SelfTestGate:
    """Reserves slots of each arena for the workers' self-tests, and collects the outcomes."""

    def __init__(self, stack: Stack, layout: ChunkLayout):
        #: Of each arena as many as the layout says; empty once it is over.
        self.slots: tuple[Slot, ...] = tuple(stack.reserve_self_test_slots(layout.self_test_slots))
        self.failure = ""  #: why nothing is stored or loaded any more; empty if nothing failed
        self._stack = stack
        self._ranks_left = layout.ranks
        self._steps_left = _MOST_STEPS

    @property
    def is_open(self) -> bool:
        """True once every rank has reported."""
        return not self._ranks_left

    def wants_steps(self) -> bool:
        """Should the engine step although it has nothing to do? Then workers attach now, and not in the first request.

        Every answer counts: not for ever.
        """
        if self.is_open or self.failure or not self._steps_left:
            return False
        self._steps_left -= 1
        return True

    def fail(self, why: str) -> None:
        """Store and load nothing any more."""
        if not self.failure:
            self.failure = why
            logger.error("kvtier: %s. Nothing is stored or loaded.", why)

    def record(self, outcomes: Counter[str], no_readers: Mapping[str, str]) -> None:
        """Count the outcomes of workers' self-tests; an empty text is a pass.

        ``no_readers``: the tiers whose frames a worker does not read by itself, and why.
        """
        for tier, why in no_readers.items():
            self._stack.stop_direct_reads(tier, why)
            logger.info("kvtier: frames of %s pass through an arena: %s", tier, why)
        if not outcomes or self.is_open:
            return
        self._ranks_left -= outcomes.total()
        if failures := [outcome for outcome in outcomes if outcome]:
            self.fail(f"the self-test failed: {failures[0]}")
        if self.is_open:
            self._stack.release_self_test_slots()
            self.slots = ()
            if not self.failure:
                logger.info("kvtier: self-test: every byte came back")
