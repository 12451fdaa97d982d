"""Copies between pages in a GPU's memory and page-locked slots. Imports nothing heavy before a mover is opened."""

from __future__ import annotations

import mmap

from kvtier_core.interfaces import Mover, PagedKVCache


def attach(cache: PagedKVCache, memory: mmap.mmap | memoryview, slot_nbytes: int) -> Mover:
    """A mover between ``cache``, on a CUDA device, and ``memory``, an arena's slots of ``slot_nbytes`` side by side.

    Raises BackendError if kvtier's CUDA library was not built, finds no such device or cannot page-lock the memory, and
    ContractError if ``cache`` does not fit its layout.
    """
    from kvtier_core.transfer.cuda.opening import open_mover

    return open_mover(cache, memory, slot_nbytes)
