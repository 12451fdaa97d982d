"""Copies between pages in a GPU's memory and page-locked slots. Importing this package loads nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier_core.interfaces import PagedKVCache

if TYPE_CHECKING:
    from kvtier_core.transfer.cuda.device_slots import DeviceSlots


def open_device_slots(cache: PagedKVCache, count: int) -> DeviceSlots:
    """``count`` slots in the memory of the device of ``cache``, with a mover. Raises BackendError."""
    from kvtier_core.transfer.cuda.device_slots import DeviceSlots

    return DeviceSlots(cache, count)
