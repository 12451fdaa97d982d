"""Page-locking, for a mover whose GPU copies by DMA; the host mover needs none."""

from __future__ import annotations

import ctypes
import mmap


def page_lock(memory: mmap.mmap) -> str:
    """What the memory is now, in words. Pageable memory is copied too, only slower."""
    import torch  # the engine's own, which has loaded the CUDA runtime

    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    error = torch.cuda.cudart().cudaHostRegister(address, len(memory), 0)
    return f"pageable (cudaHostRegister failed: {error.name})" if error.value else "page-locked"
