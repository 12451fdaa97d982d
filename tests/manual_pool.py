"""A pool without threads: the test chooses what runs next, so it can produce every interleaving."""

from __future__ import annotations

from kvtier_core.work.io_pool import Outcome, Then, Work, run


class ManualPool:
    """Work waits in `queue` until `run` does it; its continuation waits until `step`."""

    def __init__(self) -> None:
        self.queue: list[tuple[Work, Then]] = []
        self.oldest = 0.0  #: seconds that `longest` returns: how long a piece of work is said to have been on a thread
        self._done: list[tuple[Then, Outcome]] = []

    @property
    def jobs(self) -> int:
        return len(self.queue) + len(self._done)

    def submit_load(self, work: Work, then: Then) -> None:
        self.queue.append((work, then))

    def submit_store(self, work: Work, then: Then) -> None:
        self.queue.append((work, then))

    def run(self, which: int = 0) -> None:
        """Do one piece of the waiting work, by default the oldest."""
        work, then = self.queue.pop(which)
        self._done.append((then, run(work)))

    def step(self) -> int:
        done, self._done = self._done, []
        for then, outcome in done:
            then(outcome)
        return len(done)

    def longest(self) -> float:
        return self.oldest

    def wait(self, timeout: float) -> None:
        while self.queue:
            self.run(-1)  # several threads promise no order, so take the less likely one

    def close(self, timeout: float) -> bool:
        self.queue.clear()
        return True
