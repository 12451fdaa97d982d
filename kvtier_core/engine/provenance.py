"""Whose KV lies in the engine's blocks.

A block is ours if this engine's forward computed it, on KV that was ours up to there, or if kvtier loaded it. All else
is another connector's: vLLM lets several load, learns of a bad load later or never, and keeps the blocks in its own
prefix cache, where further requests find them. Nothing that is not ours is stored, nor anything computed on it.

A block is written by a load or by a forward: `given` comes before every load, `computed` before every forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request


class Provenance:
    """The blocks that are ours. What is not known to be is not."""

    def __init__(self, block_tokens: int):
        self._block_tokens = block_tokens
        self._ours: set[int] = set()

    def given(self, blocks: Sequence[int], computed: int) -> None:
        """A request was admitted with these blocks. All behind its ``computed`` tokens are overwritten, by whomever."""
        self._ours.difference_update(blocks[-(-computed // self._block_tokens) :])

    def loaded(self, blocks: Iterable[int]) -> None:
        """kvtier fills these blocks. If that fails, they are freed, and nobody gets them but by being given them."""
        self._ours.update(blocks)

    def computed(self, known: int | None, request: Request, scheduled: int, output: SchedulerOutput) -> int:
        """This step's forward computes ``scheduled`` more tokens of a request; asked in the order of scheduling.

        ``known`` are the tokens, from the first one on, whose KV was ours before; None asks the blocks themselves.
        Returns how many it is now: all, or those of before if not all that the forward stands on is ours.
        """
        size, start = self._block_tokens, request.num_computed_tokens
        end = start + scheduled
        if known is None or not start % size or start // size < end // size:  # else no block is begun or filled
            blocks = table_of(request, output)
            if known is None:
                known = size * sum(1 for _ in takewhile(self._ours.__contains__, blocks[: -(-start // size)]))
            self._ours.difference_update(blocks[start // size : -(-end // size)])
            if known >= start:
                self._ours.update(blocks[start // size : end // size])
        return end if known >= start else known

    def holds_any(self, blocks: set[int]) -> bool:
        return not self._ours.isdisjoint(blocks)

    def forget(self) -> None:
        """Nothing that lies in any block is ours any more."""
        self._ours.clear()


def table_of(request: Request, output: SchedulerOutput) -> Sequence[int]:
    """The blocks of a request that is scheduled in this step."""
    return output.kv_connector_block_state.get_block_ids(request.request_id)[0]
