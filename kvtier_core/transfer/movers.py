"""Opens the mover for memory that a worker process has mapped."""

from __future__ import annotations

import mmap

from kvtier_core.interfaces import Mover, PagedKVCache
from kvtier_core.transfer.host_mover import HostMover

#: Device types that `open_mover` supports, and for which it packs.
DEVICES = ("cpu", "cuda")


def open_mover(cache: PagedKVCache, memory: mmap.mmap | memoryview, slot_nbytes: int) -> Mover:
    """A mover between the pages of ``cache`` and ``memory``, contiguous slots of ``slot_nbytes``.

    Raises BackendError for a device that cannot reach it, and ContractError if ``cache`` does not fit its layout. A
    CUDA device cannot if kvtier's CUDA library was not built, finds no such device or cannot page-lock the memory.
    """
    if cache.device.startswith("cuda"):
        from kvtier_core.transfer.cuda import opening  # imports torch

        return opening.open_mover(cache, memory, slot_nbytes)
    return HostMover(cache, memory, slot_nbytes)
