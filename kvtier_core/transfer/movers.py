"""Opens the mover for memory that a worker process has mapped."""

from __future__ import annotations

import mmap

from kvtier_core.interfaces import Mover, PagedKVCache
from kvtier_core.transfer import cuda
from kvtier_core.transfer.host_mover import HostMover

#: Device types that `open_mover` supports, and for which it packs.
DEVICES = ("cpu", "cuda")


def open_mover(cache: PagedKVCache, memory: mmap.mmap | memoryview, slot_nbytes: int) -> Mover:
    """A mover between the pages of ``cache`` and ``memory``, contiguous slots of ``slot_nbytes``.

    Raises BackendError for a device that cannot reach it, ContractError if ``cache`` does not fit its layout.
    """
    if cache.device.startswith("cuda"):
        return cuda.attach(cache, memory, slot_nbytes)
    return HostMover(cache, memory, slot_nbytes)
