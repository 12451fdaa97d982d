"""Chooses how pages are copied: each way copies pages that lie as the engine's do, in jobs of 64 MiB and more.

It is timed, and each byte that it copied is compared.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import random
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

import attrs

from kvtier_core.errors import BackendError
from kvtier_core.transfer.cuda.host_registration import PIECE_NBYTES
from kvtier_core.transfer.cuda.library import Device, Direction, Method, NativePart
from kvtier_core.transfer.io_pool import run
from kvtier_core.transfer.page_lists import Layer

#: How much faster than the copy engines alone another way has to be. A staged copy takes multiprocessors for a moment,
#: and memory twice; a kernel that reads the slots keeps multiprocessors from the engine as long as the job takes.
_WORTH_IT = {Method.DIRECT: 1.0, Method.STAGED: 1.1, Method.KERNEL: 1.2}
#: A job of this size is measured, or of one chunk: shorter ones do not show what submitting many copies costs.
JOB_NBYTES = 64 << 20
_ROUNDS = 3  #: the best counts
#: Random bytes that are compared repeat after a prime number of them: no two pages have the same.
_PATTERN_NBYTES = (1 << 20) + 7

logger = logging.getLogger("kvtier")


@attrs.frozen
class Choice:
    """How the copies of one direction are made, and how fast each way was."""

    method: Method
    speeds: Mapping[Method, float] = attrs.field(factory=dict)  #: bytes a second
    wrong: Sequence[Method] = ()  #: what copied other bytes than it should

    def __str__(self) -> str:
        others = [f"{method} {speed / 1e9:.1f} GB/s" for method, speed in self.speeds.items()]
        others += [f"{method} copies wrong bytes" for method in self.wrong]
        return f"{self.method} ({', '.join(others) or 'not measured'})"


#: Called with the layers of a part, the ways that are possible, and whether to copy to slots.
Autotune = Callable[[Sequence[Layer], Sequence[Method], bool], Choice]


def choose(speeds: Mapping[Method, float], wrong: Sequence[Method] = ()) -> Choice:
    """The way that is worth it, by bytes a second. Raises BackendError if there is none."""
    if not speeds:
        raise BackendError("no copy method works for these pages on this device")
    return Choice(max(speeds, key=lambda method: speeds[method] / _WORTH_IT[method]), speeds, wrong)


def decided(method: Method) -> Autotune:
    """An autotune that measures nothing. It chooses ``method`` where that is possible, else DIRECT."""
    return lambda layers, possible, to_slots: Choice(method if method in possible else Method.DIRECT)


class ScratchAutotune:
    """Measures copies between scratch memory on both sides, page-locked as the arena is, and frees it.

    ``stores`` and ``loads`` are what the mover will use for each direction. Kernels that read slots over the bus hold
    multiprocessors for as long as that takes: they are tried where copies cannot be staged.
    """

    def __init__(self, device: Device, stores: Direction, loads: Direction, nbytes: int = JOB_NBYTES):
        self._device = device
        self._directions = {True: stores, False: loads}
        self._nbytes = nbytes

    def __call__(self, layers: Sequence[Layer], possible: Sequence[Method], to_slots: bool) -> Choice:
        if not layers:
            return Choice(Method.DIRECT)
        with ExitStack() as cleanup:
            scratch = run(lambda: _Scratch(self._device, layers, self._nbytes, cleanup))
            if scratch.error is not None:  # too little memory is no reason to copy nothing
                return Choice(Method.STAGED if Method.STAGED in possible else Method.DIRECT)
            tried = [method for method in possible if method is not Method.KERNEL or Method.STAGED not in possible]
            rounds = {
                method: [self._seconds(scratch.value, method, to_slots) for _ in range(_ROUNDS)] for method in tried
            }
            working = [method for method in tried if all(rounds[method])]
            wrong = [method for method in working if not self._is_right(scratch.value, method, to_slots)]
            if wrong:
                logger.error(
                    "kvtier: not used on this device: %s", ", ".join(f"{each} copies wrong bytes" for each in wrong)
                )
            return choose(
                {method: scratch.value.nbytes / min(rounds[method]) for method in working if method not in wrong}, wrong
            )

    def _is_right(self, scratch: _Scratch, method: Method, to_slots: bool) -> bool:
        """Does each byte of a job arrive in its place? The way back is that of single copies."""
        expected = scratch.refill()
        self._seconds(scratch, Method.DIRECT if to_slots else method, False)
        scratch.clear()
        self._seconds(scratch, method if to_slots else Method.DIRECT, True)
        return scratch.memory[:] == expected

    def _seconds(self, scratch: _Scratch, method: Method, to_slots: bool) -> float:
        """How long a job takes; 0 if it fails."""
        direction = self._directions[to_slots]
        begin = time.perf_counter()
        copied = run(lambda: scratch.part.copy(method, to_slots, scratch.rows, scratch.slots, direction))
        direction.kernels.synchronize()
        direction.bus.synchronize()
        return time.perf_counter() - begin if copied.error is None else 0.0


class _Scratch:
    """Pages that lie to each other as those of ``layers`` do, slots for them, and a job over random blocks."""

    part: NativePart

    def __init__(self, device: Device, layers: Sequence[Layer], nbytes: int, cleanup: ExitStack):
        shard_nbytes = sum(layer.nbytes * layer.blocks for layer in layers)
        chunks = -(-nbytes // shard_nbytes)
        self.nbytes = chunks * shard_nbytes
        width = max(layer.first + layer.blocks for layer in layers)
        self.memory = mmap.mmap(-1, self.nbytes)
        self._keep = ctypes.c_char.from_buffer(self.memory)
        address = ctypes.addressof(self._keep)
        for begin in range(address, address + self.nbytes, PIECE_NBYTES):
            device.lock(begin, min(PIECE_NBYTES, address + self.nbytes - begin))
            cleanup.callback(device.unlock, begin)
        placed, pages_nbytes = _placed(layers, chunks * width)
        pages = device.allocate(pages_nbytes)
        cleanup.callback(device.free, pages)
        moved = [layer._replace(base=pages + base) for layer, base in placed]
        self.part = device.part(moved, address, shard_nbytes, address, PIECE_NBYTES)
        cleanup.callback(self.part.close)
        # Random blocks: the engine's are seldom neighbours. Each once: a load writes no page twice.
        self.rows = array("i", random.Random(0).sample(range(chunks * width), chunks * width))
        self.slots = array("i", range(chunks))

    def refill(self) -> bytes:
        """Fill the slots with random bytes that they did not have before, and return these."""
        content = (os.urandom(_PATTERN_NBYTES) * (self.nbytes // _PATTERN_NBYTES + 1))[: self.nbytes]
        self.memory[:] = content
        return content

    def clear(self) -> None:
        """Fill the slots with zeros."""
        self.memory[:] = bytes(self.nbytes)


def _placed(layers: Sequence[Layer], blocks: int) -> tuple[list[tuple[Layer, int]], int]:
    """Each layer with the place of its page 0 in a smaller memory of so many blocks, and the bytes of that.

    Layers whose pages alternate within one stride, block after block, still do.
    """
    bases: dict[int, int] = {}
    begin, place, end, stride = 0, 0, 0, 0
    for layer in sorted(layers, key=lambda layer: layer.base):
        if not bases or layer.base >= begin + stride or layer.stride != stride:
            begin, place, stride = layer.base, end, layer.stride
            end = place + -(-stride * blocks // 256) * 256
        bases[layer.base] = place + layer.base - begin
    return [(layer, bases[layer.base]) for layer in layers], end
