"""Blocks loads until every rank has passed its self-test, and for as long as one has failed."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping

from kvtier_core.layouts import ChunkLayout
from kvtier_core.stack.interface import Stack
from kvtier_core.types import Slot

logger = logging.getLogger("kvtier")

#: How often `SelfTestGate.wants_steps` is True. A worker that never reports must not keep an idle engine awake.
_MOST_STEPS = 1000

#: The holder of the slots.
SELF_TEST = "self-test"


class SelfTestGate:
    """Reserves slots of each arena for the workers' self-tests, and collects the outcomes, for each attachment."""

    def __init__(self, stack: Stack, layout: ChunkLayout):
        self.failure = ""  #: why nothing is stored or loaded; empty if nothing failed
        self.attachment = stack.attachment  #: the one that is tested
        self._stack = stack
        self._layout = layout
        self._ended = False
        self._begin()

    def _begin(self) -> None:
        #: Of each arena as many as the layout says; empty once it is over.
        self.slots: tuple[Slot, ...] = ()
        self._ranks_left = self._layout.ranks
        self._steps_left = _MOST_STEPS
        self.renew()

    def renew(self) -> bool:
        """Look whether the workers must reach the stack anew. True if so: nothing may be loaded until they have."""
        renewed = self._stack.attachment != self.attachment
        if renewed:
            self.attachment = self._stack.attachment
            self.failure = self.failure if self._ended else ""
            self._begin()
        elif self._ranks_left and not self.slots:
            self.slots = tuple(self._stack.reserve_self_test_slots(SELF_TEST, self._layout.self_test_slots))
        return renewed

    @property
    def is_open(self) -> bool:
        """True once every rank has reported, for as long as the workers need not reach the stack anew."""
        return not self._ranks_left and self._stack.attachment == self.attachment

    def wants_steps(self) -> bool:
        """Should an idle engine step, so that workers attach before the first request? At most `_MOST_STEPS` times."""
        if self.is_open or self.failure or not self._steps_left:
            return False
        self._steps_left -= 1
        return True

    def end(self, why: str) -> None:
        """Store and load nothing any more, whatever the workers could reach."""
        self._ended = True
        self._fail(why)

    def _fail(self, why: str) -> None:
        if not self.failure:
            self.failure = why
            logger.error("kvtier: %s. Nothing is stored or loaded.", why)

    def record(self, outcomes: Counter[tuple[int, str]], no_readers: Mapping[str, str]) -> None:
        """Count the outcomes of workers' self-tests, by attachment; an empty text is a pass.

        ``no_readers``: the tiers whose frames a worker does not read by itself, and why.
        """
        for tier, why in no_readers.items():
            self._stack.stop_direct_reads(tier, why)
            logger.info("kvtier: frames of %s pass through an arena: %s", tier, why)
        found = {problem: ranks for (attachment, problem), ranks in outcomes.items() if attachment == self.attachment}
        if not found or self.is_open:
            return
        self._ranks_left -= sum(found.values())
        if failures := [problem for problem in found if problem]:
            self._fail(f"the self-test failed: {failures[0]}")
        if self.is_open:
            self._stack.release(SELF_TEST)
            self.slots = ()
            if not self.failure:
                logger.info("kvtier: self-test: every byte came back; kvtier is ready")
