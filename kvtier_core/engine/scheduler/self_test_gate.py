"""Blocks loads until every rank has passed its self-test, and for as long as one has failed."""

from __future__ import annotations

import logging

from kvtier_core.engine.messages import WorkerProgress
from kvtier_core.layouts import ChunkLayout
from kvtier_core.stack.interface import Attachments
from kvtier_core.types import Slot

logger = logging.getLogger("kvtier")

#: Limit on the steps that `SelfTestGate` wants: a worker that never reports must not keep an idle engine awake.
_MOST_STEPS = 1000

#: The holder of the slots.
SELF_TEST = "self-test"


class SelfTestGate:
    """Reserves slots of each arena for the workers' self-tests, and collects the outcomes, for each attachment."""

    def __init__(self, stack: Attachments, layout: ChunkLayout):
        self.failure = ""  #: why nothing is stored or loaded; empty if nothing failed
        self.attachment = stack.attachment  #: the one that is tested
        self._stack = stack
        self._layout = layout
        self._ended = False
        self._begin()

    def _begin(self) -> None:
        #: For each arena, as many as the layout requires; empty once the self-test is over.
        self.slots: tuple[Slot, ...] = ()
        self._ranks_left = self._layout.ranks
        self._steps_left = _MOST_STEPS
        self.renew()

    def renew(self) -> bool:
        """Check whether the workers must attach to the stack again. If True, nothing may be loaded until they have."""
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
        """True once every rank has reported, as long as the workers need not attach to the stack again."""
        return not self._ranks_left and self._stack.attachment == self.attachment

    def wants_steps(self) -> bool:
        """Should an idle engine step, so that workers attach before the first request? At most `_MOST_STEPS` times."""
        if self.is_open or self.failure or not self._steps_left:
            return False
        self._steps_left -= 1
        return True

    def end(self, why: str) -> None:
        """Store and load nothing from now on, whatever the workers can reach."""
        self._ended = True
        self._fail(why)

    def _fail(self, why: str) -> None:
        if not self.failure:
            self.failure = why
            logger.error("kvtier: %s. Nothing is stored or loaded.", why)

    def record(self, progress: WorkerProgress) -> None:
        """Count the outcomes of workers' self-tests. Workers that got no answer from a server attach again."""
        for tier, why in progress.no_readers.items():
            self._stack.stop_direct_reads(tier, why)
            logger.info("kvtier: frames of %s pass through an arena: %s", tier, why)
        outcomes = progress.self_tests.items()
        found = {problem: ranks for (attachment, problem), ranks in outcomes if attachment == self.attachment}
        if not found or self.is_open:
            return
        self._ranks_left -= sum(found.values())
        if failures := [problem for problem in found if problem]:
            self._fail(f"the self-test failed: {failures[0]}")
        if self.attachment in progress.unanswered:
            self._stack.attach_again()
        if self.is_open:
            self._stack.release(SELF_TEST)
            self.slots = ()
            if not self.failure:
                logger.info("kvtier: self-test: every byte came back; kvtier is ready")
