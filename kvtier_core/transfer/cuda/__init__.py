"""Pages in a GPU's memory to page-locked slots and back. Imports nothing heavy before a mover is wanted."""

from __future__ import annotations

import mmap

from kvtier_core.interfaces import Mover, PagedKVCache


def attach(table: PagedKVCache, memory: mmap.mmap | memoryview, slot_nbytes: int) -> Mover:
    """A mover between the pages and ``memory``, which holds the slots side by side. Raises BackendError."""
    from kvtier_core.transfer.cuda.mover import open_mover

    return open_mover(table, memory, slot_nbytes)
