"""Chooses how pages are copied: times each method on pages laid out like the engine's, in jobs of at least 64 MiB.

Every copied byte is compared.
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
from kvtier_core.transfer.cuda.library import Device, Direction, Method
from kvtier_core.transfer.page_lists import Layer
from kvtier_core.work.io_pool import run

#: The factor by which another method must be faster than the copy engines alone. A staged copy occupies multiprocessors
#: for a moment and memory twice; a kernel that reads the slots occupies multiprocessors as long as the job takes.
_WORTH_IT = {Method.DIRECT: 1.0, Method.STAGED: 1.1, Method.KERNEL: 1.2}
#: The size of a measured job, or one chunk if that is longer: shorter jobs hide the cost of submitting many copies.
JOB_NBYTES = 64 << 20
_ROUNDS = 3  #: the best one counts
#: The compared random bytes repeat after a prime number of bytes, so that no two pages are equal.
_PATTERN_NBYTES = (1 << 20) + 7

logger = logging.getLogger("kvtier")


@attrs.frozen
class Choice:
    """The chosen method for one direction, and the speed of each method."""

    method: Method
    speeds: Mapping[Method, float] = attrs.field(factory=dict)  #: bytes per second
    wrong: Sequence[Method] = ()  #: methods that copied wrong bytes

    def __str__(self) -> str:
        others = [f"{method} {speed / 1e9:.1f} GB/s" for method, speed in self.speeds.items()]
        others += [f"{method} copies wrong bytes" for method in self.wrong]
        return f"{self.method} ({', '.join(others) or 'not measured'})"


#: Called with the layers of a part, the possible methods, and whether to copy to slots.
Autotune = Callable[[Sequence[Layer], Sequence[Method], bool], Choice]


def choose(speeds: Mapping[Method, float], wrong: Sequence[Method] = ()) -> Choice:
    """The best method by bytes per second and `_WORTH_IT`. Raises BackendError if there is none."""
    if not speeds:
        raise BackendError("no copy method works for these pages on this device")
    return Choice(max(speeds, key=lambda method: speeds[method] / _WORTH_IT[method]), speeds, wrong)


def decided(method: Method) -> Autotune:
    """An autotune without measurements: it chooses ``method`` if possible, otherwise DIRECT."""
    return lambda layers, possible, to_slots: Choice(method if method in possible else Method.DIRECT)


class ScratchAutotune:
    """Measures copies between scratch memory on both sides, page-locked like the arena, and frees it.

    ``stores`` and ``loads`` are the mover's resources for each direction. Kernels that read slots over the bus occupy
    multiprocessors all the time, so they are tried only if copies cannot be staged.
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
            if scratch.error is not None:  # copy even if there is too little memory to measure
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
        """Does each byte of a job arrive in its place? The opposite direction uses DIRECT."""
        expected = (os.urandom(_PATTERN_NBYTES) * (scratch.nbytes // _PATTERN_NBYTES + 1))[: scratch.nbytes]
        scratch.memory[:] = expected
        self._seconds(scratch, Method.DIRECT if to_slots else method, False)
        scratch.memory[:] = bytes(scratch.nbytes)
        self._seconds(scratch, method if to_slots else Method.DIRECT, True)
        return scratch.memory[:] == expected

    def _seconds(self, scratch: _Scratch, method: Method, to_slots: bool) -> float:
        """The time that a job takes; 0 if it fails."""
        direction = self._directions[to_slots]
        begin = time.perf_counter()
        copied = run(lambda: scratch.part.copy(method, to_slots, scratch.rows, scratch.slots, direction))
        direction.kernels.synchronize()
        direction.bus.synchronize()
        return time.perf_counter() - begin if copied.error is None else 0.0


class _Scratch:
    """Pages with the relative layout of ``layers``, slots for them, and a job over random blocks."""

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
        # Random blocks, because the engine's are rarely contiguous; each once, because a load writes no page twice.
        self.rows = array("i", random.Random(0).sample(range(chunks * width), chunks * width))
        self.slots = array("i", range(chunks))


def _placed(layers: Sequence[Layer], blocks: int) -> tuple[list[tuple[Layer, int]], int]:
    """Each layer with the offset of its page 0 in a smaller memory of ``blocks`` blocks, and the size of that memory.

    Layers whose pages interleave within one stride still do.
    """
    bases: dict[int, int] = {}
    begin, place, end, stride = 0, 0, 0, 0
    for layer in sorted(layers, key=lambda layer: layer.base):
        if not bases or layer.base >= begin + stride or layer.stride != stride:
            begin, place, stride = layer.base, end, layer.stride
            end = place + -(-stride * blocks // 256) * 256
        bases[layer.base] = place + layer.base - begin
    return [(layer, bases[layer.base]) for layer in layers], end
