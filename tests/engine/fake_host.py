"""An inference engine of a hundred lines, for the scheduler side: paged memory, batches, a forward, and no model.

Its KV is a digest of all tokens up to and including a block, and of what else the request's KV depends on. Before it
computes anything it asserts that all blocks it stands on hold exactly that. So whatever goes wrong between the
scheduler side and the pages fails there.

With a lookahead, as draft layers have it, the KV of a block depends on so many tokens behind it, too. Of these a step
sees the first one behind what it computes, and writes the KV again that depends on later ones.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from device_engine.scheduling import HostRequest, Scheduling
from patience import HANG

from kvtier_core.config.model import StackConfig
from kvtier_core.engine.messages import ChunkPages, StepPlan, Transfer, WorkerProgress
from kvtier_core.engine.request_view import KVIdentity
from kvtier_core.engine.step import ScheduledRequest, StepResult
from kvtier_core.interfaces import NO_BLOCK
from kvtier_core.layouts import ChunkLayout, KVKind
from kvtier_remote.memory import served_tier
from kvtier_testing.samples import PagedBuffer, make_group

BLOCK = 4
CHUNK = 8
LAYOUT = ChunkLayout([make_group((512, 128), block_tokens=BLOCK)], CHUNK)
FRAME = LAYOUT.frame_nbytes
GARBAGE = b"\xbd"
ABOUT = {"engine": "e", "model": "tiny", "replica": 0, "identity": "ab" * 32, "cold": ""}


def prompt(seed: int, tokens: int, prefix: Sequence[int] = ()) -> list[int]:
    """Random token ids behind a prefix."""
    drawn = random.Random(seed)
    return [*prefix, *(drawn.randrange(1000) for _ in range(tokens - len(prefix)))]


class Host(Scheduling):
    """``late_stores`` and ``late_loads`` are steps after which a copy touches its pages, if nothing makes it sooner."""

    def __init__(
        self,
        stack: StackConfig,
        *,
        layout: ChunkLayout = LAYOUT,
        blocks: int = 40,
        budget: int = 16,
        ranks: int = 1,
        lookahead: int = 0,
        **options: Any,
    ):
        """``ranks`` report each store; all but one do nothing else."""
        super().__init__(stack, layout, range(blocks), budget, ranks, lookahead=lookahead, **options)
        self.lookahead = lookahead
        self.late_stores = self.late_loads = 0
        self.invalid: set[int] = set()  # blocks, to be reported in the next step
        self.failing: set[str] = set()  # requests whose loads fail
        self._buffer = PagedBuffer(layout, blocks, random.Random(0))
        handle = next(iter(self.manager.handles.values()))
        arena = stack.arenas[0] if stack.arenas else served_tier(handle)
        self._mover = arena.config.attach(handle, self._buffer.kv_cache())
        self.outcomes = Counter({(self.manager.attachment, ""): 1})  # of self-tests, to be reported in the next step
        self._stores: dict[int, tuple[int, Transfer]] = {}  # steps to go, by job
        self._loads: dict[str, tuple[int, Transfer]] = {}

    # -- what a test does --------------------------------------------------------------------------------

    def ask(self, request_id: str, tokens: Sequence[int], **more: Any) -> int:
        """Serve a prompt to its end, and let everything come to rest. How many of its tokens were loaded."""
        request = self.submit(request_id, tokens, **more)
        self.run(request)
        self.settle()
        return request.offered

    def run(self, *requests: HostRequest) -> None:
        """Step until these requests have computed all their tokens, and finish them."""
        for _ in range(2000):
            if not (left := [each for each in requests if each.state != "finished"]):
                return
            self.step()
            for each in left:
                if each.state == "running" and each.computed == len(each.tokens):
                    self.finish(each)
        raise AssertionError(f"does not end: {requests}")

    def generate(self, request: HostRequest, token: int) -> None:
        request.tokens.append(token)
        self._write(request, max(0, request.computed - self.lookahead), request.computed)

    def settle(self) -> None:
        while self._stores or self._loads:
            self.step()
        self.side.drain(HANG)

    def close(self) -> None:
        self.settle()
        self._mover.close()
        self.side.close()

    # -- the worker --------------------------------------------------------------------------------------

    def _work(self, plan: StepPlan, scheduled: Sequence[ScheduledRequest]) -> None:
        for job in plan.stores_to_fence:
            self._hurry(job)
        progress = self._end_stores()
        for block in self._foreign:
            self._fill(0, block, GARBAGE)
        self._foreign = []
        for each in scheduled:
            self._forward(self._requests[each.request_id], each)
        for request_id, transfer in plan.loads:
            self._loads[request_id] = (self.late_loads, transfer)
            for job, (_, store) in self._stores.items():  # a mover does that by itself
                if blocks_of(store) & blocks_of(transfer):
                    self._hurry(job)
        self._stores.update((job, (self.late_stores, transfer)) for job, transfer in plan.stores)
        progress = progress.merge(self._end_stores())
        for number, transfer in plan.audits:
            progress.audits[number, self._difference(transfer)] += 1
        ended = self._end_loads() | set(plan.failed_loads)
        invalid, self.invalid = self.invalid, set()
        failed = ended & {*self.failing, *plan.failed_loads}
        self.side.progress(StepResult(ended, failed, invalid, progress))
        for request_id in ended:
            self._loaded(self._requests[request_id], ok=request_id not in failed)

    def _forward(self, request: HostRequest, scheduled: ScheduledRequest) -> None:
        for number, (group, table) in enumerate(zip(self.layout.groups, request.tables, strict=True)):
            size, start = group.block_tokens, scheduled.computed
            for block in range(max(self._skipped(number, start), request.foreign // size), -(-start // size)):
                tokens = start if group.kind is KVKind.STATE else (block + 1) * size
                if tokens <= request.offered or tokens <= start - max(0, self.lookahead - 1):
                    why = f"{request.request_id} computes on wrong KV in its block {block} of {group.name}"
                    assert self._holds(request, number, table[block], tokens), why
        self._write(request, max(request.offered, scheduled.computed - self.lookahead), scheduled.end)
        request.computed = scheduled.end

    def _write(self, request: HostRequest, start: int, end: int) -> None:
        """The KV of these tokens, and of what else is in their blocks, as far as it can be known."""
        for number, (group, table) in enumerate(zip(self.layout.groups, request.tables, strict=True)):
            size = group.block_tokens
            for block in range(start // size, -(-end // size)):
                if table[block] != NO_BLOCK:
                    kv = self._kv(request, number, min((block + 1) * size, end), seen=end + 1)
                    self._fill(number, table[block], kv)

    def _hurry(self, job: int) -> None:
        self._stores[job] = (0, self._stores[job][1])

    def _end_stores(self) -> WorkerProgress:
        progress = WorkerProgress(self_tests=self.outcomes)
        self.outcomes = Counter()
        for job, (steps, transfer) in list(self._stores.items()):
            self._stores[job] = (steps - 1, transfer)
            if steps <= 0:
                del self._stores[job]
                sums = self._move(transfer, lambda number, slots, pages: self._mover.store(number, pages, slots))
                checksums = {(job, 0): sums} if sums else {}
                progress = progress.merge(WorkerProgress(Counter([job]), checksums=checksums))
        return progress

    def _end_loads(self) -> set[str]:
        ended = {request_id for request_id, (steps, _) in self._loads.items() if steps <= 0}
        for request_id in sorted(ended - self.failing):
            self._move(self._loads[request_id][1], self._mover.load)
        self._loads = {each: (steps - 1, load) for each, (steps, load) in self._loads.items() if each not in ended}
        return ended

    def _move(self, transfer: Transfer, move: Callable[[int, list[int], list[ChunkPages]], None]) -> tuple[int, ...]:
        """Copy slot by slot, because each may hold another part. The checksums of a store."""
        sums = []
        for slot, pages in zip(transfer.slots, transfer.pages, strict=True):
            move(0, [slot.index], [pages])
            self._mover.wait([0])
            (result,) = self._mover.finished()
            assert result.ok
            sums += result.checksums
        return tuple(sums)

    def _difference(self, transfer: Transfer) -> str:
        """Whether pages hold something else than a slot. They keep what they hold."""
        layers = range(sum(len(group.page_nbytes) for group in self.layout.groups))
        held = {(layer, block): self._buffer.page(layer, block) for layer in layers for block in blocks_of(transfer)}
        self._move(transfer, self._mover.load)
        same = all(self._buffer.page(*place) == page for place, page in held.items())
        for place, page in held.items():
            self._buffer.put(*place, page)
        return "" if same else "other KV"

    # -- pages -------------------------------------------------------------------------------------------

    def _kv(self, request: HostRequest, group: int, tokens: int, seen: int) -> bytes:
        """What the KV of a block of a group depends on that ends behind so many tokens."""
        if self.layout.groups[group].kind is not KVKind.STATE:
            tokens = min(tokens + self.lookahead, seen)
        salt, items = b"", ()
        if isinstance(request.identity, KVIdentity):
            salt, items = request.identity.salt, request.identity.items
        return repr((salt, [item for item in items if item.offset < tokens], request.tokens[:tokens])).encode()

    def _holds(self, request: HostRequest, group: int, block: int, tokens: int) -> bool:
        kv = self._kv(request, group, tokens, seen=len(request.tokens))
        return all(self._buffer.page(layer, block) == _page(kv, layer, nbytes) for layer, nbytes in self._layers(group))

    def _fill(self, group: int, block: int, kv: bytes) -> None:
        for layer, nbytes in self._layers(group):
            self._buffer.put(layer, block, _page(kv, layer, nbytes))

    def _layers(self, group: int) -> Iterator[tuple[int, int]]:
        """The layers of a group, numbered over all groups, with the bytes of a page."""
        before = sum(len(each.page_nbytes) for each in self.layout.groups[:group])
        return enumerate(self.layout.groups[group].page_nbytes, before)


def blocks_of(transfer: Transfer) -> set[int]:
    """The blocks whose pages are copied."""
    return {block for chunk in transfer.pages for row in chunk for block in row if block != NO_BLOCK}


def _page(kv: bytes, layer: int, nbytes: int) -> bytes:
    return hashlib.shake_128(kv + bytes([layer])).digest(nbytes)
