"""Chooses copy engine or kernel: both copy the same pages to and from page-locked memory; the faster one is used."""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable

import torch

from kvtier_core.errors import BackendError
from kvtier_core.transfer.cuda.library import Library, NativePages

#: Called with the bytes of a page, whether to copy to slots, and KERNEL or DMA. Returns the seconds that a job took,
#: or None if this device cannot copy that way.
Autotune = Callable[[int, bool, str], float | None]

KERNEL, DMA = "kernel", "dma"

#: A kernel takes multiprocessors from the engine, a copy engine does not: it must be faster by this factor.
_WORTH_IT = 1.2
#: A job of about this size is measured, within these limits of its pages, and the best of so many rounds counts.
_NBYTES = 4 << 20
_PAGES = range(8, 1025)
_ROUNDS = 5


def choose(autotune: Autotune, nbytes: int, to_slots: bool) -> str:
    """KERNEL or DMA, for pages of ``nbytes`` in this direction. Raises BackendError if the device can do neither."""
    kernel, dma = autotune(nbytes, to_slots, KERNEL), autotune(nbytes, to_slots, DMA)
    if dma is None:
        raise BackendError(f"pages of {nbytes} bytes cannot be copied by the device")
    return KERNEL if kernel is not None and kernel * _WORTH_IT < dma else DMA


def decided(method: str) -> Autotune:
    """An autotune that measures nothing and chooses ``method``."""
    return lambda nbytes, to_slots, each: 1.0 if each == method else 10.0


class ScratchAutotune:
    """Measures copies between scratch memory of its own on both sides, which it frees after each."""

    def __init__(self, library: Library, device: torch.device):
        self._library = library
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def __call__(self, nbytes: int, to_slots: bool, method: str) -> float | None:
        count = max(_PAGES.start, min(_PAGES.stop - 1, _NBYTES // nbytes))
        pages = torch.zeros(count * nbytes, dtype=torch.uint8, device=self._device)
        slot = torch.zeros(count * nbytes, dtype=torch.uint8, pin_memory=True)
        layer = (pages.data_ptr(), nbytes, nbytes, 0)
        native = self._library.open(self._device.index or 0, [layer], slot.data_ptr(), slot.nbytes)
        # Random blocks, so that no two pages are adjacent on both sides: the engine's pages seldom are.
        blocks = random.Random(0).sample(range(count), count)
        pieces = array("i", [number for place, block in enumerate(blocks) for number in (block, 0, place)])
        torch.cuda.synchronize(self._device)
        try:
            return min(self._seconds(native, method, to_slots, pieces) for _ in range(_ROUNDS))
        except BackendError:
            return None
        finally:
            self._stream.synchronize()
            native.close()

    def _seconds(self, native: NativePages, method: str, to_slots: bool, pieces: array[int]) -> float:
        copy = native.kernel if method == KERNEL else native.dma
        begin = time.perf_counter()
        copy(to_slots, pieces.buffer_info()[0], len(pieces) // 3, self._stream.cuda_stream)
        self._stream.synchronize()
        return time.perf_counter() - begin
