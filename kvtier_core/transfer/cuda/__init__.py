"""Copies between pages in a GPU's memory and page-locked slots. Imports nothing heavy until a mover is opened."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

from kvtier_core.interfaces import Mover, PagedKVCache

if TYPE_CHECKING:
    from kvtier_core.transfer.cuda.device_slots import DeviceSlots


def attach(cache: PagedKVCache, memory: mmap.mmap | memoryview, slot_nbytes: int) -> Mover:
    """A mover between ``cache``, on a CUDA device, and ``memory``, an arena's contiguous slots of ``slot_nbytes``.

    Raises BackendError if kvtier's CUDA library was not built, finds no such device or cannot page-lock the memory, and
    ContractError if ``cache`` does not fit its layout.
    """
    from kvtier_core.transfer.cuda.opening import open_mover

    return open_mover(cache, memory, slot_nbytes)


def open_device_slots(cache: PagedKVCache, count: int) -> DeviceSlots:
    """``count`` slots in the memory of the device of ``cache``, with a mover. Raises BackendError."""
    from kvtier_core.transfer.cuda.device_slots import DeviceSlots

    return DeviceSlots(cache, count)
